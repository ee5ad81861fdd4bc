"""The ranks' rows in data-set order, a window of rows at a time: predictions.parquet, and files like it."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from dualeval.columns import RaggedRows, Rows, TextRows, concatenated_rows, rows_of
from dualeval.engine.folder.mapped_columns import HeldColumns, MappedColumns
from dualeval.engine.folder.stored_columns import PLAIN, StoredColumn
from dualeval.engine.parts import indices_of, texts_of
from dualeval.engine.plan import EvalPlan
from dualeval.errors import DualevalError

if TYPE_CHECKING:
    from dualeval.tasks import Dataset, Task

# Rows held at once; also the row group size of the Parquet file.
WINDOW_ROWS = 16_384

# Bytes of values of ragged columns and text in them, at most, or one chunk's.
WINDOW_BYTES = 256 << 20
# Of a field of the schema whose strings are a column, and not what the task's ``texts`` has made of others.
COLUMN_OF_TEXT = {b"dualeval": b"column of text"}

# The journal's own column: 1 where the sample was evaluated, 0 where it could not be read.
EVALUATED = "evaluated"


class RowsOfChunks(Protocol):
    """Rows of some chunks, on the disk (``JournalFile``) or in memory (``MemoryRows``)."""

    @property
    def path(self) -> Path: ...

    @property
    def chunks(self) -> tuple[int, ...]: ...

    @property
    def rows(self) -> tuple[int, ...]: ...

    @property
    def columns(self) -> dict[str, StoredColumn]: ...

    def read_rows(self, column: str, start: int, stop: int) -> Rows: ...

    def read_offsets(self, column: str) -> npt.NDArray[np.int64]: ...


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
    step: Callable[[], None] = lambda: None,
) -> None:
    """Merge the rows of all chunks into one Parquet file in data-set order.

    Columns: id (string), index (int64), then those of ``kept`` and the task's ``texts``; null in every one
        of these
    where the sample could not be read. Whole under its name, or not there.

    Args:
        path: the file to write.
        files: journal files that hold every chunk of the plan once.
        plan: the run's plan.
        task: gives the texts.
        dataset: gives the samples' ids.
        kept: the columns of the journal that are written.
        step: called after each window of rows.
    """
    import pyarrow
    import pyarrow.parquet

    partial = _partial_of_its_own(path)
    writer = None
    own_pool = pyarrow.default_memory_pool()
    # Arrow's own allocator takes segments of several MB a thread, by chance more or fewer of them: 13 to
    # 28 MB for 100,000 rows. The writer has no option for its pool, it takes the default one.
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    try:
        for start, rows in windows_of(files, plan, kept):
            table = _table(pyarrow, task, dataset, kept, rows, start)
            if writer is None:
                # No dictionaries: ids and losses hardly repeat, and a dictionary is kept for the whole file.
                writer = pyarrow.parquet.ParquetWriter(
                    partial, table.schema, compression="zstd", use_dictionary=False
                )
            writer.write_table(table)
            # Two windows at once would double the memory.
            del rows, table
            step()
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    finally:
        try:
            if writer is not None:
                writer.close()
        finally:
            pyarrow.set_memory_pool(own_pool)
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)


def parquet_bytes(
    task: Task, dataset: Dataset, kept: Sequence[str], rows: Mapping[str, Rows], start: int
) -> int:
    """Write rows as ``write_predictions`` would, into memory; returns the file's size.

    Args:
        task: as there, as ``dataset`` and ``kept``.
        rows: consecutive rows by column, ``EVALUATED`` among them.
        start: index of the first one's sample.
    """
    import pyarrow
    import pyarrow.parquet

    table = _table(pyarrow, task, dataset, kept, rows, start)
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink)
    return len(sink.getvalue())


def _table(
    pyarrow: Any,
    task: Task,
    dataset: Dataset,
    kept: Sequence[str],
    rows: Mapping[str, Rows],
    start: int,
) -> Any:
    """Consecutive rows as an Arrow table."""
    evaluated = evaluated_of(rows)
    stop = start + len(evaluated)
    missing = None if evaluated.all() else ~evaluated
    table = pyarrow.table(
        {
            "id": pyarrow.array([dataset.id(i) for i in range(start, stop)], pyarrow.string()),
            "index": pyarrow.array(indices_of(dataset, start, stop)),
            **{name: _arrow(pyarrow, rows[name], missing) for name in kept},
            **{
                name: pyarrow.array(texts, pyarrow.string(), mask=missing)
                for name, texts in texts_of(task, dataset, rows, start).items()
            },
        }
    )
    of_text = [name for name in kept if isinstance(rows[name], TextRows)]
    if not of_text:
        return table
    fields = [
        field.with_metadata(COLUMN_OF_TEXT) if field.name in of_text else field for field in table.schema
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
    step: Callable[[], None] = lambda: None,
) -> None:
    """Write one column as a JSON object, sample id to value, in data-set order.

    Samples that could not be read are left out. ASCII, a line a sample; whole under its name, or not there.

    Args:
        path: the file to write.
        files: as for ``write_predictions``, as ``plan``, ``task``, ``dataset``, ``kept`` and ``step``.
        column: one of ``kept`` or of the task's ``texts``; finite where it holds floats.
    """
    partial = _partial_of_its_own(path)
    try:
        with partial.open("w", encoding="ascii") as file:
            before = "{\n"
            for start, rows in windows_of(files, plan, kept):
                for entry in json_entries(task, dataset, rows, start, column):
                    file.write(f"{before}{entry}")
                    before = ",\n"
                step()
            file.write("{}\n" if before == "{\n" else "\n}\n")
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    partial.replace(path)


def json_entries(
    task: Task, dataset: Dataset, rows: Mapping[str, Rows], start: int, column: str
) -> Iterator[str]:
    """The lines of ``write_json_file`` for consecutive rows, without commas; failed samples have none.

    Raises:
        KeyError: there is no such column.
        ValueError: a value is NaN or infinite.
    """
    values = rows[column].tolist() if column in rows else texts_of(task, dataset, rows, start)[column]
    for place in np.flatnonzero(rows[EVALUATED]).tolist():
        yield json.dumps({dataset.id(start + place): values[place]}, allow_nan=False)[1:-1]


def evaluated_of(rows: Mapping[str, Rows]) -> npt.NDArray[np.bool_]:
    """Which of some rows' samples could be read."""
    return np.asarray(rows[EVALUATED]).astype(bool)


