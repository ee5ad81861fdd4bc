"""A run beside a finished one: what the result says of how predictions moved, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from torch import Tensor

import dualeval
from dualeval.columns.ragged import RaggedRows
from dualeval.engine.folder import stored_rows
from dualeval.engine.values.row_comparison import Difference, as_one_kind, right, same_entries, text_rows
from dualeval.errors import UsageError
from dualeval.metrics import Mean
from dualeval.report.table import print_result
from dualeval.result import PREDICTIONS, STATUS, Result
from tests.comparison.test_comparison import changed
from tests.engine.test_evaluator import evaluate
from tests.vehicles.tiny import TinyTask

COUNT = 300


class Seeded(TinyTask):
    """A TinyTask with weights of another seed, and other columns on demand."""

    def __init__(
        self,
        count: int = COUNT,
        broken: Sequence[int] = (),
        *,
        seed: int = 0,
        more: Mapping[str, Any] | None = None,
        rows: Sequence[str] = TinyTask.rows,
    ) -> None:
        super().__init__(count, broken, seed=seed)
        self._more = more or {}
        self.rows = (*rows, *self._more)  # type: ignore[assignment]

    def observe(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Any]:
        columns = super().observe(outputs, batch)
        return {**columns, **{name: make(columns) for name, make in self._more.items()}}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reference") / "first"
    evaluate(Seeded(), out, batch_size=32, job={"precision": "fp32", "mean": (0.5,), "by": ()})
    return out


def table_of(run: Path) -> Any:
    return pyarrow.parquet.read_table(run / PREDICTIONS).to_pandas()


def expected(first: Path, second: Path) -> dict[str, Any]:
    one, other = table_of(second), table_of(first)
    moved = (one.loss.astype(float) - other.loss.astype(float)).to_numpy()
    right, was = one.prediction == one.target, other.prediction == other.target
    return {
        "changed": int((one.prediction != other.prediction).sum()),
        "became_right": int((right & ~was).sum()),
        "became_wrong": int((~right & was).sum()),
        "mean": pytest.approx(moved.mean()),
        "mean_absolute": pytest.approx(np.abs(moved).mean()),
        "largest": np.abs(moved).max(),
        "largest_at": one.id[int(np.abs(moved).argmax())],
    }


def test_the_numbers_are_those_of_the_two_files(
    first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_rows, "WINDOW_ROWS", 7)
    monkeypatch.setattr("dualeval.engine.folder.row_windows.WINDOW_ROWS", 7)
    out = tmp_path / "second"
    job = {"precision": "fp32", "mean": (0.5,), "layout": "x", "by": ("target",)}
    result = evaluate(Seeded(seed=1), out, batch_size=16, reference=first, job=job)
    wanted, found = expected(first, out), result.reference
    assert wanted["changed"] > 50
    assert {name: found[name] for name in ("changed", "became_right", "became_wrong")} == {
        name: wanted[name] for name in ("changed", "became_right", "became_wrong")
    }
    assert found["agreement"] == (COUNT - wanted["changed"]) / COUNT
    for name in ("mean", "mean_absolute", "largest", "largest_at"):
        assert found["loss"][name] == wanted[name]
    assert found["columns"]["confidence"]["largest"] > 0
    assert found["columns"]["target"] == {"rows_differ": 0, "first": None}
    assert not found["same_bits"]
    assert list(found["differs_in"]) == ["batch_size", "weights_fingerprint"]
    other = {**found, "columns": {"prediction_name": found["columns"]["confidence"]}}
    assert "\n  prediction_name " in str(replace(result, reference=other))
    assert len(found["first_changed"]) == 10
    assert json.loads((out / "result.json").read_text())["reference"] == found
    # Finished: from its rows, the same; and without --reference what was written.
    again = evaluate(Seeded(seed=1), out, batch_size=16, reference=first, job=job)
    assert again.earlier
    assert again.reference == found
    assert evaluate(Seeded(seed=1), out, batch_size=16).reference == found
    # Nothing is written.
    assert evaluate(Seeded(seed=1), None, batch_size=16, reference=first, job=job).reference == found


def test_a_reference_decides_neither_identity_nor_digest(first: Path, tmp_path: Path) -> None:
    alone = evaluate(Seeded(seed=2), tmp_path, batch_size=32)
    shown = evaluate(Seeded(seed=2), tmp_path, batch_size=32, reference=first)
    assert shown.earlier and shown.reference["samples"] == COUNT
    assert (shown.fingerprint, shown.metrics_digest) == (alone.fingerprint, alone.metrics_digest)
    assert alone.reference == {} == json.loads((tmp_path / "result.json").read_text())["reference"]


def test_the_same_bits_are_said(first: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluate(Seeded(), None, batch_size=32, reference=str(first))
    assert found.reference["same_bits"]
    assert found.reference["agreement"] == 1.0
    assert found.reference["loss"]["largest"] == 0.0
    assert found.reference["differs_in"] == {}
    print_result(found)
    shown = capsys.readouterr().out
    assert "agreement     300 predictions are equal (100.00 %)\n" in shown
    assert "the same bits in every row" in shown
    assert f"reference       {first}" in shown


def test_failed_samples_are_counted_apart(tmp_path: Path) -> None:
    class Skipping(Seeded):
        """Its data are the same whatever can be read."""

        def __init__(self, broken: Sequence[int]) -> None:
            super().__init__(40, broken)
            self._dataset.fingerprint = lambda count: f"{count:064d}"  # type: ignore[method-assign]

    evaluate(Skipping([1, 2, 3]), tmp_path / "a", batch_size=8, on_error="skip")
    for out in (tmp_path / "b", None):
        found = evaluate(
            Skipping([3, 4]), out, batch_size=8, on_error="skip", reference=tmp_path / "a"
        ).reference
        assert found["failed"] == {"here": 1, "there": 2, "both": 1}
        assert found["samples"] == 36
        assert found["agreement"] == 1.0


def test_columns_of_other_kinds_are_named(tmp_path: Path) -> None:
    def ragged(columns: Mapping[str, Tensor]) -> Any:
        return [row[: 1 + int(target) % 3] for row, target in zip(columns["top"], columns["target"])]  # noqa: B905

    there = {"words": lambda columns: ["a"] * len(columns["loss"]), "kind": lambda columns: columns["loss"]}
    here = {
        "words": lambda columns: ["a", "b"] * (len(columns["loss"]) // 2),
        "kind": lambda columns: columns["target"],
        "parts": ragged,
    }
    evaluate(Seeded(20, more={**there, "parts": ragged}), tmp_path / "a")
    evaluate(Seeded(20, more=there), tmp_path / "without")
    result = evaluate(Seeded(20, more=here), tmp_path / "b", reference=tmp_path / "a")
    found = result.reference
    assert found["columns"]["words"] == {"rows_differ": 10, "first": "tiny/1"}
    assert found["columns"]["parts"] == {"rows_differ": 0, "first": None}
    assert found["not_compared"] == {
        "kind": "int32 with rows of shape () in this run, float32 with rows of shape () in the reference"
    }
    result = evaluate(Seeded(20, more=here), tmp_path / "c", reference=tmp_path / "without")
    assert result.reference["not_compared"]["parts"] == "only in this run"


def test_without_prediction_and_loss_the_columns_of_both_are_compared(tmp_path: Path) -> None:
    class Plain(Seeded):
        def metrics(self) -> list[Any]:
            return [Mean("confidence")]

    evaluate(Plain(20, rows=("confidence",)), tmp_path / "a")
    result = evaluate(Plain(20, rows=("confidence",), seed=1), None, reference=tmp_path / "a")
    found = result.reference
    assert (found["prediction"], found["agreement"], found["loss"]) == (None, None, None)
    assert found["columns"]["confidence"]["rows_differ"] == 20
    print_result(result)


@pytest.mark.parametrize("options", [{"limit": 40}, {"sample": 30, "seed": 3}])
def test_a_part_is_compared_only_to_the_same_part(
    tmp_path: Path, first: Path, options: dict[str, Any]
) -> None:
    evaluate(Seeded(), tmp_path / "a", **options)
    found = evaluate(Seeded(seed=1), tmp_path / "b", reference=tmp_path / "a", **options).reference
    assert found["samples"] == (options.get("limit") or options["sample"])
    with pytest.raises(UsageError, match=r"a run over different samples, .*: (sample|300 samples there)"):
        evaluate(Seeded(seed=1), tmp_path / "c", reference=first, **options)
    assert not (tmp_path / "c").exists(), "nothing is made where nothing can be compared"


def test_a_reference_that_cannot_be_compared_is_refused_at_the_start(
    first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Seeded, "forward", lambda *_: pytest.fail("something was evaluated"))
    unfinished, without = changed(first, tmp_path / "unfinished"), changed(first, tmp_path / "without")
    status = json.loads((first / STATUS).read_text())
    (unfinished / STATUS).write_text(json.dumps({**status, "state": "stopped"}))
    (without / PREDICTIONS).unlink()
    other = changed(first, tmp_path / "data", data={"fingerprint": "0" * 64, "contents": None})
    turned = changed(first, tmp_path / "turned", lambda table: table.take(list(range(COUNT))[::-1]))
    few = changed(first, tmp_path / "few", lambda table: table.select(["id", "index", "top"]))
    cases: list[tuple[Any, str]] = [
        (tmp_path / "nothing", "--reference: there is no folder"),
        (unfinished, r"--reference: .* holds no finished run: its state is 'stopped'"),
        (without, r"--reference: .* no predictions\.parquet any more"),
        (other, r"over different data: .* in labels, sizes or texts \(.*0{8}\)"),
        (turned, r"in a different order: sample 0 is 'tiny/299' there.*'dualeval compare"),
        (few, "no column is in both runs"),
        *((wrong, r"reference .*: expected the folder of a finished run") for wrong in ("", 3)),
    ]
    for reference, said in cases:
        with pytest.raises(UsageError, match=said):
            evaluate(Seeded(rows=("loss",)), tmp_path / "b", reference=reference)
    with pytest.raises(UsageError, match="reference and out are both"):
        evaluate(Seeded(), first, reference=str(first))
    assert not (tmp_path / "b").exists()


def test_a_loop_of_ones_own_is_compared(tmp_path: Path) -> None:
    def run(out: Path | None, factor: float, **options: Any) -> Result:
        with dualeval.Session(launcher="none", device="cpu") as session:
            for batch in session.batches(torch.arange(20.0), batch_size=4, out=out, **options):
                session.add(batch, loss=batch * factor)
            return session.result()

    run(tmp_path / "a", 1.0)
    for out in (tmp_path / "b", None):
        found = run(out, 1.5, reference=tmp_path / "a").reference
        assert (found["loss"]["largest"], found["loss"]["largest_at"]) == (9.5, "19")


# -- rows beside other rows: kinds that can be compared, and values that are equal ----------------------


NAN = float("nan")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ([1.0, NAN, 2.0, NAN], [1.0, NAN, 3.0, 1.0], [True, True, False, False]),
        (["a", None, "b", None], ["a", None, "c", "d"], [True, True, False, False]),
        ([1, 2], ["1", "2"], [False, False]),
        ([True, False], [True, True], [True, False]),
        ([1, 2], [1.0, 2.5], [True, False]),
    ],
)
def test_missing_entries_are_equal_and_texts_are_no_numbers(
    one: list[Any], other: list[Any], same: list[bool]
) -> None:
    assert same_entries(pyarrow.array(one), pyarrow.array(other)).tolist() == same


def test_numbers_of_one_shape_and_form_can_be_compared() -> None:
    single, double = np.zeros((2, 3), np.float32), np.zeros((2, 3))
    pair = as_one_kind(single, double)
    assert pair is not None
    assert {rows.dtype for rows in map(np.asarray, pair)} == {np.dtype(np.float64)}
    assert as_one_kind(single, double[:, :2]) is None
    assert as_one_kind(single, single.astype(np.int32)) is None
    ragged = RaggedRows(np.zeros(2, np.float32), np.array([0, 2]))
    assert as_one_kind(ragged, RaggedRows(np.zeros(2), np.array([0, 2]))) is None


def test_no_text_is_not_the_empty_one() -> None:
    difference = Difference.of(text_rows([""]))
    assert difference.add(text_rows(["", "a"]), text_rows([None, "a"]), str).tolist() == [0]
    assert difference.to_json() == {"rows_differ": 1, "first": "0"}


def test_a_prediction_is_right_by_its_target_and_an_answer_by_exact_match() -> None:
    columns = {
        "prediction": np.array([1, 2]),
        "target": np.array([1, 3]),
        "exact_match": np.array([0.0, 1.0]),
    }
    for name, expected in (("prediction", [True, False]), ("answer", [False, True])):
        found = right(columns, name)
        assert found is not None and found.tolist() == expected
    assert right({"prediction": np.array([0.5])}, "prediction") is None
