"""Columns: plain tensors, those that are made late, numbers (``Ragged``) and text (``Text``) of any length.

The last two are the values of all samples, one after the other, and how many each sample has. Ledger metrics
get them in torch, as ``Ragged`` and ``Text``; files and metrics of all rows have the same in numpy, as
``RaggedRows`` and ``TextRows``, which may be memory-mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualeval.errors import UsageError

# Parquet's lists and strings count their values in int32.
_MOST_VALUES = 2**31 - 1
_UNMASKED = {Tensor, np.ndarray, int, float, str}  # for speed: most samples hold these alone


class Ragged:
    """A column whose rows differ in length, as boxes or tokens; a sequence of the samples' tensors.

    Args:
        values: those of all samples, one sample's behind the other's, shape (total,) or (total, k).
        lengths: how many of them each sample has, integers of shape (samples,), which add up to ``total``.
            That they do is checked on the host, so that making a column never waits for a device.

    Attributes:
        values: as given.
        lengths: as int64.

    Raises:
        UsageError: ``values`` is one number, or ``lengths`` are no integers of one dimension.
    """

    form: ClassVar[str] = "ragged"

    def __init__(self, values: Tensor, lengths: Tensor) -> None:
        lengths = torch.as_tensor(lengths)
        if not isinstance(values, Tensor) or values.ndim == 0:
            fault = "one number" if isinstance(values, Tensor) else f"a {type(values).__name__}"
            raise UsageError(
                f"the values of a ragged column are {fault}, expected a tensor of shape (total, ...): the "
                "values of all samples, one after the other"
            )
        whole = not (lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool)
        if lengths.ndim != 1 or not (whole or not len(lengths)):
            raise UsageError(
                f"the lengths of a ragged column have shape {tuple(lengths.shape)} and {lengths.dtype}, "
                "expected integers of shape (samples,)"
            )
        self.values = values
        self.lengths = lengths.to(torch.int64)

    @property
    def offsets(self) -> Tensor:
        """Where each sample's values begin, and where the last one's end: int64 of shape (samples + 1,)."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, chosen: Any) -> Any:
        """One sample's tensor by an ``int``; a column by a mask, a slice, or a list or tensor of places."""
        if isinstance(chosen, (int, np.integer)):
            start, stop = self._ends(chosen)
            return self.values[start:stop]
        ends = self.offsets
        lengths, starts = self.lengths[chosen], ends[:-1][chosen]
        before = lengths.cumsum(0) - lengths
        places = torch.repeat_interleave(starts - before, lengths)
        places += torch.arange(len(places), device=places.device)
        return of_parts(type(self), [self.values[places], lengths])

    def __iter__(self) -> Iterator[Any]:
        ends = self.offsets.tolist()
        return (self.values[start:stop] for start, stop in pairwise(ends))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} samples, {len(self.values)} values)"

    def tolist(self) -> list[Any]:
        """The samples' values as Python lists."""
        return [row.tolist() for row in self]

    def _ends(self, sample: int | np.integer[Any]) -> tuple[int, int]:
        if not -len(self) <= sample < len(self):
            raise IndexError(f"sample {sample} of a column of {len(self)} samples")
        ends = self.offsets
        sample %= len(self)
        return int(ends[sample]), int(ends[sample + 1])


class Text(Ragged):
    """A column of text; a sequence of the samples' strings.

    Args:
        strings: one a sample.

    Attributes:
        values: their UTF-8, one after the other, uint8 of shape (bytes,), on the CPU.
        lengths: bytes of each of them, int64 of shape (samples,).

    Raises:
        UsageError: one is no Unicode text.
    """

    form: ClassVar[str] = "text"

    def __init__(self, strings: Iterable[str]) -> None:
        encoded = []
        for place, string in enumerate(strings):
            if not isinstance(string, str):
                raise UsageError(
                    f"the text of sample {place} of the batch is a {type(string).__name__}, expected a str"
                )
            try:
                encoded.append(string.encode())
            except UnicodeEncodeError as error:
                raise UsageError(
                    f"the text of sample {place} of the batch is not Unicode (half a surrogate pair): "
                    f"{string!a}"
                ) from error
        joined = np.frombuffer(bytearray(b"".join(encoded)), np.uint8)
        super().__init__(torch.from_numpy(joined), torch.tensor([*map(len, encoded)], dtype=torch.int64))

    def __getitem__(self, chosen: Any) -> Any:
        """One sample's string by an ``int``; a column by a mask, a slice, or a list or tensor of places."""
        column = super().__getitem__(chosen)
        return _string(column.numpy()) if isinstance(chosen, (int, np.integer)) else column

    def __iter__(self) -> Iterator[str]:
        return (_string(row.numpy()) for row in super().__iter__())

    def tolist(self) -> list[Any]:
        """The samples' strings."""
        return list(self)


