"""EvalPlan: which samples make a batch, which batches make a chunk, which chunks a rank takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

# Bounds the ledger's chunk section, so that its reduction does not grow with the data set.
MAX_CHUNKS = 131_072


@dataclass(frozen=True, kw_only=True)
class EvalPlan:
    """The division of a data set, fixed by the number of samples and the batch size alone.

    A floating-point kernel may give a row other last bits in a batch of another shape, so a batch has the
    same samples at every world size: ranks take whole chunks.
    """

    # Samples to evaluate.
    num_samples: int
    # Samples a batch; the last batch may be shorter.
    batch_size: int

    def __post_init__(self) -> None:
        assert self.num_samples >= 1, "an empty data set is refused before a plan is made"
        assert self.batch_size >= 1, "the job refuses such a batch size"

    # Cached: the loop asks for these several times a batch.
    @cached_property
    def num_batches(self) -> int:
        """Number of batches."""
        return -(-self.num_samples // self.batch_size)

    @cached_property
    def num_chunks(self) -> int:
        """Number of chunks: one per batch up to ``MAX_CHUNKS``; beyond that, chunks grow evenly."""
        return min(self.num_batches, MAX_CHUNKS)

    def batch_samples(self, batch: int) -> range:
        """Indices of the samples of a batch."""
        start = batch * self.batch_size
        return range(start, min(start + self.batch_size, self.num_samples))

    def chunk_batches(self, chunk: int) -> range:
        """Numbers of the batches of a chunk."""
        batches, chunks = self.num_batches, self.num_chunks
        return range(chunk * batches // chunks, (chunk + 1) * batches // chunks)

    def chunk_samples(self, chunk: int) -> range:
        """Indices of the samples of a chunk."""
        batches = self.chunk_batches(chunk)
        return range(self.batch_samples(batches[0]).start, self.batch_samples(batches[-1]).stop)

    def chunk_of(self, sample: int) -> int:
        """Number of the chunk of a sample."""
        return ((sample // self.batch_size + 1) * self.num_chunks - 1) // self.num_batches

    def chunk_sizes(self) -> npt.NDArray[np.int64]:
        """Number of samples of each chunk, shape (chunks,)."""
        batches = np.arange(self.num_chunks + 1, dtype=np.int64) * self.num_batches // self.num_chunks
        return np.diff(np.minimum(batches * self.batch_size, self.num_samples))

    def samples_in(self, chunks: Sequence[int]) -> int:
        """Number of samples of some chunks together."""
        return int(self.chunk_sizes()[np.asarray(chunks, np.int64)].sum())

    def static_chunks(self, rank: int, size: int) -> range:
        """Chunks of a rank in the static schedule: chunk c belongs to rank c mod size."""
        return range(rank, self.num_chunks, size)
