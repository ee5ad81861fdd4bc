"""Parts of a data set: the first samples, said as what they are, and samples drawn by their ids."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

import dualeval
from dualeval.data.image_sets.class_folders import ImageFolder
from dualeval.data.preprocessing import Preprocessing
from dualeval.engine.samples import subset as parts
from dualeval.engine.samples.subset import drawn
from dualeval.engine.scoring import rescoring
from dualeval.engine.scoring.rescoring import rescore
from dualeval.engine.values.options import RunOptions
from dualeval.engine.values.plan import EvalPlan
from dualeval.errors import ExactlyOnceError, UsageError
from dualeval.metrics import Mean
from dualeval.metrics.classification import classification_metric
from dualeval.metrics.intervals import wilson_interval
from dualeval.options.job import Job
from dualeval.report.table import print_result
from dualeval.result import described_part
from dualeval.tasks.image_classification import ImageClassification
from tests.conftest import Launch
from tests.data.test_image_folder import save
from tests.engine.test_evaluator import evaluate, rows
from tests.vehicles.launchers import start
from tests.vehicles.tiny import CLASSES, TinyDataset, TinyTask

# What sha256sum draws of the ids "0" to "99", with a zero byte between seed and id.
DRAWN_OF_100 = {0: [8, 14, 49, 57, 60, 94], 1: [8, 66, 68, 71, 78, 84]}


def smallest(names: Sequence[str], count: int, seed: int) -> list[int]:
    """The rule in one line."""
    digests = [(hashlib.sha256(f"{seed}\0{name}".encode()).digest(), at) for at, name in enumerate(names)]
    return sorted(at for _, at in sorted(digests)[:count])


class Named:
    """Samples that have an id, twice the same one too."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def id(self, index: int) -> str:
        return self.names[index]

    def __getitems__(self, indices: Sequence[int]) -> list[str]:
        return [self.names[index] for index in indices]

    def fingerprint(self, count: int) -> str:
        return str(count)


# -- which samples are drawn -------------------------------------------------------------------------


def test_the_same_ids_are_drawn_everywhere() -> None:
    for seed, expected in DRAWN_OF_100.items():
        assert parts.draw(dualeval.wrap(range(100)), 6, seed).tolist() == expected
    names = [f"class/{index}.png" for index in range(1000)]
    for count in (1, 10, 999, 1000):
        assert parts.draw(Named(names), count, 7).tolist() == smallest(names, count, 7)


def test_samples_of_equal_ids_are_drawn_in_data_set_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """In data-set order; and a larger sample keeps the smaller one."""
    monkeypatch.setattr(parts, "_IDS_AT_ONCE", 64)
    names = [f"{index % 150}" for index in range(300)]
    for count in range(1, 301, 13):
        assert parts.draw(Named(names), count, 0).tolist() == smallest(names, count, 0)


# -- evaluating them -------------------------------------------------------------------------------


def losses(out: Path) -> dict[str, float]:
    found = rows(out)
    return dict(zip(found["id"], found["loss"], strict=True))


def test_drawn_samples_are_evaluated_in_data_set_order(tmp_path: Path) -> None:
    evaluate(TinyTask(200), tmp_path / "all", batch_size=8)
    result = evaluate(TinyTask(200), tmp_path / "out", batch_size=8, sample=100, seed=4)
    chosen = smallest([f"tiny/{index}" for index in range(200)], 100, 4)
    found = rows(tmp_path / "out")
    assert found["index"] == chosen
    assert found["id"] == [f"tiny/{index}" for index in chosen]
    assert found["target"] == [index * 31 % CLASSES for index in chosen]
    of_all = losses(tmp_path / "all")
    assert found["loss"] == pytest.approx([of_all[name] for name in found["id"]], rel=1e-5)
    assert result.part == {"kind": "drawn", "samples": 100, "of": 200, "seed": 4}
    assert result.samples == {"total": 100, "evaluated": 100, "failed": 0}
    assert result.data["samples"] == 200
    assert result.warnings == []
    assert "100 of 200 samples, seed 4, fingerprint" in result.description["data"]