class RaggedRows(Sequence[Any]):
    """The rows of a ragged column in numpy: a read-only sequence of the samples' arrays."""

    form: ClassVar[str] = "ragged"

    def __init__(self, values: npt.NDArray[Any], offsets: npt.NDArray[np.int64]) -> None:
        # Those of all samples, one sample's behind the other's, shape (total,) or (total, k).
        self.values = values
        # Where each sample's values begin, and where the last one's end, int64 of shape (samples + 1,).
        self.offsets = offsets

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """How many values each sample has, int64 of shape (samples,)."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, chosen: Any) -> Any:
        """One sample's array by an ``int``; rows by a mask, a slice, or a list or array of places."""
        if isinstance(chosen, (int, np.integer)):
            return self._row(range(len(self))[chosen])
        if isinstance(chosen, slice) and chosen.step in (None, 1):
            start, stop, _ = chosen.indices(len(self))
            offsets = self.offsets[start : max(start, stop) + 1]
            return type(self)(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])
        lengths, starts = self.lengths[chosen], self.offsets[:-1][chosen]
        offsets = offsets_of(lengths)
        places = np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])
        return type(self)(self.values[places], offsets)

    def __iter__(self) -> Iterator[Any]:
        return map(self._row, range(len(self)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} samples, {len(self.values)} values)"

    def tolist(self) -> list[Any]:
        """The samples' values as Python lists."""
        return [row.tolist() for row in self]

    def _row(self, sample: int) -> Any:
        return self.values[self.offsets[sample] : self.offsets[sample + 1]]


class TextRows(RaggedRows):
    """The rows of a column of text: a read-only sequence of strings; ``values`` are their UTF-8 bytes."""

    form: ClassVar[str] = "text"

    def tolist(self) -> list[Any]:
        """The samples' strings."""
        return list(self)

    def _row(self, sample: int) -> str:
        return _string(super()._row(sample))


# What a task makes of a batch and a ledger metric reads; and the same in numpy, for files and row metrics.
Column: TypeAlias = "Tensor | Ragged"
NumpyRows: TypeAlias = "npt.NDArray[Any] | RaggedRows"
_COLUMNS: dict[str, type[Ragged]] = {"ragged": Ragged, "text": Text}
_ROWS: dict[str, type[RaggedRows]] = {"ragged": RaggedRows, "text": TextRows}


def form_of(column: Column | NumpyRows) -> str:
    """ "plain", "ragged" or "text"."""
    return column.form if isinstance(column, (Ragged, RaggedRows)) else "plain"


def values_of(rows: NumpyRows) -> npt.NDArray[Any]:
    """The array that holds the values: the rows themselves, where each is as long as the others."""
    return rows.values if isinstance(rows, RaggedRows) else rows


def offsets_of(lengths: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
    """Where rows of these lengths begin, and where the last one ends."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def rows_of(form: str, values: npt.NDArray[Any], offsets: npt.NDArray[np.int64]) -> RaggedRows:
    """Rows of the form "ragged" or "text"."""
    return _ROWS[form](values, offsets)


def parts_of(column: Any) -> list[Any]:
    """The tensors that a column is made of: values and lengths, or itself."""
    return [column.values, column.lengths] if isinstance(column, Ragged) else [column]


def of_parts(kind: type[Any], parts: Sequence[Any]) -> Any:
    """A column of such parts."""
    if not issubclass(kind, Ragged):
        [part] = parts
        return part
    made = object.__new__(kind)
    made.values, made.lengths = parts
    return made


def all_copied(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Columns in memory of their own; what is no column stays as it is."""
    return {
        name: each_part(Tensor.clone, column)
        if isinstance(column, Ragged)
        else (column.clone() if isinstance(column, Tensor) else column)
        for name, column in columns.items()
    }


def each_part(change: Callable[[Tensor], Tensor], column: Ragged) -> Ragged:
    """A ragged column with each of its tensors changed; their lengths have to go together still."""
    return cast(Ragged, of_parts(type(column), [change(part) for part in parts_of(column)]))


def each_array(change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]], rows: NumpyRows) -> NumpyRows:
    """As ``each_part``, of rows in numpy."""
    return (
        type(rows)(change(rows.values), change(rows.offsets))
        if isinstance(rows, RaggedRows)
        else change(rows)
    )


def kind_of(column: Column | NumpyRows) -> tuple[str, Any, tuple[int, ...]]:
    """What is the same for every batch: form, dtype, and shape of a row (of one value of a ragged row)."""
    values = column.values if isinstance(column, (Ragged, RaggedRows)) else column
    return form_of(column), values.dtype, tuple(values.shape[1:])


def kind_text(column: Column | NumpyRows) -> str:
    """A column's kind, for people."""
    form, dtype, shape = kind_of(column)
    if form == "plain":
        return f"{dtype} with rows of shape {shape}"
    return "text" if form == "text" else f"ragged, of {dtype} with values of shape {shape}"


def empty_rows(like: Column, count: int) -> Column:
    """Rows of a column's kind that hold nothing: zeros, or no values."""
    if isinstance(like, Ragged):
        values = like.values.new_empty(0, *like.values.shape[1:])
        return cast(Ragged, of_parts(type(like), [values, like.lengths.new_zeros(count)]))
    return like.new_zeros(count, *like.shape[1:])


