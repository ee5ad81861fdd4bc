"""From finished batches to the ledger and the journal: integer work, grouped over many batches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import inf
from pathlib import Path
from time import monotonic, perf_counter
from typing import NamedTuple, cast

import torch
from torch import Tensor

from dualeval.columns.late import LateColumns
from dualeval.columns.ragged import Column, Ragged, concatenated, each_part, empty_rows, kind_of, kind_text
from dualeval.engine.control.progress import Progress, Stage
from dualeval.engine.folder.journal import MOST_OF_AN_ERROR, JournalWriter
from dualeval.engine.folder.row_windows import EVALUATED
from dualeval.engine.folder.stored_rows import MemoryWriter
from dualeval.engine.samples.feed import FailedSample
from dualeval.engine.values.measured import update
from dualeval.engine.values.plan import EvalPlan
from dualeval.errors import ExactlyOnceError, UsageError
from dualeval.metrics import Metric

_NAMED_AT_MOST = 10
# Most rows of a journal file, plus a chunk: bounds this rank's memory. One update of the ledger takes as
# many, for its cost is per call, not per sample.
FLUSH_ROWS = 16_384
# Most bytes of ragged columns' and texts' values in a journal file, plus a chunk: likewise.
FLUSH_BYTES = 256 << 20
FLUSH_EVERY_S = 5.0


class Ledger:
    """Layout and content of the vector: per chunk [folded, evaluated, failed], then each metric's slots."""

    def __init__(self, plan: EvalPlan, metrics: Sequence[Metric]) -> None:
        self._plan = plan
        self._metrics = tuple(metrics)
        self._places: list[slice] = []
        start = 3 * plan.num_chunks
        for metric in self._metrics:
            self._places.append(slice(start, start + metric.size))
            start += metric.size
        # The vector, 1-d int64 on the CPU.
        self.values = torch.zeros(start, dtype=torch.int64)

    def fold(self, chunks: Sequence[int], evaluated: Sequence[int], failed: Sequence[int]) -> None:
        """Count one more fold of each of these chunks."""
        counts = self.values[: 3 * self._plan.num_chunks].view(3, -1)
        new = torch.tensor([[1] * len(chunks), evaluated, failed], dtype=torch.int64)
        counts.index_add_(1, torch.tensor(chunks, dtype=torch.int64), new)

    def update(self, columns: Mapping[str, Column], batches: Sequence[int]) -> None:
        """Add the evaluated samples of consecutive batches to every metric."""
        for metric, part in zip(self._metrics, self._places, strict=True):
            update(metric, self.values[part], columns, batches)

    def slots(self) -> list[tuple[Metric, Tensor]]:
        """Each metric with its slots."""
        return [(metric, self.values[part]) for metric, part in zip(self._metrics, self._places, strict=True)]

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
        sentences = []
        for chunk in wrong[:_NAMED_AT_MOST]:
            samples = self._plan.chunk_samples(chunk)
            sentences.append(
                f"chunk {chunk} (samples {samples.start} to {samples.stop - 1}): folded {folded[chunk]} "
                f"times, {evaluated[chunk]} evaluated and {failed[chunk]} failed of {len(samples)}"
            )
        if wrong:
            more = f"; and {len(wrong) - _NAMED_AT_MOST} more" if len(wrong) > _NAMED_AT_MOST else ""
            raise ExactlyOnceError(
                f"{len(wrong)} of {self._plan.num_chunks} chunks were not counted exactly once: "
                f"{'; '.join(sentences)}{more}"
            )


@dataclass(frozen=True, kw_only=True)
class HandedBatch:
    """A batch that has been handed out, without its data, which would otherwise stay on the device."""

    # Number of its chunk.
    chunk: int
    batch: int
    # Its samples' indices in the data set.
    samples: range
    # Whether it is its chunk's last batch.
    is_last: bool
    # Its samples that could not be read.
    failed: tuple[FailedSample, ...] = ()


