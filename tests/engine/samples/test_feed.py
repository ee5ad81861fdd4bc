"""Feed: order, failed samples, worker processes."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from collections import OrderedDict, UserDict
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from torch import Tensor

from dualeval.engine.samples import feed
from dualeval.engine.samples.feed import FailedSample, Feed, Reader
from dualeval.engine.values.nests import zeros_like
from dualeval.errors import DualevalError, UsageError, with_type
from dualeval.tasks import Task
from dualeval.tasks.image_classification import ImageClassification
from dualeval.tasks.question_answering import QuestionAnswering
from tests.engine.test_evaluator import evaluate
from tests.vehicles import questions
from tests.vehicles.tiny import TinyTask

CPU = torch.device("cpu")


class Batch(NamedTuple):
    data: Any
    failed: tuple[FailedSample, ...]


def read(task: TinyTask, batches: list[range], workers: int = 0) -> list[Batch]:
    return [Batch(*each) for each in Feed(Reader(task.dataset(), task), batches, workers=workers, device=CPU)]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_come_in_order(workers: int) -> None:
    batches = [range(4), range(8, 12), range(12, 13)]
    fed = read(TinyTask(13), batches, workers)
    assert [len(batch.data["targets"]) for batch in fed] == [4, 4, 1]
    assert fed[1].data["targets"].tolist() == [index * 31 % 7 for index in range(8, 12)]
    assert all(batch.failed == () for batch in fed)


class Seeking(TinyTask):
    """Reads from files that were opened before the reading processes: one, one in each process, or many."""

    def __init__(self, path: Path, kind: str) -> None:
        super().__init__(12)
        path.write_bytes(bytes(range(12)))
        self.kind, self.process = kind, os.getpid()
        many = range(12 if kind == "many" else 1)
        self.files = [path.open("rb", buffering=0) for _ in many]

    def dataset(self) -> Any:
        return self

    def __len__(self) -> int:
        return 12

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        if self.kind == "own" and os.getpid() != self.process:
            self.files[0].close()
            self.files = [open(each.name, "rb", buffering=0) for each in self.files]  # noqa: PTH123, SIM115
            self.process = os.getpid()
        found = []
        for index in indices:
            file = self.files[index % len(self.files)]
            file.seek(index)
            found.append(torch.frombuffer(bytearray(file.read(1)), dtype=torch.uint8))
        return found

    def collate(self, samples: Any) -> Any:
        return torch.cat(samples)


@pytest.mark.parametrize(
    ("kind", "workers", "refused"),
    [("one", 2, True), ("one", 1, False), ("one", 0, False), ("own", 2, False), ("many", 2, False)],
)
def test_reading_processes_share_no_position_in_a_file(
    tmp_path: Path, kind: str, workers: int, refused: bool
) -> None:
    task = Seeking(tmp_path / "kept.bin", kind)
    try:
        if refused:
            with pytest.raises(UsageError, match=r"keeps .*kept\.bin open.* --workers 0"):
                read(task, [range(6), range(6, 12)], workers)
        else:
            fed = read(task, [range(6), range(6, 12)], workers)
            assert torch.cat([batch.data for batch in fed]).tolist() == [*range(12)]
    finally:
        for file in task.files:
            file.close()


def test_an_error_of_our_own_is_said_without_its_type() -> None:
    assert with_type(UsageError("a mask is no picture")) == "a mask is no picture"
    assert with_type(ValueError("a mask is no picture")) == "ValueError: a mask is no picture"


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_sample_becomes_zeros(workers: int) -> None:
    [whole] = read(TinyTask(4), [range(4)])
    [batch] = read(TinyTask(4, broken=[1]), [range(4)], workers)
    assert [(sample.index, sample.error) for sample in batch.failed] == [(1, "OSError: sample 1 is broken")]
    assert batch.data["features"].shape == whole.data["features"].shape
    assert batch.data["features"][1].abs().sum() == 0
    for index in (0, 2, 3):
        assert torch.equal(batch.data["features"][index], whole.data["features"][index])


def test_an_unreadable_sample_is_tried_twice() -> None:
    task = TinyTask(3, broken=[1])
    read(task, [range(3)])
    assert task.dataset().reads.count(1) == 2


def test_a_batch_without_a_readable_sample_has_no_data() -> None:
    [batch] = read(TinyTask(2, broken=[0, 1]), [range(2)])
    assert batch.data is None
    assert [sample.index for sample in batch.failed] == [0, 1]


def test_no_batches_give_nothing() -> None:
    assert read(TinyTask(2), [], workers=2) == []


class Dropping(TinyTask):
    """A data set that leaves out a bad sample instead of raising."""

    def __init__(self) -> None:
        super().__init__(4)
        whole = self._dataset.__getitems__
        self._dataset.__getitems__ = lambda indices: whole(indices)[1:]  # type: ignore[method-assign]


def test_a_data_set_must_not_drop_samples() -> None:
    with pytest.raises(DualevalError, match="gave 3 samples for the 4 indices 0 to 3"):
        read(Dropping(), [range(4)])


# -- what takes a failed sample's place ------------------------------------------------------------


class Given(TinyTask):
    """Gives these samples; those that are None cannot be read."""

    def __init__(self, samples: list[Any]) -> None:
        super().__init__(len(samples))
        self._samples = samples
        self._dataset.__getitems__ = self._read  # type: ignore[method-assign]

    def _read(self, indices: Sequence[int]) -> list[Any]:
        chosen = [self._samples[index] for index in indices]
        if any(sample is None for sample in chosen):
            raise OSError("broken")
        return chosen

    def collate(self, samples: Any) -> Any:
        return samples


class Boxes(NamedTuple):
    corners: Any
    name: str = "x"


@dataclass(frozen=True)
class Scan:
    pixels: Any
    spacing: float
    where: InitVar[str] = "here"

    def __post_init__(self, where: str) -> None:
        assert where


@dataclass(slots=True)
class Note:
    text: str
    score: Any = 1


VALUES: dict[str, tuple[Any, Any]] = {
    "array": (np.full((2, 3), 7, np.uint8), np.zeros((2, 3), np.uint8)),
    "array of texts": (np.array(["a", "bc"]), np.array(["", ""], "<U2")),
    "numpy number": (np.float32(3), np.float32(0)),
    "tensor": (torch.full((2,), 3, dtype=torch.int16), torch.zeros(2, dtype=torch.int16)),
    "bool": (True, False),
    "int": (3, 0),
    "float": (0.5, 0.0),
    "text": ("abc", ""),
    "None": (None, None),
    "path": (PurePosixPath("a/b"), PurePosixPath()),
    "user dict": (UserDict(a=1), UserDict(a=0)),
    "named tuple": (Boxes((1, 2)), Boxes((0, 0), "")),
    "data class": (Scan(pixels=[1.5], spacing=2.0), Scan(pixels=[0.0], spacing=0.0)),
    "data class with slots": (Note("abc"), Note("", 0)),
}


@pytest.mark.parametrize(
    ("name", "workers"),
    [*((name, 0) for name in VALUES), ("array", 1), ("numpy number", 1), ("named tuple", 1)],
)
def test_every_kind_of_value_has_a_zero(name: str, workers: int) -> None:
    value, zero = VALUES[name]
    [batch] = read(Given([{"x": value}, None, {"x": value}]), [range(3)], workers)
    assert [sample.index for sample in batch.failed] == [1]
    found = batch.data[1]["x"]
    assert type(found) is type(zero)
    same(found, zero)
    same(batch.data[0]["x"], value)
    same(batch.data[2]["x"], value)


def test_a_samples_own_values_stay() -> None:
    value = {"a": [torch.ones(2), np.ones(2)], "b": Note("abc"), "c": OrderedDict(x=1)}
    before = copy.deepcopy(value)
    zeros_like(value)
    assert repr(value) == repr(before)


# -- found out at the first batch ------------------------------------------------------------------


class Ready(TinyTask):
    """Gives whole batches; ``flaky`` reads of many samples fail."""

    def __init__(self, bad: Sequence[int], flaky: int = 0) -> None:
        super().__init__(6)
        self._dataset.__getitems__ = self._read  # type: ignore[method-assign,assignment]
        self._bad = bad
        self._flaky = flaky

    def _read(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        for index in indices:
            if index in self._bad:
                raise OSError(f"sample {index} is torn")
        if len(indices) > 1 and self._flaky:
            self._flaky -= 1
            raise OSError("no connection")
        return {"x": torch.tensor(list(indices))}

    def collate(self, samples: Any) -> Any:
        return samples


@pytest.mark.parametrize("fill", [False, True], ids=["stop", "skip"])
def test_a_ready_batch_is_refused_with_its_own_error(fill: bool) -> None:
    task = Ready([1, 4])
    with pytest.raises(UsageError) as error:
        Reader(task.dataset(), task, fill=fill)[range(3)]
    message = str(error.value)
    for words in (
        "samples tiny/0 to tiny/2 (indices 0 to 2) cannot be read: OSError: sample 1 is torn.",
        *("sample tiny/1 (index 1) gives OSError: sample 1 is torn.", "returns ready batches"),
        *("--on-error skip", "return a list of samples"),
    ):
        assert words in message


def test_a_ready_batch_is_tried_twice() -> None:
    task = Ready([], flaky=1)
    data, failed = Reader(task.dataset(), task)[range(3)]
    assert data["x"].tolist() == [0, 1, 2] and failed == ()
    task = Ready([], flaky=2)
    with pytest.raises(UsageError, match=r"indices 0 to 2\) cannot be read: OSError: no connection\. TinyD"):
        Reader(task.dataset(), task)[range(3)]


def same(one: Any, other: Any) -> None:
    if isinstance(one, np.ndarray | np.generic):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.array_equal(one, other)
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one, other)
    else:
        assert one == other


@pytest.mark.parametrize("workers", [0, 1])
def test_a_value_without_a_zero_is_named(workers: int) -> None:
    task = Given([(torch.ones(2), slice(3)), None])
    with pytest.raises(UsageError) as error:
        read(task, [range(2)], workers)
    message = str(error.value)
    assert message.startswith("sample tiny/1 (index 1) cannot be read: OSError: broken. ")
    for words in ("TinyDataset hold a builtins.slice", "placeholder(index)", "mend or remove"):
        assert words in message
    assert "Traceback" not in message


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_may_say_what_takes_a_samples_place(workers: int) -> None:
    task = Given([slice(3), None, None])
    task.dataset().placeholder = lambda index: slice(0, index)  # type: ignore[attr-defined]
    [batch] = read(task, [range(3)], workers)
    assert batch.data == [slice(3), slice(0, 1), slice(0, 2)]
    assert [sample.index for sample in batch.failed] == [1, 2]


class Whole(TinyTask):
    """Ready batches that are views of the whole data set, as from a file of all images."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.images = torch.arange(count * 784, dtype=torch.float32).view(count, 784)

    def dataset(self) -> Any:
        return self

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        part = self.images[indices[0] : indices[-1] + 1]
        return {"features": part[:, 1:], "again": [part], "targets": part[:, 0]}

    def collate(self, samples: Any) -> Any:
        return samples


