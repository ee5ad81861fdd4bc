"""A rank that comes late is awaited, on every backend, and waiting takes no core."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import ROOT, Launch
from tests.launchers import start

WORKER = ROOT / "tests" / "workers" / "late_worker.py"
HOROVOD_OVER_MPI = ("mpirun", "horovod")
WAYS = [
    ("torchrun", "torch"),
    ("mpirun", "torch"),
    ("horovodrun", "horovod"),
    HOROVOD_OVER_MPI,
    ("mpirun", "mpi"),
]
SIZE = 3


def check(launch: Launch, folder: Path, seconds: float) -> None:
    """Wait on all backends at the same time: ranks that sleep are not in each other's way."""

    def run(way: tuple[str, str]) -> None:
        too_much = wait(way, "first")
        # Over MPI a thread of Horovod's looks without a pause for as long as the cycles of the ranks happen
        # to begin apart: mostly a few hundredths, in one start of some twenty more than half of each cycle.
        if too_much and way == HOROVOD_OVER_MPI:
            too_much = wait(way, "second")
        assert not too_much, too_much

    def wait(way: tuple[str, str], attempt: str) -> list[str]:
        """Start ranks of which the last is late; says which of the others took too much of a core."""
        launcher, backend = way
        reports = folder / f"{launcher}-{backend}-{attempt}"
        reports.mkdir()
        too_much = []
        command: list[str | Path] = [
            *(*start(launcher, SIZE), sys.executable),
            *(WORKER, backend, str(seconds), reports),
        ]
        done = launch(command, timeout=2 * seconds + 150, variables={"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, f"{way}: {done.stdout} {done.stderr}"
        for rank in range(SIZE - 1):
            for what, (waited, cpu) in zip(
                ("joining", "reducing"), json.loads((reports / f"rank-{rank}.json").read_text()), strict=True
            ):
                report = f"{way}, rank {rank}, {what}: {cpu:.1f} s of a core in {waited:.1f} s"
                print(report)
                assert waited > 0.7 * seconds, report
                # Joining imports the library meanwhile: a second and a half at most.
                if cpu >= 0.3 * waited + 1.5:
                    too_much.append(report)
        return too_much

    with ThreadPoolExecutor(len(WAYS)) as pool:
        for finished in [pool.submit(run, way) for way in WAYS]:
            finished.result()


@pytest.mark.long
@pytest.mark.needs("horovod", "mpi")
@pytest.mark.timeout(600)
def test_a_rank_90_s_late(launch: Launch, tmp_path: Path) -> None:
    """Longer than Horovod's own limit of 30 s."""
    check(launch, tmp_path, 90)
