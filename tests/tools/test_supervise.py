"""Commands that are run to their end or a limit leave no process behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from time import monotonic

import psutil  # type: ignore[import-untyped]
import pytest

from dualeval.tools.trials import Interrupted, Interrupts, ask, run_supervised

# A launcher whose rank is in a session of its own, takes no SIGTERM, and outlives it.
WANDERING = """
import os, signal, subprocess, sys, time
rank = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
rank += "; print('up', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", rank], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
if sys.argv[1] == "stays":
    time.sleep(600)
"""


def runs_on(path: Path) -> bool:
    """Whether the rank whose number is in a file is alive; one that nobody has waited for yet is not."""
    try:
        status = psutil.Process(int(path.read_text().split()[0])).status()
    except psutil.NoSuchProcess:
        return False
    return bool(status != psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize(("manner", "code"), [("stays", None), ("leaves", 0)])
def test_nothing_is_left(tmp_path: Path, manner: str, code: int | None) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    start = monotonic()
    ended = run_supervised(
        [sys.executable, "-c", WANDERING, manner], stdout=out, stderr=err, environ=os.environ, timeout_s=2
    )
    assert ended.code == code, err.read_text()
    assert 0 < ended.seconds <= monotonic() - start
    assert not runs_on(out)


def test_a_signal_leaves_nothing(tmp_path: Path) -> None:
    out, err = tmp_path / "out", tmp_path / "err"

    def interrupt() -> None:
        while not out.exists() or not out.read_text().endswith("\n"):
            pause.wait(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    pause = threading.Event()
    helper = threading.Thread(target=interrupt)
    with Interrupts() as interrupts, pytest.raises(Interrupted, match="SIGTERM"):
        helper.start()
        run_supervised(
            [sys.executable, "-c", WANDERING, "stays"],
            stdout=out,
            stderr=err,
            environ=os.environ,
            timeout_s=60,
            check=interrupts.check,
        )
    helper.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert not runs_on(out)


def test_an_answer() -> None:
    words = ["bash", "-c", "echo out; echo err >&2; exit 3"]
    assert ask(words, os.environ, 10) == (3, "out\n", "err\n")