def concatenated(columns: Sequence[Column]) -> Column:
    """The rows of columns of one kind, one column's behind the other's."""
    first = columns[0]
    pieces = zip(*map(parts_of, columns), strict=True)
    column: Column = of_parts(type(first), [torch.cat(piece) for piece in pieces])
    return column


def concatenated_rows(rows: Sequence[NumpyRows]) -> NumpyRows:
    """As ``concatenated``, of rows in numpy."""
    first, values = rows[0], np.concatenate([values_of(part) for part in rows])
    if not isinstance(first, RaggedRows):
        return values
    lengths = np.concatenate([part.lengths for part in rows if isinstance(part, RaggedRows)])
    return type(first)(values, offsets_of(lengths))


def to_rows(column: Column) -> NumpyRows:
    """A column of the host in numpy, in the same memory."""
    if not isinstance(column, Ragged):
        return column.numpy()
    return rows_of(column.form, column.values.numpy(), column.offsets.numpy())


def to_column(rows: NumpyRows) -> Column:
    """Rows in torch; in the same memory where they lie there in order."""
    values = torch.from_numpy(np.ascontiguousarray(values_of(rows)))
    if not isinstance(rows, RaggedRows):
        return values
    return cast(Ragged, of_parts(_COLUMNS[rows.form], [values, torch.from_numpy(rows.lengths)]))


def as_columns(made: Any) -> Any:
    """What a task made of a batch, with lists of tensors as ``Ragged`` and lists of strings as ``Text``.

    On the device too, without waiting for it. What is no mapping stays as it is.
    """
    if not isinstance(made, Mapping):
        return made
    return {
        name: as_column(name, column) if isinstance(column, (list, tuple)) else column
        for name, column in made.items()
    }


def as_column(name: str, entries: Sequence[Any]) -> Column:
    """A list with an entry a sample as a column: of tensors a ``Ragged``, of strings a ``Text``."""
    if entries and all(isinstance(entry, str) for entry in entries):
        try:
            return Text(entries)
        except UsageError as error:
            raise UsageError(f"the column {name!r}: {error}") from error
    if not entries or not all(isinstance(entry, Tensor) for entry in entries):
        kinds = ", ".join(sorted({type(entry).__name__ for entry in entries})) or "nothing"
        raise UsageError(
            f"the column {name!r} is a list of {kinds}, expected a tensor with one row per sample, a list of "
            "tensors or of str with one entry per sample, or dualeval.Ragged(values, lengths)"
        )
    first = entries[0]
    if all(entry.ndim == 0 for entry in entries):
        return torch.stack(list(entries))
    for place, entry in enumerate(entries):
        if entry.ndim == 0 or (entry.dtype, entry.shape[1:]) != (first.dtype, first.shape[1:]):
            raise UsageError(
                f"the column {name!r} is a list of tensors that do not match: entry {place} is {entry.dtype} "
                f"of shape {tuple(entry.shape)}, and entry 0 {first.dtype} of shape {tuple(first.shape)}. "
                "Expected one dtype, and one shape except for the first dimension: where a sample has none, "
                "torch.zeros((0, 4)) and not torch.zeros(0)"
            )
    return Ragged(torch.cat(list(entries)), torch.tensor([len(entry) for entry in entries]))


def host_columns(made: Any, samples: range) -> Any:
    """As ``as_columns``, of columns on the host, with the lengths of each ragged one checked."""
    if isinstance(made, Mapping) and {*map(type, made.values())} <= {Tensor}:
        return made
    columns = as_columns(made)
    for name, column in columns.items() if isinstance(columns, Mapping) else ():
        if isinstance(column, Ragged):
            _check_lengths(name, column, samples)
    return columns


def refuse_masked(what: str, value: Any) -> None:
    """Refuse masked entries of numpy at any depth: torch would read the numbers behind the mask."""
    if isinstance(value, np.ndarray):
        if type(value) is not np.ndarray and np.ma.is_masked(value):
            raise UsageError(
                f"{what} masked entries of numpy, whose mask torch ignores: leave these samples out of the "
                "data, or give array.filled(0), and a column of weights that is 0 for them"
            )
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            if type(each) not in _UNMASKED:
                refuse_masked(what, each)


def _check_lengths(name: str, column: Ragged, samples: range) -> None:
    lengths, count = column.lengths, len(column.values)
    where = f"the ragged column {name!r} of samples {samples.start} to {samples.stop - 1}"
    if len(lengths) and int(lengths.min()) < 0:
        place = int(lengths.argmin())
        raise UsageError(f"{where} has the length {int(lengths[place])} at position {place}")
    if (total := int(lengths.sum())) != count:
        raise UsageError(
            f"{where} has lengths that add up to {total}, and {count} values: expected one length per "
            "sample, and the values of all samples, one after the other"
        )
    if count > _MOST_VALUES:
        raise UsageError(
            f"{where} has {count} values, and one batch may have {_MOST_VALUES}: take a smaller batch size"
        )


def _string(encoded: npt.NDArray[np.uint8]) -> str:
    return encoded.tobytes().decode()
