"""The ids of samples: one digest of all of them, and those that are there twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice

import numpy as np
import numpy.typing as npt

from dualeval.engine.samples.subset import ids_of
from dualeval.result import sha256_of_json
from dualeval.tasks import Dataset
from dualeval.world import World

_MOST_BLOCKS = 1024
_LEAST_BLOCK = 64  # samples


def hashes_of_ids(
    dataset: Dataset, samples: int, world: World, step: Callable[[], None]
) -> tuple[list[str], npt.NDArray[np.uint64]]:
    """The hashes of this rank's blocks of ids, and of its single ids; none if ids cost reading samples."""
    of_blocks, single = list[str](), [np.empty(0, np.uint64)]
    blocks = [] if getattr(dataset, "reads_for_ids", False) else blocks_of(samples)
    for block in blocks[world.rank :: world.size]:
        ids = [*map(str, ids_of(dataset, block))]
        of_blocks.append(sha256_of_json(ids))
        if not getattr(dataset, "unique_ids", False):
            single.append(hashed(ids))
        step()
    return of_blocks, np.concatenate(single)


def hashed(ids: Sequence[str]) -> npt.NDArray[np.uint64]:
    """8 bytes of each id's hash: more would not fit in memory for 10**8 ids."""
    return np.fromiter(map(_hash, ids), np.uint64, len(ids))


def _hash(name: str) -> int:
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def repeated(hashes: npt.NDArray[np.uint64], ids: Iterator[str]) -> dict[str, int]:
    """The ids that occur more than once, with their counts; ``ids`` is read only if two hashes are equal."""
    ordered = np.sort(hashes)
    suspect = frozenset(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    counts = Counter(name for name in ids if _hash(name) in suspect) if suspect else {}
    # Two different ids may have the same hash.
    return {name: count for name, count in counts.items() if count > 1}


def joined(samples: int, ranks: Sequence[list[str]]) -> str | None:
    """The digest of all ids, from the blocks' hashes that ``hashes_of_ids`` returned on every rank."""
    if not any(ranks):
        return None
    blocks = range(len(blocks_of(samples)))
    return sha256_of_json([samples, *(ranks[block % len(ranks)][block // len(ranks)] for block in blocks)])


def digest_of(samples: int, ids: Iterable[str]) -> str | None:
    """The same digest as ``joined``, from all ids in order."""
    names = iter(ids)
    return joined(samples, [[sha256_of_json([*islice(names, len(block))]) for block in blocks_of(samples)]])


def blocks_of(samples: int) -> list[range]:
    """Blocks of consecutive samples to hash together; the number of samples alone decides them."""
    size = max(_LEAST_BLOCK, -(-samples // _MOST_BLOCKS))
    return [range(first, min(first + size, samples)) for first in range(0, samples, size)]
