"""Columns of the user's data that no task reads: kept for the rows of a run, in little memory."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from decimal import Decimal
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dualeval.messages import written

# Why a column is left out that the caller has not named among others.
NOT_NAMED = "--keep does not name it"
# Letters of a text, and different texts, of a column that is kept without being named.
_LONGEST = 100
_MOST_TEXTS = 1 << 20
# Numbers of a column that may be names, as versions are. More are measured, and --by cuts them.
_MOST_NAMES = 100
_ROWS_AT_ONCE = 1 << 14
_MOST_WHOLE = 2**63
# Beyond this float64, which has a gap as NaN, has no place for each whole number.
MOST_EXACT = 2**53
_DIGITS_OF_LARGE = len(str(MOST_EXACT))
# Of a cell of CSV. One that begins with 0, as 007, or is longer than a number may be, is a name.
_WHOLE = re.compile(r"-?(0|[1-9][0-9]{0,17})", re.ASCII)
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?|[nN][aA][nN]", re.ASCII)
_CODE = re.compile(r"[+-]?(0[0-9]+|[0-9]{19,})", re.ASCII)
_GAP, _LARGE = "gap", "large"
_PLAIN: Mapping[type, str] = {bool: "bool", int: "whole", float: "number", str: "text", type(None): _GAP}
# Columns of which part of a data set a row is, and their values.
_OF_PARTS = re.compile(r"split|subset|set|partition|phase|fold|is_?(train|valid|val|validation|test)", re.I)
# Of which fold of a cross-validation it is; more values than these are no folds.
_OF_FOLDS = re.compile(r"(k_?|cv_?)?fold(_?id)?", re.I)
_MOST_FOLDS = 20
_KINDS = ("train", "val", "test", "dev", "eval")
_FLAGS = ({"true", "false"}, {"0", "1"})
# Which have a text that says all of them.
_AS_TEXT = (date, time, Decimal)


@dataclass(frozen=True)
class Texts:
    """A column of texts: each row's place among the different ones."""

    places: npt.NDArray[np.int32]
    distinct: Sequence[str]


Values: TypeAlias = "npt.NDArray[Any] | Texts"


@dataclass(frozen=True, kw_only=True)
class KeptColumns:
    """The kept columns of all samples."""

    values: Mapping[str, Values] = field(default_factory=dict)
    # By name, why a column that is there is not kept.
    left_out: Mapping[str, str] = field(default_factory=dict)

    def of(self, indices: Sequence[int]) -> dict[str, Any]:
        """The values of some samples by column: bool, int64 or float64 arrays, and lists of texts."""
        chosen = np.asarray(indices, np.int64)
        return {
            name: [values.distinct[place] for place in values.places[chosen].tolist()]
            if isinstance(values, Texts)
            else values[chosen]
            for name, values in self.values.items()
        }

    def train_beside_test(self) -> Iterator[tuple[str, str]]:
        """Each column by which some rows are to train with, or may be, and what it has."""
        for name, values in self.values.items():
            if not _OF_PARTS.fullmatch(name) and not _OF_FOLDS.fullmatch(name):
                continue
            places, texts = (values.places, values.distinct) if isinstance(values, Texts) else (values, ())
            indices, counts = np.unique(places, return_counts=True)
            splits = [str(texts[each] if texts else each) for each in indices]
            kinds = {next((k for k in _KINDS if split.casefold().startswith(k)), "") for split in splits}
            is_flag = name.casefold().startswith("is") and {*map(str.casefold, splits)} in _FLAGS
            if is_flag or {"train"} < kinds - {""}:
                yield name, " and ".join(f"{n:,} of {split}" for split, n in zip(splits, counts, strict=True))
            elif _OF_FOLDS.fullmatch(name) and 1 < len(splits) <= _MOST_FOLDS:
                held = f"rows of {len(splits)} folds ({', '.join(splits)})"
                yield name, f"{held}, of which a model is usually trained with all but one"

    def named_otherwise(
        self, classes: npt.NDArray[np.int32], names: Sequence[str]
    ) -> Iterator[tuple[str, int]]:
        """Each column that names the classes of all rows, another name for each, but not those of ``names``.

        And a row's place that shows it.
        """
        known = {name.casefold(): index for index, name in enumerate(names)}
        for column, values in self.values.items():
            if not isinstance(values, Texts):
                continue
            of_texts = np.array([known.get(text.casefold(), -1) for text in values.distinct])
            named = of_texts[values.places]
            one, other = np.unique(np.stack([classes, named]), axis=1)
            alone = len({*one.tolist()}) == len({*other.tolist()}) == len(one)
            if alone and other.min() >= 0 and (one != other).any():
                yield column, int(np.flatnonzero(classes != named)[0])

    def select(self, indices: npt.NDArray[np.int64]) -> KeptColumns:
        """Of some samples alone, in this order."""
        chosen: dict[str, Values] = {
            name: Texts(values.places[indices], values.distinct)
            if isinstance(values, Texts)
            else values[indices]
            for name, values in self.values.items()
        }
        return KeptColumns(values=chosen, left_out=self.left_out)


