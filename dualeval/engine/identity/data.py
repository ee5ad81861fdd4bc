"""The contents of samples: the ranks of a node share the reading, and all nodes compare what they read."""

from __future__ import annotations

import hashlib
import socket
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from dualeval.backends.base import Backend
from dualeval.engine.control.plane import ControlPlane
from dualeval.errors import UsageError
from dualeval.tasks import Dataset

_MOST_BLOCKS = 1024
_LEAST_BLOCK = 64  # samples
_WORDS = 2  # int64 a block: 128 bits of its hash
_NAMED_AT_MOST = 4


def contents_fingerprint(
    dataset: Dataset, samples: int, backend: Backend, control: ControlPlane
) -> str | None:
    """sha256, in hex, over the contents of the first samples; None where the data set gives none.

    A collective, with the same result on every rank. Samples are cut into blocks, by their number alone.
    Each node reads all of them, for it may have a copy of its own; block b is read by its local rank b mod
    local size.
    """
    read = getattr(dataset, "content_fingerprint", None)
    if read is None:
        return None
    blocks = blocks_of(samples)
    world = backend.world
    limits = torch.iinfo(torch.int64)
    least = torch.full((len(blocks), _WORDS), limits.max)
    most = torch.full((len(blocks), _WORDS), limits.min)
    for number in range(world.local_rank, len(blocks), world.local_size):
        control.progress.step("setup")
        least[number] = most[number] = torch.frombuffer(_hash_of(read, blocks[number]), dtype=torch.int64)
    control.meet()
    own = least.clone()
    # Two short ones, whatever the number of ranks: a list of each rank's hashes would be megabytes.
    least, most = backend.all_reduce(least, op="min"), backend.all_reduce(most, op="max")
    differing = (least != most).any(dim=1).nonzero().flatten().tolist()
    if differing:
        _refuse(dataset, blocks, differing, own, backend)
    return hashlib.sha256(least.numpy().tobytes()).hexdigest()


def contents_now(dataset: Dataset, samples: int) -> str | None:
    """What ``contents_fingerprint`` is of the data as they lie there now, read by this process alone."""
    read = getattr(dataset, "content_fingerprint", None)
    if read is None:
        return None
    return hashlib.sha256(b"".join(_hash_of(read, block) for block in blocks_of(samples))).hexdigest()


def _hash_of(read: Callable[[range], str], block: range) -> bytearray:
    return bytearray(hashlib.sha256(str(read(block)).encode()).digest()[: 8 * _WORDS])


def blocks_of(samples: int) -> list[range]:
    """Consecutive samples that are hashed together, cut by their number alone."""
    size = max(_LEAST_BLOCK, -(-samples // _MOST_BLOCKS))
    return [range(first, min(first + size, samples)) for first in range(0, samples, size)]


def _refuse(
    dataset: Dataset, blocks: list[range], differing: list[int], own: torch.Tensor, backend: Backend
) -> None:
    """Say which hosts have read other contents than rank 0's; a collective."""
    number = differing[0]
    words = own[number].tolist()
    everyone: list[Any] = backend.all_gather_json({"host": socket.gethostname(), "words": words})
    hosts: dict[tuple[int, ...], dict[str, int]] = defaultdict(dict)
    for rank, report in enumerate(everyone):
        if report["words"][0] != torch.iinfo(torch.int64).max:  # another rank of its node has read it
            hosts[tuple(report["words"])].setdefault(report["host"], rank)
    shown = " and ".join(
        ", ".join(f"{host} (rank {rank})" for host, rank in list(named.items())[:_NAMED_AT_MOST])
        + (", ..." if len(named) > _NAMED_AT_MOST else "")
        for named in hosts.values()
    )
    block = blocks[number]
    raise UsageError(
        f"the data set has other contents on {shown}: samples {block.start} to {block.stop - 1} "
        f"({dataset.id(block.start)} to {dataset.id(block.stop - 1)}) differ, and {len(differing) - 1} more "
        f"of {len(blocks)} such blocks. Give every node the same data."
    )
