"""StoredRows: predictions.parquet read back, a window of rows at a time, to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dualeval.columns import Rows, offsets_of, rows_of
from dualeval.engine.folder.predictions import COLUMN_OF_DATA, COLUMN_OF_TEXT
from dualeval.engine.folder.windows import WINDOW_ROWS
from dualeval.errors import DualevalError, UsageError

# Of every task's file, and never null.
_IDS = ("id", "index")


@dataclass(frozen=True, kw_only=True)
class Window:
    """Consecutive rows of the file."""

    # Number of the first of them.
    start: int
    # Whether each sample could be read, shape (rows,).
    evaluated: npt.NDArray[np.bool_]
    # By name, the rows of the samples that could, in order, first dimension these samples.
    columns: Mapping[str, Rows]
    # Each row's, where they were asked for.
    ids: Sequence[str]
    indices: npt.NDArray[np.int64]
    # By name, the texts of all rows, where they were asked for.
    texts: Mapping[str, Sequence[str | None]] = field(default_factory=dict)


class RowSource(Protocol):
    """Rows that metrics can be computed from, a window at a time."""

    # Where they are, for messages.
    path: Path
    # The columns of the task and of its metrics, and those of the data.
    names: tuple[str, ...]

    def windows(
        self, names: Sequence[str], *, with_ids: bool = False, multiple_of: int = 1
    ) -> Iterator[Window]: ...


class StoredRows:
    """The rows of a finished run."""

    def __init__(self, path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        self.path = path
        with self._readable():
            schema = pyarrow.parquet.read_schema(path)
        if any(name not in schema.names for name in _IDS):
            raise DualevalError(f"{path} is damaged: it has no column {' or '.join(_IDS)}")
        # By name, "b", "i" or "f" of the columns with one number a sample, "" of the others.
        self.kinds = {field.name: _kind(field.type) for field in schema}
        # The columns of the task and of its metrics; without id, index and the task's `texts`.
        self.names = tuple(
            field.name for field in schema if field.name not in _IDS and not _is_of_texts(field)
        )
        # Those of them that are the user's data's.
        self.data_names = tuple(
            field.name for field in schema if COLUMN_OF_DATA.items() <= (field.metadata or {}).items()
        )

    def windows(
        self, names: Sequence[str], *, with_ids: bool = False, multiple_of: int = 1
    ) -> Iterator[Window]:
        """Read columns, a window of rows at a time: memory does not grow with their number."""
        for name in names:
            if name not in self.names:
                raise UsageError(
                    f"{self.path} has no column {name!r} that a metric could read; it has "
                    f"{', '.join(self.names)}"
                )
        start = 0
        for batch in self._batches([*(_IDS if with_ids else ()), *names], multiple_of):
            evaluated = self._evaluated(batch, names, start)
            with self._readable():
                columns = {name: _rows(batch.column(name)) for name in names}
            yield Window(
                start=start,
                evaluated=evaluated,
                columns=columns,
                ids=self._not_null(batch.column("id"), "id").to_pylist() if with_ids else [],
                indices=self._not_null(batch.column("index"), "index").to_numpy()
                if with_ids
                else np.empty(0, np.int64),
            )
            start += len(evaluated)

    def whole(self, name: str) -> Any:
        """Read one column of all rows, ids and texts too."""
        import pyarrow
        import pyarrow.parquet

        with self._readable(), pyarrow.parquet.ParquetFile(self.path) as file:
            if name not in file.schema_arrow.names:
                return None
            column = file.read(columns=[name]).column(name)
            # The offsets of a string are 32-bit numbers, too few for the ids of many samples.
            if pyarrow.types.is_string(column.type):
                column = column.cast(pyarrow.large_string())
            column = column.combine_chunks()
        return self._not_null(column, name) if name in _IDS else column

    def batch(self, samples: range) -> Window:
        """Read the rows of consecutive samples, all columns and texts."""
        import pyarrow.parquet

        with self._readable(), pyarrow.parquet.ParquetFile(self.path) as file:
            groups: list[int] = []
            first = start = 0
            for number in range(file.num_row_groups):
                rows = file.metadata.row_group(number).num_rows
                if start < samples.stop and start + rows > samples.start:
                    first = first if groups else start
                    groups.append(number)
                start += rows
            names = [name for name in file.schema_arrow.names if name not in _IDS]
            table = file.read_row_groups(groups, columns=names)
            [batch] = table.slice(samples.start - first, len(samples)).combine_chunks().to_batches()
            columns = {name: _rows(batch.column(name)) for name in self.names}
            texts = {name: batch.column(name).to_pylist() for name in names if name not in self.names}
        return Window(
            start=samples.start,
            evaluated=self._evaluated(batch, self.names, samples.start),
            columns=columns,
            ids=[],
            indices=np.empty(0, np.int64),
            texts=texts,
        )

    def at(self, places: Sequence[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Read some rows as Python values: their places, in order, with all columns and texts."""
        import pyarrow.parquet

        wanted = np.unique(np.asarray(places, np.int64))
        with self._readable(), pyarrow.parquet.ParquetFile(self.path) as file:
            start = 0
            for group in range(file.num_row_groups):
                stop = start + file.metadata.row_group(group).num_rows
                own = wanted[(wanted >= start) & (wanted < stop)]
                if len(own):
                    found = file.read_row_group(group).take(pyarrow.array(own - start)).to_pylist()
                    yield from zip(own.tolist(), found, strict=True)
                start = stop

    def _evaluated(self, batch: Any, names: Sequence[str], start: int) -> npt.NDArray[np.bool_]:
        """Whether each row has values: in all columns, or in none."""
        evaluated = _there(batch.column(names[0]))
        for name in names[1:]:
            differing = np.flatnonzero(_there(batch.column(name)) != evaluated)
            if len(differing):
                raise DualevalError(
                    f"{self.path} is damaged: row {start + int(differing[0])} has a value in only one of the "
                    f"columns {names[0]!r} and {name!r}"
                )
        return evaluated

    def _not_null(self, column: Any, name: str) -> Any:
        if column.null_count:
            raise DualevalError(f"{self.path} is damaged: a row has no {name}")
        return column

    def _batches(self, names: Sequence[str], multiple_of: int) -> Iterator[Any]:
        import pyarrow.parquet

        rows = max(1, WINDOW_ROWS // multiple_of) * multiple_of
        with self._readable(), pyarrow.parquet.ParquetFile(self.path) as file:
            # Group by group: those of long rows are small, and so are the windows. Each begins with a batch.
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(rows, row_groups=[group], columns=list(names)):
                    yield batch.select(list(names))

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Turn what the library says of a damaged file into a message."""
        import pyarrow

        try:
            yield
        except (OSError, pyarrow.ArrowException) as error:
            raise DualevalError(f"{self.path} cannot be read: {str(error).partition(chr(10))[0]}") from error


def _is_of_texts(field: Any) -> bool:
    """Whether a field holds what the task's ``texts`` have made of other columns."""
    import pyarrow

    metadata = field.metadata or {}
    marks = (COLUMN_OF_TEXT, COLUMN_OF_DATA)
    return pyarrow.types.is_string(field.type) and not any(mark.items() <= metadata.items() for mark in marks)


def _kind(kind: Any) -> str:
    import pyarrow

    if pyarrow.types.is_boolean(kind):
        return "b"
    return "i" if pyarrow.types.is_integer(kind) else "f" if pyarrow.types.is_floating(kind) else ""


# From the buffers: ``to_numpy`` and the like import pandas, where that is installed, which takes a second.
_NUMPYS = {"halffloat": "float16", "float": "float32", "double": "float64"}


def _rows(array: Any) -> Rows:
    """The rows that are there, of the column's own dtype; a copy of its own."""
    import pyarrow

    kind, there = array.type, _there(array)
    if not (is_text := pyarrow.types.is_string(kind)) and not pyarrow.types.is_list(kind):
        return _numbers(array)[there]
    buffers = array.buffers()
    ends = np.frombuffer(buffers[1], np.int32)[array.offset : array.offset + len(array) + 1]
    # What is null has no values.
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
    """All entries, also in place of those that are null; a copy."""
    here, kind = slice(array.offset, array.offset + len(array)), str(array.type)
    if kind.startswith("fixed_size_list"):
        return _numbers(array.values).reshape(-1, array.type.list_size)[here]
    buffer = array.buffers()[1]
    if kind == "bool":
        return _bits(buffer, array)
    return np.frombuffer(buffer, _NUMPYS.get(kind, kind))[here].copy()
