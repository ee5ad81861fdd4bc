"""Columns of the user's data among those of a task: which are kept, what identifies them, and a batch's."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualeval.columns import Column, Text, described, parts_of
from dualeval.engine.folder.windows import EVALUATED
from dualeval.engine.options import RunOptions
from dualeval.engine.samples import HuggingFaceSamples
from dualeval.errors import UsageError
from dualeval.further_columns import MOST_EXACT, NOT_NAMED, KeptColumns
from dualeval.options.choices import NO_COLUMN, columns_of_groups
from dualeval.tasks import Dataset, Task
from dualeval.wording import did_you_mean

_OF_FILES = ("id", "index", EVALUATED)
_AT_ONCE = 1 << 14
_ONE_TYPE = (
    'Expected one type for all samples: of numbers with gaps floats, with nan for a gap; of texts "" for one.'
)
# How types are called.
_TEXTS, _BOOLS, _WHOLE, _NUMBERS = "texts", "true and false", "whole numbers", "numbers with decimals or gaps"
# By numpy's kind of a value.
_KEPT_AS = {"b": np.bool_, "i": np.int64, "u": np.int64, "f": np.float64}


@dataclass(frozen=True, kw_only=True)
class DataColumns:
    """The columns of the data that the rows of a run keep."""

    names: tuple[str, ...]
    dataset: Dataset
    # By name, the type that all values together have; a batch without a gap may look like another one.
    kinds: dict[str, str] = field(default_factory=dict)

    def of(self, samples: range) -> dict[str, Column]:
        """The columns of consecutive samples."""
        found = read(self.dataset, samples)
        if absent := [name for name in self.names if name not in found]:
            raise UsageError(
                f"columns(indices) of {_kind(self.dataset)} gives no {absent[0]!r} for samples "
                f"{samples.start} to {samples.stop - 1}: give the same columns for all samples"
            )
        return {name: _as_kind(found[name], self.kinds.get(name)) for name in self.names}

    def digests(self, count: int, step: Callable[[], None]) -> dict[str, str]:
        """sha256, in hex, over the values of the first ``count`` samples, by column; checks their types."""
        hashes = {name: hashlib.sha256() for name in self.names}
        for first in range(0, count, _AT_ONCE):
            samples = range(first, min(first + _AT_ONCE, count))
            found = DataColumns(names=self.names, dataset=self.dataset).of(samples)
            for name, column in found.items():
                if (kind := _kind_of(column)) != self.kinds.setdefault(name, kind):
                    raise UsageError(
                        f"{_kind(self.dataset)}.columns(indices): the column {name!r} holds "
                        f"{self.kinds[name]} for the first samples, and {kind} for samples "
                        f"{samples.start} to {samples.stop - 1}. {_ONE_TYPE}"
                    )
                hashes[name].update(described(column).encode())
                for part in parts_of(column):
                    hashes[name].update(np.ascontiguousarray(part.numpy()).data)
            step()
        return {name: found.hexdigest() for name, found in hashes.items()}


def data_columns_of(
    task: Task, dataset: Dataset, options: RunOptions, taken: Collection[str]
) -> tuple[DataColumns | None, list[str]]:
    """Choose the columns of the data that are kept beside those ``taken``; and what is to be said of it."""
    asked = [name for name in options.keep if name != NO_COLUMN]
    also = (*columns_of_groups(options.by), *filter(None, [options.cluster]))
    whole: Any = getattr(dataset, "whole", dataset)
    if isinstance(whole, HuggingFaceSamples):
        whole.read_columns((*options.keep, *also) if options.keep else ())
    there = read(dataset, range(min(1, len(dataset)))) if callable(getattr(dataset, "columns", None)) else {}
    kept = getattr(whole, "kept", None)
    left_out = kept.left_out if isinstance(kept, KeptColumns) else {}
    if not there and not left_out and not asked:
        return None, []
    taken = {*taken, *_OF_FILES, *_names_of_texts(task, taken)}
    for name in asked:
        _check(name, there, left_out, taken)
    wanted = {*asked, *also} if options.keep else {*there}
    names = tuple(name for name in there if name in wanted and name not in taken)
    said = {name: "the rows have a column of this name" for name in there if name in taken}
    notes = [
        f"the column {name} of the data is not kept: {why}" for name, why in {**left_out, **said}.items()
    ]
    return DataColumns(names=names, dataset=dataset) if names else None, [] if options.keep else notes


def _check(
    name: str, there: Mapping[str, Column], left_out: Mapping[str, str], taken: Collection[str]
) -> None:
    if (why := left_out.get(name, NOT_NAMED)) != NOT_NAMED:
        # Of a task that was made in Python without the name.
        hint = f"Give keep=({name!r},) to the task, too" if why.startswith("it has") else "Leave it out"
        raise UsageError(f"--keep {name}: the column cannot be kept: {why}. {hint}.")
    if name not in there:
        has = f"it has {', '.join((*there, *left_out))}" if there or left_out else "it has none of its own"
        raise UsageError(f"--keep {name}: the data has no such column; {has}.")
    if name in taken:
        raise UsageError(
            f"--keep {name}: the rows have a column of this name, which is not the data's. Rename the data's."
        )


def _names_of_texts(task: Task, rows: Collection[str]) -> tuple[str, ...]:
    """The columns of text that a task makes of its rows."""
    # The user's own method may need more than no rows; the first batch is tried with real ones.
    with suppress(Exception):
        return tuple(task.texts({name: np.empty(0, np.int64) for name in rows}, 0))
    return ()


def read(dataset: Dataset, samples: range) -> dict[str, Column]:
    """What a data set says of some of its samples, as columns."""
    found = dataset.columns(samples)  # type: ignore[attr-defined]
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise UsageError(
            f"{_kind(dataset)}.columns(indices) returned {type(found).__name__}, expected a dict of values "
            "by column, one a sample. Mend it, or give it another name."
        )
    return {name: _column(dataset, name, values, len(samples)) for name, values in found.items()}


def _column(dataset: Dataset, name: str, values: Any, count: int) -> Column:
    with suppress(TypeError, ValueError):  # lists of different lengths, for example
        array = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
        if array.shape == (count,):
            if array.dtype.kind == "O" or not isinstance(values, (np.ndarray, Tensor)):
                _check_types(dataset, name, values)
            if array.dtype.kind in _KEPT_AS:
                return torch.from_numpy(array.astype(_KEPT_AS[array.dtype.kind]))
            plain = array.tolist()
            if any(isinstance(value, str) for value in plain):
                return Text(["" if value is None else value for value in plain])
            return torch.tensor([np.nan if value is None else value for value in plain], dtype=torch.float64)
    raise UsageError(
        f"{_kind(dataset)}.columns(indices): the column {name!r} is a {type(values).__name__} for "
        f"{count} samples, expected one text, number or bool a sample, in a list, array or tensor"
    )


def _kind_of(column: Column) -> str:
    if not isinstance(column, Tensor):
        return _TEXTS
    return {torch.bool: _BOOLS, torch.int64: _WHOLE}.get(column.dtype, _NUMBERS)


def _as_kind(column: Column, kind: str | None) -> Column:
    """A batch's column as the whole one is: one without a gap, or of gaps alone, may look like another."""
    if kind == _NUMBERS and isinstance(column, Tensor):
        return column.to(torch.float64)
    if kind == _TEXTS and isinstance(column, Tensor) and bool(column.isnan().all()):
        return Text([""] * len(column))
    return column


