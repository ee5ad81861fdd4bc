"""Before a run goes on, or a finished one is shown again, two batches are evaluated anew and compared."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from torch import Tensor, nn

from dualeval.engine.checks import replay as proving
from dualeval.engine.device import machines
from dualeval.engine.folder import recorder
from dualeval.engine.folder.journal import read_journal_file
from dualeval.engine.loop.forward import evaluate_alone
from dualeval.engine.values.plan import EvalPlan
from dualeval.errors import UsageError
from dualeval.metrics import Measured, Metric, RowMetric
from dualeval.result import Result, read_status
from tests.engine.test_evaluator import evaluate
from tests.vehicles.tiny import TinyTask

SAMPLES = 200
BATCH = 10

# What a model reads, as from a helper module, a file or the environment, and no identity names: a factor, and
# the number of batches after which it breaks.
unnamed = {"factor": 1.0, "batches": math.inf, "limit": 2.0, "scale": 1.0, "unsteady": 0.0, "ticks": 0.0}


class Reading(TinyTask):
    """A task whose forward reads something that no identity names."""

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        unnamed["batches"] -= 1
        if unnamed["batches"] < 0:
            raise RuntimeError("enough")
        return super().forward(model, batch) * unnamed["factor"]


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch, no_look: None) -> None:
    monkeypatch.setattr(recorder, "FLUSH_ROWS", 30)
    monkeypatch.setitem(unnamed, "factor", 1.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def begin(out: Path) -> None:
    unnamed["batches"] = 13
    with pytest.raises(RuntimeError, match="enough"):
        finish(out)
    unnamed["batches"] = math.inf


def finish(out: Path, **options: Any) -> Result:
    return evaluate(Reading(SAMPLES), out, batch_size=BATCH, **options)


@pytest.fixture(params=[begin, finish], ids=["begun", "finished"])
def there(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with a run that has not come to its end, or has."""
    make: Callable[[Path], object] = request.param
    make(tmp_path / "out")
    return tmp_path / "out"


