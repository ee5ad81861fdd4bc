"""Which files of the package a plain run imports, how long they are, and which of them run no function.

A plain run is `python -m dualeval run` of the embedded job into a new folder, in one process. A file is idle
if it has functions, and none of them runs but while the file itself is imported. A room's `__init__.py` that
only says what the room is counts for nothing.

    python benchmarks/rooms.py [--checkout FOLDER]
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_OPTIMIZED = 1  # of a code object's flags: a function's, and not a module's or class's


def counted(arguments: list[str]) -> None:
    """Run the command in this process; the last line that it prints is the files, and those that ran."""
    importing: set[str] = set()
    ran: set[str] = set()

    def note(frame: Any, event: str, _: object) -> None:
        code, is_call = frame.f_code, event == "call"
        if code.co_name == "<module>":
            (importing.add if is_call else importing.discard)(code.co_filename)
        elif is_call and code.co_flags & _OPTIMIZED and code.co_filename not in importing:
            ran.add(code.co_filename)

    def end(code: int) -> None:
        sys.setprofile(None)
        paths = {name: str(getattr(module, "__file__", "")) for name, module in sys.modules.items()}
        files = [path for name, path in paths.items() if name.split(".")[0] == "dualeval"]
        print("\n" + json.dumps([sorted(files), sorted(ran.intersection(files))]), flush=True)
        leave(code)

    leave, vars(os)["_exit"] = os._exit, end  # as the command ends its process
    threading.setprofile(note)
    sys.setprofile(note)
    from dualeval.cli import main as run

    run(arguments)


def files_of_plain_run(checkout: Path = ROOT, *options: str) -> dict[str, tuple[int, bool]]:
    """The lines of each file that a checkout's plain run imports, and whether the file is idle."""
    with tempfile.TemporaryDirectory() as made:
        command = ["run", "--no-progress", "--limit", "1280", "--out", f"{made}/out", *options]
        done = subprocess.run(
            [sys.executable, __file__, "--count", *command],
            env={**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
    files, ran = json.loads(done.stdout.splitlines()[-1])
    found = {}
    for path in map(Path, files):
        text = path.read_text("utf-8")
        tree = ast.parse(text)
        if [type(node) for node in tree.body] == [ast.Expr]:
            continue  # a docstring alone
        has_functions = any(isinstance(node, ast.FunctionDef | ast.Lambda) for node in ast.walk(tree))
        is_idle = has_functions and str(path) not in ran
        found[str(path.relative_to(checkout / "dualeval"))] = text.count("\n"), is_idle
    return found


def main() -> None:
    """Read the command line, count, and print."""
    if sys.argv[1:2] == ["--count"]:
        counted(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--checkout", metavar="FOLDER", type=Path, default=ROOT, help="of another commit")
    files = files_of_plain_run(parser.parse_args().checkout.resolve())
    for name, (lines, is_idle) in sorted(files.items()):
        print(f"{lines:>7,}  {name}{'  idle' if is_idle else ''}")
    idle = [lines for lines, is_idle in files.values() if is_idle]
    lines = sum(lines for lines, _ in files.values())
    print(f"{lines:>7,}  lines in {len(files)} files, of which {sum(idle):,} in {len(idle)} idle files")


if __name__ == "__main__":
    main()
