"""Draw the pictures of docs: what ``make run`` and ``dualeval compare`` print. ``make picture`` calls it."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

from rich.console import Console

import dualeval
from dualeval.report.comparison import print_comparison
from dualeval.report.table import print_result
from dualeval.result import read_result

DOCS = Path(__file__).resolve().parent
_LIMIT_S = 300


def picture(name: str, title: str, width: int, show: Callable[[Console], None]) -> str:
    """Draw what is printed as SVG text; ``width`` columns are as many as the longest line needs."""
    console = Console(
        record=True, file=StringIO(), width=width, force_terminal=True, color_system="truecolor"
    )
    show(console)
    drawn = console.export_svg(title=title, unique_id=name)
    # Without this a browser loads the font from a server each time that it shows the picture.
    return re.sub(r" *@font-face \{.*?\}\n", "", drawn, flags=re.DOTALL)


def main() -> None:
    """Run the embedded job and README's example, and write the pictures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def run(*words: str) -> None:
            command = [sys.executable, *words]
            subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL, timeout=_LIMIT_S)

        evaluate = ("-m", "dualeval", "run", "--no-progress")
        run(*evaluate, "--out", "embedded")
        result = read_result(folder / "embedded/result.json")
        # A reader's folder in place of the temporary one.
        shown = replace(result, folder=f"/home/me/dualeval/runs/20261122T101500-{result.fingerprint[:8]}")
        table = picture("run", "make run", 121, lambda console: print_result(shown, console))
        (DOCS / "run.svg").write_text(table, "utf-8")

        (folder / "examples").symlink_to(DOCS.parent / "examples")
        run("examples/small_classifier.py")
        data = ("--data", "runs/small/val", "--preprocessing", "none")
        job = ("--model", "examples.small_classifier:net", *data)
        for epoch in ("epoch-1", "epoch-3"):
            run(*evaluate, *job, "--weights", f"runs/small/{epoch}.pt", "--out", f"runs/{epoch}")
        compared = dualeval.compare(folder / "runs/epoch-1", folder / "runs/epoch-3")
        compared.a["folder"], compared.b["folder"] = "runs/epoch-1", "runs/epoch-3"
        table = picture(
            "compare", "dualeval compare", 165, lambda console: print_comparison(compared, console)
        )
        (DOCS / "compare.svg").write_text(table, "utf-8")


if __name__ == "__main__":
    main()