def test_another_sample_is_another_job_and_the_same_one_goes_on(tmp_path: Path) -> None:
    first = evaluate(TinyTask(60), tmp_path, batch_size=8, sample=20)
    again = evaluate(TinyTask(60), tmp_path, batch_size=8, sample=20, seed=0)
    assert again.earlier
    assert (again.replay, again.metrics_digest) == ("same bits", first.metrics_digest)
    others: list[dict[str, Any]] = [{"sample": 20, "seed": 1}, {"sample": 21}, {"limit": 20}, {}]
    for options in others:
        seeds = r".*job\.sample\.seed: 0 there, 1 now" if "seed" in options else ""
        with pytest.raises(UsageError, match="holds another job" + seeds):
            evaluate(TinyTask(60), tmp_path, batch_size=8, **options)


def test_a_sample_of_all_is_the_job_without_one(tmp_path: Path) -> None:
    """It is the job without a sample."""
    said: list[str] = []
    evaluate(TinyTask(20), tmp_path)
    result = evaluate(TinyTask(20), tmp_path, sample=30, note=said.append)
    assert result.earlier
    assert result.part == {"kind": "all", "samples": 20, "of": 20}
    assert said[0] == "all 20 samples of the data set are evaluated: 30 were asked for"


@pytest.mark.parametrize("workers", [0, 2])
def test_failed_samples_of_a_part_are_named_by_their_own_index(tmp_path: Path, workers: int) -> None:
    chosen = smallest([f"tiny/{index}" for index in range(40)], 12, 0)
    task = TinyTask(40, [chosen[3], chosen[7]])
    result = evaluate(task, tmp_path, batch_size=4, sample=12, on_error="skip", workers=workers)
    assert result.samples == {"total": 12, "evaluated": 10, "failed": 2}
    assert [entry["id"] for entry in result.failed] == [f"tiny/{chosen[3]}", f"tiny/{chosen[7]}"]
    wanted = rf"sample tiny/{chosen[3]} \(index {chosen[3]}\) cannot be read"
    with pytest.raises(UsageError, match=wanted):
        evaluate(TinyTask(40, [chosen[3]]), tmp_path / "b", batch_size=4, sample=12, workers=workers)


class Asking(TinyTask):
    """A task that asks for its samples by their indices, in each way that a task can."""

    rows = ("target", "own_index", "loss", "words")  # type: ignore[assignment]
    exports = {"names.json": "name"}  # noqa: RUF012
    shift = 0

    def postprocess(self, columns: Mapping[str, Any], samples: range) -> Mapping[str, Any]:
        assert isinstance(samples, range)
        own = torch.arange(samples.start, samples.stop)
        assert columns["target"].tolist() == (own * 31 % CLASSES).tolist()
        words = dualeval.Ragged(own.repeat_interleave(2), torch.full((len(own),), 2))
        return {**columns, "own_index": own + self.shift, "words": words}

    def texts(self, rows: Mapping[str, Any], first: int) -> Mapping[str, Sequence[str | None]]:
        count = len(rows["target"])
        assert rows["own_index"].tolist() == [*range(first, first + count)]
        return {"name": [f"name {first + at}" for at in range(count)]}

    def findings(self, count: int) -> Mapping[str, Sequence[str]]:
        return {"odd": [f"tiny/{index}" for index in range(1, count, 2)], "none": []}


def test_a_task_is_told_the_indices_in_the_whole_data_set(tmp_path: Path) -> None:
    result = evaluate(Asking(90), tmp_path, batch_size=8, sample=40)
    chosen = smallest([f"tiny/{index}" for index in range(90)], 40, 0)
    found = rows(tmp_path)
    assert found["own_index"] == found["index"] == chosen
    assert found["name"] == [f"name {index}" for index in chosen]
    assert found["words"] == [[index, index] for index in chosen]
    named = json.loads((tmp_path / "names.json").read_text())
    assert named == {f"tiny/{index}": f"name {index}" for index in chosen}
    assert result.data["findings"] == {"odd": [f"tiny/{index}" for index in chosen if index % 2]}
    assert evaluate(Asking(90), tmp_path, batch_size=8, sample=40).replay == "same bits"


class Cut(Asking):
    """One that gives a row too few."""

    def postprocess(self, columns: Mapping[str, Any], samples: range) -> Mapping[str, Any]:
        return {name: column[1:] for name, column in super().postprocess(columns, samples).items()}


class Numbers(Asking):
    """One that gives a number for a batch."""

    def postprocess(self, columns: Mapping[str, Any], samples: range) -> Mapping[str, Any]:
        return {**super().postprocess(columns, samples), "loss": 1.0}


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Cut, "postprocess gave . rows of the column .* for samples"),
        (Numbers, "postprocess gave no rows of the column 'loss' for samples"),
    ],
)
def test_a_postprocess_with_other_rows_is_refused(task: type[Asking], message: str) -> None:
    with pytest.raises(ExactlyOnceError, match=message):
        evaluate(task(90), None, batch_size=8, sample=40)