def read_columns(
    files: Sequence[RowsOfChunks],
    plan: EvalPlan,
    columns: Sequence[str],
    folder: Path | None,
    step: Callable[[], None] = lambda: None,
) -> dict[str, Rows]:
    """Read columns of all evaluated samples, in data-set order.

    Args:
        files: as for ``write_predictions``, as ``plan`` and ``step``.
        columns: their names.
        folder: where they are written to be mapped; None where nothing is written, and all lies in memory.

    Returns:
        By name, arrays whose first dimension is the evaluated samples, or as many ragged rows; read-only.

    Raises:
        OSError: they cannot be written.
    """
    with MappedColumns(folder) if folder is not None else HeldColumns() as found:
        for _, rows in windows_of(files, plan, columns):
            evaluated = evaluated_of(rows)
            found.append({name: rows[name][evaluated] for name in columns})
            step()
        return found.columns()


def _partial_of_its_own(path: Path) -> Path:
    # A second run in the folder may be at the same place.
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")


def _arrow(pyarrow: Any, rows: Rows, missing: npt.NDArray[np.bool_] | None) -> Any:
    if isinstance(rows, RaggedRows):
        return _ragged_arrow(pyarrow, rows, missing)
    if rows.ndim == 1:
        return pyarrow.array(rows, mask=missing)
    mask = None if missing is None else pyarrow.array(missing)
    return pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(rows.reshape(-1)), rows.shape[1], mask=mask)


