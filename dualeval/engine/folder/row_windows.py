"""The rows of a run: where they are stored, windows of them in data-set order, and all rows for a metric.

In a journal file, or a rank's memory, columns follow each other in C order. A plain column consists of its
rows. A ragged column, or one of text, has ``rows + 1`` int64 offsets, and then the values of all rows; so a
few rows can be read without the others.

A metric of all rows gets them mapped from files without a name: the system's page cache drops pages if memory
is short, and the system frees the files however the process ends.
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from dualeval.columns.ragged import (
    Column,
    NumpyRows,
    RaggedRows,
    concatenated_rows,
    each_array,
    form_of,
    kind_text,
    rows_of,
    to_rows,
    values_of,
)
from dualeval.engine.values.plan import EvalPlan
from dualeval.errors import DualevalError
from dualeval.result import PREDICTIONS

# Rows held at once; also the row group size of the Parquet file.
WINDOW_ROWS = 16_384
# Most bytes of ragged and text values in a window, unless one chunk has more.
WINDOW_BYTES = 256 << 20
# The journal's own column: 1 where the sample was evaluated, 0 where it could not be read.
EVALUATED = "evaluated"
_OFFSET = np.dtype("<i8")
PLAIN = "plain"


@dataclass(frozen=True, kw_only=True)
class StoredColumn:
    """Where a column is stored."""

    # "plain", "ragged" or "text".
    form: str
    # Its little-endian numpy dtype.
    dtype: np.dtype[Any]
    # The shape of one row; () for a scalar column. In a ragged column, the shape of one value of a row.
    row_shape: tuple[int, ...]
    # Byte positions: of its offsets, if there are any, and of its values.
    offset: int
    values_at: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; in a ragged column, of one value of a row."""
        return int(self.dtype.itemsize * np.prod(self.row_shape, dtype=np.int64))

    def empty(self, rows: int) -> NumpyRows:
        """Rows that hold nothing: zeros, or no values."""
        if self.form == PLAIN:
            return np.zeros((rows, *self.row_shape), self.dtype)
        return rows_of(self.form, np.empty((0, *self.row_shape), self.dtype), np.zeros(rows + 1, np.int64))


@dataclass(frozen=True, kw_only=True)
class RowsOfChunks(ABC):
    """Rows of some chunks, on the disk (``JournalFile``) or in memory (``MemoryRows``)."""

    # Where they are; names them in messages.
    path: Path
    # Numbers of the chunks, in the order of the rows.
    chunks: tuple[int, ...]
    # Number of rows of each chunk.
    rows: tuple[int, ...]
    columns: dict[str, StoredColumn]

    def read_rows(self, column: str, start: int, stop: int) -> NumpyRows:
        """Rows ``start`` to ``stop`` of a column: shape (stop - start, *row_shape), or ragged ones."""
        stored = self.columns[column]
        if stored.form == PLAIN:
            return self._values(stored, start, stop)
        offsets = self.read_offsets(column, start, stop)
        return rows_of(stored.form, self._values(stored, *offsets[[0, -1]].tolist()), offsets - offsets[0])

    def read_offsets(self, column: str, start: int = 0, stop: int | None = None) -> npt.NDArray[np.int64]:
        """Where the values of each row of a ragged column begin, and where those of the last row end."""
        count = (sum(self.rows) if stop is None else stop) - start + 1
        return self._read(_OFFSET, count, self.columns[column].offset + _OFFSET.itemsize * start)

    def _values(self, column: StoredColumn, start: int, stop: int) -> npt.NDArray[Any]:
        count = (stop - start) * column.row_bytes // column.dtype.itemsize
        values = self._read(column.dtype, count, column.values_at + start * column.row_bytes)
        return values.reshape(stop - start, *column.row_shape)

    @abstractmethod
    def _read(self, dtype: np.dtype[Any], count: int, offset: int) -> npt.NDArray[Any]:
        """Read ``count`` values from byte ``offset``."""


def describe_columns(columns: Mapping[str, Column]) -> tuple[list[dict[str, Any]], list[npt.NDArray[Any]]]:
    """Plain values that describe the columns, and the arrays that hold them in their order on the disk."""
    entries, arrays = [], []
    for name, column in columns.items():
        rows = to_rows(column)
        values = _little(values_of(rows))
        entry: dict[str, Any] = {"name": name, "dtype": values.dtype.str, "shape": list(values.shape[1:])}
        if isinstance(rows, RaggedRows):
            entry |= {"form": form_of(rows), "values": len(values)}
            arrays.append(_little(rows.offsets))
        entries.append(entry)
        arrays.append(values)
    return entries, arrays


