"""How reading processes hand over batches: parts of larger storages, and a shared memory without room."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from dualeval.engine.feed import own_storages
from dualeval.engine.nests import tensors_in
from tests.conftest import Launch


def bytes_of(batch: object) -> int:
    storages: list[Tensor] = [tensor for _, tensor in tensors_in(batch)]
    return sum(
        {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in storages}.values()
    )


def test_small_parts_of_a_storage_get_their_own() -> None:
    everything = torch.arange(3000.0).view(1000, 3)
    for batch, expected in (
        (everything[10:74], 64 * 12),
        ({"a": everything[:64], "b": [everything[64:128]]}, 128 * 12),
        (everything[10:74, 1:], 64 * 12 - 4),
        (everything[5:5], 0),
        # Its copy would be as large: contiguous columns; most of the samples.
        (torch.zeros(3, 1000).t()[:64], 12_000),
        (everything[:600], 12_000),
    ):
        assert bytes_of(own_storages(batch)) == expected
    found = own_storages({"a": [everything[7:9, 1:]]})["a"][0]
    assert torch.equal(found, everything[7:9, 1:]) and found.stride() == (3, 1)
    assert own_storages(everything) is everything
    conjugated = torch.zeros(100, 2, dtype=torch.complex64).conj()[:1]
    assert own_storages(conjugated) is conjugated


# Batches of 112 kB, as a collate of one's own and as torch's make them.
READ = """
import torch
from torch.utils.data import default_collate
from dualeval.engine.feed import Feed, Reader
from dualeval.errors import UsageError
from tests.tiny import TinyTask

class ByTorch(TinyTask):
    def collate(self, samples):
        return default_collate([{"features": features, "targets": target} for features, target in samples])

batches = [range(first, first + 2000) for first in range(0, 40_000, 2000)]
for task in (TinyTask(40_000), ByTorch(40_000)):
    feed = Feed(Reader(task.dataset(), task), batches, workers=2, device=torch.device("cpu"))
    try:
        found = list(feed)
    except UsageError as error:
        print(error)
        continue
    for (data, failed), samples in zip(found, batches, strict=True):
        expected = task.collate(task.dataset().__getitems__(samples))
        assert not failed and all(torch.equal(data[name], expected[name]) for name in expected)
    print(len(found), *sorted({*feed.notes}))
"""


def read_with(launch: Launch, size: str) -> list[str]:
    """What comes of it where the shared memory has a size."""
    mount = f'mount -t tmpfs -o size={size} none /dev/shm && exec "$0" "$@"'
    words = ["unshare", "--mount", "sh", "-c", mount, sys.executable, "-c", READ]
    done = launch(words, timeout=120, variables={"OMP_NUM_THREADS": "1"}).ok()
    assert not done.stderr
    return list(done.stdout.splitlines())


@pytest.mark.needs("mounts")
def test_batches_that_find_no_room_are_sent_through_pipes(launch: Launch) -> None:
    """As in a container. torch alone would lose them, and wait for ever."""
    said = " /dev/shm has no room for the batches of reading processes: they are sent through pipes"
    lines = read_with(launch, "256k")
    assert [line.partition(",")[0] for line in lines] == [f"20{said}"] * 2
    assert all("--ipc=host" in line for line in lines)


DOOR = """
import torch, dualeval
from dualeval.metrics import Mean
class Large(torch.utils.data.Dataset):
    def __len__(self): return 12
    def __getitem__(self, index): return torch.full((750_000,), float(index))
done = dualeval.evaluate(model=torch.nn.Identity().eval(), data=Large(),
    forward=lambda model, batch: batch.mean(1), observe=lambda out, batch: {"v": out},
    metrics=[Mean("v")], workers=2, batch_size=4, device="cpu")
print(done.metrics["v"])
"""


@pytest.mark.needs("mounts")
def test_torchs_collate_that_finds_no_room(launch: Launch) -> None:
    """It makes its batch in the shared memory, and the task has its own words for what it raises."""
    mount = 'mount -t tmpfs -o size=1m none /dev/shm && exec "$0" "$@"'
    words = ["unshare", "--mount", "sh", "-c", mount, sys.executable, "-c", DOOR]
    done = launch(words, timeout=120, variables={"OMP_NUM_THREADS": "1"}).ok()
    assert done.stdout.split() == ["5.5"]
    assert "they are sent through pipes" in done.stderr


@pytest.mark.needs("mounts")
def test_a_memory_without_room_for_a_lock(launch: Launch) -> None:
    for line in read_with(launch, "16k"):
        assert line.startswith("/dev/shm on ") and "no room for the locks of reading processes." in line
        assert line.endswith("Or type --workers 0.")
