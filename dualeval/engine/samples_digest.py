"""samples_digest: which samples a result is of, by their ids, each its own; the ranks share the hashing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch

from dualeval.backends.base import Backend
from dualeval.engine.identity.data import blocks_of
from dualeval.engine.parts import ids_of
from dualeval.errors import UsageError
from dualeval.result import sha256_of_json
from dualeval.tasks import Dataset
from dualeval.world import World

_AT_ONCE = 1 << 23  # hashes of ids that rank 0 compares: 64 MB


def hashes_of_ids(
    dataset: Dataset, samples: int, world: World, step: Callable[[], None]
) -> tuple[list[str], npt.NDArray[np.uint64]]:
    """The hash of the ids in each of this rank's blocks, and of each id; none where ids cost readings."""
    found, single = list[str](), [np.empty(0, np.uint64)]
    blocks = [] if getattr(dataset, "reads_for_ids", False) else blocks_of(samples)
    for block in blocks[world.rank :: world.size]:
        ids = [*map(str, ids_of(dataset, block))]
        found.append(sha256_of_json(ids))
        if not getattr(dataset, "unique_ids", False):
            single.append(hashed(ids))
        step()
    return found, np.concatenate(single)


def hashed(ids: Sequence[str]) -> npt.NDArray[np.uint64]:
    """8 bytes of each id's hash: of 10**8 ids all that can be held."""
    return np.fromiter(map(_hash, ids), np.uint64, len(ids))


def _hash(name: str) -> int:
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def repeated(hashes: npt.NDArray[np.uint64], ids: Iterator[str]) -> dict[str, int]:
    """The ids that are there more than once, and how often; ``ids`` are read where two hashes are alike."""
    ordered = np.sort(hashes)
    suspect = frozenset(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    counts = Counter(name for name in ids if _hash(name) in suspect) if suspect else {}
    # Two different ids may have one hash.
    return {name: count for name, count in counts.items() if count > 1}


def check_ids(dataset: Dataset, samples: int, hashes: npt.NDArray[np.uint64], backend: Backend) -> None:
    """On rank 0, refuse two samples of one id, by the hashes of all ranks; a collective."""
    ordered, parts = np.sort(hashes), -(-samples // _AT_ONCE)
    ends = np.searchsorted(ordered, np.array([(part << 64) // parts for part in range(1, parts)], np.uint64))
    twice: dict[str, int] = {}
    for own in np.split(ordered.view(np.int64), ends):
        of_ranks = backend.gather(torch.from_numpy(own))
        if of_ranks is not None and not twice:
            ids = (str(name) for block in blocks_of(samples) for name in ids_of(dataset, block))
            twice = repeated(torch.cat(of_ranks).numpy().view(np.uint64), ids)
    for name, count in twice.items():
        raise UsageError(
            f"{count:,} samples have the id {name!r}: each sample needs an id of its own. Let ids= (or the "
            "data set's id()) return another text for each, or leave ids= out: then the index is the id"
        )


def joined(samples: int, ranks: Sequence[list[str]]) -> str | None:
    """The digest, of what ``hashes_of_ids`` gave on every rank."""
    if not any(ranks):
        return None
    blocks = range(len(blocks_of(samples)))
    return sha256_of_json([samples, *(ranks[block % len(ranks)][block // len(ranks)] for block in blocks)])


def digest_of(samples: int, ids: Iterable[str]) -> str | None:
    """The digest, of all ids in order."""
    names = iter(ids)
    return joined(samples, [[sha256_of_json([*islice(names, len(block))]) for block in blocks_of(samples)]])
