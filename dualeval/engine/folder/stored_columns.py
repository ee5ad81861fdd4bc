"""Where columns lie in a journal file, or in a rank's memory, one after the other in C order.

A plain column is its rows. A ragged one, or one of text, is first ``rows + 1`` int64 offsets, and then the
values of all rows; so a few rows can be read without the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dualeval.columns import Column, RaggedRows, Rows, form_of, rows_of, to_rows, values_of

_OFFSET = np.dtype("<i8")
PLAIN = "plain"


@dataclass(frozen=True, kw_only=True)
class StoredColumn:
    """Where a column lies."""

    # "plain", "ragged" or "text".
    form: str
    # Its little-endian numpy dtype.
    dtype: np.dtype[Any]
    # The shape of one row; () for a scalar column. Of a ragged one that of one value of a row.
    row_shape: tuple[int, ...]
    # Bytes from the start: of its offsets, if it has some, and of its values.
    offset: int
    values_at: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; of a ragged column those of one value of a row."""
        return int(self.dtype.itemsize * np.prod(self.row_shape, dtype=np.int64))

    def empty(self, rows: int) -> Rows:
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

    def read_rows(self, column: str, start: int, stop: int) -> Rows:
        """Rows ``start`` to ``stop`` of a column: shape (stop - start, *row_shape), or ragged ones."""
        found = self.columns[column]
        if found.form == PLAIN:
            return self._values(found, start, stop)
        offsets = self.read_offsets(column, start, stop)
        return rows_of(found.form, self._values(found, *offsets[[0, -1]].tolist()), offsets - offsets[0])

    def read_offsets(self, column: str, start: int = 0, stop: int | None = None) -> npt.NDArray[np.int64]:
        """Where the values of rows of a ragged column begin, and the last one's end."""
        count = (sum(self.rows) if stop is None else stop) - start + 1
        return self._read(_OFFSET, count, self.columns[column].offset + _OFFSET.itemsize * start)

    def _values(self, column: StoredColumn, start: int, stop: int) -> npt.NDArray[Any]:
        count = (stop - start) * column.row_bytes // column.dtype.itemsize
        found = self._read(column.dtype, count, column.values_at + start * column.row_bytes)
        return found.reshape(stop - start, *column.row_shape)

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