def test_data_of_ones_own_is_drawn_by_its_ids() -> None:
    data = [(row, index % 4) for index, row in enumerate(torch.randn(50, 4))]
    chosen = smallest([str(index) for index in range(50)], 10, 2)
    result = dualeval.evaluate(model=nn.Identity(), data=data, sample=10, seed=2, metrics=["top1"])
    right = [int(data[index][0].argmax()) == data[index][1] for index in chosen]
    assert result.metrics["top1"] == sum(right) / 10
    wrong = [(row, 9 if index == chosen[4] else target) for index, (row, target) in enumerate(data)]
    with pytest.raises(UsageError, match=rf"sample {chosen[4]} has the label 9"):
        dualeval.evaluate(model=nn.Identity(), data=wrong, sample=10, seed=2)


def test_a_column_of_ids_is_read_as_a_whole() -> None:
    """Read as a whole, not one by one."""
    names = [f"n{index * 7 % 100:03}" for index in range(100)]
    data = datasets.Dataset.from_dict({"name": names, "x": list(range(100))})
    wrapped = dualeval.wrap(data, ids="name")
    asked: list[int] = []
    wrapped.id = lambda index: asked.append(index) or names[index]  # type: ignore[method-assign, func-returns-value]
    assert parts.draw(wrapped, 9, 3).tolist() == smallest(names, 9, 3)
    assert len(asked) == 1
    drawn = parts.DrawnSamples(dualeval.wrap(data, ids="name"), np.array([1, 2, 50]), 3)
    assert drawn.__getitems__([0, 2]) == [{"name": "n007", "x": 1}, {"name": "n050", "x": 50}]
    one, other = (
        parts.DrawnSamples(dualeval.wrap(kind, ids="name"), np.array([1, 2, 50]), 3)._content_fingerprint(
            range(3)
        )
        for kind in (data, data.map(lambda row: {"x": row["x"] + (row["name"] == "n050")}))
    )
    assert one != other


def test_pictures_of_a_folder_are_drawn_and_no_other_is_looked_at(tmp_path: Path) -> None:
    for number in range(12):
        save(tmp_path / f"{'abc'[number // 4]}/{number:02}.png")
    whole = ImageFolder(tmp_path, Preprocessing(resize=20, crop=16))
    drawn = parts.DrawnSamples(whole, np.array([1, 6, 7, 11]), 0)
    assert [drawn.id(place) for place in range(4)] == ["a/01.png", "b/06.png", "b/07.png", "c/11.png"]
    before = drawn.fingerprint(4), parts.DrawnSamples(whole, np.array([1, 6, 7, 10]), 0).fingerprint(4)
    assert before[0] != before[1]
    contents: Any = drawn
    assert contents.content_fingerprint(range(4)) == whole.select([1, 6, 7, 11]).content_fingerprint(range(4))
    assert [target for _, target in drawn.__getitems__(range(4))] == [0, 1, 1, 2]
    # What is not drawn is not looked at; what is may not change.
    (tmp_path / "a/00.png").write_bytes(b"no picture")
    assert drawn.fingerprint(4) == before[0]
    (tmp_path / "b/06.png").write_bytes((tmp_path / "b/06.png").read_bytes() + b" ")
    with pytest.raises(OSError, match=r"b/06\.png has changed since"):
        drawn.__getitems__([1])
    assert parts.part_of(drawn, EvalPlan(num_samples=4, batch_size=2))["of_classes"] == 3


def test_ranks_draw_the_same(launch: Launch, tmp_path: Path) -> None:
    """And compare it with what one process has drawn, which a job file names."""
    alone = evaluate(ImageClassification(), tmp_path / "one", sample=150, seed=5)
    (tmp_path / "job.toml").write_text('reference = "one"\n')
    options: list[str | Path] = ["--config", tmp_path / "job.toml", "--sample", "150", "--seed", "5"]
    options += ["--workers", "1", "--json", "--no-progress", "--out", tmp_path / "two"]
    done = launch([*start("torchrun", 2), "dualeval", "run", *options], timeout=90)
    found = json.loads(done.stdout)
    reference = found["reference"]
    assert (reference["samples"], reference["same_bits"], reference["differs_in"]) == (150, True, {})
    assert found["metrics_digest"] == alone.metrics_digest
    assert found["fingerprint"] == alone.fingerprint
    of_all = {"classes": 10, "of_classes": 10}
    assert found["part"] == {"kind": "drawn", "samples": 150, "of": 10_000, "seed": 5, **of_all}
    assert (found["job"]["sample"], found["job"]["seed"]) == (150, 5)
    assert rows(tmp_path / "one") == rows(tmp_path / "two")