def _check_types(dataset: Dataset, name: str, values: Any) -> None:
    """Check that a list, or an array of objects, holds values of one type, and gaps."""
    types = {type(value) for value in values if value is not None}
    named = {
        "text" if issubclass(each, str) else "bool" if issubclass(each, (bool, np.bool_)) else "number"
        for each in types
    }
    if len(named) > 1:
        raise UsageError(
            f"{_kind(dataset)}.columns(indices): the column {name!r} holds values of several types: "
            f"{', '.join(sorted(each.__name__ for each in types))}. {_ONE_TYPE}"
        )
    has_gap = any(value is None for value in values)
    if has_gap and any(isinstance(value, int) and abs(value) > MOST_EXACT for value in values):
        raise UsageError(
            f"{_kind(dataset)}.columns(indices): the column {name!r} holds whole numbers beyond 2**53 beside "
            "None, for which float64 has no place. Give texts."
        )


def _kind(dataset: Dataset) -> str:
    whole: Any = getattr(dataset, "whole", dataset)
    return type(getattr(whole, "wrapped", whole)).__name__


def check_by(task: Task, by: Sequence[str], columns: Sequence[str]) -> None:
    """Check, before anything is evaluated, that the rows have the columns of groups."""
    known = [*columns, *(_names_of_texts(task, columns) if by else ())]
    for name in columns_of_groups(by):
        if name not in known:
            raise UsageError(
                f"--by {name}: there is no such column. The columns are {', '.join(known)}."
                f"{did_you_mean(name, known)}"
            )
