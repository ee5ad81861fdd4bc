"""How large the house is, by room: files, lines, and lines of code, beside those of the last release.

    python benchmarks/size.py [--release VERSION]

``--release`` writes the figures down as those of a release. A link is counted once; a line of code is neither
empty nor of a comment or docstring alone.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import subprocess
import tokenize
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAST = ROOT / "benchmarks/results/size.json"
# Folders of the source; the package's own folders and files are a room each.
SOURCE = ("dualeval", "backends", "launch", "slurm")
SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(text: str) -> int:
    """How many lines hold code."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings |= set(range(first.lineno, (first.end_lineno or 0) + 1))
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SILENT:
            found |= set(range(token.start[0], token.end[0] + 1))
    return len(found - docstrings)


def room_of(path: Path) -> str:
    """The room of a file, given from the root."""
    parts = path.parts
    if parts[0] == "dualeval" or parts[0] == "tests":
        return "/".join(parts[:2]) if len(parts) > 2 else f"{parts[0]}, loose files"
    return parts[0] if parts[0] in SOURCE or parts[0] == "benchmarks" else "other"


def measured() -> dict[str, list[int]]:
    """By room: files, lines, lines of code, of all Python files that git knows."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    rooms: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for name in filter(None, listed.stdout.split("\0")):
        if not (ROOT / name).is_file():
            continue  # deleted, and not committed
        text = (ROOT / name).read_text("utf-8")
        sums = [room_of(Path(name))]
        sums.append(
            "ALL SOURCE" if name.split("/")[0] in SOURCE else "ALL TESTS" if name.startswith("tests/") else ""
        )
        for room in filter(None, sums):
            for place, number in enumerate((1, text.count("\n"), code_lines(text))):
                rooms[room][place] += number
    return dict(sorted(rooms.items()))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--release", metavar="VERSION", help="write the figures down as this release's")
    release = parser.parse_args().release
    now = measured()
    if release:
        LAST.write_text(json.dumps({"release": release, "rooms": now}, indent=1) + "\n", "utf-8")
    last = json.loads(LAST.read_text("utf-8"))
    print(f"{'':28}{'files':>14}{'lines':>18}{'of code':>18}   (behind each: at {last['release']})")
    for room in {**now, **last["rooms"]}:
        pairs = zip(now.get(room, [0, 0, 0]), last["rooms"].get(room, [0, 0, 0]), (6, 9, 9), strict=True)
        print(
            f"{room:28}"
            + "".join(f"{new:>{width},} {f'({old:,})':>{width + 1}}" for new, old, width in pairs)
        )


if __name__ == "__main__":
    main()
