"""Many ranks on one machine, few as its cores may be: one control plane, and the digest of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Launch
from tests.control_ranks import fail_in_the_middle, on_many_ranks, stop_all
from tests.faults import LOADED_S
from tests.launchers import start

CONTROLLED = pytest.mark.parametrize(
    ("size", "processes"),
    [(128, 2), pytest.param(1000, 4, marks=[pytest.mark.long, pytest.mark.timeout(600)])],
)


@CONTROLLED
def test_a_failure_reaches_all(size: int, processes: int) -> None:
    """Promised within 2 s of a rank's failure; the ranks of a process are in each other's way here."""
    moments = on_many_ranks(size, processes, fail_in_the_middle)
    assert all(isinstance(of_rank, dict) for of_rank in moments), moments
    failed = moments[size // 2]["failed"]
    heard = [of_rank["heard"] - failed for of_rank in moments if "failed" not in of_rank]
    print(f"{size} ranks: heard after {max(heard):.2f} s; {moments[0]}")
    assert max(heard) < 2.0 + LOADED_S
    # Rank 0 evaluates beside it.
    assert moments[0]["cores of beats"] < 0.1


@CONTROLLED
def test_a_stop_is_concluded_by_all(size: int, processes: int) -> None:
    moments = on_many_ranks(size, processes, stop_all)
    assert all(isinstance(of_rank, dict) for of_rank in moments), moments
    signalled = moments[size // 2]["signalled"]
    ended = max(of_rank["ended"] for of_rank in moments) - signalled
    print(f"{size} ranks: ended after {ended:.2f} s")
    assert ended < 5.0 + LOADED_S


@pytest.mark.long
def test_32_ranks_have_the_digest_of_one(launch: Launch, tmp_path: Path) -> None:
    found = []
    for size in (1, 32):
        out = tmp_path / str(size)
        launch([*start("torchrun", size), "dualeval", "run", "--no-progress", "--out", out], timeout=270).ok()
        found.append(json.loads((out / "result.json").read_text()))
    assert found[0]["metrics_digest"] == found[1]["metrics_digest"]
    assert found[1]["samples"] == {"total": 10_000, "evaluated": 10_000, "failed": 0}
    # 157 batches: at least four for each rank.
    assert len(found[1]["timing"]["ranks"]) == 32
