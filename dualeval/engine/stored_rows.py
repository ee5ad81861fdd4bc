"""StoredRows: predictions.parquet read back, a window of rows at a time, to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dualeval.columns import Rows, offsets_of, rows_of
from dualeval.engine.folder.predictions import COLUMN_OF_TEXT
from dualeval.engine.folder.windows import WINDOW_ROWS
from dualeval.errors import DualevalError, UsageError

# Of every task's file, and never null.
_IDS = ("id", "index")


@dataclass(frozen=True, kw_only=True)
class Window:
    """Consecutive rows of the file.

    Attributes:
        start: number of the first of them.
        evaluated: whether each sample could be read, shape (rows,).
        columns: by name, the rows of the samples that could, in order, first dimension these samples.
        ids: each row's, where they were asked for.
        indices: likewise.
        texts: by name, the texts of all rows, where they were asked for.
    """

    start: int
    evaluated: npt.NDArray[np.bool_]
    columns: Mapping[str, Rows]
    ids: Sequence[str]
    indices: npt.NDArray[np.int64]
    texts: Mapping[str, Sequence[str | None]] = field(default_factory=dict)


class StoredRows:
    """The rows of a finished run.

    Args:
        path: its predictions.parquet.

    Attributes:
        path: as given.
        names: the columns of the task and of its metrics; without id, index and the task's ``texts``.

    Raises:
        DualevalError: it cannot be read, or is no file of a run.
    """

    def __init__(self, path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        self.path = path
        with self._readable():
            schema = pyarrow.parquet.read_schema(path)
        if any(name not in schema.names for name in _IDS):
            raise DualevalError(f"{path} is damaged: it has no column {' or '.join(_IDS)}")
        self.names = tuple(
            field.name for field in schema if field.name not in _IDS and not _is_of_texts(field)
        )

    def windows(
        self, names: Sequence[str], *, with_ids: bool = False, multiple_of: int = 1
    ) -> Iterator[Window]:
        """Read columns, a window of rows at a time: memory does not grow with their number.

        Args:
            names: the columns; at least one, which tells which samples could be read.
            with_ids: read ids and indices too.
            multiple_of: the number of rows of each window but the last is a multiple of this one.

        Raises:
            UsageError: the file has no such column, or the task's ``texts`` have made it.
            DualevalError: it is damaged.
        """
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
        """Read one column of all rows, ids and texts too.

        Args:
            name: the column.

        Returns:
            a ``pyarrow.Array`` with an entry a sample, null where the sample could not be read; None where
            the file has no such column.

        Raises:
            DualevalError: the file is damaged.
        """
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
        """Read the rows of consecutive samples, all columns and texts.

        Args:
            samples: their indices in the data set.

        Raises:
            DualevalError: the file is damaged.
        """
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

    def _evaluated(self, batch: Any, names: Sequence[str], start: int) -> npt.NDArray[np.bool_]:
        """Whether each row has values: in all columns, or in none."""
        evaluated = np.asarray(batch.column(names[0]).is_valid())
        for name in names[1:]:
            differing = np.flatnonzero(np.asarray(batch.column(name).is_valid()) != evaluated)
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
    return pyarrow.types.is_string(field.type) and not COLUMN_OF_TEXT.items() <= metadata.items()


def _rows(array: Any) -> Rows:
    """The rows that are there, of the column's own dtype; a copy of its own."""
    import pyarrow

    kind = array.type
    if pyarrow.types.is_string(kind):
        lengths, encoded = _encoded(array.drop_null())
        return rows_of("text", encoded, offsets_of(lengths))
    if pyarrow.types.is_list(kind):
        # Without the lists that are null; of the others the values that belong to these rows.
        lengths = array.drop_null().value_lengths().to_numpy(zero_copy_only=False)
        return rows_of("ragged", _numbers(array.flatten()), offsets_of(lengths))
    return _numbers(array)


def _encoded(strings: Any) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """The lengths of strings in bytes, and their UTF-8."""
    _, offsets, data = strings.buffers()
    ends = np.frombuffer(offsets, np.int32)[strings.offset : strings.offset + len(strings) + 1]
    if not len(strings) or data is None:
        return np.zeros(len(strings), np.int32), np.empty(0, np.uint8)
    return np.diff(ends), np.frombuffer(data, np.uint8)[ends[0] : ends[-1]].copy()


def _numbers(array: Any) -> npt.NDArray[Any]:
    import pyarrow

    if pyarrow.types.is_fixed_size_list(array.type):
        width = array.type.list_size
        # Without the lists that are null.
        values = array.flatten().to_numpy(zero_copy_only=False)
        return np.array(values).reshape(-1, width)
    return np.array(array.drop_null().to_numpy(zero_copy_only=False))