def place_columns(entries: Iterable[Mapping[str, Any]], rows: int, offset: int) -> dict[str, StoredColumn]:
    """Where columns are stored that follow each other from byte ``offset``."""
    columns = {}
    for entry in entries:
        form = entry.get("form", PLAIN)
        column = columns[entry["name"]] = StoredColumn(
            form=form,
            dtype=np.dtype(entry["dtype"]),
            row_shape=tuple(entry["shape"]),
            offset=offset,
            values_at=offset + (0 if form == PLAIN else _OFFSET.itemsize * (rows + 1)),
        )
        offset = column.values_at + entry.get("values", rows) * column.row_bytes
    return columns


def _little(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<"))


def evaluated_of(rows: Mapping[str, NumpyRows]) -> npt.NDArray[np.bool_]:
    """Which rows belong to samples that could be read."""
    return np.asarray(rows[EVALUATED]).astype(bool)


def windows_of(
    files: Sequence[RowsOfChunks], plan: EvalPlan, columns: Sequence[str]
) -> Iterator[tuple[int, dict[str, NumpyRows]]]:
    """Read the rows of consecutive chunks, about ``WINDOW_ROWS`` at a time.

    Samples that could not be read have zeros, or ragged rows of length 0.
    """
    where = _places(files, plan)
    known = _known_columns(files)
    wanted = {name: known[name] for name in (EVALUATED, *columns)}
    sizes = _ragged_bytes(files, plan, where, wanted)
    chunk = 0
    while chunk < plan.num_chunks:
        first = plan.chunk_samples(chunk).start
        last, size = chunk, sizes[chunk]
        while (
            last + 1 < plan.num_chunks
            and plan.chunk_samples(last + 1).stop - first <= WINDOW_ROWS
            and size + sizes[last + 1] <= WINDOW_BYTES
        ):
            last += 1
            size += sizes[last]
        chunks = range(chunk, last + 1)
        yield first, {name: _rows_of(files, plan, where, chunks, name, wanted[name]) for name in wanted}
        chunk = last + 1


def read_columns(
    files: Sequence[RowsOfChunks],
    plan: EvalPlan,
    columns: Sequence[str],
    folder: Path | None,
    step: Callable[[], None] = lambda: None,
) -> dict[str, NumpyRows]:
    """Read columns of all evaluated samples, in data-set order, mapped from files in a folder."""

    def pieces() -> Iterator[dict[str, NumpyRows]]:
        for _, rows in windows_of(files, plan, columns):
            evaluated = evaluated_of(rows)
            yield {name: rows[name][evaluated] for name in columns}
            step()

    if folder is None:  # if nothing is written, all rows are in memory already
        held = list(pieces())
        return {name: read_only(concatenated_rows([piece.pop(name) for piece in held])) for name in columns}
    with MappedColumns(folder) as mapped:
        for piece in pieces():
            mapped.append(piece)
        return mapped.columns()


def _known_columns(files: Sequence[RowsOfChunks]) -> dict[str, StoredColumn]:
    """One column of each name; a file whose samples all failed has only ``EVALUATED``."""
    known: dict[str, StoredColumn] = {}
    for file in files:
        for name, column in file.columns.items():
            like = known.setdefault(name, column)
            if (like.form, like.dtype, like.row_shape) != (column.form, column.dtype, column.row_shape):
                kind, other = kind_text(column.empty(0)), kind_text(like.empty(0))
                raise DualevalError(
                    f"column {name!r} is {kind} in {file.path}, and {other} in another file: each batch must "
                    "give the same columns, of the same dtype and row shape. Fix the task: that "
                    "makes it another job, which starts over."
                )
    return known


def _ragged_bytes(
    files: Sequence[RowsOfChunks],
    plan: EvalPlan,
    where: npt.NDArray[np.int64],
    wanted: Mapping[str, StoredColumn],
) -> npt.NDArray[np.int64]:
    """Bytes of values of ragged columns in each chunk, shape (chunks,): the same for any number of ranks."""
    sizes = np.zeros(plan.num_chunks, np.int64)
    ragged = [name for name, column in wanted.items() if column.form != PLAIN]
    for file in files if ragged else ():
        chunks = np.array(file.chunks, np.int64)
        first = where[chunks, 1]
        for name in file.columns.keys() & ragged:
            offsets = file.read_offsets(name)
            values = offsets[first + np.array(file.rows, np.int64)] - offsets[first]
            sizes[chunks] += values * wanted[name].row_bytes
    return sizes


def _rows_of(
    files: Sequence[RowsOfChunks],
    plan: EvalPlan,
    where: npt.NDArray[np.int64],
    chunks: range,
    name: str,
    column: StoredColumn,
) -> NumpyRows:
    """One column of consecutive chunks."""
    numbers = where[chunks.start : chunks.stop, 0]
    rows: dict[int, NumpyRows] = {}
    for number in sorted(set(numbers.tolist())):
        if name not in files[number].columns:
            continue
        # One read per column and file: a file's chunks of this window lie close together.
        held = (chunks.start + np.flatnonzero(numbers == number)).tolist()
        places = [(int(where[c, 1]), int(where[c, 1]) + len(plan.chunk_samples(c))) for c in held]
        low = min(start for start, _ in places)
        block = files[number].read_rows(name, low, max(stop for _, stop in places))
        rows |= {c: block[start - low : stop - low] for c, (start, stop) in zip(held, places, strict=True)}
    sizes = ((c, len(plan.chunk_samples(c))) for c in chunks if c not in rows)
    rows |= {c: column.empty(size) for c, size in sizes}
    return concatenated_rows([rows[c] for c in chunks])


def _places(files: Sequence[RowsOfChunks], plan: EvalPlan) -> npt.NDArray[np.int64]:
    """For each chunk the number of its file and of its first row there, shape (chunks, 2)."""
    where = np.full((plan.num_chunks, 2), -1, np.int64)
    for number, file in enumerate(files):
        chunks = np.array(file.chunks, np.int64)
        again = chunks[where[chunks, 0] >= 0]
        if len(again):
            raise DualevalError(
                f"chunk {again[0]} is in {files[where[again[0], 0]].path} and again in {file.path}"
            )
        where[chunks, 0] = number
        where[chunks, 1] = np.cumsum(file.rows) - file.rows
    absent = np.flatnonzero(where[:, 0] < 0)
    if len(absent):
        raise DualevalError(f"no journal file holds the rows of chunks {absent[:10].tolist()}")
    return where


class MappedColumns:
    """Takes columns in pieces, and returns them whole, mapped and read-only.

    The files are in a folder, or in the system's temporary folder; an error says if that is full.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._files = ExitStack()
        self._values: dict[str, _Array] = {}
        # Form and offsets of each ragged column.
        self._offsets: dict[str, tuple[str, _Array]] = {}

    def __enter__(self) -> MappedColumns:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def append(self, columns: Mapping[str, NumpyRows]) -> None:
        """Take the next rows; each call has the same columns, of the same kinds."""
        with self._room():
            for name, rows in columns.items():
                values = values_of(rows)
                if name not in self._values:
                    self._values[name] = self._array(values)
                    if isinstance(rows, RaggedRows):
                        self._offsets[name] = form_of(rows), self._array(rows.offsets)
                        self._offsets[name][1].append(np.zeros(1, np.int64))
                if isinstance(rows, RaggedRows):
                    self._offsets[name][1].append(rows.offsets[1:] + self._values[name].rows)
                self._values[name].append(values)

    def columns(self) -> dict[str, NumpyRows]:
        """All columns, by name; they stay valid when the files are closed."""
        with self._room():
            arrays: dict[str, NumpyRows] = {name: array.mapped() for name, array in self._values.items()}
            for name, (form, offsets) in self._offsets.items():
                arrays[name] = rows_of(form, values_of(arrays[name]), offsets.mapped())
        return arrays

    def _array(self, like: npt.NDArray[Any]) -> _Array:
        return _Array(self._files.enter_context(_nameless(self._folder)), like.dtype, like.shape[1:])

    @contextmanager
    def _room(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._folder is not None:
                raise
            raise DualevalError(
                f"the columns of metrics of all rows cannot be written to a temporary file in "
                f"{tempfile.gettempdir()}: {error.strerror or error}. Make room there, or name another "
                "folder by the variable TMPDIR."
            ) from error


def read_only(rows: NumpyRows) -> NumpyRows:
    """The same rows, which cannot be written to."""
    return each_array(_read_only, rows)


def copied(rows: NumpyRows) -> NumpyRows:
    """The same rows in memory of their own, which can be written to."""
    return each_array(np.ndarray.copy, rows)


class _Array:
    """An array that grows in a file."""

    def __init__(self, file: IO[bytes], dtype: np.dtype[Any], row_shape: tuple[int, ...]) -> None:
        self._file = file
        self._dtype = dtype
        self._row_shape = row_shape
        # How many rows it has.
        self.rows = 0

    def append(self, rows: npt.NDArray[Any]) -> None:
        if rows.size:
            self._file.write(np.ascontiguousarray(rows).data)
        self.rows += len(rows)

    def mapped(self) -> npt.NDArray[Any]:
        self._file.flush()
        shape = (self.rows, *self._row_shape)
        if 0 in shape:  # an empty file cannot be mapped
            return _read_only(np.empty(shape, self._dtype))
        # A plain array over the mapping: results computed from a memmap would be memmaps, too.
        return np.asarray(np.memmap(self._file, self._dtype, mode="r", shape=shape))


def _nameless(folder: Path | None) -> IO[bytes]:
    return tempfile.TemporaryFile(dir=folder, prefix=f"{PREDICTIONS}.")


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view