def _ragged_arrow(pyarrow: Any, rows: RaggedRows, missing: npt.NDArray[np.bool_] | None) -> Any:
    # What a failed sample's placeholder has in a row that is null, Arrow does not write.
    offsets = rows.offsets.astype(np.int32)
    if isinstance(rows, TextRows):
        valid = None if missing is None else pyarrow.py_buffer(np.packbits(~missing, bitorder="little"))
        data = pyarrow.py_buffer(np.ascontiguousarray(rows.values))
        return pyarrow.StringArray.from_buffers(len(rows), pyarrow.py_buffer(offsets), data, valid)
    mask = None if missing is None else pyarrow.array(missing)
    return pyarrow.ListArray.from_arrays(
        pyarrow.array(offsets), _arrow(pyarrow, rows.values, None), mask=mask
    )


def windows_of(
    files: Sequence[RowsOfChunks], plan: EvalPlan, columns: Sequence[str]
) -> Iterator[tuple[int, dict[str, Rows]]]:
    """Read the rows of consecutive chunks, about ``WINDOW_ROWS`` at a time.

    Args:
        files: as for ``write_predictions``, as ``plan``.
        columns: their names.

    Yields:
        the index of the first sample, and the columns with ``EVALUATED``, one row for each sample.
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
        yield first, _window(files, plan, where, range(chunk, last + 1), wanted)
        chunk = last + 1


def _known_columns(files: Sequence[RowsOfChunks]) -> dict[str, StoredColumn]:
    """A column of each name: a file whose samples all failed has none but ``EVALUATED``."""
    known: dict[str, StoredColumn] = {}
    for file in files:
        for name, column in file.columns.items():
            like = known.setdefault(name, column)
            if like.kind != column.kind:
                raise DualevalError(
                    f"column {name!r} is {_described(column)} in {file.path}, and {_described(like)} in "
                    "another file: each batch must give the same columns, of the same dtype and row shape. "
                    "Fix the task and start over with --fresh."
                )
    return known


def _described(column: StoredColumn) -> str:
    form = "" if column.form == PLAIN else f"{column.form}, "
    return f"{form}{column.dtype} with rows of shape {column.row_shape}"


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
        for name in ragged:
            if name in file.columns:
                offsets = file.read_offsets(name)
                values = offsets[first + np.array(file.rows, np.int64)] - offsets[first]
                sizes[chunks] += values * wanted[name].row_bytes
    return sizes


def _window(
    files: Sequence[RowsOfChunks],
    plan: EvalPlan,
    where: npt.NDArray[np.int64],
    chunks: range,
    wanted: Mapping[str, StoredColumn],
) -> dict[str, Rows]:
    """Columns of consecutive chunks; zeros, or ragged rows of length 0, where no sample could be read."""
    first, stop = plan.chunk_samples(chunks[0]).start, plan.chunk_samples(chunks[-1]).stop
    plain = {
        name: np.zeros((stop - first, *column.row_shape), column.dtype)
        for name, column in wanted.items()
        if column.form == PLAIN
    }
    ragged: dict[str, dict[int, Rows]] = {name: {} for name in wanted if name not in plain}
    for file_number in sorted(set(where[chunks.start : chunks.stop, 0].tolist())):
        file = files[file_number]
        # One read a column and file: a file's chunks of this window lie close together.
        own = [c for c in chunks if where[c, 0] == file_number]
        low = min(int(where[c, 1]) for c in own)
        high = max(int(where[c, 1]) + len(plan.chunk_samples(c)) for c in own)
        for name in set(wanted) & set(file.columns):
            block = file.read_rows(name, low, high)
            for c in own:
                samples = plan.chunk_samples(c)
                source = int(where[c, 1]) - low
                part = block[source : source + len(samples)]
                if name in ragged:
                    ragged[name][c] = part
                else:
                    plain[name][samples.start - first : samples.stop - first] = part
    for name, parts in ragged.items():
        for c in chunks:
            parts.setdefault(c, _without_values(wanted[name], len(plan.chunk_samples(c))))
    return {
        **plain,
        **{name: concatenated_rows([parts[c] for c in chunks]) for name, parts in ragged.items()},
    }


def _without_values(like: StoredColumn, rows: int) -> RaggedRows:
    return rows_of(like.form, np.empty((0, *like.row_shape), like.dtype), np.zeros(rows + 1, np.int64))


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