def test_other_numbers_are_refused_by_name(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = (".journal", ".parquet")
    before = {path: path.read_bytes() for path in there.rglob("*") if path.suffix in kept}
    state = getattr(read_status(there), "state", None)
    monkeypatch.setitem(unnamed, "factor", 1.000001)
    with pytest.raises(UsageError) as caught:
        finish(there)
    for words in ("sample tiny/", "(index ", "column 'confidence': 0.", " there, 0.", " now", "--fresh"):
        assert words in str(caught.value)
    assert {path: path.read_bytes() for path in before} == before, "nothing that was finished is lost"
    assert state != "done" or getattr(read_status(there), "state", None) == "done"
    monkeypatch.setitem(unnamed, "factor", 1.0)
    assert finish(there).replay == "same bits"


def test_a_comparison_that_is_left_out_is_skipped_in_the_result(
    there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(unnamed, "factor", 2.0)
    assert finish(there, replay=False).replay == "skipped"


def played_machine(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    real = machines.machine_facts
    monkeypatch.setattr(
        "dualeval.engine.job.agreement.machine_facts", lambda *args: {**real(*args), **changes}
    )


def test_another_machine_is_compared_to_tolerance(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played_machine(monkeypatch, model="another CPU")
    monkeypatch.setitem(unnamed, "factor", 1.5)
    with pytest.raises(UsageError, match="holds other numbers"):
        finish(there)
    monkeypatch.setitem(unnamed, "factor", 1.000001)
    assert finish(there).replay == "within tolerance"


def test_a_model_that_gives_other_bits_each_time_is_compared_to_tolerance(
    there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = TinyTask.forward

    def noisy(self: TinyTask, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = forward(self, model, batch)
        return logits + 1e-5 * torch.rand(logits.shape)

    monkeypatch.setattr(TinyTask, "forward", noisy)
    notes: list[str] = []
    assert finish(there, note=notes.append).replay == "within tolerance"
    assert any("does not give the same bits twice" in note for note in notes)


def test_a_sample_that_cannot_be_read_any_more_is_named(there: Path) -> None:
    task = Reading(SAMPLES)
    task.dataset()._broken = set(range(SAMPLES))
    fingerprint = TinyTask(SAMPLES).dataset().fingerprint(SAMPLES)
    task.dataset().fingerprint = lambda count: fingerprint  # type: ignore[method-assign]
    with pytest.raises(UsageError, match=r"sample tiny/\d+ \(index \d+\) cannot be read"):
        evaluate(task, there, batch_size=BATCH)


def test_failed_samples_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of the first, no sample could be read.
    monkeypatch.setattr(proving, "places_drawn", lambda fingerprint, count: [0, 5])

    def run() -> Result:
        task = Reading(SAMPLES, broken=[*range(0, SAMPLES, 2), *range(20)])
        return evaluate(task, tmp_path, batch_size=BATCH, on_error="skip")

    run()
    again = run()
    assert (again.earlier, again.replay) == (True, "same bits")


def test_each_batch_is_read_back_from_journal_and_parquet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever batch is drawn, its stored rows are the ones of its samples."""
    begin(tmp_path / "begun")
    files = tuple(map(read_journal_file, sorted((tmp_path / "begun/journal").glob("*.journal"))))
    finish(tmp_path / "done")
    wanted = pyarrow.parquet.read_table(tmp_path / "done/predictions.parquet")
    seen: dict[str, set[int]] = {"begun": set(), "done": set()}
    plan = EvalPlan(num_samples=SAMPLES, batch_size=BATCH)
    for draw in range(20):
        path, machines = tmp_path / "done/predictions.parquet", [{"model": "m", "chunks": 20}]
        batches = {
            "begun": [*proving.batches_of_journal(files, plan, f"{draw:x}")],
            "done": [*proving.batches_of_predictions(path, plan, f"{draw:x}", machines)],
        }
        for name, two in batches.items():
            assert len({stored.samples for stored in two}) == 2
            seen[name].add(two[0].samples.start)
            for stored in two:
                rows = wanted.slice(stored.samples.start, BATCH).to_pydict()
                for column, values in stored.columns.items():
                    assert values.tolist() == rows[column], column
        assert batches["done"][1].machines == ({"model": "m"},)
    assert seen == {"begun": set(range(0, 130, 10)), "done": set(range(0, SAMPLES, 10))}


def test_two_batches_are_drawn_where_there_are_two() -> None:
    fingerprints = [hashlib.sha256(bytes([number])).hexdigest() for number in range(200)]
    assert {tuple(proving.places_drawn(each, 1)) for each in fingerprints} == {(0,)}
    pairs = {tuple(proving.places_drawn(each, 3)) for each in fingerprints}
    assert pairs == {(one, other) for one in range(3) for other in range(3) if one != other}


@pytest.mark.parametrize("number", [0, 1])
def test_a_difference_in_either_of_two_batches_is_found(
    there: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    seen: list[range] = []

    def differs(evaluation: Any, samples: range) -> Any:
        columns, failed = evaluate_alone(evaluation, samples)
        seen.append(samples)
        confidence = np.asarray(columns["confidence"])
        return {**columns, "confidence": confidence / 2 if len({*seen}) > number else confidence}, failed

    monkeypatch.setattr("dualeval.engine.loop.strategy.evaluate_alone", differs)
    with pytest.raises(UsageError, match="column 'confidence'") as caught:
        finish(there)
    assert len({*seen}) == number + 1
    assert f"sample tiny/{seen[-1].start} " in str(caught.value)


class Limited:
    """A metric whose limit is looked up where no identity looks."""

    name = "limited"
    size = 1
    columns = ("loss",)

    def update(self, ledger: Tensor, columns: Mapping[str, Tensor]) -> None:
        ledger += torch.count_nonzero(columns["loss"] < unnamed["limit"])

    def compute(self, ledger: Tensor) -> Measured:
        return Measured(values={"limited": int(ledger) * unnamed["scale"]})


class Largest:
    """A metric of all rows that does the same."""

    name = "largest"
    columns = ("loss",)

    def compute(self, columns: Mapping[str, Any]) -> Measured:
        return Measured(values={"largest": float(columns["loss"].max()) * unnamed["scale"]})


class Measuring(Reading):
    """A task with these metrics, and a column that is another each time."""

    rows = (*Reading.rows, "ticks")  # type: ignore[assignment]

    def observe(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        unnamed["ticks"] += 1
        columns = super().observe(outputs, batch)
        return {
            **columns,
            "ticks": torch.full_like(columns["loss"], 1000.0 * unnamed["ticks"] * unnamed["unsteady"]),
        }

    def metrics(self) -> list[Metric | RowMetric]:
        return [*super().metrics(), Limited(), Largest()]


def measure(out: Path, **options: Any) -> Result:
    return evaluate(Measuring(SAMPLES), out, batch_size=BATCH, **options)


@pytest.mark.parametrize(("begun", "name"), [(True, "limit"), (False, "limit"), (False, "scale")])
def test_metrics_that_read_something_else_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool, name: str
) -> None:
    if begun:
        monkeypatch.setitem(unnamed, "batches", 13)
        with pytest.raises(RuntimeError, match="enough"):
            measure(tmp_path)
        monkeypatch.setitem(unnamed, "batches", math.inf)
    else:
        assert set(measure(tmp_path).metric_digests) >= {"limited", "largest", "loss"}
        assert measure(tmp_path).replay == "same bits"
    before = unnamed[name]
    monkeypatch.setitem(unnamed, name, before + 1.0)
    with pytest.raises(UsageError, match="metric 'limited' gives other numbers for the rows in "):
        measure(tmp_path)
    monkeypatch.setitem(unnamed, name, before)
    assert measure(tmp_path).replay == "same bits"


def test_one_unsteady_column_frees_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(unnamed, "unsteady", 1e-9)
    measure(tmp_path)
    notes: list[str] = []
    assert measure(tmp_path, note=notes.append).replay == "within tolerance"
    assert any("(column ticks)" in note for note in notes)
    monkeypatch.setitem(unnamed, "factor", 1.000001)
    with pytest.raises(UsageError, match=r"column 'confidence'.*something outside of it has changed"):
        measure(tmp_path)


def test_a_column_that_is_never_the_same_is_said_to_be_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(unnamed, "unsteady", 1.0)
    measure(tmp_path)
    with pytest.raises(UsageError, match=r"column 'ticks'.*gives different numbers each time.*--no-replay"):
        measure(tmp_path)
