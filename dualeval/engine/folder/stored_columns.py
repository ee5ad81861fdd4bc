"""Where columns lie in a journal file, or in a rank's memory, one after the other in C order.

A plain column is its rows. A ragged one, or one of text, is first ``rows + 1`` int64 offsets, and then the
values of all rows; so a few rows can be read without the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dualeval.columns import Column, RaggedRows, Rows, form_of, rows_of, to_rows, values_of

_OFFSET = np.dtype("<i8")
PLAIN = "plain"

# Reads so many values of a dtype from so many bytes after the start.
Source: TypeAlias = Callable[[np.dtype[Any], int, int], npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class StoredColumn:
    """Where a column lies."""

    name: str
    # Its little-endian numpy dtype.
    dtype: np.dtype[Any]
    # The shape of one row; () for a scalar column. Of a ragged one that of one value of a row.
    row_shape: tuple[int, ...]
    # Bytes from the start.
    offset: int
    # "plain", "ragged" or "text".
    form: str
    # Number of its rows.
    rows: int
    # Number of their values; of a plain column that of its rows.
    values: int

    @property
    def kind(self) -> tuple[str, np.dtype[Any], tuple[int, ...]]:
        """What is the same in every file of a run."""
        return self.form, self.dtype, self.row_shape

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; of a ragged column those of one value of a row."""
        return int(self.dtype.itemsize * np.prod(self.row_shape, dtype=np.int64))

    @property
    def end(self) -> int:
        """Bytes from the start to behind the column."""
        return self._values_at + self.values * self.row_bytes

    @property
    def _values_at(self) -> int:
        return self.offset + (0 if self.form == PLAIN else _OFFSET.itemsize * (self.rows + 1))

    def read(self, source: Source, start: int, stop: int) -> Rows:
        """Rows ``start`` to ``stop``."""
        if self.form == PLAIN:
            return self._values(source, start, stop)
        offsets = self.offsets(source, start, stop)
        return rows_of(self.form, self._values(source, offsets[0], offsets[-1]), offsets - offsets[0])

    def offsets(self, source: Source, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Where the values of rows ``start`` to ``stop`` of a ragged column begin, and the last one's end."""
        return source(_OFFSET, stop - start + 1, self.offset + _OFFSET.itemsize * start)

    def _values(self, source: Source, start: int, stop: int) -> npt.NDArray[Any]:
        count = int(stop - start) * self.row_bytes // self.dtype.itemsize
        found = source(self.dtype, count, int(self._values_at + start * self.row_bytes))
        return found.reshape(stop - start, *self.row_shape)


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

    def read_rows(self, column: str, start: int, stop: int) -> Rows:
        """Rows ``start`` to ``stop`` of a column: shape (stop - start, *row_shape), or ragged ones."""
        return self.columns[column].read(self._read, start, stop)

    def read_offsets(self, column: str) -> npt.NDArray[np.int64]:
        """Where the values of each row of a ragged column begin, and the last one's end."""
        return self.columns[column].offsets(self._read, 0, sum(self.rows))

    @abstractmethod
    def _read(self, dtype: np.dtype[Any], count: int, offset: int) -> npt.NDArray[Any]:
        """Read so many values from so many bytes after the start."""


def describe_columns(columns: Mapping[str, Column]) -> tuple[list[dict[str, Any]], list[npt.NDArray[Any]]]:
    """Plain values that describe the columns, and the arrays that hold them in their order on the disk."""
    described, arrays = [], []
    for name, column in columns.items():
        rows = to_rows(column)
        values = _little(values_of(rows))
        entry: dict[str, Any] = {"name": name, "dtype": values.dtype.str, "shape": list(values.shape[1:])}
        if isinstance(rows, RaggedRows):
            entry |= {"form": form_of(rows), "values": len(values)}
            arrays.append(_little(rows.offsets))
        described.append(entry)
        arrays.append(values)
    return described, arrays


def place_columns(described: Iterable[Mapping[str, Any]], rows: int, offset: int) -> dict[str, StoredColumn]:
    """Where columns lie that are written one after the other."""
    columns = {}
    for entry in described:
        column = StoredColumn(
            name=entry["name"],
            dtype=np.dtype(entry["dtype"]),
            row_shape=tuple(entry["shape"]),
            offset=offset,
            form=entry.get("form", PLAIN),
            rows=rows,
            values=entry.get("values", rows),
        )
        columns[column.name] = column
        offset = column.end
    return columns


def _little(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
