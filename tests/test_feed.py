"""Feed: order, failed samples, worker processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dualeval.engine.feed import Batch, Feed, Reader, zeros_like
from dualeval.errors import DualevalError
from tests.tiny import TinyTask

CPU = torch.device("cpu")


def read(task: TinyTask, batches: list[range], workers: int = 0) -> list[Batch]:
    return list(Feed(Reader(task.dataset(), task), batches, workers=workers, device=CPU))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_come_in_order(workers: int) -> None:
    batches = [range(4), range(8, 12), range(12, 13)]
    fed = read(TinyTask(13), batches, workers)
    assert [len(batch.data["targets"]) for batch in fed] == [4, 4, 1]
    assert fed[1].data["targets"].tolist() == [index * 31 % 7 for index in range(8, 12)]
    assert all(batch.failed == () for batch in fed)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_sample_becomes_zeros(workers: int) -> None:
    [whole] = read(TinyTask(4), [range(4)])
    [batch] = read(TinyTask(4, broken=[1]), [range(4)], workers)
    assert [(sample.index, sample.error) for sample in batch.failed] == [(1, "OSError: sample 1 is broken")]
    assert batch.data["features"].shape == whole.data["features"].shape
    assert batch.data["features"][1].abs().sum() == 0
    for index in (0, 2, 3):
        assert torch.equal(batch.data["features"][index], whole.data["features"][index])


def test_it_is_tried_twice() -> None:
    task = TinyTask(3, broken=[1])
    read(task, [range(3)])
    assert task.dataset().reads.count(1) == 2


def test_a_batch_without_a_readable_sample_has_no_data() -> None:
    [batch] = read(TinyTask(2, broken=[0, 1]), [range(2)])
    assert batch.data is None
    assert [sample.index for sample in batch.failed] == [0, 1]


def test_no_batches() -> None:
    assert read(TinyTask(2), [], workers=2) == []


def test_zeros_keep_the_structure() -> None:
    sample: Any = {
        "image": torch.ones(2, 3, dtype=torch.uint8),
        "box": [torch.ones(4), 3],
        "name": "x",
        "t": (1.5,),
    }
    zeros = zeros_like(sample)
    assert zeros["image"].dtype == torch.uint8 and zeros["image"].sum() == 0
    assert zeros["box"][1] == 0 and zeros["name"] == "" and zeros["t"] == (0.0,)


class Dropping(TinyTask):
    """A data set that leaves out a bad sample instead of raising."""

    def __init__(self) -> None:
        super().__init__(4)
        whole = self._dataset.__getitems__
        self._dataset.__getitems__ = lambda indices: whole(indices)[1:]  # type: ignore[method-assign]


def test_a_data_set_must_not_drop_samples() -> None:
    with pytest.raises(DualevalError, match="gave 3 samples for the 4 indices 0 to 3"):
        read(Dropping(), [range(4)])