# -- what a result says --------------------------------------------------------------------------------


def labelled(count: int) -> TinyTask:
    """Samples in the order of their classes, as in a tree of class folders."""
    task = TinyTask(count)
    task.dataset().targets = [index * CLASSES // count for index in range(count)]  # type: ignore[attr-defined]
    return task


def test_the_first_samples_are_said_to_be_the_first(tmp_path: Path) -> None:
    result = evaluate(labelled(7000), tmp_path, batch_size=64, limit=1500)
    assert result.part == {"kind": "first", "samples": 1500, "of": 7000, "classes": 2, "of_classes": 7}
    assert described_part(result.part) == "first 1,500 of 7,000 (2 of 7 classes)"
    assert result.warnings == [
        "first 1,500 of 7,000 (2 of 7 classes): the first samples are not a random sample, so the "
        "intervals say nothing about the others. --sample 1500 draws a random one."
    ]
    assert result.whole_set_intervals == {}
    assert evaluate(labelled(70), None, limit=70).part == {"kind": "all", "samples": 70, "of": 70}
    drawn = evaluate(labelled(70), None, sample=9).part
    assert described_part(drawn) == "9 of 70 drawn at random (seed 0; 7 of 7 classes)"


class Holding(TinyDataset):
    """One that was made of another."""

    def __init__(self, wrapped: TinyDataset) -> None:
        super().__init__(len(wrapped))
        self.wrapped = wrapped


@pytest.mark.parametrize(
    ("targets", "is_known"),
    [
        ([0, 1, 2, 0], True),
        (np.array([0, 1, 2, 0], np.uint8), True),
        ([0, 1, 2], False),
        ([[0], [1, 2], [2], [0]], False),
        (None, False),
    ],
)
def test_a_part_says_how_many_classes_its_known_targets_have(targets: Any, is_known: bool) -> None:
    data = TinyDataset(4)
    data.targets = targets  # type: ignore[attr-defined]
    for dataset in (data, Holding(data)):
        part = parts.part_of(dataset, EvalPlan(num_samples=2, batch_size=1))
        assert (part.get("classes"), part.get("of_classes")) == ((2, 3) if is_known else (None, None))


def test_intervals_of_the_whole_set_are_narrower_than_beyond_it(tmp_path: Path) -> None:
    result = evaluate(TinyTask(200), tmp_path, batch_size=8, sample=150)
    assert {*result.whole_set_intervals} == {*result.intervals} != set()
    for name, (low, high) in result.intervals.items():
        value = float(result.metrics[name])  # type: ignore[arg-type]
        # sqrt(1 - 150 / 200)
        assert result.whole_set_intervals[name] == pytest.approx(
            (value - (value - low) / 2, value + (high - value) / 2)
        )
    again = rescore(tmp_path, metrics=[classification_metric("top1", CLASSES)])
    assert again.whole_set_intervals == {"top1": result.whole_set_intervals["top1"]}
    checks = rescoring.verify(tmp_path, TinyTask(200).metrics())
    assert [check.name for check in checks if check.differences] == []


def covered(
    intervals_of: Callable[[np.ndarray], tuple[float, tuple[float, float]]], values: np.ndarray
) -> Any:
    """How often the interval of the whole set and the one beyond it hold the whole set's mean."""
    data, truth, count = dualeval.wrap(range(len(values))), values.mean(), len(values) // 2
    part = {"kind": "drawn", "samples": count, "of": len(values)}
    hits = np.zeros(2)
    rounds = 600
    for seed in range(rounds):
        value, beyond = intervals_of(values[parts.draw(data, count, seed)])
        of_all = parts.whole_set_intervals(
            part, count, {"metrics": {"m": value}, "intervals": {"m": beyond}}
        )["m"]
        hits += [low <= truth <= high for low, high in (of_all, beyond)]
    return hits / rounds


def test_the_interval_of_the_whole_set_covers_it() -> None:
    """Half of the set is drawn: the interval beyond it is too wide for the set by 1.41."""
    generator = np.random.default_rng(0)
    right = generator.random(400) < 0.8

    def of_proportion(drawn: np.ndarray) -> tuple[float, tuple[float, float]]:
        return float(drawn.mean()), wilson_interval(int(drawn.sum()), len(drawn))

    def of_mean(drawn: np.ndarray) -> tuple[float, tuple[float, float]]:
        metric = Mean("x")
        ledger = torch.zeros(metric.size, dtype=torch.int64)
        metric.update(ledger, {"x": torch.from_numpy(drawn)})
        measured = metric.compute(ledger)
        return float(measured.values["x"]), measured.intervals["x"]  # type: ignore[arg-type]

    for values, intervals_of in ((right, of_proportion), (generator.gamma(2.0, size=400), of_mean)):
        of_all, beyond = covered(intervals_of, values)
        assert 0.92 <= of_all <= 0.975
        assert beyond >= 0.985


# -- options -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample": 0}, "sample 0: expected a whole number of at least 1"),
        ({"sample": 2.5}, "sample 2.5: expected a whole number"),
        ({"sample": 5, "seed": -1}, "seed -1: expected a whole number of at least 0"),
        ({"sample": 5, "limit": 9}, "limit 9 takes the first samples and sample 5 draws some: leave out"),
        ({"seed": 3}, "seed 3 alone draws nothing: give sample N too"),
    ],
)
def test_options_that_make_no_part_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RunOptions(**options)
    with pytest.raises(UsageError, match="--" + message.split()[0]):
        Job.of(**options)