class _Finished(NamedTuple):
    """A batch whose columns are on the host."""

    # Number of its samples.
    rows: int
    # None if none of its samples could be read.
    columns: Mapping[str, Column] | None
    # The rows of the samples that could not be read.
    failed: tuple[int, ...]
    # Bytes of the values of its ragged columns.
    ragged_bytes: int = 0


class _File(NamedTuple):
    """The contents of one journal file, as arguments of ``JournalWriter.write``."""

    chunks: Sequence[int]
    rows: Sequence[int]
    delta: Tensor
    columns: Mapping[str, Column]
    failures: Sequence[tuple[int, str]]


class _Part:
    """Finished chunks on their way into one journal file."""

    def __init__(self) -> None:
        self.chunks: list[int] = []
        # For each chunk, the number of its rows, and of those whose samples could not be read.
        self.rows_of_chunks: list[int] = []
        self.failed_of_chunks: list[int] = []
        # Index and error of these samples.
        self.failures: list[tuple[int, str]] = []
        self.batches: list[_Finished] = []
        # Number of the batches' rows, and bytes of the values of their ragged columns.
        self.rows = self.ragged_bytes = 0

    def evaluated(self) -> Tensor:
        """Which rows belong to samples that could be read, bool of shape (rows,)."""
        mask = torch.ones(self.rows, dtype=torch.bool)
        start = 0
        for finished in self.batches:
            if finished.failed:
                mask[[start + row for row in finished.failed]] = False
            start += finished.rows
        return mask

    def columns(self, empty: Mapping[str, Column]) -> dict[str, Column]:
        """All rows; ``empty`` has the columns' dtypes and row shapes."""
        pieces: list[Mapping[str, Column]] = []
        for is_late, run in groupby(self.batches, key=lambda each: isinstance(each.columns, LateColumns)):
            if is_late:  # of many batches at once
                first, *others = [cast(LateColumns, finished.columns) for finished in run]
                pieces.append(first.joined(others).made(empty))
                continue
            for rows, columns, *_ in run:
                if columns is None:
                    columns = {name: empty_rows(like, rows) for name, like in empty.items()}
                pieces.append(columns)
        return {name: concatenated([piece[name] for piece in pieces]) for name in empty}


def _with_own_memory(column: Tensor) -> Tensor:
    """A tensor in its own memory: a view would keep a whole larger storage until the fold.

    Memory that is shared with a reading process also keeps a file open for every batch that waits.
    """
    if column.layout is not torch.strided:
        return column
    storage = column.untyped_storage()
    # Ask the storage: the tensor's own method makes two more Python objects.
    if storage.nbytes() > column.nbytes or storage.is_shared():
        return column.clone(memory_format=torch.contiguous_format)
    return column


def check_rows(columns: Mapping[str, Column], batch: int, samples: range) -> None:
    """Check that the columns of a batch have one row a sample."""
    rows = len(samples)
    if isinstance(columns, LateColumns):
        columns = columns.given
    for name, column in columns.items():
        if len(column) != rows:
            raise ExactlyOnceError(
                f"column {name!r} of batch {batch} (samples {samples.start} to {samples.stop - 1}) has "
                f"{len(column)} values, expected {rows}: the task's collate, forward and observe must keep "
                "one row per sample, in order"
            )


