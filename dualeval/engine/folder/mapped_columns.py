"""All rows of some columns for metrics of all rows: written once to files without a name, and mapped.

What a metric reads is then in the system's page cache, which gives it up where memory is short; this
process holds none of it. The files have no name any more before the first row is in them: whatever ends the
process, the system takes their room back.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from dualeval.columns import RaggedRows, Rows, each_array, form_of, rows_of, values_of
from dualeval.errors import DualevalError
from dualeval.result import PREDICTIONS


class MappedColumns:
    """Takes columns a piece at a time, and gives them back whole, mapped and read-only.

    The files are in a folder, or in the system's temporary one, whose lack of room is said here.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._files = ExitStack()
        self._values: dict[str, _Array] = {}
        # Of each ragged column; its form too.
        self._offsets: dict[str, tuple[str, _Array]] = {}

    def __enter__(self) -> MappedColumns:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def append(self, columns: Mapping[str, Rows]) -> None:
        """Take the next rows; each time of the same columns, of the same kinds."""
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

    def columns(self) -> dict[str, Rows]:
        """All that was taken, by name; valid also when the files are closed."""
        with self._room():
            found: dict[str, Rows] = {name: array.mapped() for name, array in self._values.items()}
            for name, (form, offsets) in self._offsets.items():
                found[name] = rows_of(form, values_of(found[name]), offsets.mapped())
        return found

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


def read_only(rows: Rows) -> Rows:
    """The same rows, which cannot be written to."""
    return each_array(_read_only, rows)


def copied(rows: Rows) -> Rows:
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
        if 0 in shape:  # nothing is no file that could be mapped
            return _read_only(np.empty(shape, self._dtype))
        # A plain array over the mapping: what is computed of numpy's own kind would be of that kind, too.
        return np.asarray(np.memmap(self._file, self._dtype, mode="r", shape=shape))


def _nameless(folder: Path | None) -> IO[bytes]:
    return tempfile.TemporaryFile(dir=folder, prefix=f"{PREDICTIONS}.")


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    found = array.view()
    found.flags.writeable = False
    return found
