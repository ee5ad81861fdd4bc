"""Rows, read a window at a time: from predictions.parquet, from a run that will write them, from memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualeval.backends.base import Backend
from dualeval.columns.ragged import Column, NumpyRows, offsets_of, rows_of
from dualeval.engine.folder.predictions import COLUMN_OF_DATA, COLUMN_OF_TEXT
from dualeval.engine.folder.row_windows import (
    WINDOW_ROWS,
    RowsOfChunks,
    describe_columns,
    evaluated_of,
    place_columns,
    windows_of,
)
from dualeval.engine.samples.subset import texts_of
from dualeval.engine.values.plan import EvalPlan
from dualeval.errors import DualevalError
from dualeval.tasks import Dataset, Task

# Columns of every task's file; never null.
_IDS = ("id", "index")


@dataclass(frozen=True, kw_only=True)
class Window:
    """Consecutive rows."""

    # Number of the first row.
    start: int
    # Whether each sample could be read, shape (rows,).
    evaluated: npt.NDArray[np.bool_]
    # By name, the rows of the samples that could be read, in order; these are the first dimension.
    columns: Mapping[str, NumpyRows]
    # By name, the texts of all rows, if they were asked for.
    texts: Mapping[str, Sequence[str | None]] = field(default_factory=dict)
    # The ids of all rows, if they were asked for.
    ids: Sequence[str] = ()


class RowSource(Protocol):
    """Rows that metrics can be computed from, a window at a time."""

    @property
    def path(self) -> Path:
        """Where they are, for messages."""

    @property
    def names(self) -> tuple[str, ...]:
        """The columns of the task and of its metrics, and those of the data."""

    # If no column is named, all columns and the texts.
    def windows(self, names: Sequence[str] | None = None, *, multiple_of: int = 1) -> Iterator[Window]: ...


@dataclass(frozen=True, kw_only=True)
class NewRows:
    """The rows of a run that has just been evaluated, before they are written anywhere."""

    path: Path
    names: tuple[str, ...]
    files: Sequence[RowsOfChunks]
    plan: EvalPlan
    task: Task
    dataset: Dataset

    def windows(self, names: Sequence[str] | None = None, *, multiple_of: int = 1) -> Iterator[Window]:
        """Columns, or all with the texts, a window at a time; each window holds only whole batches."""
        wanted = self.names if names is None else names
        for start, rows in windows_of(self.files, self.plan, wanted):
            evaluated = evaluated_of(rows)
            yield Window(
                start=start,
                evaluated=evaluated,
                columns={name: rows[name][evaluated] for name in wanted},
                texts=texts_of(self.task, self.dataset, rows, start) if names is None else {},
            )


class StoredRows:
    """The rows of a finished run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._opened() as file:
            schema = file.schema_arrow
            # Number of all rows.
            self.count: int = file.metadata.num_rows
        if any(name not in schema.names for name in _IDS):
            raise DualevalError(f"{path} is damaged: it has no column {' or '.join(_IDS)}")
        # By name, "b", "i" or "f" for columns with one number a sample, "" for the others.
        self.kinds = {field.name: _kind(field.type) for field in schema}
        # The columns of the task and of its metrics; without id, index and the task's `texts`.
        self.names = tuple(
            field.name for field in schema if field.name not in _IDS and not _is_of_texts(field)
        )
        # The columns that come from the user's data.
        self.data_names = tuple(
            field.name for field in schema if COLUMN_OF_DATA.items() <= (field.metadata or {}).items()
        )

    def windows(
        self, names: Sequence[str] | None = None, *, with_ids: bool = False, multiple_of: int = 1
    ) -> Iterator[Window]:
        """Read columns, or all with the texts, a window at a time: memory does not grow with the rows."""
        read = self._but_ids if names is None else list(names)
        read = [*(["id"] if with_ids else ()), *read]
        size = max(1, WINDOW_ROWS // multiple_of) * multiple_of
        start = 0
        with self._opened() as file:
            # By row group: groups of long rows are small, and so are their windows. Each begins with a batch.
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(size, row_groups=[group], columns=read):
                    yield self._window(batch.select(read), start)
                    start += len(batch)

    def whole(self, name: str) -> Any:
        """Read one column of all rows; also the ids, or a column of texts."""
        import pyarrow

        if name not in self.kinds:
            return None
        with self._opened() as file:
            column = file.read(columns=[name]).column(name)
            # The offsets of a string are 32-bit numbers, too few for the ids of many samples.
            if pyarrow.types.is_string(column.type):
                column = column.cast(pyarrow.large_string())
            column = column.combine_chunks()
        return self._not_null(column, name) if name in _IDS else column

    def batch(self, samples: range) -> Window:
        """Read the rows of consecutive samples, all columns and texts."""
        with self._opened() as file:
            groups = {
                number: rows.start
                for number, rows in _groups(file)
                if rows.start < samples.stop and rows.stop > samples.start
            }
            table = file.read_row_groups(list(groups), columns=self._but_ids)
            first = samples.start - min(groups.values())
            [batch] = table.slice(first, len(samples)).combine_chunks().to_batches()
            return self._window(batch, samples.start)

    def at(self, places: Sequence[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Read some rows as Python values: their positions, in order, with all columns and texts."""
        import pyarrow

        wanted = np.unique(np.asarray(places, np.int64))
        with self._opened() as file:
            for number, rows in _groups(file):
                part = wanted[(wanted >= rows.start) & (wanted < rows.stop)]
                if len(part):
                    dicts = file.read_row_group(number).take(pyarrow.array(part - rows.start)).to_pylist()
                    yield from zip(part.tolist(), dicts, strict=True)

    @property
    def _but_ids(self) -> list[str]:
        return [name for name in self.kinds if name not in _IDS]

    def _window(self, batch: Any, start: int) -> Window:
        names = [name for name in batch.schema.names if name in self.names]
        texts = {
            name: batch.column(name).to_pylist() for name in batch.schema.names if name not in (*names, "id")
        }
        ids = self._not_null(batch.column("id"), "id").to_pylist() if "id" in batch.schema.names else ()
        return Window(
            start=start,
            # For a sample that could not be read, all columns are null.
            evaluated=_there(batch.column(names[0])),
            columns={name: _rows(batch.column(name)) for name in names},
            texts=texts,
            ids=ids,
        )

    def _not_null(self, column: Any, name: str) -> Any:
        if column.null_count:
            raise DualevalError(f"{self.path} is damaged: a row has no {name}")
        return column

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """The open file; the library's errors about a damaged file become a DualevalError."""
        import pyarrow
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(self.path) as file:
                yield file
        except (OSError, pyarrow.ArrowException) as error:
            raise DualevalError(f"{self.path} cannot be read: {str(error).partition(chr(10))[0]}") from error


def _groups(file: Any) -> Iterator[tuple[int, range]]:
    """The row groups of a file, and the rows of each."""
    start = 0
    for number in range(file.num_row_groups):
        stop = start + file.metadata.row_group(number).num_rows
        yield number, range(start, stop)
        start = stop


def _is_of_texts(field: Any) -> bool:
    """Whether a field was made from other columns by the task's ``texts``."""
    import pyarrow

    metadata = field.metadata or {}
    marks = (COLUMN_OF_TEXT, COLUMN_OF_DATA)
    return pyarrow.types.is_string(field.type) and not any(mark.items() <= metadata.items() for mark in marks)


def _kind(kind: Any) -> str:
    import pyarrow

    if pyarrow.types.is_boolean(kind):
        return "b"
    return "i" if pyarrow.types.is_integer(kind) else "f" if pyarrow.types.is_floating(kind) else ""


# From the buffers: ``to_numpy``, ``to_pandas_dtype`` and the like import pandas, which takes a second; an
# older pyarrow fails if pandas is not installed.


def _rows(array: Any) -> NumpyRows:
    """The rows that are not null, in the column's dtype; a copy."""
    import pyarrow

    kind, there = array.type, _there(array)
    if not (is_text := pyarrow.types.is_string(kind)) and not pyarrow.types.is_list(kind):
        return _numbers(array)[there]
    buffers = array.buffers()
    ends = np.frombuffer(buffers[1], np.int32)[array.offset : array.offset + len(array) + 1]
    # Null entries have no values.
    offsets = offsets_of(np.diff(ends)[there])
    if not is_text:
        return rows_of("ragged", _numbers(array.values)[ends[0] : ends[-1]], offsets)
    data = np.empty(0, np.uint8) if buffers[2] is None else np.frombuffer(buffers[2], np.uint8)
    return rows_of("text", data[ends[0] : ends[-1]].copy(), offsets)


def _there(array: Any) -> npt.NDArray[np.bool_]:
    """Which entries are not null, bool of shape (entries,)."""
    if not array.null_count:
        return np.ones(len(array), np.bool_)
    return _bits(array.buffers()[0], array)


def _bits(buffer: Any, array: Any) -> npt.NDArray[np.bool_]:
    bits = np.unpackbits(np.frombuffer(buffer, np.uint8), bitorder="little")
    return bits[array.offset : array.offset + len(array)].astype(np.bool_)


def _numbers(array: Any) -> npt.NDArray[Any]:
    """All entries, with arbitrary numbers for those that are null; a copy."""
    import pyarrow

    here, kind = slice(array.offset, array.offset + len(array)), array.type
    if pyarrow.types.is_fixed_size_list(kind):
        return _numbers(array.values).reshape(-1, kind.list_size)[here]
    if pyarrow.types.is_boolean(kind):
        return _bits(array.buffers()[1], array)
    of_kind = "u" if pyarrow.types.is_unsigned_integer(kind) else _kind(kind)
    return np.frombuffer(array.buffers()[1], f"{of_kind}{kind.bit_width // 8}")[here].copy()


@dataclass(frozen=True, kw_only=True)
class MemoryRows(RowsOfChunks):
    """Rows of finished chunks, read like those of a journal file."""

    # The columns in C order, one after the other, uint8.
    content: npt.NDArray[np.uint8]

    def _read(self, dtype: np.dtype[Any], count: int, offset: int) -> npt.NDArray[Any]:
        return self.content[offset : offset + count * dtype.itemsize].view(dtype)


class MemoryWriter:
    """Takes the same arguments as a ``JournalWriter``, and keeps only the rows."""

    def __init__(self, *, keeps: bool) -> None:
        self.folder = None
        self._keeps = keeps
        # Index and error of each sample that could not be read.
        self.failures: list[tuple[int, str]] = []
        # For each part: how to read it, and the columns themselves.
        self.written: list[tuple[dict[str, Any], list[npt.NDArray[Any]]]] = []

    def write(
        self,
        chunks: Sequence[int],
        rows: Sequence[int],
        delta: Tensor,
        columns: Mapping[str, Column],
        failures: Sequence[tuple[int, str]] = (),
    ) -> None:
        """Keep the rows of finished chunks; arguments as for ``JournalWriter``."""
        self.failures += failures
        if self._keeps:
            entries, arrays = describe_columns(columns)
            self.written.append(({"chunks": list(chunks), "rows": list(rows), "columns": entries}, arrays))


def collect_rows(
    writer: object, backend: Backend, rounds: int, step: Callable[[], None] = lambda: None
) -> list[MemoryRows]:
    """Bring the rows in all ranks' memory to rank 0, one part of each rank a round. A collective."""
    collected, waiting = [], []
    if isinstance(writer, MemoryWriter):
        waiting, writer.written = writer.written[::-1], []
    for _ in range(rounds):
        header, arrays = waiting.pop() if waiting else (None, [])
        pieces = [torch.from_numpy(array.reshape(-1).view(np.uint8)) for array in arrays]
        content = torch.cat([torch.empty(0, dtype=torch.uint8), *pieces])
        del arrays, pieces
        headers = backend.gather_json(header) or []
        contents = backend.gather(content) or []
        for rank, (facts, values) in enumerate(zip(headers, contents, strict=True)):
            if facts is not None:
                rows = tuple(facts["rows"])
                collected.append(
                    MemoryRows(
                        path=Path(f"the memory of rank {rank}"),
                        chunks=tuple(facts["chunks"]),
                        rows=rows,
                        columns=place_columns(facts["columns"], sum(rows), 0),
                        content=values.numpy(),
                    )
                )
        step()
    return collected