class Recorder:
    """Takes the batches of one rank, chunk by chunk, and folds whole chunks.

    One thread adds; another may flush, so that finished work is saved even if the first thread hangs. With
    ``beside``, which makes a device current in a thread, whole chunks are folded by the thread that writes
    them, while the first one launches batches.
    """

    def __init__(
        self,
        plan: EvalPlan,
        metrics: Sequence[Metric],
        rows: Sequence[str],
        writer: JournalWriter | MemoryWriter,
        progress: Progress | None = None,
        *,
        beside: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> None:
        self._beside = beside
        # A caller's, as its decimal precision: a thread begins with none of its own.
        self._context = copy_context()
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
        # Index and error of the first failed sample.
        self.first_failed: tuple[int, str] | None = None
        # Number of chunks written so far.
        self.chunks_saved = 0
        # Seconds spent on the ledger.
        self.metrics_s = 0.0
        # Seconds of waiting for journal files.
        self.journal_s = 0.0
        self._empty: dict[str, Column] | None = None  # the columns' dtypes and row shapes, once seen
        self._late_kind: object = None  # of columns that are computed when they are folded
        self._chunk: list[_Finished] = []
        self._chunk_failures: list[tuple[int, str]] = []
        # By whether its chunks have failed samples: a resumed run skips such a file and tries these again.
        self._parts = {False: _Part(), True: _Part()}
        self._flushed_at = monotonic()
        # What is being folded and written, or could not be; the thread that does it; and that thread's error.
        self._file: _Part | _File | None = None
        self._writing: threading.Thread | None = None
        self._problem: BaseException | None = None
        # Not while that thread folds.
        self._is_folded = threading.Event()
        self._is_folded.set()

    @property
    def folder(self) -> Path | None:
        """The folder of the journal's files; None if nothing is written."""
        return self.writer.folder

    def add(self, handed: HandedBatch, columns: Mapping[str, Column] | None) -> None:
        """Take a batch whose columns (on the CPU) are complete."""
        batch, samples, failed = handed.batch, handed.samples, handed.failed
        check_rows({} if columns is None else columns, batch, samples)
        ragged_bytes = 0
        with self._lock:
            if failed:
                failures = [(sample.index, sample.error[:MOST_OF_AN_ERROR]) for sample in failed]
                self.failed.extend(index for index, _ in failures)
                self._chunk_failures += failures
                self.first_failed = min(failures[0], self.first_failed or failures[0])
            if columns is not None:
                if self._empty is None:
                    # Columns that are neither counted nor kept would only wait here for the fold.
                    used = [name for name in self._used if name in columns]
                    self._empty = {name: empty_rows(columns[name], 0) for name in used}
                    self._late_kind = columns.kind if isinstance(columns, LateColumns) else None
                if not isinstance(columns, LateColumns) or columns.kind != self._late_kind:
                    columns, ragged_bytes = self._checked(columns, self._empty, batch, samples)
            rows_failed = tuple([sample.index - samples.start for sample in failed]) if failed else ()
            self._chunk.append(_Finished(len(samples), columns, rows_failed, ragged_bytes))
            if handed.is_last:
                self._finish_chunk(handed.chunk)

    def _checked(
        self, columns: Mapping[str, Column], kinds: Mapping[str, Column], batch: int, samples: range
    ) -> tuple[Mapping[str, Column], int]:
        """The columns that are used, each in memory of its own; and the bytes of the ragged ones' values."""
        used: dict[str, Column] = {}
        ragged_bytes = 0
        for name, like in kinds.items():
            column = columns.get(name)
            is_alike = (
                type(column) is Tensor is type(like)
                and column.dtype is like.dtype
                and column.shape[1:] == like.shape[1:]
            )
            if column is None or not (is_alike or kind_of(column) == kind_of(like)):
                problem = "is not there" if column is None else f"is {kind_text(column)}"
                raise UsageError(
                    f"column {name!r} of batch {batch} (samples {samples.start} to {samples.stop - 1}) "
                    f"{problem}, and in the first batch it was {kind_text(like)}: each "
                    "batch must give the same columns, of the same dtype and row shape"
                )
            if isinstance(column, Ragged):
                used[name] = each_part(_with_own_memory, column)
                ragged_bytes += column.values.nbytes
            else:
                used[name] = _with_own_memory(column)
        return used, ragged_bytes

    def _finish_chunk(self, chunk: int) -> None:
        start = perf_counter()
        part, rows = self._parts[bool(self._chunk_failures)], 0
        for finished in self._chunk:
            rows += finished.rows
            part.ragged_bytes += finished.ragged_bytes
        part.chunks.append(chunk)
        part.rows_of_chunks.append(rows)
        part.failed_of_chunks.append(len(self._chunk_failures))
        part.failures += self._chunk_failures
        part.batches += self._chunk
        part.rows += rows
        self._chunk, self._chunk_failures = [], []
        self.metrics_s += perf_counter() - start
        is_full = part.rows >= FLUSH_ROWS or part.ragged_bytes >= FLUSH_BYTES
        if is_full or self._problem is not None or monotonic() - self._flushed_at >= FLUSH_EVERY_S:
            self._flush()

    def flush(self, wait_s: float = -1.0) -> bool:
        """Write all whole chunks since the last flush, to one journal file, or to two if samples failed.

        Waits until they are on the disk; returns whether that took at most ``wait_s``.
        """
        limit = inf if wait_s < 0 else monotonic() + wait_s
        if not self._lock.acquire(timeout=wait_s):
            return False
        try:
            return self._flush(limit) and self._await_file(limit)
        finally:
            self._lock.release()

    def _flush(self, limit: float = inf) -> bool:
        """Hand all whole chunks to the writing thread; only one file is written at a time."""
        self._flushed_at = monotonic()
        for has_failures, part in self._parts.items():
            if not part.chunks:
                continue
            if not self._await_file(limit):
                return False
            start = perf_counter()
            self._file = part if self._beside else self._folded(part)
            self._parts[has_failures] = _Part()
            self.metrics_s += perf_counter() - start
            self._begin_file()
        return True

    def _folded(self, part: _Part) -> _File:
        """The file of finished chunks: the metrics' counts, and the rows that are kept."""
        evaluated, columns = part.evaluated(), part.columns(self._empty or {})
        delta = Ledger(self._plan, self._metrics)
        if evaluated.any():
            read = columns if evaluated.all() else {name: rows[evaluated] for name, rows in columns.items()}
            delta.update(read, [finished.rows - len(finished.failed) for finished in part.batches])
        read_of_chunks = [
            rows - failed for rows, failed in zip(part.rows_of_chunks, part.failed_of_chunks, strict=True)
        ]
        delta.fold(part.chunks, read_of_chunks, part.failed_of_chunks)
        kept = {name: columns[name] for name in self._names if name in columns}
        kept = {EVALUATED: evaluated.to(torch.uint8), **kept}
        return _File(part.chunks, part.rows_of_chunks, delta.values, kept, part.failures)

    def _begin_file(self) -> None:
        write = partial(self._write_file, torch.is_inference_mode_enabled())
        if self.writer.folder is None and not self._beside:
            write()
            return
        # In a thread: a slow disk delays nothing but the next file.
        if isinstance(self._file, _Part):
            self._is_folded.clear()
        self._writing = threading.Thread(target=write, name="dualeval-journal", daemon=True)
        self._writing.start()

    def _write_file(self, is_inference: bool) -> None:
        file = self._file
        assert file is not None
        try:
            if isinstance(file, _Part):
                assert self._beside is not None
                # As in the thread that adds: what a caller's inference mode has made is written only in it.
                with self._beside(), torch.inference_mode(is_inference):
                    file = self._file = self._context.run(self._folded, file)
                self._is_folded.set()
            self.writer.write(*file)
            # A ledger made in inference mode can be written only in it, and threads start outside of it.
            with torch.inference_mode():
                self.ledger.values += file.delta
            self.chunks_saved += len(file.chunks)
            self._file = None
        except BaseException as error:  # noqa: BLE001 - raised where the file is waited for
            self._problem = error
        finally:
            self._is_folded.set()

    def _await_file(self, limit: float) -> bool:
        """Wait for the file that is being written; if it could not be written, try again.

        Returns whether it is written; raises the writing thread's error.
        """
        if self._file is None and self._writing is None:
            return True

        def left() -> float | None:
            return None if limit == inf else max(0.0, limit - monotonic())

        start, chunk = perf_counter(), self._progress.position.chunk
        if self._writing is None:
            self._begin_file()
        if not self._is_folded.is_set():
            self._progress.step(Stage.METRICS, chunk)
            self._is_folded.wait(left())
            folded = perf_counter()
            self.metrics_s += folded - start
            start = folded
        self._progress.step(Stage.JOURNAL, chunk)
        if self._writing is not None:
            self._writing.join(left())
            if self._writing.is_alive():
                return False
            self._writing = None
        self.journal_s += perf_counter() - start
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        return True
