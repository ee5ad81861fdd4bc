"""The ranks' rows in data-set order, a window of consecutive chunks at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dualeval.columns import RaggedRows, Rows, concatenated_rows, rows_of
from dualeval.engine.folder.mapped_columns import HeldColumns, MappedColumns
from dualeval.engine.folder.stored_columns import PLAIN, RowsOfChunks, StoredColumn
from dualeval.engine.plan import EvalPlan
from dualeval.errors import DualevalError

# Rows held at once; also the row group size of the Parquet file.
WINDOW_ROWS = 16_384

# Bytes of values of ragged columns and text in them, at most, or one chunk's.
WINDOW_BYTES = 256 << 20
# The journal's own column: 1 where the sample was evaluated, 0 where it could not be read.
EVALUATED = "evaluated"


def evaluated_of(rows: Mapping[str, Rows]) -> npt.NDArray[np.bool_]:
    """Which of some rows' samples could be read."""
    return np.asarray(rows[EVALUATED]).astype(bool)


def windows_of(
    files: Sequence[RowsOfChunks], plan: EvalPlan, columns: Sequence[str]
) -> Iterator[tuple[int, dict[str, Rows]]]:
    """Read the rows of consecutive chunks, about ``WINDOW_ROWS`` at a time."""
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


def read_columns(
    files: Sequence[RowsOfChunks],
    plan: EvalPlan,
    columns: Sequence[str],
    folder: Path | None,
    step: Callable[[], None] = lambda: None,
) -> dict[str, Rows]:
    """Read columns of all evaluated samples, in data-set order."""
    with MappedColumns(folder) if folder is not None else HeldColumns() as found:
        for _, rows in windows_of(files, plan, columns):
            evaluated = evaluated_of(rows)
            found.append({name: rows[name][evaluated] for name in columns})
            step()
        return found.columns()


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
