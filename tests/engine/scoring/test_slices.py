"""Columns of the data in the rows, and metrics by their values: as of a run over each group alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dualeval
from dualeval.engine.folder.stored_rows import StoredRows
from dualeval.engine.scoring.rescoring import rescore
from dualeval.engine.scoring.slices import groups_of
from dualeval.errors import UsageError
from dualeval.metrics import Mean, Measured, Metric, RowMetric
from dualeval.result import Result, read_result
from tests.engine.test_evaluator import evaluate, rows
from tests.vehicles.tiny import CLASSES, TinyDataset, TinyTask

COUNT = 400


def scanners(indices: Sequence[int]) -> list[str]:
    return ["AB"[index % 2] if index % 40 else "C" for index in indices]


class Scanned(TinyDataset):
    """Samples with columns of their own."""

    # Added to each age.
    older = 0

    def columns(self, indices: Sequence[int]) -> Mapping[str, Any]:
        return {
            "scanner": scanners(indices),
            "age": torch.tensor([index % 90 + self.older for index in indices]),
            "dose": np.array([math.nan if index % 5 == 0 else index / 4 for index in indices]),
            "is_female": [index % 3 == 0 for index in indices],
        }


class ScannedTask(TinyTask):
    def __init__(self, count: int = COUNT, broken: Sequence[int] = (), **options: Any) -> None:
        super().__init__(count, broken, **options)
        self._dataset = Scanned(count, broken)


class Part(TinyDataset):
    """Some samples of a TinyDataset alone."""

    def __init__(self, indices: Sequence[int]) -> None:
        super().__init__(len(indices))
        self.indices = indices

    def _read(self, index: int) -> tuple[Tensor, int]:
        return super()._read(self.indices[index])


class PartTask(TinyTask):
    def __init__(self, indices: Sequence[int]) -> None:
        super().__init__(len(indices))
        self._dataset = Part(indices)


# -- columns in the rows -------------------------------------------------------------------------------


def test_columns_of_the_data_are_columns_of_the_rows(tmp_path: Path) -> None:
    """Behind those of the task, null where a sample could not be read, and marked as the data's."""
    result = evaluate(ScannedTask(broken=[7]), tmp_path / "out", batch_size=32, on_error="skip")
    found = rows(tmp_path / "out")
    assert list(found)[-4:] == ["scanner", "age", "dose", "is_female"]
    assert found["scanner"] == [None if at == 7 else name for at, name in enumerate(scanners(range(COUNT)))]
    assert found["age"] == [None if at == 7 else at % 90 for at in range(COUNT)]
    assert [found["is_female"][at] for at in (3, 4, 7)] == [True, False, None]
    assert math.isnan(found["dose"][5]) and found["dose"][6] == 1.5
    stored = StoredRows(tmp_path / "out" / "predictions.parquet")
    assert stored.data_names == ("scanner", "age", "dose", "is_female") == stored.names[-4:]
    plain = evaluate(TinyTask(COUNT, [7]), tmp_path / "plain", batch_size=32, on_error="skip")
    assert result.metrics_digest == plain.metrics_digest and result.fingerprint != plain.fingerprint
    assert StoredRows(tmp_path / "plain" / "predictions.parquet").data_names == ()


def test_what_is_not_asked_for_costs_nothing_and_changes_no_job(tmp_path: Path) -> None:
    none = evaluate(ScannedTask(), tmp_path / "none", batch_size=32, keep=("none",))
    plain = evaluate(TinyTask(COUNT), tmp_path / "plain", batch_size=32)
    assert json.loads((tmp_path / "none" / "job.json").read_text())["job"].get("data_columns") is None
    assert rows(tmp_path / "none").keys() == rows(tmp_path / "plain").keys()
    assert none.metrics_digest == plain.metrics_digest
    # Where nothing is written no batch gets them, and the job is the same one.
    calls: list[int] = []

    class Counted(Scanned):
        def columns(self, indices: Sequence[int]) -> Mapping[str, Any]:
            calls.append(len(indices))
            return super().columns(indices)

    task = ScannedTask()
    task._dataset = Counted(COUNT)
    in_memory = evaluate(task, None, batch_size=32)
    assert calls == [1, COUNT], "which there are, and their digest"
    assert in_memory.fingerprint == evaluate(ScannedTask(), tmp_path / "all", batch_size=32).fingerprint


