"""Models whose forward holds collectives: one forward a round on every rank, whatever goes wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dualeval.engine.sharding import lockstep as rounds
from dualeval.engine.values.plan import EvalPlan
from tests.conftest import ROOT, Finished, Launch
from tests.vehicles.launchers import start
from tests.vehicles.sessions import evaluate
from tests.vehicles.workers.lockstep_worker import ShardedTask

WORKER = ROOT / "tests/vehicles/workers" / "lockstep_worker.py"
GUEST = ROOT / "tests/vehicles/workers" / "sharded_guest_worker.py"


def run(launch: Launch, ranks: int, out: Path | str, **given: Any) -> Finished:
    keys = [f"{key}={value}" for key, value in given.items()]
    # A real start, whose agent ends a rank that is suspended.
    variables = {"PYTHONFAULTHANDLER": "1"} if given.get("what") == "SIGSTOP" else {}
    return launch([*start("torchrun", ranks), sys.executable, WORKER, out, *keys], variables=variables)


def printed(done: Finished) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def whole_digest() -> str:
    """Of the whole model, in this process."""
    return evaluate(ShardedTask(53, {"shard": "no"}), batch_size=4).metrics_digest


def test_there_are_as_many_rounds_as_the_rank_with_most_batches_has() -> None:
    plan = EvalPlan(num_samples=53, batch_size=4)
    chunks = range(plan.num_chunks)
    assert [rounds.rounds_of(plan, chunks, size) for size in (1, 2, 3, 14, 20)] == [14, 7, 5, 1, 1]
    assert rounds.rounds_of(plan, [3, 5, 6], 2) == 2
    assert rounds.rounds_of(plan, [], 2) == 0


def test_uneven_data_gives_the_digest_of_the_whole_model(launch: Launch, tmp_path: Path) -> None:
    launch([*start("torchrun", 3), sys.executable, WORKER, "uneven", tmp_path]).ok()
    found = json.loads((tmp_path / "found.json").read_text())
    for name, case in found.items():
        assert case["sharded"] == case["whole"], name
    assert found["resumed whole"]["replay"] == found["resumed sharded"]["replay"] == "same bits"
    assert "sample tiny/21 (index 21) cannot be read" in found["unreadable"]["error"]
    assert "--schedule dynamic: the model is sharded" in found["dynamic"]["error"]
    assert found["prime"]["schedules"] == ["lockstep", "static"]
    assert found["prime"]["deterministic"] == [True, True]
    deterministic, warnings = found["drawn"]["result"]
    [warning] = [warning for warning in warnings if "the same samples give different numbers" in warning]
    assert deterministic is False and "forward or observe draws random numbers" in warning


def test_training_is_bit_for_bit_as_without_the_evaluations(launch: Launch, tmp_path: Path) -> None:
    launch([*start("torchrun", 2), sys.executable, GUEST, tmp_path]).ok()
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0]["evaluates"][1] == ranks[1]["evaluates"][1]
    for rank in ranks:
        assert rank["evaluates"][0] == rank["trains"][0]
        for epoch in rank["evaluates"][1]:
            sharded, whole = epoch["sharded"], epoch["whole"]
            assert (sharded.pop("schedule"), whole.pop("schedule")) == ("lockstep", None)
            assert sharded == whole
            assert sharded["layout"] == "channels-last"
    digests = {epoch["sharded"]["digest"] for epoch in ranks[0]["evaluates"][1]}
    assert len(digests) == len(ranks[0]["evaluates"][1])


def test_a_signal_to_one_rank_ends_all_after_the_same_round(launch: Launch, tmp_path: Path) -> None:
    stopped = run(launch, 2, tmp_path / "run", what="SIGTERM", rank=1, at=4)
    # torchrun gives its own exit code; the run's is in the folder.
    assert stopped.returncode != 0
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "stopped", status
    assert "stopped by SIGTERM" in stopped.stderr
    resumed = printed(run(launch, 3, tmp_path / "run"))
    assert resumed["replay"] == "same bits"
    assert resumed["digest"] == whole_digest()


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_is_killed_in_a_round_is_named(launch: Launch, tmp_path: Path, rank: int) -> None:
    killed = run(launch, 3, tmp_path / "run", what="SIGKILL", rank=rank, at=4)
    assert killed.returncode != 0
    assert f"rank {rank} on " in killed.stderr
    assert "exited without a message" in killed.stderr or "can no longer be reached" in killed.stderr
    assert "torch.distributed broke" not in killed.stderr
    resumed = printed(run(launch, 2, tmp_path / "run"))
    assert resumed["digest"] == whole_digest()


@pytest.mark.long
@pytest.mark.parametrize("what", ["sleep", "SIGSTOP"])
def test_a_rank_that_stalls_in_a_round_is_named(launch: Launch, what: str) -> None:
    stalled = run(launch, 3, "-", what=what, rank=1, at=4, heartbeat=6)
    assert stalled.returncode != 0
    assert "dualeval: error: rank 1 on " in stalled.stderr
    assert "no progress for" in stalled.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("raise", "ValueError: this rank's own error"),
        (
            "fewer",
            "does not always call the units of the sharded model in the same order: where this one calls 2",
        ),
        ("more", "where this one calls 0, the first one no further one"),
    ],
)
def test_a_forward_that_goes_wrong_on_one_rank_ends_all(launch: Launch, what: str, words: str) -> None:
    ended = run(launch, 3, "-", what=what, rank=1, at=4)
    assert ended.returncode != 0
    assert words in ended.stderr
    assert "digest" not in ended.stdout


def test_in_a_script_a_forward_that_fails_on_one_rank_leaves_none_waiting(launch: Launch) -> None:
    done = launch([*start("torchrun", 2), sys.executable, WORKER, "failing"])
    found = printed(done)
    assert found["raised"] == [
        "PeerError: ValueError: this rank's own error",
        "ValueError: this rank's own error",
    ]
    assert len({*found["digests"]}) == 1


@pytest.mark.long
def test_a_model_that_fails_ends_its_attempt_alone(launch: Launch) -> None:
    ended = launch([*start("torchrun", 2), sys.executable, WORKER, "attempts"]).ok()
    assert ended.stdout.splitlines() == [
        *("good: done", "everywhere: ValueError: this rank's own error", "good after everywhere: done"),
        *("columns of one rank: ValueError: this rank's own columns", "good after columns: done"),
        *("forward of one rank: ValueError: this rank's own error", "good at last: done"),
    ]
