"""What a person's terminal shows after Ctrl-C: the last line alone, no half of a bar, and the cursor."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path
from time import monotonic

import pytest

from tests.conftest import ROOT
from tests.faulty_models import FAULT

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