@pytest.mark.parametrize(
    ("keep", "says"),
    [
        ("scaner", "--keep scaner: the data has no such column; it has scanner, age, dose, is_female, loss"),
        ("loss", "--keep loss: the rows have a column of this name, which is not the data's. Rename the"),
        ("index", "--keep index: the rows have a column of this name"),
    ],
)
def test_kept_names_that_collide_or_are_not_there_are_refused(tmp_path: Path, keep: str, says: str) -> None:
    class Colliding(Scanned):
        def columns(self, indices: Sequence[int]) -> Mapping[str, Any]:
            more = {"loss": [0.5] * len(indices), "index": [3] * len(indices), "note": ["x"] * len(indices)}
            return {**super().columns(indices), **more}

    class Noted(ScannedTask):
        def texts(self, rows: Mapping[str, Any], first: int) -> Mapping[str, Sequence[str]]:
            return {"note": ["own"] * len(rows["loss"])}

    task = Noted()
    task._dataset = Colliding(COUNT)
    with pytest.raises(UsageError, match=says):
        evaluate(task, tmp_path / "out", keep=(keep,))
    notes: list[str] = []
    evaluate(task, tmp_path / "out", note=notes.append)
    assert notes == [
        f"the column {name} of the data is not kept: the rows have a column of this name"
        for name in ("loss", "index", "note")
    ]
    found = rows(tmp_path / "out")
    assert found["note"][0] == "own" and found["loss"][0] != 0.5 and "age" in found


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (
            lambda indices: ["x"],
            "Odd.columns\\(indices\\) returned a list, expected a dict of values by the names",
        ),
        (
            lambda indices: {"a": [1]},
            "the column 'a' is a list of 1 entries for 64 samples, expected one text",
        ),
        (
            lambda indices: {"a": [[1, 2]] * len(indices)},
            "'a' cannot be kept: it holds values of the type list",
        ),
        (lambda indices: {"a" if 0 in indices else "b": [1.0] * len(indices)}, "gives no 'a' for samples 64"),
    ],
)
def test_columns_that_are_none_are_refused(tmp_path: Path, made: Callable[..., Any], says: str) -> None:
    class Odd(TinyDataset):
        def columns(self, indices: Sequence[int]) -> Any:
            return made(indices)

    task = TinyTask(70)
    task._dataset = Odd(70)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UsageError, match=says):
        patch.setattr("dualeval.engine.job.evaluation._AT_ONCE", 64)
        evaluate(task, tmp_path / "out")


def test_a_column_has_the_type_of_all_its_values(tmp_path: Path) -> None:
    """The type of a column is that of all its values, and not that of a batch."""

    class Gaps(TinyDataset):
        def columns(self, indices: Sequence[int]) -> Mapping[str, Any]:
            return {
                "whole": [None if at == 50 else at for at in indices],
                "mixed": [at + 0.5 if at == 50 else at for at in indices],
                "flag": [None if at == 50 else at % 2 == 0 for at in indices],
                "text": [None if at > 30 else "x" for at in indices],
                "any": [at if at % 2 else np.float32(at) if at > 40 else "x" for at in indices],
            }

    task = TinyTask(70)
    task._dataset = Gaps(70)
    evaluate(task, tmp_path / "out", batch_size=16)
    found = rows(tmp_path / "out")
    assert found["whole"][49] == 49.0 and math.isnan(found["whole"][50])
    assert found["mixed"][49:51] == [49.0, 50.5] and found["text"][30:32] == ["x", ""]
    assert [found["flag"][at] for at in (48, 49, 50)] == ["True", "False", ""]
    assert [found["any"][at] for at in (40, 41, 42)] == ["x", "41", "42.0"]


def test_a_changed_value_is_another_job(tmp_path: Path) -> None:
    evaluate(ScannedTask(), tmp_path / "out", batch_size=32)
    other = ScannedTask()
    other.dataset().older = 1  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"holds another job \(.* \(job.data_columns.age\): "):
        evaluate(other, tmp_path / "out", batch_size=32)
    # One that is not kept decides nothing.
    evaluate(ScannedTask(), tmp_path / "few", batch_size=32, keep=("scanner",))
    assert evaluate(other, tmp_path / "few", batch_size=32, keep=("scanner",)).earlier


