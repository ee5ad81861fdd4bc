"""From finished batches to the ledger and the journal: integer work, grouped over many batches."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf
from pathlib import Path
from time import monotonic, perf_counter
from typing import NamedTuple, cast

import torch
from torch import Tensor

from dualeval.columns import Column, Ragged, concatenated, described, each_part, empty_rows, kind_of
from dualeval.engine.feed import FailedSample
from dualeval.engine.folder.journal import MOST_OF_AN_ERROR, JournalWriter
from dualeval.engine.folder.windows import EVALUATED
from dualeval.engine.in_memory import MemoryWriter
from dualeval.engine.ledger import Ledger
from dualeval.engine.plan import EvalPlan
from dualeval.engine.progress import Progress
from dualeval.errors import ExactlyOnceError, UsageError
from dualeval.metrics import Metric
from dualeval.metrics.classification import LogitColumns, joined

# Samples that one ledger update takes: its cost is per call, not per sample. As many as a journal file holds.
FOLD_SAMPLES = 16_384
# Rows that one journal file holds at most (and a chunk): bounds this rank's memory.
FLUSH_ROWS = 16_384
# Bytes of values of ragged columns and text that it holds at most (and a chunk), likewise.
FLUSH_BYTES = 256 << 20
FLUSH_EVERY_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """A batch that has been handed out, without its data: these would stay on the device for as long."""

    # Number of its chunk.
    chunk: int
    batch: int
    # Its samples' indices in the data set.
    samples: range
    # Whether it is its chunk's last one.
    is_last: bool
    # Those that could not be read.
    failed: tuple[FailedSample, ...] = ()


class _Finished(NamedTuple):
    """A batch whose columns are on the host."""

    # Number of its samples.
    rows: int
    # None where no sample of it could be read.
    columns: Mapping[str, Column] | None
    # The rows of the samples that could not be read.
    failed: tuple[int, ...]
    # Bytes of the values of its ragged columns.
    ragged_bytes: int = 0


class _File(NamedTuple):
    """What one journal file holds, as ``JournalWriter.write`` takes it."""

    chunks: Sequence[int]
    rows: Sequence[int]
    delta: Tensor
    columns: Mapping[str, Column]
    failures: Sequence[tuple[int, str]]


class _Part:
    """Finished chunks on their way into one journal file."""

    def __init__(self, plan: EvalPlan, metrics: Sequence[Metric], names: Sequence[str]) -> None:
        self._plan = plan
        self._names = tuple(names)
        # Their ledger, without what is still to be folded.
        self.delta = Ledger(plan, metrics)
        self.chunks: list[int] = []
        # Number of rows of each.
        self.rows_of_chunks: list[int] = []
        # Index and error of their samples that could not be read.
        self.failures: list[tuple[int, str]] = []
        # Number of their rows.
        self.rows = 0
        # Bytes of the values of their ragged columns.
        self.ragged_bytes = 0
        self._unfolded: list[_Finished] = []
        self._unfolded_rows = 0
        self._unfolded_chunks: list[tuple[int, int, int]] = []  # number, samples evaluated, samples failed
        self._folded: list[dict[str, Column]] = []

    def take(
        self,
        chunk: int,
        batches: Sequence[_Finished],
        failures: Sequence[tuple[int, str]],
        empty: Mapping[str, Column] | None,
    ) -> None:
        """Take a finished chunk; ``empty`` has the columns' dtypes and row shapes, once they are known."""
        rows = 0
        for finished in batches:
            rows += finished.rows
            self.ragged_bytes += finished.ragged_bytes
        self.chunks.append(chunk)
        self.rows_of_chunks.append(rows)
        self.failures += failures
        self.rows += rows
        self._unfolded.extend(batches)
        self._unfolded_rows += rows
        self._unfolded_chunks.append((chunk, rows - len(failures), len(failures)))
        if self._unfolded_rows >= FOLD_SAMPLES:
            self.fold(empty)

    def fold(self, empty: Mapping[str, Column] | None) -> None:
        """Bring the rows since the last fold into the delta."""
        if not self._unfolded:
            return
        evaluated = _evaluated(self._unfolded)
        parts = [*_parts(self._unfolded, empty or {})]
        columns = {name: concatenated([part[name] for part in parts]) for name in empty or {}}
        if evaluated.any():
            whole = bool(evaluated.all())
            before = [slots.clone() for _, slots in self.delta.parts()]
            batches = [finished.rows - len(finished.failed) for finished in self._unfolded]
            read = columns if whole else {name: column[evaluated] for name, column in columns.items()}
            try:
                self.delta.update(read, batches)
            except BaseException:
                # Some metrics have taken these rows, others have not; and they stay to be folded.
                for (_, slots), kept in zip(self.delta.parts(), before, strict=True):
                    slots.copy_(kept)
                raise
        rows = {name: columns[name] for name in self._names if name in columns}
        self._folded.append({EVALUATED: evaluated.to(torch.uint8), **rows})
        self.delta.fold(*zip(*self._unfolded_chunks, strict=True))
        self._unfolded, self._unfolded_rows, self._unfolded_chunks = [], 0, []

    def columns(self, empty: Mapping[str, Column] | None) -> dict[str, Column]:
        """All rows, folded, in the order of ``chunks``."""
        # Parts folded before this rank could read anything hold no columns: their rows are zeros.
        known = empty or {}
        names = [EVALUATED, *(name for name in self._names if name in known)]
        return {
            name: concatenated(
                [
                    part[name] if name in part else empty_rows(known[name], len(part[EVALUATED]))
                    for part in self._folded
                ]
            )
            for name in names
        }

    def clear(self) -> None:
        """Forget what has been written."""
        self.delta.values.zero_()
        self.chunks, self.rows_of_chunks, self._folded, self.failures = [], [], [], []
        self.rows = self.ragged_bytes = 0