OWN_SEED = """
import torch
import dualeval

def seeded(seed: int = 3, count: int = 20):
    torch.manual_seed(seed)
    data = [(torch.rand(2), torch.rand(1)) for _ in range(count)]
    return dualeval.ModelTask(model=torch.nn.Linear(2, 1), data=data)
"""


def test_a_task_with_a_seed_of_its_own_keeps_it(tmp_path: Path) -> None:
    """It had one before runs had: it keeps its default, gets what is given, and is told apart by it."""
    (tmp_path / "with_own_seed.py").write_text(OWN_SEED)
    task = f"{tmp_path}/with_own_seed.py:seeded"
    plain, given, both = Job.of(task), Job.of(task, seed=5), Job.of(task, seed=6, sample=7)
    assert [job.options.seed for job in (plain, given, both)] == [3, 5, 6]
    assert [job.to_json()["seed"] for job in (plain, given, both)] == [3, 5, 6]
    assert [(job.sample, job.seed) for job in (plain, given, both)] == [(None, None), (None, None), (7, 6)]
    assert plain.make_task().given_options["seed"] == 3


def test_the_table_says_which_interval_is_about_what() -> None:
    result = evaluate(TinyTask(2000, metrics=["top1"]), None, batch_size=64, sample=1500)
    stream = io.StringIO()
    print_result(result, Console(file=stream, width=100))
    lines = [[*map(str.strip, re.split("[│┃]", line)[1:-1])] for line in stream.getvalue().splitlines()]
    assert ["metric", "value", "95 %: all 2,000", "95 %: beyond them"] in lines
    [row] = [line for line in lines if line[:1] == ["top1"]]
    of_all, beyond = ([float(end.rstrip(" %")) for end in ends.split(" to ")] for ends in row[2:])
    assert [of_all, beyond] == [
        [round(100 * end, 2) for end in intervals["top1"]]
        for intervals in (result.whole_set_intervals, result.intervals)
    ]
    assert "samples         1,500 of 2,000 drawn at random (seed 0), 0 failed\n" in stream.getvalue()


# -- what a data set says of itself ------------------------------------------------------------------


class Selecting(Named):
    """A data set whose ``select`` returns what it was made with."""

    def __init__(self, names: Sequence[str], returned: Any) -> None:
        super().__init__(names)
        self.returned = returned

    def select(self, indices: Sequence[int]) -> Any:
        assert type(indices[0]) is int
        return self.returned


@pytest.mark.parametrize(
    "returned",
    [3, Named(["0", "1"]), Named(["8", "14", "49", "57", "60", "95"])],
    ids=["int", "few", "other"],
)
def test_a_select_that_gives_other_samples_is_refused(returned: object) -> None:
    data = Selecting([str(index) for index in range(100)], returned)
    options = RunOptions(sample=6, seed=0)
    said = (
        f"^Selecting\\.select\\(indices\\) returned a {type(returned).__name__}, expected .* 6 drawn samples"
    )
    with pytest.raises(UsageError, match=said):
        drawn(data, options, note=print)