class EndingScanned(ScannedTask):
    """Raises in the forward of its fifth batch."""

    __module__ = ScannedTask.__module__

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        self.left = getattr(self, "left", 5) - 1
        if self.left < 0:
            raise RuntimeError("enough")
        return super().forward(model, batch)


def test_a_killed_run_goes_on_with_its_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_look: None
) -> None:
    monkeypatch.setattr("dualeval.engine.folder.recorder.FLUSH_ROWS", 50)
    whole = evaluate(ScannedTask(), tmp_path / "whole", batch_size=32, by=("scanner",))
    with pytest.raises(RuntimeError, match="enough"):
        evaluate(EndingScanned(), tmp_path / "out", batch_size=32, by=("scanner",))
    found = evaluate(ScannedTask(), tmp_path / "out", batch_size=32, by=("scanner",))
    assert found.chunks["resumed"] > 0 and found.replay == "same bits"
    assert repr(rows(tmp_path / "out")) == repr(rows(tmp_path / "whole"))
    assert found.slices == whole.slices and found.metrics_digest == whole.metrics_digest


def test_columns_of_hugging_face_are_kept_and_sliced(tmp_path: Path) -> None:
    data = datasets.Dataset.from_dict(
        {
            "x": [[float(at)] * 2 for at in range(60)],
            "label": [at % 2 for at in range(60)],
            "site": ["NS"[at % 2] for at in range(60)],
            "essay": ["word " * 50] * 60,
        }
    )
    notes: list[str] = []
    model = nn.Linear(2, 2)
    torch.nn.init.ones_(model.weight)

    def run(out: Path, **options: Any) -> Result:
        return dualeval.evaluate(
            model=model,
            data=data,
            metrics=["loss"],
            forward=lambda model, batch: model(batch["x"]),
            device="cpu",
            out=out,
            note=notes.append,
            **options,
        )

    result = run(tmp_path / "out", by=("site",), sample=40)
    found = rows(tmp_path / "out")
    assert found["site"] == ["NS"[at % 2] for at in found["index"]] and "essay" not in found
    assert [group["label"] for group in result.slices["site"]] == ["N", "S"]
    assert any(
        note.startswith("the column essay of the data is not kept: it has texts of 250") for note in notes
    )
    run(tmp_path / "named", keep=("essay",), by=("site",))
    found = rows(tmp_path / "named")
    assert found["essay"][0] == "word " * 50 and found["site"][1] == "S"
    with pytest.raises(UsageError, match="--keep x: the column cannot be kept: it holds list"):
        run(tmp_path / "nested", keep=("x",))


# -- groups --------------------------------------------------------------------------------------------


def test_each_kind_of_column_has_its_groups() -> None:
    def labels(values: Any, **options: Any) -> list[tuple[str, int]]:
        found = groups_of("a", {"a": values}, **options)
        assert [len(places) for places in found.members()] == np.bincount(found.places).tolist()
        return [*zip(found.names, map(len, found.members()), strict=True)]

    assert labels(["b", "a", "", None, "a"]) == [("(empty)", 1), ("a", 2), ("b", 1), ("(missing)", 1)]
    assert labels(np.array([True, False, True])) == [("false", 1), ("true", 2)]
    assert labels(np.array([3, 1, 3, -2])) == [("-2", 1), ("1", 1), ("3", 2)]
    assert labels(np.array([0.5, math.nan, 2.0])) == [("0.5", 1), ("2", 1), ("(missing)", 1)]
    ages = np.arange(100)
    assert labels(ages) == [("<25", 25), ("25 to <50", 25), ("50 to <75", 25), ("75 or more", 25)]
    assert labels(ages, bins=(0, 40, 60)) == [("0 to <40", 40), ("40 to <60", 20), ("60 or more", 40)]
    # A dozen different numbers are groups of their own, without bins.
    assert len(labels(ages % 12)) == 12 and len(labels(ages % 13)) == 4
    assert labels(ages % 12, bins=(5,)) == [("<5", 44), ("5 or more", 56)]
    # Most are equal: there are fewer quartiles.
    assert labels(np.concatenate([np.zeros(90), np.arange(20.0)])) == [("<1", 91), ("1 or more", 19)]
    large = [2**53 + 1, 2**53, 10**15 + 1, 10**15]
    assert labels(np.array(large)) == [(str(value), 1) for value in sorted(large)]
    assert labels(np.arange(13) + 2**53)[0] == ("<9007199254740995", 3)
    # Digits that nobody needs.
    assert [label for label, _ in labels(ages / 7)] == [
        "<3.57143",
        "3.57143 to <7.14286",
        "7.14286 to <10.7143",
        "10.7143 or more",
    ]
    assert "<1.000000025" in labels(1 + ages * 1e-9)[0][0]
    with pytest.raises(UsageError, match="there are 2,000 groups, expected 1,000 at most"):
        labels([str(at) for at in range(2000)])


