"""From finished batches to the ledger and the journal: integer work, grouped over many batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, perf_counter

import torch
from torch import Tensor

from dualeval.engine.feed import FailedSample
from dualeval.engine.journal import JournalWriter
from dualeval.engine.ledger import Ledger
from dualeval.engine.plan import EvalPlan
from dualeval.engine.predictions import EVALUATED
from dualeval.errors import ExactlyOnceError
from dualeval.metrics import Metric

# Samples that one ledger update takes: its cost is per call, not per sample.
FOLD_SAMPLES = 4_096
# Rows that one journal file holds at most (and a chunk): bounds this rank's memory.
FLUSH_ROWS = 16_384
FLUSH_EVERY_S = 5.0


@dataclass(frozen=True, kw_only=True)
class _Finished:
    """A batch whose columns are on the host; ``columns`` is None where no sample of it could be read."""

    rows: int
    columns: Mapping[str, Tensor] | None
    evaluated: Tensor


class Recorder:
    """Takes the batches of one rank, in order, and folds whole chunks.

    Attributes:
        ledger: everything folded so far.
        failed: the failed samples so far.
        metrics_s: seconds spent on the ledger.
        journal_s: seconds spent on journal files.
    """

    def __init__(
        self, plan: EvalPlan, metrics: Sequence[Metric], rows: Sequence[str], writer: JournalWriter
    ) -> None:
        self._plan = plan
        self._rows = tuple(rows)
        self._writer = writer
        self.ledger = Ledger(plan, metrics)
        self._delta = Ledger(plan, metrics)
        self.failed: list[FailedSample] = []
        self.metrics_s = 0.0
        self.journal_s = 0.0
        self._empty: dict[str, Tensor] | None = None  # the columns' dtypes and row shapes, once seen
        self._chunk_failed = 0
        self._unfolded: list[_Finished] = []
        self._unfolded_rows = 0
        self._chunks: list[int] = []
        self._folded: list[dict[str, Tensor]] = []
        self._folded_rows = 0
        self._flushed_at = monotonic()

    def add(
        self,
        chunk: int,
        batch: int,
        columns: Mapping[str, Tensor] | None,
        failed: Sequence[FailedSample],
    ) -> None:
        """Take a batch whose columns (on the CPU) are complete."""
        samples = self._plan.batch_samples(batch)
        for name, column in (columns or {}).items():
            if len(column) != len(samples):
                raise ExactlyOnceError(
                    f"column {name!r} of batch {batch} (samples {samples.start} to {samples.stop - 1}) has "
                    f"{len(column)} values, expected {len(samples)}: the task's collate, forward and observe "
                    "must keep one row a sample, in order"
                )
        evaluated = torch.ones(len(samples), dtype=torch.bool)
        for sample in failed:
            evaluated[sample.index - samples.start] = False
        self.failed.extend(failed)
        self._chunk_failed += len(failed)
        if columns is not None and self._empty is None:
            self._empty = {name: column[:0] for name, column in columns.items()}
        self._unfolded.append(_Finished(rows=len(samples), columns=columns, evaluated=evaluated))
        self._unfolded_rows += len(samples)
        if batch == self._plan.chunk_batches(chunk)[-1]:
            self._finish_chunk(chunk)

    def _finish_chunk(self, chunk: int) -> None:
        self._chunks.append(chunk)
        total = len(self._plan.chunk_samples(chunk))
        self._delta.fold(chunk, total - self._chunk_failed, self._chunk_failed)
        self._chunk_failed = 0
        if self._unfolded_rows >= FOLD_SAMPLES:
            self._fold()
        if self._folded_rows + self._unfolded_rows >= FLUSH_ROWS or (
            monotonic() - self._flushed_at >= FLUSH_EVERY_S
        ):
            self.flush()

    def _fold(self) -> None:
        """Bring the rows since the last fold, all of whole chunks, into the delta."""
        if not self._unfolded:
            return
        start = perf_counter()
        evaluated = torch.cat([finished.evaluated for finished in self._unfolded])
        columns = {
            name: torch.cat([self._column(finished, name, empty) for finished in self._unfolded])
            for name, empty in (self._empty or {}).items()
        }
        if evaluated.any():
            whole = bool(evaluated.all())
            self._delta.update(columns if whole else {name: c[evaluated] for name, c in columns.items()})
        rows = {name: columns[name] for name in self._rows if name in columns}
        self._folded.append({EVALUATED: evaluated.to(torch.uint8), **rows})
        self._folded_rows += self._unfolded_rows
        self._unfolded, self._unfolded_rows = [], 0
        self.metrics_s += perf_counter() - start

    @staticmethod
    def _column(finished: _Finished, name: str, empty: Tensor) -> Tensor:
        if finished.columns is not None:
            return finished.columns[name]
        return empty.new_zeros(finished.rows, *empty.shape[1:])

    def flush(self) -> None:
        """Write all whole chunks since the last flush to one journal file."""
        self._fold()
        self._flushed_at = monotonic()
        if not self._chunks:
            return
        start = perf_counter()
        # Parts folded before this rank could read anything hold no columns: their rows are zeros.
        names = [EVALUATED, *(name for name in self._rows if name in (self._empty or {}))]
        columns = {
            name: torch.cat([self._folded_column(part, name) for part in self._folded]) for name in names
        }
        rows = [len(self._plan.chunk_samples(chunk)) for chunk in self._chunks]
        self._writer.write(self._chunks, rows, self._delta.values, columns)
        self.ledger.values += self._delta.values
        self._delta.values.zero_()
        self._chunks, self._folded, self._folded_rows = [], [], 0
        self.journal_s += perf_counter() - start

    def _folded_column(self, part: Mapping[str, Tensor], name: str) -> Tensor:
        if name in part:
            return part[name]
        assert self._empty is not None
        return self._empty[name].new_zeros(len(part[EVALUATED]), *self._empty[name].shape[1:])
