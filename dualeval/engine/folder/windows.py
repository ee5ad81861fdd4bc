"""The ranks' rows in data-set order, a window of consecutive chunks at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dualeval.columns import Rows, concatenated_rows, described
from dualeval.engine.folder.mapped_columns import MappedColumns, read_only
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
    """Read the rows of consecutive chunks, about ``WINDOW_ROWS`` at a time.

    Zeros, or ragged rows of length 0, are those of samples that could not be read.
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
) -> dict[str, Rows]:
    """Read columns of all evaluated samples, in data-set order, mapped from files in a folder."""

    def pieces() -> Iterator[dict[str, Rows]]:
        for _, rows in windows_of(files, plan, columns):
            evaluated = evaluated_of(rows)
            yield {name: rows[name][evaluated] for name in columns}
            step()

    if folder is None:  # where nothing is written, all rows lie in memory already
        held = list(pieces())
        return {name: read_only(concatenated_rows([piece.pop(name) for piece in held])) for name in columns}
    with MappedColumns(folder) as found:
        for piece in pieces():
            found.append(piece)
        return found.columns()


def _known_columns(files: Sequence[RowsOfChunks]) -> dict[str, StoredColumn]:
    """A column of each name: a file whose samples all failed has none but ``EVALUATED``."""
    known: dict[str, StoredColumn] = {}
    for file in files:
        for name, column in file.columns.items():
            like = known.setdefault(name, column)
            if (like.form, like.dtype, like.row_shape) != (column.form, column.dtype, column.row_shape):
                own, other = described(column.empty(0)), described(like.empty(0))
                raise DualevalError(
                    f"column {name!r} is {own} in {file.path}, and {other} in another file: each batch must "
                    "give the same columns, of the same dtype and row shape. Fix the task and start over "
                    "with --fresh."
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
) -> Rows:
    """One column of consecutive chunks."""
    numbers = where[chunks.start : chunks.stop, 0]
    parts: dict[int, Rows] = {}
    for number in sorted(set(numbers.tolist())):
        if name not in files[number].columns:
            continue
        # One read a column and file: a file's chunks of this window lie close together.
        own = (chunks.start + np.flatnonzero(numbers == number)).tolist()
        places = [(int(where[c, 1]), int(where[c, 1]) + len(plan.chunk_samples(c))) for c in own]
        low = min(start for start, _ in places)
        block = files[number].read_rows(name, low, max(stop for _, stop in places))
        parts |= {c: block[start - low : stop - low] for c, (start, stop) in zip(own, places, strict=True)}
    sizes = ((c, len(plan.chunk_samples(c))) for c in chunks if c not in parts)
    parts |= {c: column.empty(size) for c, size in sizes}
    return concatenated_rows([parts[c] for c in chunks])


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