def test_a_reading_process_hands_over_its_batch_and_not_all_the_data() -> None:
    task = Whole(1000)
    [expected] = read(task, [range(64, 96)])
    [found] = read(task, [range(64, 96)], workers=1)
    for name in ("features", "targets"):
        one, other = found.data[name], expected.data[name]
        assert torch.equal(one, other)
        assert one.stride() == other.stride(), "another order of memory may give other bits"
        assert one.untyped_storage().nbytes() <= 32 * 784 * 4
    assert torch.equal(found.data["again"][0], expected.data["again"][0])
    assert expected.data["features"].untyped_storage().nbytes() == 1000 * 784 * 4


class Collecting(TinyTask):
    def collate(self, samples: Any) -> dict[str, Tensor]:
        gc.collect()
        return super().collate(samples)


def test_a_reading_process_gives_back_nothing_of_its_parents(tmp_path: Path) -> None:
    """That may be memory of a GPU, and a forked process ends at giving it back."""
    gc.collect()
    gc.disable()
    try:
        cycle: list[Any] = [OrderedDict()]
        cycle.append(cycle)
        # Written by whoever collects the cycle.
        weakref.finalize(cycle[0], (tmp_path / "collected").touch).atexit = False
        del cycle
        frozen = gc.get_freeze_count()
        read(Collecting(8), [range(4), range(4, 8)], workers=1)
        assert not [*tmp_path.iterdir()]
        # The process itself collects as before.
        assert gc.get_freeze_count() == frozen and not gc.isenabled()
        gc.collect()
        assert [*tmp_path.iterdir()]
    finally:
        gc.enable()


