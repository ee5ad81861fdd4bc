"""A rank that goes down with an error waits for nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launchers import start

WORKER = Path(__file__).with_name("hung_peer_worker.py")


def _await(path: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, f"the ranks ended before {path.name} was there"
        assert time.monotonic() < deadline, f"{path.name} was never there"
        time.sleep(0.01)


@pytest.mark.parametrize("group", ["own", "callers"])
def test_a_failed_rank_does_not_wait_for_one_that_hangs(group: str, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*start("torchrun", 2), sys.executable, str(WORKER), str(tmp_path), group],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        _await(tmp_path / "closed", process)
    finally:
        hanging = tmp_path / "pid-1"
        if hanging.exists():
            os.kill(int(hanging.read_text()), signal.SIGKILL)
        process.terminate()
        process.wait(60)
