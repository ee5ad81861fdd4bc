"""A sample that cannot be read changes no other sample's bits, whatever the samples are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from torch import Tensor

from dualeval.tasks import Task
from dualeval.tasks.image_classification import ImageClassification
from dualeval.tasks.question_answering import QuestionAnswering
from tests import questions
from tests.engine.test_evaluator import evaluate
from tests.tiny import TinyTask

BATCH = 4
# Of questions: 2 to 4 and 12 have one window, 10 has 29, 13 has one of five tokens, the others have two.
FAILING: dict[str, list[tuple[int, ...]]] = {
    "questions": [(), (0,), (1, 2, 3), (5,), (6, 11), (4, 10), (13,)],
    "images": [(), (0,), (2, 3, 8)],
    "numpy": [(), (0,), (5, 6, 18)],
}


class NumpyTask(TinyTask):
    """A tiny task whose samples are numpy arrays and numpy numbers."""

    def __init__(self) -> None:
        super().__init__(19)
        read = self._dataset.__getitems__

        def as_numpy(indices: Sequence[int]) -> Any:
            return [{"features": x.numpy(), "target": np.int64(target)} for x, target in read(indices)]

        self._dataset.__getitems__ = as_numpy  # type: ignore[method-assign]

    def collate(self, samples: Any) -> dict[str, Tensor]:
        return {
            "features": torch.from_numpy(np.stack([sample["features"] for sample in samples])),
            "targets": torch.from_numpy(np.stack([sample["target"] for sample in samples])),
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
        "numpy": NumpyTask,
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
def test_the_others_rows_are_the_same(inputs: Path, tmp_path: Path, kind: str) -> None:
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