def _evaluated(batches: Sequence[_Finished]) -> Tensor:
    """Which rows of some batches are of samples that could be read, bool of shape (rows,)."""
    evaluated = torch.ones(sum(finished.rows for finished in batches), dtype=torch.bool)
    start = 0
    for finished in batches:
        if finished.failed:
            evaluated[[start + row for row in finished.failed]] = False
        start += finished.rows
    return evaluated


def _parts(batches: Sequence[_Finished], empty: Mapping[str, Column]) -> Iterator[Mapping[str, Column]]:
    """The columns of consecutive batches; of logits that wait, of many batches at once."""
    for is_late, run in groupby(batches, key=lambda finished: type(finished.columns) is LogitColumns):
        if is_late:
            yield joined([cast(LogitColumns, finished.columns) for finished in run]).made(empty)
            continue
        for rows, columns, *_ in run:
            if columns is None:
                columns = {name: empty_rows(like, rows) for name, like in empty.items()}
            yield columns


def _with_own_memory(column: Tensor) -> Tensor:
    """A tensor in memory of its own: a part of something larger would keep all of that until the fold.

    Memory that is shared with a reading process is an open file besides, for every batch that waits.
    """
    if column.layout is not torch.strided:
        return column
    storage = column.untyped_storage()
    # The storage itself is asked: the tensor's own method makes two objects of Python on the way there.
    if storage.nbytes() > column.nbytes or storage.is_shared():
        return column.clone(memory_format=torch.contiguous_format)
    return column


def check_rows(columns: Mapping[str, Column], batch: int, samples: range) -> None:
    """Check that the columns of a batch have one row a sample."""
    rows = len(samples)
    if type(columns) is LogitColumns:
        columns = {"logits": columns.logits, "target": columns.target}
    for name, column in columns.items():
        if len(column) != rows:
            raise ExactlyOnceError(
                f"column {name!r} of batch {batch} (samples {samples.start} to {samples.stop - 1}) has "
                f"{len(column)} values, expected {rows}: the task's collate, forward and observe "
                "must keep one row a sample, in order"
            )


