"""Draw docs/run.svg, the picture in the README: what ``make run`` prints. ``make picture`` calls this."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from io import StringIO
from pathlib import Path

from rich.console import Console

from dualeval.report.table import print_result
from dualeval.result import Result, read_result

PICTURE = Path(__file__).resolve().parent / "run.svg"
# Columns: as many as the longest line needs.
_WIDTH = 121


def picture(result: Result) -> str:
    """Draw what a run prints at its end, as SVG text."""
    console = Console(
        record=True, file=StringIO(), width=_WIDTH, force_terminal=True, color_system="truecolor"
    )
    print_result(result, console)
    drawn = console.export_svg(title="make run", unique_id="run")
    # Without this a browser loads the font from a server each time that it shows the picture.
    return re.sub(r" *@font-face \{.*?\}\n", "", drawn, flags=re.DOTALL)


def main() -> None:
    """Run the embedded job and write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "dualeval", "run", "--no-progress", "--out", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)
        result = read_result(Path(folder) / "result.json")
    # A reader's folder in place of the temporary one.
    shown = f"/home/me/dualeval/runs/20261122T101500-{result.fingerprint[:8]}"
    PICTURE.write_text(picture(replace(result, folder=shown)), "utf-8")


if __name__ == "__main__":
    main()