def test_a_cross_has_the_groups_that_there_are() -> None:
    keys: Mapping[str, Any] = {"scanner": ["A", "B", "A", "A"], "sex": np.array([True, False, True, False])}
    found = groups_of("scanner*sex", keys)
    assert found.names == ["A * false", "A * true", "B * false"]
    assert found.values[1] == {"scanner": "A", "sex": True}
    assert [places.tolist() for places in found.members()] == [[3], [0, 2], [1]]


def test_bins_cut_the_numbers_of_a_cross() -> None:
    ages, grades = np.arange(60), np.arange(60) % 3
    keys: Mapping[str, Any] = {"age": ages, "grade": grades, "sex": ["f", "m"] * 30}
    assert groups_of("age*grade", keys, (30,)).names[:3] == ["<30 * 0", "<30 * 1", "<30 * 2"]
    assert groups_of("sex*grade", keys, (1,)).names == ["f * <1", "f * 1 or more", "m * <1", "m * 1 or more"]
    keys = {"a": grades, "b": grades}
    assert groups_of("a*b", keys, (1,)).names == ["<1 * <1", "1 or more * 1 or more"]


# -- metrics by group ----------------------------------------------------------------------------------


def of_group(result: Result, by: str, label: str) -> dict[str, Any]:
    return next(group for group in result.slices[by] if group["label"] == label)


def test_a_group_has_the_numbers_of_a_run_over_it_alone(tmp_path: Path) -> None:
    """To the bit: values and intervals of every metric."""
    by = ("scanner", "scanner*is_female", "target")
    result = evaluate(ScannedTask(broken=[7]), tmp_path / "out", batch_size=32, on_error="skip", by=by)
    names = scanners(range(COUNT))
    chosen = {
        ("scanner", "A"): [at for at in range(COUNT) if names[at] == "A"],
        ("scanner*is_female", "B * true"): [at for at in range(COUNT) if names[at] == "B" and at % 3 == 0],
        ("target", "3"): [at for at in range(COUNT) if at * 31 % CLASSES == 3 and at != 7],
    }
    chosen = {key: [at for at in places if at != 7] for key, places in chosen.items()}
    for (expression, label), places in chosen.items():
        alone = evaluate(PartTask(places), None, batch_size=32)
        found = of_group(result, expression, label)
        numbers = {name: value for name, value in alone.metrics.items() if isinstance(value, (int, float))}
        assert found["metrics"] == pytest.approx(numbers, rel=1e-6) and found["samples"] == len(places)
        assert found["metrics"]["top1"] == alone.metrics["top1"]
        assert found["intervals"].keys() == alone.intervals.keys()
        assert found["intervals"]["top1"] == [*alone.intervals["top1"]]
        losses = np.array(rows(tmp_path / "out")["loss"], object)[places].astype(np.float64)
        assert found["metrics"]["loss"] == math.fsum(losses) / len(places)
    assert sum(group["samples"] for group in result.slices["scanner"]) == COUNT - 1
    assert of_group(result, "scanner", "C")["small"] == "only 10 samples: too few for a statement"
    assert of_group(result, "scanner", "A")["small"] is None
    assert read_result(tmp_path / "out" / "result.json").slices == result.slices
    # They are no part of what a run measures.
    plain = evaluate(ScannedTask(broken=[7]), tmp_path / "plain", batch_size=32, on_error="skip")
    assert (plain.metrics_digest, plain.fingerprint) == (result.metrics_digest, result.fingerprint)
    assert plain.slices == {}
    in_memory = evaluate(ScannedTask(broken=[7]), None, batch_size=32, on_error="skip", by=by)
    assert in_memory.slices == result.slices
    assert "│ A       │ 190" in str(result) and "│ C       │ 10 (small) │" in str(result)
    assert "(small): too few samples, or clusters of them, for a statement" in str(result)
    rough = replace(
        result, slices={"scanner": [{**group, "rough": {"loss": "x"}} for group in result.slices["scanner"]]}
    )
    assert "for a statement; rough: the interval may cover less than 95 %; the JSON says why" in str(rough)
    assert rescore(tmp_path / "out", metrics=[Mean("loss")]).slices == {}


