"""EarlyStopping: when it stops, what it keeps, what it refuses; and that all ranks decide alike."""

from __future__ import annotations

import dataclasses
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dualeval import EarlyStopping
from dualeval.errors import UsageError
from dualeval.result import Result
from tests.conftest import ROOT, Launch
from tests.engine.test_evaluator import evaluate
from tests.engine.test_session import lines
from tests.vehicles.launchers import start, way
from tests.vehicles.tiny import TinyTask

WORKER = ROOT / "tests/vehicles/workers" / "early_stopping_worker.py"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return evaluate(TinyTask(40), tmp_path_factory.mktemp("measured"), batch_size=10)


def of(measured: Result, value: Any, name: str = "top1") -> Result:
    return dataclasses.replace(measured, metrics={**measured.metrics, name: value})


NAN = float("nan")


@pytest.mark.parametrize(
    ("options", "values", "decisions", "best_epoch"),
    [
        pytest.param({}, [0.1, 0.2, 0.2, 0.1, 0.3], "---s-", 4, id="in a row, and a tie is none"),
        pytest.param({"patience": 1}, [0.1, 0.1], "-s", 0, id="of equal ones the first"),
        pytest.param({"metric": "loss"}, [2.0, 1.0, 1.5, 1.0], "---s", 1, id="lower"),
        pytest.param({"min_delta": 0.1}, [0.5, 0.55, 0.59], "--s", 2, id="best by less than min_delta"),
        pytest.param(
            {"min_delta": 0.1}, [0.5, 0.55, 0.61, 0.7], "----", 3, id="against the last improvement"
        ),
        pytest.param({}, [NAN, 0.1, None, float("inf")], "---s", 1, id="never better where not finite"),
        pytest.param({}, [None, NAN, 0.1], "-s-", 2, id="stops where nothing was ever finite"),
    ],
)
def test_training_stops_after_patience_without_an_improvement(
    measured: Result, options: dict[str, Any], values: list[Any], decisions: str, best_epoch: int
) -> None:
    stopping = EarlyStopping(**{"metric": "top1", "patience": 2, **options})
    results = [of(measured, value, options.get("metric", "top1")) for value in values]
    best: list[int] = []
    for number, (result, decision) in enumerate(zip(results, decisions, strict=True)):
        assert stopping.update(result) is stopping.should_stop is (decision == "s"), number
        best += [number] if stopping.is_best else []
    assert stopping.best_epoch == best[-1] == best_epoch
    assert stopping.best is results[best_epoch]


def test_a_metric_without_a_direction_needs_one(measured: Result) -> None:
    undirected = dataclasses.replace(of(measured, 1.0), directions={})
    with pytest.raises(
        UsageError, match=r"whether higher or lower is better for 'top1': pass .*direction='hi"
    ):
        EarlyStopping("top1", 1).update(undirected)
    stopping = EarlyStopping("top1", 1, direction="lower")
    assert not stopping.update(undirected)
    assert stopping.update(dataclasses.replace(undirected, metrics={"top1": 1.5}))
    with pytest.raises(UsageError, match="direction='lower', but higher is better for 'top1'"):
        EarlyStopping("top1", 1, direction="lower").update(measured)


def test_a_result_without_the_metric_is_refused_and_not_counted(measured: Result) -> None:
    stopping = EarlyStopping("top_1", 1)
    with pytest.raises(UsageError, match=r"no metric 'top_1': it has loss, top1, .* Did you mean top1\?"):
        stopping.update(measured)
    listed = dataclasses.replace(measured, metrics={"top_1": [0.5, 0.5]}, directions={"top_1": "higher"})
    with pytest.raises(UsageError, match="'top_1' is a list, and EarlyStopping compares one number"):
        stopping.update(listed)
    with pytest.raises(UsageError, match=r"takes the Result that dualeval.evaluate returns, not a float"):
        stopping.update(0.5)  # type: ignore[arg-type]
    # Nothing was counted.
    assert stopping.state_dict() == EarlyStopping("top_1", 1).state_dict()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"metric": ""}, "metric ''"),
        ({"patience": 0}, "patience 0: expected a whole number of at least 1"),
        ({"min_delta": -0.1}, "min_delta -0.1: expected a number of at least 0"),
        ({"direction": "up"}, "direction 'up': expected one of higher, lower"),
        ({"backend": "torch"}, "backend 'torch': expected a Backend, such as session.backend"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        EarlyStopping(**{"metric": "top1", "patience": 1, **options})


def test_a_resumed_training_decides_as_one_that_was_not_stopped(measured: Result) -> None:
    values = [0.1, 0.4, 0.35, 0.2]
    whole, resumed = EarlyStopping("top1", 2), EarlyStopping("top1", 2)
    for number, value in enumerate(values):
        # As a checkpoint keeps it.
        file = io.BytesIO()
        torch.save({"stopping": resumed.state_dict()}, file)
        file.seek(0)
        resumed = EarlyStopping("top1", 2)
        resumed.load_state_dict(torch.load(file, weights_only=True)["stopping"])
        assert resumed.update(of(measured, value)) is whole.update(of(measured, value)) is (number == 3)
        assert resumed.state_dict() == whole.state_dict()
    assert resumed.best is not None and whole.best is not None
    assert resumed.best.metrics_digest == whole.best.metrics_digest
    again = EarlyStopping("top1", 2)
    again.load_state_dict(whole.state_dict())
    assert again.should_stop
    longer = EarlyStopping("top1", 3)
    longer.load_state_dict(whole.state_dict())
    assert not longer.should_stop


def test_a_state_that_is_none_is_refused(measured: Result) -> None:
    stopping = EarlyStopping("top1", 1)
    with pytest.raises(UsageError, match=r"belongs to EarlyStopping\('loss', ...\)"):
        stopping.load_state_dict(EarlyStopping("loss", 1).state_dict())
    for state in ({}, {"epoch": 3}, {**stopping.state_dict(), "progress": {"updates": 1, "more": 2}}, None):
        with pytest.raises(UsageError, match="not a state of EarlyStopping"):
            stopping.load_state_dict(state)  # type: ignore[arg-type]
    assert stopping.state_dict() == EarlyStopping("top1", 1).state_dict()


@pytest.mark.parametrize(
    ("launcher", "backend"), [way("torchrun", "torch"), way("horovodrun", "horovod", long=True)]
)
def test_all_ranks_decide_as_rank_0(launch: Launch, tmp_path: Path, launcher: str, backend: str) -> None:
    done = launch([*start(launcher, 2), sys.executable, WORKER, backend], cwd=tmp_path).ok()
    found = lines(done)
    assert [said.pop("rank") for said in found] == [0, 1]
    for said in found:
        assert said == {
            "decisions": [False, False, False, True],
            "bests": [True, True, False],
            "best_epoch": 1,
            "best": 0.6,
            "refusals": [
                "on rank 1: the result has no metric 'right': it has top1.",
                "EarlyStopping has patience=2 on rank 0 and patience=3 on rank 1: give all ranks the same",
            ],
            "nan": [False, True],
            "session": [False, True],
            "in session": [False, True],
        }