class Recorder:
    """Takes the batches of one rank, a chunk's one after the other, and folds whole chunks.

    One thread adds; another may flush, so that what is finished is saved also where the first one hangs.
    """

    def __init__(
        self,
        plan: EvalPlan,
        metrics: Sequence[Metric],
        rows: Sequence[str],
        writer: JournalWriter | MemoryWriter,
        progress: Progress | None = None,
    ) -> None:
        self._plan = plan
        self._metrics = tuple(metrics)
        self._names = tuple(rows)
        reads = [name for metric in self._metrics for name in metric.columns]
        self._used = tuple(dict.fromkeys([*self._names, *reads]))
        self.writer = writer
        self._progress = progress or Progress()
        self._lock = threading.Lock()
        # Everything written so far.
        self.ledger = Ledger(plan, metrics)
        # Indices of the failed samples so far; their errors are with their chunks' rows.
        self.failed: list[int] = []
        # Index and error of the first of them.
        self.first_failed: tuple[int, str] | None = None
        # Number of chunks written so far.
        self.chunks_saved = 0
        # Seconds spent on the ledger.
        self.metrics_s = 0.0
        # Seconds of waiting for journal files.
        self.journal_s = 0.0
        self._empty: dict[str, Column] | None = None  # the columns' dtypes and row shapes, once seen
        self._late_kind: object = None  # of logits whose columns are made where they are folded
        self._chunk: list[_Finished] = []
        self._chunk_failures: list[tuple[int, str]] = []
        self._whole = _Part(plan, self._metrics, self._names)
        # In files of their own: a resumed run leaves these out and tries their samples again.
        self._with_failures: _Part | None = None
        self._flushed_at = monotonic()
        # The file that is being written, or could not be; who writes it, and what has prevented it.
        self._file: _File | None = None
        self._writing: threading.Thread | None = None
        self._problem: BaseException | None = None

    @property
    def folder(self) -> Path | None:
        """Where the journal's files are written; None where nothing is."""
        return self.writer.folder

    def add(self, work: Work, columns: Mapping[str, Column] | None) -> None:
        """Take a batch whose columns (on the CPU) are complete."""
        batch, samples, failed = work.batch, work.samples, work.failed
        check_rows({} if columns is None else columns, batch, samples)
        ragged_bytes = 0
        with self._lock:
            if failed:
                self._note_failures(failed)
            if columns is not None:
                if self._empty is None:
                    # What nobody counts or keeps would only wait here for the fold.
                    used = [name for name in self._used if name in columns]
                    self._empty = {name: empty_rows(columns[name], 0) for name in used}
                    self._late_kind = columns.kind if type(columns) is LogitColumns else None
                columns, ragged_bytes = self._taken(columns, self._empty, batch, samples)
            rows_failed = tuple([sample.index - samples.start for sample in failed]) if failed else ()
            self._chunk.append(_Finished(len(samples), columns, rows_failed, ragged_bytes))
            if work.is_last:
                self._finish_chunk(work.chunk)

    def _note_failures(self, failed: Sequence[FailedSample]) -> None:
        failures = [(sample.index, sample.error[:MOST_OF_AN_ERROR]) for sample in failed]
        self.failed.extend(index for index, _ in failures)
        self._chunk_failures += failures
        self.first_failed = min(failures[0], self.first_failed or failures[0])

    def _taken(
        self, columns: Mapping[str, Column], kinds: Mapping[str, Column], batch: int, samples: range
    ) -> tuple[Mapping[str, Column], int]:
        """The columns that are used, each in memory of its own; and the bytes of the ragged ones' values."""
        if type(columns) is LogitColumns and columns.kind == self._late_kind:
            return columns, 0
        taken: dict[str, Column] = {}
        ragged_bytes = 0
        for name, like in kinds.items():
            column = columns.get(name)
            is_alike = (
                type(column) is Tensor is type(like)
                and column.dtype is like.dtype
                and column.shape[1:] == like.shape[1:]
            )
            if column is None or not (is_alike or kind_of(column) == kind_of(like)):
                found = "is not there" if column is None else f"is {described(column)}"
                raise UsageError(
                    f"column {name!r} of batch {batch} (samples {samples.start} to {samples.stop - 1}) "
                    f"{found}, and in the first batch it was {described(like)}: each "
                    "batch must give the same columns, of the same dtype and row shape"
                )
            if isinstance(column, Ragged):
                taken[name] = each_part(_with_own_memory, column)
                ragged_bytes += column.values.nbytes
            else:
                taken[name] = _with_own_memory(column)
        return taken, ragged_bytes

    def _finish_chunk(self, chunk: int) -> None:
        start = perf_counter()
        part = self._whole
        if self._chunk_failures:
            if self._with_failures is None:
                self._with_failures = _Part(self._plan, self._metrics, self._names)
            part = self._with_failures
        part.take(chunk, self._chunk, self._chunk_failures, self._empty)
        self._chunk, self._chunk_failures = [], []
        self.metrics_s += perf_counter() - start
        is_full = part.rows >= FLUSH_ROWS or part.ragged_bytes >= FLUSH_BYTES
        if is_full or self._problem is not None or monotonic() - self._flushed_at >= FLUSH_EVERY_S:
            self._flush()

    def flush(self, wait_s: float = -1.0) -> bool:
        """Write all whole chunks since the last flush, to one journal file, or two where samples failed.

        Waits until they are on the disk; returns whether they were within that time.
        """
        limit = inf if wait_s < 0 else monotonic() + wait_s
        if not self._lock.acquire(timeout=wait_s):
            return False
        try:
            return self._flush(limit) and self._await_file(limit)
        finally:
            self._lock.release()

    def _flush(self, limit: float = inf) -> bool:
        """Hand all whole chunks to the thread that writes; one file is under way at a time."""
        self._flushed_at = monotonic()
        for part in (self._whole, self._with_failures):
            if part is None or not part.chunks:
                continue
            start = perf_counter()
            part.fold(self._empty)
            self.metrics_s += perf_counter() - start
            if not self._await_file(limit):
                return False
            self._file = _File(
                part.chunks,
                part.rows_of_chunks,
                part.delta.values.clone(),
                part.columns(self._empty),
                part.failures,
            )
            part.clear()
            self._begin_file()
        return True

    def _begin_file(self) -> None:
        if self.writer.folder is None:
            self._write_file()
            return
        # A slow disk makes nobody wait before the next file.
        self._writing = threading.Thread(target=self._write_file, name="dualeval-journal", daemon=True)
        self._writing.start()

    def _write_file(self) -> None:
        file = self._file
        assert file is not None
        try:
            self.writer.write(*file)
            # A ledger that was made in inference mode takes nothing outside of it, where a thread begins.
            with torch.inference_mode():
                self.ledger.values += file.delta
            self.chunks_saved += len(file.chunks)
            self._file = None
        except BaseException as error:  # noqa: BLE001 - raised where the file is waited for
            self._problem = error

    def _await_file(self, limit: float = inf) -> bool:
        """Wait for the file that is being written; what could not be written is tried once more.

        Returns whether it is written; raises what was raised in its thread.
        """
        if self._file is None and self._writing is None:
            return True
        start = perf_counter()
        self._progress.step("journal", self._progress.position.chunk)
        if self._writing is None:
            self._begin_file()
        if self._writing is not None:
            self._writing.join(None if limit == inf else max(0.0, limit - monotonic()))
            if self._writing.is_alive():
                return False
            self._writing = None
        self.journal_s += perf_counter() - start
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        return True