# -- a sample that cannot be read changes no other sample's bits, whatever the samples are --------------


BATCH = 4
# Of questions: 2 to 4 and 12 have one window, 10 has 29, 13 has one of five tokens, the others have two.
FAILING: dict[str, list[tuple[int, ...]]] = {
    "questions": [(), (0,), (1, 2, 3), (5,), (6, 11), (4, 10), (13,)],
    "images": [(), (0,), (2, 3, 8)],
}


def tasks(inputs: Path) -> dict[str, Callable[[], Task]]:
    """How each kind of task is made."""
    return {
        "questions": lambda: QuestionAnswering(
            model=inputs / "model",
            data=inputs / "questions.json",
            batch_size=BATCH,
            max_length=128,
            stride=32,
        ),
        "images": lambda: ImageClassification(
            model="resnet18",
            weights="random:0",
            data=inputs / "images",
            num_classes=2,
            preprocessing={"resize": 64, "crop": 64},
        ),
    }


def break_samples(task: Task, failing: Sequence[int]) -> None:
    """Have the task's data set raise for some samples, at every attempt."""
    dataset: Any = task.dataset()
    read = dataset.__getitems__

    def reading(indices: Sequence[int]) -> Any:
        if broken := sorted(set(indices) & set(failing)):
            raise OSError(f"sample {broken[0]} is broken")
        return read(indices)

    dataset.__getitems__ = reading


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions of many lengths with a model, and pictures of many sizes."""
    folder = tmp_path_factory.mktemp("inputs")
    questions.save_tiny_bert(folder / "model")
    questions.write_questions(folder / "questions.json", unanswerable=True)
    for number in range(10):
        picture = Image.linear_gradient("L").resize((70 + 9 * number, 120 - 5 * number)).rotate(7 * number)
        path = folder / "images" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)
    return folder


def rows_of(out: Path) -> dict[int, dict[str, Any]]:
    """The rows of samples that could be read, by index."""
    table = pyarrow.parquet.read_table(out / "predictions.parquet").to_pylist()
    return {
        row["index"]: row
        for row in table
        if any(value is not None for name, value in row.items() if name not in ("id", "index"))
    }


@pytest.mark.parametrize("kind", FAILING)
def test_a_failed_sample_changes_no_other_row(inputs: Path, tmp_path: Path, kind: str) -> None:
    found = []
    for number, failing in enumerate(FAILING[kind]):
        task = tasks(inputs)[kind]()
        break_samples(task, failing)
        evaluate(task, tmp_path / str(number), batch_size=BATCH, on_error="skip")
        found.append(rows_of(tmp_path / str(number)))
    whole = found[0]
    assert list(whole) == list(range(max(whole) + 1))
    for rows, failing in zip(found, FAILING[kind], strict=True):
        assert rows == {index: row for index, row in whole.items() if index not in failing}


def test_positions_in_files_are_not_looked_at_without_proc(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (tmp_path / "file").open("w+") as written, (tmp_path / "file").open() as read:
        found = feed._read_by_position()
        assert read.fileno() in found and written.fileno() not in found
        monkeypatch.setattr(feed, "_DESCRIPTORS", tmp_path / "none")
        assert feed._read_by_position() == {}


def test_the_bytes_of_a_batch_are_those_in_all_kinds_of_nests() -> None:
    nest = {"a": [Scan(torch.zeros(4), 1.0), (torch.zeros(2).bool(),)], "b": "x"}
    assert feed._bytes_in(nest) == 18
