"""The ledger: every count of a run in one int64 vector, so that merging is integer addition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dualeval.columns import Column
from dualeval.engine.columns import update
from dualeval.engine.plan import EvalPlan
from dualeval.errors import ExactlyOnceError
from dualeval.metrics import Metric

_NAMED_AT_MOST = 10


class Ledger:
    """Layout and content of the vector: per chunk [folded, evaluated, failed], then each metric's slots."""

    def __init__(self, plan: EvalPlan, metrics: Sequence[Metric]) -> None:
        self._plan = plan
        self._metrics = tuple(metrics)
        self._slices: list[slice] = []
        start = 3 * plan.num_chunks
        for metric in self._metrics:
            self._slices.append(slice(start, start + metric.size))
            start += metric.size
        # The vector, 1-d int64 on the CPU.
        self.values = torch.zeros(start, dtype=torch.int64)

    def fold(self, chunks: Sequence[int], evaluated: Sequence[int], failed: Sequence[int]) -> None:
        """Note that chunks were folded in once more."""
        counts = self.values[: 3 * self._plan.num_chunks].view(3, -1)
        new = torch.tensor([[1] * len(chunks), evaluated, failed], dtype=torch.int64)
        counts.index_add_(1, torch.tensor(chunks, dtype=torch.int64), new)

    def update(self, columns: Mapping[str, Column], batches: Sequence[int]) -> None:
        """Add the evaluated samples of consecutive batches to every metric."""
        for metric, part in zip(self._metrics, self._slices, strict=True):
            update(metric, self.values[part], columns, batches)

    def parts(self) -> list[tuple[Metric, Tensor]]:
        """Each metric with its slots."""
        return [(metric, self.values[part]) for metric, part in zip(self._metrics, self._slices, strict=True)]

    def totals(self) -> tuple[int, int]:
        """Samples evaluated and samples failed, over all chunks."""
        chunks = self._plan.num_chunks
        evaluated, failed = self.values[chunks : 3 * chunks].view(2, chunks).sum(dim=1).tolist()
        return evaluated, failed

    def verify_exactly_once(self) -> None:
        """Check on the reduced ledger that each chunk was folded once, with all its samples."""
        folded, evaluated, failed = self.values[: 3 * self._plan.num_chunks].view(3, -1)
        sizes = torch.from_numpy(self._plan.chunk_sizes())
        wrong = ((folded != 1) | (evaluated + failed != sizes)).nonzero().flatten().tolist()
        said = []
        for chunk in wrong[:_NAMED_AT_MOST]:
            samples = self._plan.chunk_samples(chunk)
            said.append(
                f"chunk {chunk} (samples {samples.start} to {samples.stop - 1}): folded {folded[chunk]} "
                f"times, {evaluated[chunk]} evaluated and {failed[chunk]} failed of {len(samples)}"
            )
        if wrong:
            more = f"; and {len(wrong) - _NAMED_AT_MOST} more" if len(wrong) > _NAMED_AT_MOST else ""
            raise ExactlyOnceError(
                f"{len(wrong)} of {self._plan.num_chunks} chunks were not counted exactly once: "
                f"{'; '.join(said)}{more}"
            )
