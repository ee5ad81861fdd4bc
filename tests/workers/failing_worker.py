"""One rank of runs with samples that cannot be read: ``failing_worker.py INPUTS OUT``.

Evaluates each kind of job with every set of failing samples, into OUT/KIND/NUMBER.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualeval.engine.options import RunOptions
from dualeval.launch import detect
from dualeval.tasks import Task
from dualeval.tasks.image_classification import ImageClassification
from dualeval.tasks.question_answering import QuestionAnswering
from dualeval.world.devices import connect
from tests.sessions import joined, run_task
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


def main() -> None:
    torch.set_num_threads(1)
    inputs, out = Path(sys.argv[1]), Path(sys.argv[2])
    with connect(None, detect(os.environ), "cpu") as backend, joined(backend) as control:
        for kind, make in tasks(inputs).items():
            for number, failing in enumerate(FAILING[kind]):
                task = make()
                break_samples(task, failing)
                run_task(
                    task,
                    backend,
                    control,
                    RunOptions(out=out / kind / str(number), batch_size=BATCH, on_error="skip"),
                )


if __name__ == "__main__":
    main()
