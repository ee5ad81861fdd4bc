"""The memory through which reading processes hand over batches, and for how many of them it has room.

torch puts the tensors of a batch into files in ``/dev/shm``, where Docker gives containers 64 MB by default.
A batch that finds no room there is lost, and the rank would wait for it for ever.
"""

from __future__ import annotations

import errno
import io
import pickle
import shutil
import socket
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dualeval.engine.feed import FailedSample, Feed, Reader
from dualeval.engine.storages import own_storages, sample_bytes
from dualeval.errors import UsageError
from dualeval.tasks import Dataset, Task
from dualeval.world.network import host_identity

SHARED_MEMORY = Path("/dev/shm")
# The locks of its queues, each a page there, and what the tensors of a batch leave of their last pages.
_BESIDE_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What the reading processes of a rank need of the shared memory, and what is there for them."""

    # The name of the rank's host.
    host: str
    # The same for ranks that share this memory, and for no others.
    place: str
    # Bytes of it that nobody has taken yet.
    free: int
    # Bytes of the tensors of a batch, about; 0 where there are none, or that cannot be told.
    batch: int
    # Number of reading processes.
    workers: int
    # Batches that each of them may read ahead.
    ahead: int
    # Batches that the rank itself may have at a time.
    held: int
    # Number of batches for the rank.
    batches: int
    # Whether there was no room even for the locks of one process.
    full: bool = False

    @property
    def needed(self) -> int:
        """The most bytes that are taken at a time."""
        if not self.workers or not (self.batch or self.full):
            return 0
        most = min(self.workers * self.ahead + self.held, self.batches)
        return self.batch * most + self.workers * _BESIDE_BYTES

    def fitting(self, room: int) -> int:
        """The number of reading processes, up to the present one, for which so many bytes are enough."""
        if self.full:
            return 0
        fewer = (replace(self, workers=workers) for workers in range(self.workers, 0, -1))
        return next((one.workers for one in fewer if one.needed <= room), 0)


def measure_reading(
    dataset: Dataset,
    task: Task,
    batch_size: int,
    *,
    workers: int,
    ahead: int,
    held: int,
    batches: int,
) -> Reading:
    """Find out, from the first sample, what a rank's reading processes need, before they are started."""
    free, batch, place, full = 0, 0, "", False
    if workers and SHARED_MEMORY.is_dir():
        # Its size is 0 where it has no limit.
        usage = shutil.disk_usage(SHARED_MEMORY)
        free = usage.free
        # No exception of this rank alone: the others learn of it, and all stop or go on together.
        full = bool(usage.total) and free < _BESIDE_BYTES
        if usage.total and not full:
            batch, full = _batch_bytes(_Sizes(dataset, task, batch_size))
        # By the kernel and its mount: hosts of one kernel (containers) may share it or not.
        place = f"{host_identity().partition('.')[0]}:{SHARED_MEMORY.stat().st_dev}"
    return Reading(
        host=socket.gethostname(),
        place=place,
        free=free,
        batch=batch,
        workers=workers,
        ahead=ahead,
        held=held,
        batches=batches,
        full=full,
    )


def _batch_bytes(reader: _Sizes) -> tuple[int, bool]:
    """The bytes of a batch; and whether there was no room even to find out."""
    try:
        # In a process of its own: what a data set opens may not outlive a fork.
        [sized] = Feed(reader, [range(1)], workers=1, device=torch.device("cpu"))
    except OSError as error:
        # Other ranks, or other programs, have taken what was free.
        if error.errno != errno.ENOSPC:
            raise
        return 0, True
    return sized.data, False


def choose_workers(everyone: Sequence[Reading], *, chosen: bool) -> tuple[list[int], list[str]]:
    """Decide on the number of reading processes of each rank; every rank comes to the same."""
    places: dict[str, list[Reading]] = {}
    for reading in everyone:
        if reading.needed:
            places.setdefault(reading.place, []).append(reading)
    lowered = {place: least for place, sharing in places.items() if (least := _lowered(sharing)) is not None}
    said = [_shortage(places[place], workers) for place, workers in lowered.items()]
    if chosen and said:
        raise UsageError(f"--workers: {said[0]} {_ADVICE} Or type --workers {min(lowered.values())}.")
    workers = [min(reading.workers, lowered.get(reading.place, reading.workers)) for reading in everyone]
    return workers, [f"{text} {_ADVICE}" for text in said]


_ADVICE = (
    "A container gets more with 'docker run --ipc=host' or --shm-size, in Kubernetes with an emptyDir of "
    "memory at /dev/shm."
)


def _lowered(sharing: Sequence[Reading]) -> int | None:
    """How many processes each of the ranks that share the memory may have; None where all have room."""
    free = min(reading.free for reading in sharing)
    full = any(reading.full for reading in sharing)
    if not full and sum(reading.needed for reading in sharing) <= free:
        return None
    return min(reading.fitting(free // len(sharing)) for reading in sharing)


def _shortage(sharing: Sequence[Reading], workers: int) -> str:
    first, needed = sharing[0], sum(reading.needed for reading in sharing)
    batch = max(reading.batch for reading in sharing)
    ranks = f"{len(sharing)} ranks" if len(sharing) > 1 else "1 rank"
    return (
        f"{SHARED_MEMORY} on {first.host} has {_megabytes(first.free)} free, and {ranks} with "
        f"{max(reading.workers for reading in sharing)} reading processes each may take "
        f"{_megabytes(needed)} there{f' ({_megabytes(batch)} a batch)' if batch else ''}: there is room for "
        f"{f'{workers} of them a rank' if workers else 'none of them'}."
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.3g} MB" if size < 1e9 else f"{size / 1e9:,.3g} GB"


class _Sizes(Reader):
    """Reads one sample, and gives the bytes that a batch of such samples takes in place of it."""

    def __init__(self, dataset: Dataset, task: Task, batch_size: int) -> None:
        super().__init__(dataset, task, fill=False)
        self._batch_size = batch_size

    def __getitem__(self, indices: range) -> tuple[Any, tuple[FailedSample, ...]]:
        try:
            data, _ = super().__getitem__(indices)
            data = own_storages(data, samples=self._batch_size)
        except Exception:  # noqa: BLE001 - what is wrong with a sample is said where it is read to be evaluated
            return 0, ()
        return tensor_bytes(data, samples=self._batch_size), ()


def tensor_bytes(batch: Any, *, samples: int = 1) -> int:
    """The bytes of all storages that tensors in a batch have, wherever in it they are."""
    found = _Tensors(io.BytesIO())
    found.dump(batch)
    sharing: defaultdict[int, list[Tensor]] = defaultdict(list)
    for tensor in found.tensors.values():
        sharing[_storage(tensor)[0]].append(tensor)
    total = 0
    for place, tensors in sharing.items():
        if not place:
            total += sum(tensor.numel() * tensor.element_size() * samples for tensor in tensors)
            continue
        size = _storage(tensors[0])[1]
        parts = [sample_bytes(tensor) for tensor in tensors]
        # A storage that is as large as what the tensors have of it grows with the samples; a larger one is
        # there for all of them.
        total += max(size, min(sum(parts), max(size, *parts)) * samples)
    return total


def _storage(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor's storage is, and its bytes; 0 where it has none of its own, as a sparse one."""
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except (NotImplementedError, RuntimeError):
        return 0, 0


class _Tensors(pickle.Pickler):
    """Looks for tensors where a queue between processes would: in all that is pickled."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: dict[int, Tensor] = {}

    def persistent_id(self, found: Any) -> int | None:
        if not isinstance(found, Tensor):
            return None
        self.tensors[id(found)] = found
        return id(found)
