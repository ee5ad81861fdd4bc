"""What would fail after the last batch fails on the first one, with the column's or metric's name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from dualeval.engine.checks import first_batch
from dualeval.errors import UsageError
from dualeval.metrics import Mean, Measured, Metric, RowMetric
from tests.engine.test_evaluator import evaluate
from tests.vehicles.tiny import TinyTask

pytestmark = pytest.mark.usefixtures("no_look")

SAMPLES = 100
BATCH = 10


class Counting:
    """A metric that counts samples, and gives whatever it is told to."""

    size = 1
    columns = ("loss",)

    def __init__(self, value: Any = 1, name: str = "counting", key: str = "counted", **more: Any) -> None:
        self.name = name
        self._key = key
        self._value = value
        self._more = more

    def update(self, ledger: Tensor, columns: Mapping[str, Tensor]) -> None:
        ledger[0] += len(columns[self.columns[0]])

    def compute(self, ledger: Tensor) -> Measured:
        return Measured(values={self._key: self._value}, **self._more)


class OfRows:
    """A metric of all rows."""

    def __init__(self, columns: tuple[str, ...] = ("loss",), reads: str = "loss", least: int = 0) -> None:
        self.name = "of_rows"
        self.columns = columns
        self._reads = reads
        self._least = least

    def compute(self, columns: Mapping[str, npt.NDArray[Any]]) -> Measured:
        if len(columns[self._reads]) < self._least:
            raise ValueError("too few samples")
        return Measured(values={"of_rows": len(columns[self._reads])})


class Custom(TinyTask):
    """A task of somebody's own, which counts its forwards."""

    exports: Mapping[str, str] = {}

    def __init__(
        self,
        *,
        metrics: Sequence[Metric | RowMetric] = (),
        columns: Mapping[str, Tensor] | None = None,
        rows: tuple[str, ...] = ("loss",),
        texts: Mapping[str, Sequence[str]] | None = None,
        files: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(SAMPLES)
        self._own_metrics = metrics
        self._columns = columns or {}
        self._texts = texts or {}
        self.rows = rows  # type: ignore[assignment]
        self.exports = files or {}
        self.forwards = 0

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        self.forwards += 1
        return super().forward(model, batch)

    def observe(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**super().observe(outputs, batch), **self._columns}

    def metrics(self) -> list[Metric | RowMetric]:
        return [Mean("loss"), *self._own_metrics]

    def texts(self, rows: Mapping[str, npt.NDArray[Any]], first: int) -> Mapping[str, Sequence[str]]:
        return self._texts


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def column(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros((BATCH, *shape), dtype=dtype)


FAILURES: dict[str, tuple[dict[str, Any], str]] = {
    "a row metric's column that is no row": (
        {"metrics": [OfRows(columns=("embedding",))]},
        r"metric 'of_rows' reads column 'embedding', which the task does not make",
    ),
    "a column that a row metric reads and does not name": (
        {"metrics": [OfRows(reads="rank")]},
        r"metric 'of_rows' reads column 'rank', which is not among its columns \(loss\)",
    ),
    "a tensor as a value": (
        {"metrics": [Counting(torch.tensor(1.0))]},
        r"metric 'counting' gave a Tensor for counted, .*\.item\(\)",
    ),
    "a text that is no Unicode": (
        {"metrics": [Counting(chr(0xD800))]},
        "metric 'counting' gave a text that is not Unicode",
    ),
    "an array as a value": ({"metrics": [Counting({"a": np.zeros(3)})]}, r"a ndarray for counted\.a"),
    "a number as a key": ({"metrics": [Counting(1, key=1)]}, r"values has the key 1, expected a text"),  # type: ignore[arg-type]
    "an interval of three": (
        {"metrics": [Counting(1, intervals={"counted": (0, 1, 2)})]},
        r"gave a tuple for intervals.counted, expected a pair",
    ),
    "a unit of no value": (
        {"metrics": [Counting(1, units={"counted_": "fraction"})]},
        r"gave units for 'counted_', and no value of that name",
    ),
    "a direction that is none": (
        {"metrics": [Counting(1, directions={"counted": "up"})]},
        r"gave 'up' for directions\.counted, expected higher or lower",
    ),
    "a column of three dimensions": (
        {"columns": {"map": column(2, 3)}, "rows": ("map",)},
        r"column 'map' has shape \(10, 2, 3\), expected \(samples,\) or \(samples, values\)",
    ),
    "a bf16 column": (
        {"columns": {"score": column(dtype=torch.bfloat16)}, "rows": ("score",)},
        r"column 'score' is torch.bfloat16, which cannot be written.*\.float\(\)",
    ),
    "one number for a batch": (
        {"columns": {"score": torch.tensor(1.0)}, "rows": ("score",)},
        r"column 'score' is one number for a batch of 10 samples",
    ),
    "two metrics with one key": (
        {"metrics": [Counting(), Counting(name="other")]},
        r"two metrics give a value called 'counted'",
    ),
    "two metrics of one name": (
        {"metrics": [Counting(), Counting(key="other")]},
        r"two metrics are called 'counting'",
    ),
    **{
        f"a row named {name}": (
            {"columns": {name: column()}, "rows": (name,)},
            f"column '{name}' has a name that is taken",
        )
        for name in ("index", "evaluated", "id")
    },
    "a row that nobody makes": (
        {"rows": ("los",)},
        r"column 'los' is in the task's rows, but observe and postprocess gave only: loss",
    ),
    "a text named as a row": ({"texts": {"loss": BATCH * ["x"]}}, r"texts have a column 'loss'"),
    "a file of a column that is not there": (
        {"files": {"answers.json": "answer"}},
        r"answers.json is to hold the column 'answer'",
    ),
    "a file of a column with NaN": (
        {"columns": {"score": column() / 0}, "rows": ("score",), "files": {"scores.json": "score"}},
        r"scores.json: the column 'score' cannot be written as JSON",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_is_wrong_fails_on_the_first_batch(tmp_path: Path, name: str) -> None:
    options, words = FAILURES[name]
    task = Custom(**options)
    with pytest.raises(UsageError, match=words):
        evaluate(task, tmp_path / "out", batch_size=BATCH)
    assert task.forwards <= 1


@pytest.mark.parametrize(
    ("metric", "words", "measured"),
    [
        (Counting(float("nan")), "metric 'counting' gave nan for counted, which is null", None),
        (Counting([1.0, float("inf")]), "metric 'counting' gave inf for counted[1]", [1.0, None]),
        (
            Counting(1.0, intervals={"counted": (0.0, float("nan"))}),
            "metric 'counting' gave nan for intervals.counted",
            1.0,
        ),
    ],
)
def test_what_is_not_finite_is_said_at_once_and_is_null_at_the_end(
    tmp_path: Path, metric: Metric, words: str, measured: Any
) -> None:
    """Some metrics are undefined on one batch of one class; none may cost the run its end."""
    notes: list[str] = []
    task = Custom(metrics=[metric])
    result = evaluate(task, tmp_path, batch_size=BATCH, note=notes.append)
    assert [note for note in notes if note.startswith("on the first batch alone, ") and words in note]
    assert [warning for warning in result.warnings if words in warning]
    of_all: list[str] = []
    evaluate(task, tmp_path / "one", batch_size=1000, note=of_all.append)
    assert not [note for note in of_all if "first batch" in note], "one batch is said of once, at the end"
    assert result.metrics["counted"] == measured
    assert "counted" not in result.intervals


def test_a_metric_may_be_undefined_on_the_first_batch(tmp_path: Path) -> None:
    class Late(Counting):
        def compute(self, ledger: Tensor) -> Measured:
            return Measured(values={"late": 1 // (int(ledger[0]) // SAMPLES)})

    notes: list[str] = []
    result = evaluate(Custom(metrics=[Late()]), tmp_path, batch_size=BATCH, note=notes.append)
    assert result.metrics["late"] == 1
    [note] = [note for note in notes if "ZeroDivisionError" in note]
    assert "metric 'counting' fails on the first batch alone" in note


def test_a_metric_that_cannot_update_is_named_with_its_own_frames(tmp_path: Path) -> None:
    class Broken(Counting):
        def update(self, ledger: Tensor, columns: Mapping[str, Tensor]) -> None:
            raise ZeroDivisionError("in my metric")

    task = Custom(metrics=[Broken()])
    with pytest.raises(RuntimeError, match=r"metric 'counting' fails on the first batch: ZeroDivisionError"):
        evaluate(task, tmp_path, batch_size=BATCH)
    assert task.forwards == 1


def test_what_a_metric_returns_must_be_measured(tmp_path: Path) -> None:
    class Plain(Counting):
        def compute(self, ledger: Tensor) -> Any:
            return {"counted": 1}

    with pytest.raises(UsageError, match=r"metric 'counting' returned a dict, expected dualeval.Measured"):
        evaluate(Custom(metrics=[Plain()]), tmp_path, batch_size=BATCH)


@pytest.mark.parametrize("kind", ["dtype", "width", "missing"])
def test_each_batch_has_the_same_columns(tmp_path: Path, kind: str) -> None:
    class Varying(Custom):
        def observe(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            later = self.forwards > 3
            found = (
                {"dtype": column().long(), "width": column(2), "missing": None}[kind] if later else column()
            )
            more = {} if found is None else {"score": found}
            return {**super().observe(outputs, batch), **more}

    task = Varying(rows=("loss", "score"))
    with pytest.raises(UsageError, match=r"column 'score' of batch 3 \(samples 30 to 39\) is .* first batch"):
        evaluate(task, tmp_path, batch_size=BATCH)


def test_a_first_batch_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    task = Custom(metrics=[Counting({1, 2})])
    task.dataset()._broken = set(range(BATCH))
    with pytest.raises(UsageError, match="gave a set for counted"):
        evaluate(task, tmp_path, batch_size=BATCH, on_error="skip")
    assert task.forwards == 1


def test_the_trial_changes_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = evaluate(TinyTask(SAMPLES, broken=[3]), tmp_path / "a", batch_size=BATCH, on_error="skip")
    monkeypatch.setattr(first_batch, "try_first_batch", lambda *_, **__: [])
    plain = evaluate(TinyTask(SAMPLES, broken=[3]), tmp_path / "b", batch_size=BATCH, on_error="skip")
    assert tried.metrics_digest == plain.metrics_digest