NO_COLUMNS = KeptColumns()


class WithColumns:
    """A data set whose samples have further columns."""

    kept: KeptColumns = NO_COLUMNS

    def columns(self, indices: Sequence[int]) -> dict[str, Any]:
        """The kept columns of some samples; as of ``Dataset``."""
        return self.kept.of(indices)


class FurtherColumns:
    """Takes the columns of a table that are no task's (``chosen``), while its rows are read once.

    Without names to ``keep`` all small ones are taken, and none by ``("none",)``. ``cells`` are all texts, of
    which some are numbers; ``unfit`` says of columns why they cannot be kept.
    """

    def __init__(
        self,
        names: Sequence[str] = (),
        chosen: Sequence[str] = (),
        keep: Sequence[str] = (),
        *,
        cells: bool = False,
        unfit: Mapping[str, str] | None = None,
    ) -> None:
        # Of two columns of one name nobody knows which is meant, and what has no name cannot be named.
        there = [name for name in names if name and names.count(name) == 1]
        wanted = [name for name in there if (name in keep if keep else name not in chosen)]
        self._unfit = {name: why for name, why in (unfit or {}).items() if name in wanted}
        if keep:
            self._unfit |= {name: NOT_NAMED for name in there if name not in wanted}
        # Those that are read.
        self.names = tuple(name for name in wanted if name not in self._unfit)
        self._columns = {name: _Column(cells=cells, is_named=name in keep) for name in self.names}

    def split_off(self, rows: Iterator[tuple[Any, ...]], count: int) -> Iterator[tuple[Any, ...]]:
        """Rows without these columns, which stand behind a number and ``count`` values."""
        return self._split_off(rows, count + 1) if self.names else rows

    def _split_off(self, rows: Iterator[tuple[Any, ...]], count: int) -> Iterator[tuple[Any, ...]]:
        block: list[tuple[Any, ...]] = []
        for row in rows:
            block.append(row[count:])
            yield row[:count]
            if len(block) == _ROWS_AT_ONCE:
                self._take(block)
                block = []
        self._take(block)

    def _take(self, block: list[tuple[Any, ...]]) -> None:
        for name, values in zip(self.names, zip(*block, strict=True), strict=bool(block)):
            self._columns[name].take(values)

    def take(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Take the values of consecutive rows by column."""
        for name in self.names:
            self._columns[name].take(columns[name])

    def kept(self) -> KeptColumns:
        """The columns of all rows that were taken."""
        columns = {name: column.values() for name, column in self._columns.items()}
        left_out = {name: values for name, values in columns.items() if isinstance(values, str)}
        return KeptColumns(
            values={name: values for name, values in columns.items() if not isinstance(values, str)},
            left_out={**self._unfit, **left_out},
        )


class _Column:
    """The values of one column, as JSON until all have shown what they are."""

    def __init__(self, *, cells: bool, is_named: bool) -> None:
        self._cells = cells
        self._is_named = is_named
        self._kinds: set[str] = set()
        self._blocks: list[str] = []
        # Why it is not kept.
        self._unfit: str | None = None

    def take(self, values: Sequence[Any]) -> None:
        """Take the values of consecutive rows."""
        if self._unfit is not None:
            return
        if self._cells:
            longest = max(map(len, values), default=0)
            self._kinds |= set() if "text" in self._kinds else set(map(_kind_of_cell, {*values}))
            if "text" not in self._kinds and longest >= _DIGITS_OF_LARGE:
                whole = (int(text) for text in {*values} if _WHOLE.fullmatch(text))
                self._kinds |= {_LARGE} if any(abs(value) > MOST_EXACT for value in whole) else set()
        else:
            values = [str(value) if isinstance(value, _AS_TEXT) else value for value in values]
            kinds = {type(value) for value in values}
            if other := next((kind for kind in kinds if kind not in _PLAIN), None):
                self._leave_out(f"it holds values of the type {other.__name__}")
                return
            self._kinds |= {_PLAIN[kind] for kind in kinds}
            if any(type(value) is int and not -_MOST_WHOLE <= value < _MOST_WHOLE for value in values):
                self._kinds.add("text")
            if any(type(value) is int and abs(value) > MOST_EXACT for value in values):
                self._kinds.add(_LARGE)
            longest = max((len(value) for value in values if type(value) is str), default=0)
        if longest > _LONGEST and not self._is_named:
            self._leave_out(f"it has texts of {longest:,} letters, and more than {_LONGEST} are not kept")
            return
        self._blocks.append(json.dumps(values))

    def _leave_out(self, why: str) -> None:
        self._unfit, self._blocks = why, []

    def values(self) -> Values | str:
        """All values; or why they are not kept."""
        if self._unfit is not None:
            return self._unfit
        kinds = self._kinds - {_LARGE}
        numbers = kinds - {_GAP}
        if kinds == {"bool"}:
            return self._array(np.bool_, bool)
        if kinds == {"whole"}:
            return self._array(np.int64, int)
        if kinds == {"whole", _GAP} and _LARGE in self._kinds:
            return self._texts()
        if numbers and numbers <= {"whole", "number"} and not self._has_spellings():
            return self._array(np.float64, lambda value: math.nan if value in (None, "") else float(value))
        return self._texts()

    def _has_spellings(self) -> bool:
        """Whether two cells are one number in other digits: as versions 1.1 and 1.10 are two names."""
        known: dict[float, str] = {}
        is_twice = False
        for block in self._blocks if self._cells and "number" in self._kinds else ():
            for text in {*json.loads(block)} - {""}:
                # 1.0 and 1 are a float and an int, as programs write them; -0.0 is rounded.
                digits = text.removesuffix(".0").lstrip("-")
                is_twice |= known.setdefault(float(text), digits) != digits
            if len(known) > _MOST_NAMES:
                return False
        return is_twice

    def _array(self, dtype: Any, of: Any) -> npt.NDArray[Any]:
        return np.concatenate([np.array([of(value) for value in block], dtype) for block in self._unpacked()])

    def _texts(self) -> Texts | str:
        known: dict[str, int] = {}
        places = []
        for block in self._unpacked():
            texts = ["" if value is None else written(value) for value in block]
            places.append(np.array([known.setdefault(text, len(known)) for text in texts], np.int32))
            if len(known) > _MOST_TEXTS and not self._is_named:
                return f"it has more than {_MOST_TEXTS:,} different texts"
        return Texts(np.concatenate(places), list(known))

    def _unpacked(self) -> Iterator[list[Any]]:
        # Twice at once they would need the double.
        while self._blocks:
            yield json.loads(self._blocks.pop(0))


def _kind_of_cell(text: str) -> str:
    if not text or _WHOLE.fullmatch(text):
        return "whole" if text else _GAP
    return "number" if _NUMBER.fullmatch(text) and not _CODE.fullmatch(text) else "text"
