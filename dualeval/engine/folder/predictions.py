"""predictions.parquet and files like it: the rows of all ranks, written in data-set order."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dualeval.atomic_files import whole_file
from dualeval.columns.ragged import NumpyRows, RaggedRows, TextRows
from dualeval.engine.folder.row_windows import EVALUATED, RowsOfChunks, evaluated_of, windows_of
from dualeval.engine.samples.subset import indices_of, texts_of
from dualeval.engine.values.plan import EvalPlan
from dualeval.tasks import Dataset, Task

# Metadata of a field that is a column of text, and not made by the task's ``texts`` from other columns.
COLUMN_OF_TEXT = {b"dualeval": b"column of text"}
# Metadata of a field that is a column of the user's data.
COLUMN_OF_DATA = {b"dualeval": b"data"}


def load_library() -> None:
    """Import the library that writes the rows; it takes a part of a second, and the first batch needs it."""
    import pyarrow.parquet  # noqa: F401


def write_predictions(
    path: Path,
    files: Sequence[RowsOfChunks],
    plan: EvalPlan,
    task: Task,
    dataset: Dataset,
    kept: Sequence[str],
    of_data: Collection[str] = (),
    step: Callable[[], None] = lambda: None,
) -> None:
    """Merge the rows of all chunks into one Parquet file in data-set order.

    Columns: id (string), index (int64), then those of ``kept`` and the task's ``texts``, which are null for
    samples that could not be read. ``of_data`` names the columns of ``kept`` that come from the data. The
    file appears complete or not at all.
    """
    import pyarrow
    import pyarrow.parquet

    with whole_file(path) as partial, _arrow_pool_of_system(pyarrow):
        writer = None
        try:
            for start, rows in windows_of(files, plan, kept):
                table = _table(pyarrow, task, dataset, kept, rows, start, of_data)
                if writer is None:
                    # No dictionaries: ids and losses hardly repeat, and each is kept for the whole file.
                    writer = pyarrow.parquet.ParquetWriter(
                        partial, table.schema, compression="zstd", use_dictionary=False
                    )
                writer.write_table(table)
                # Two windows at once would double the memory.
                del rows, table
                step()
        finally:
            if writer is not None:
                writer.close()


@contextmanager
def _arrow_pool_of_system(pyarrow: Any) -> Iterator[None]:
    """Have Arrow take memory from the system's allocator within the block.

    Arrow's own allocator takes segments of several MB per thread, more or fewer by chance: 13 to 28 MB for
    100,000 rows. The writer has no option for its pool; it takes the default one.
    """
    pool = pyarrow.default_memory_pool()
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    try:
        yield
    finally:
        pyarrow.set_memory_pool(pool)


def write_to_memory(
    task: Task, dataset: Dataset, kept: Sequence[str], rows: Mapping[str, NumpyRows], start: int
) -> None:
    """Try to write rows as ``write_predictions`` would."""
    import pyarrow
    import pyarrow.parquet

    table = _table(pyarrow, task, dataset, kept, rows, start)
    pyarrow.parquet.write_table(table, pyarrow.BufferOutputStream())


def _table(
    pyarrow: Any,
    task: Task,
    dataset: Dataset,
    kept: Sequence[str],
    rows: Mapping[str, NumpyRows],
    start: int,
    of_data: Collection[str] = (),
) -> Any:
    """Consecutive rows as an Arrow table."""
    evaluated = evaluated_of(rows)
    stop = start + len(evaluated)
    missing = None if evaluated.all() else ~evaluated
    table = pyarrow.table(
        {
            "id": _texts(pyarrow, [dataset.id(i) for i in range(start, stop)], None),
            "index": _plain(pyarrow, indices_of(dataset, start, stop), None),
            **{name: _arrow(pyarrow, rows[name], missing) for name in kept},
            **{
                name: _texts(pyarrow, texts, missing)
                for name, texts in texts_of(task, dataset, rows, start).items()
            },
        }
    )
    marks = {name: COLUMN_OF_TEXT for name in kept if isinstance(rows[name], TextRows)}
    marks |= dict.fromkeys(of_data, COLUMN_OF_DATA)
    if not marks:
        return table
    fields = [
        field.with_metadata(marks[field.name]) if field.name in marks else field for field in table.schema
    ]
    return pyarrow.Table.from_arrays(table.columns, schema=pyarrow.schema(fields))


def write_json_file(
    path: Path,
    files: Sequence[RowsOfChunks],
    plan: EvalPlan,
    task: Task,
    dataset: Dataset,
    kept: Sequence[str],
    column: str,
    step: Callable[[], None],
) -> None:
    """Write one column as a JSON object, sample id to value, in data-set order.

    Samples that could not be read are left out. ASCII, a line per sample; the file is complete or absent.
    """
    with whole_file(path) as partial, partial.open("w", encoding="ascii") as file:
        before = "{\n"
        for start, rows in windows_of(files, plan, kept):
            for entry in json_entries(task, dataset, rows, start, column):
                file.write(f"{before}{entry}")
                before = ",\n"
            step()
        file.write("{}\n" if before == "{\n" else "\n}\n")


def json_entries(
    task: Task, dataset: Dataset, rows: Mapping[str, NumpyRows], start: int, column: str
) -> Iterator[str]:
    """The lines of ``write_json_file`` for consecutive rows, without commas; failed samples have none."""
    values = rows[column].tolist() if column in rows else texts_of(task, dataset, rows, start)[column]
    for place in np.flatnonzero(rows[EVALUATED]).tolist():
        yield json.dumps({dataset.id(start + place): values[place]}, allow_nan=False)[1:-1]


def _arrow(pyarrow: Any, rows: NumpyRows, missing: npt.NDArray[np.bool_] | None) -> Any:
    if isinstance(rows, RaggedRows):
        return _ragged_arrow(pyarrow, rows, missing)
    if rows.ndim == 1:
        return _plain(pyarrow, rows, missing)
    mask = None if missing is None else _plain(pyarrow, missing, None)
    values = _plain(pyarrow, rows.reshape(-1), None)
    return pyarrow.FixedSizeListArray.from_arrays(values, rows.shape[1], mask=mask)


def _ragged_arrow(pyarrow: Any, rows: RaggedRows, missing: npt.NDArray[np.bool_] | None) -> Any:
    # Arrow does not write the values of a failed sample's placeholder, because its row is null.
    offsets = rows.offsets.astype(np.int32)
    if isinstance(rows, TextRows):
        data = pyarrow.py_buffer(np.ascontiguousarray(rows.values))
        valid = _valid(pyarrow, missing)
        return pyarrow.StringArray.from_buffers(len(rows), pyarrow.py_buffer(offsets), data, valid)
    mask = None if missing is None else _plain(pyarrow, missing, None)
    values = _arrow(pyarrow, rows.values, None)
    return pyarrow.ListArray.from_arrays(_plain(pyarrow, offsets, None), values, mask=mask)


# Arrays are made from buffers: ``pyarrow.array`` imports pandas, if installed, which takes a second.


def _plain(pyarrow: Any, values: npt.NDArray[Any], missing: npt.NDArray[np.bool_] | None) -> Any:
    is_bool = values.dtype == np.bool_
    data = np.packbits(values, bitorder="little") if is_bool else np.ascontiguousarray(values)
    kind = pyarrow.from_numpy_dtype(values.dtype)
    return pyarrow.Array.from_buffers(kind, len(values), [_valid(pyarrow, missing), pyarrow.py_buffer(data)])


def _texts(pyarrow: Any, texts: Sequence[str | None], missing: npt.NDArray[np.bool_] | None) -> Any:
    absent = np.array([text is None for text in texts], np.bool_) | (False if missing is None else missing)
    encoded = [b"" if text is None else text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return pyarrow.StringArray.from_buffers(
        len(texts), pyarrow.py_buffer(offsets), pyarrow.py_buffer(b"".join(encoded)), _valid(pyarrow, absent)
    )


def _valid(pyarrow: Any, missing: npt.NDArray[np.bool_] | None) -> Any:
    """The bitmap of the rows that are not null; None if no row is null."""
    if missing is None or not missing.any():
        return None
    return pyarrow.py_buffer(np.packbits(~missing, bitorder="little"))