def test_a_finished_run_is_sliced_from_its_rows(tmp_path: Path) -> None:
    asked = evaluate(ScannedTask(), tmp_path / "asked", batch_size=32, by=("age",), bins=(40,))
    evaluate(ScannedTask(), tmp_path / "out", batch_size=32, by=("scanner",))
    text = (tmp_path / "out" / "result.json").read_text()
    task = ScannedTask()
    found = evaluate(task, tmp_path / "out", batch_size=32, by=("age",), bins=(40,))
    assert found.earlier and found.slices == asked.slices and len(task.dataset().reads) < COUNT // 2
    assert (tmp_path / "out" / "result.json").read_text() == text
    again = evaluate(ScannedTask(), tmp_path / "out", batch_size=32)
    assert list(again.slices) == ["scanner"], "those that were asked for first"
    with pytest.raises(UsageError, match=r"--by scaner: there is no such column\. The columns are target,"):
        evaluate(ScannedTask(), tmp_path / "new", by=("scaner",))
    assert not (tmp_path / "new").exists()


def test_the_intervals_of_a_group_allow_for_its_clusters(tmp_path: Path) -> None:
    """A column of the data may say which samples go together; a group's intervals allow for its own."""
    result = evaluate(ScannedTask(), tmp_path / "out", batch_size=32, by=("scanner",), cluster="age")
    assert result.clusters == {"column": "age", "count": 90}
    found = of_group(result, "scanner", "A")
    names = scanners(range(COUNT))
    ages = {at % 90 for at in range(COUNT) if names[at] == "A"}
    assert found["clusters"] == len(ages)
    naive = of_group(evaluate(ScannedTask(), None, batch_size=32, by=("scanner",)), "scanner", "A")
    assert found["intervals"]["loss"] != naive["intervals"]["loss"] and found["metrics"] == naive["metrics"]
    few = evaluate(ScannedTask(), None, batch_size=32, by=("is_female",), cluster="scanner")
    assert few.slices["is_female"][0]["small"] == "only 3 clusters: too few for a statement"


def test_groups_that_are_too_many_cost_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualeval.engine.scoring.slices._MOST_GROUPS", 2)
    result = evaluate(ScannedTask(), tmp_path / "out", batch_size=32, by=("scanner",))
    assert result.slices == {} and result.metrics["top1"] is not None
    said = "no slices: --by scanner: there are 3 groups, expected 2 at most. Name a column with fewer values."
    assert result.warnings == [said]


class Batches:
    """The number of batches."""

    name, columns, size, per_batch = "batches", ("loss",), 1, True

    def update(self, ledger: Tensor, columns: Mapping[str, Tensor]) -> None:
        ledger += 1

    def compute(self, ledger: Tensor) -> Measured:
        return Measured(values={"batches": int(ledger[0])})


class Unkept(Mean):
    keeps_rows = False


def test_what_has_no_slices_is_named(tmp_path: Path) -> None:
    class Odd(ScannedTask):
        def metrics(self) -> list[Metric | RowMetric]:
            return [Mean("loss"), Batches(), Unkept("confidence")]

    result = evaluate(Odd(), tmp_path / "out", batch_size=COUNT, by=("target", "scanner"))
    assert of_group(result, "scanner", "A")["metrics"].keys() == {"loss"}
    assert result.warnings[-1] == (
        "no slices of batches, confidence: their columns are not kept, or they need whole batches"
    )
