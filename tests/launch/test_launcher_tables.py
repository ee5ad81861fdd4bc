"""docs/launchers.md says of each launcher what its file in launch/launchers says."""

from __future__ import annotations

import subprocess
import sys

from dualeval.launch.launchers import LAUNCHERS
from tests.conftest import ROOT

PAGE = ROOT / "docs/launchers.md"


def test_the_tables_are_those_of_the_code() -> None:
    code = "import launcher_tables as t; print(t.with_tables(t.PAGE.read_text('utf-8')), end='')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "docs", capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == PAGE.read_text("utf-8"), "type: make tables"


def test_each_launcher_has_a_file_and_its_page_is_there() -> None:
    files = {path.stem for path in (ROOT / "launch/launchers").glob("*.py")} - {"__init__", "base"}
    assert len(files) == len(LAUNCHERS)
    for launcher in LAUNCHERS.values():
        assert not launcher.page or (ROOT / "docs/launchers" / f"{launcher.page}.md").exists()
