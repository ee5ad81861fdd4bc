"""Every sample of a run as a row of its page's table; of more than a page has room for, those that matter."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dualeval.comparison.worst import CONFIDENCE, PREDICTION, TARGET, JudgedRows

if TYPE_CHECKING:
    from dualeval.comparison.compared import Comparison
    from dualeval.report.page.runs import Runs

MOST = 100_000
# Of the rows in a page, as JSON.
_BYTES = 4_500_000
# Of a column with more different texts one is searched for, not chosen.
_CHOICES = 300
# Of masks by class, pixels: right, of the target, predicted. Of more classes the table has no columns.
_MASK_COUNTS, _MASK_CLASSES = ("intersection", "target_pixels", "predicted_pixels"), 25
# Behind it a class is named.
WRONG_PIXELS = "wrong pixels of "
# Of a text, where a page has no room for all of it, or one answer of a server.
_LETTERS, _SERVED_LETTERS = 60, 1000


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the table: of all rows numbers, NaN for none; or texts."""

    name: str
    # Of texts int32: their places in `texts`, -1 for none.
    values: npt.NDArray[Any]
    # A ``pyarrow.LargeStringArray`` of different texts; None for numbers.
    texts: Any = None
    # Of numbers, those that are NaN: in `values` they are infinite, on the side of the worst.
    nans: npt.NDArray[np.bool_] | None = None
    # Of numbers, whether the page filters by them: by one of many it only sorts.
    filters: bool = True

    @property
    def is_choice(self) -> bool:
        """Whether rows are chosen by these texts: a few, which are not one a row."""
        return self.texts is not None and 0 < len(self.texts) <= min(_CHOICES, len(self.values) - 1)

    def some(self, places: npt.NDArray[Any]) -> list[Any]:
        """The values of these rows, for people: None for none."""
        values = self.values[places].tolist()
        if self.texts is None:
            nans = [False] * len(values) if self.nans is None else self.nans[places].tolist()
            return ["nan" if is_nan else _number(each) for each, is_nan in zip(values, nans, strict=True)]
        return [None if each < 0 else _begun(self.texts[each].as_py(), _SERVED_LETTERS) for each in values]

    def embedded(self, places: npt.NDArray[Any], letters: int | None = None) -> dict[str, Any]:
        """These rows as they are in a page, with the texts that they need; of each the first ``letters``."""
        if self.texts is None:
            is_low = self.nans is not None and bool((self.values[self.nans] < 0).any())
            more = {**({"low": True} if is_low else {}), **({} if self.filters else {"plain": True})}
            return {"name": self.name, "values": self.some(places), **more}
        used, of_rows = np.unique(self.values[places], return_inverse=True)
        has_none = int(len(used) > 0 and used[0] < 0)
        texts = [_begun(each, letters) for each in self.texts.take(used[has_none:]).to_pylist()]
        column = {"name": self.name, "texts": texts, "choice": self.is_choice}
        values = [None if each < 0 else each for each in (of_rows - has_none).tolist()]
        return column if values == [*range(len(texts))] else {**column, "values": values}


def columns_of(runs: Runs) -> list[Column]:
    """The table of all rows of a run, with what other runs say of the same samples."""
    rows = runs.rows
    columns = [
        Column(name="id", values=np.arange(rows.rows.count, dtype=np.int32), texts=rows.rows.whole("id"))
    ]
    columns += _judged(rows)
    for name in rows.further:
        if (column := _of_file(rows, name)) is not None:
            columns.append(column)
    columns += _wrong_pixels(rows)
    for run, other in runs.others.items():
        there = other.places_of(columns[0].texts)
        for column in _judged(other):
            if column.name != TARGET:
                none = np.append(column.values, np.array([-1 if column.texts is not None else np.nan]))
                # Those that the other run lacks are at -1: the last one, which is none.
                values = none.astype(column.values.dtype)[there]
                nans = None if column.nans is None else np.append(column.nans, False)[there]
                columns.append(replace(column, name=f"{column.name} in {run}", values=values, nans=nans))
    return columns


def rows_of(
    columns: Sequence[Column], rows: JudgedRows, comparisons: Sequence[Comparison] = ()
) -> dict[str, Any]:
    """What a page has of its table: ``columns``, and how many rows there are in ``of``.

    A column has a ``name`` and ``values``, numbers or None; those of texts are places in its ``texts``, or
    there are none, and each row has its own text. By a ``choice`` of them rows are chosen. Numbers that JSON
    lacks are "nan", "inf" and "-inf"; a NaN is the lowest of a column that is ``low``, else the highest.
    ``cut`` says that texts end after so many letters; of some of the rows ``gaps`` says how far each one's
    place in the file is from that of the one before it. By a ``plain`` column rows are only sorted.
    """
    of = rows.rows.count
    most = MOST
    letters = _LETTERS if sum(each.texts.nbytes for each in columns[1:] if each.texts) > _BYTES else None
    while True:
        places = np.arange(of) if of <= most else _worst(rows, comparisons, most)
        # Ids are whole: they are links.
        embedded = [each.embedded(places, letters if at else None) for at, each in enumerate(columns)]
        table = {"of": of, "columns": embedded, **({"cut": letters} if letters else {})}
        if len(places) < of:
            table["gaps"] = np.diff(places, prepend=0).tolist()
        size = len(json.dumps(table, separators=(",", ":")))
        if size <= _BYTES or not len(places):
            return table
        if letters is None:
            letters = _LETTERS
            continue
        most = int(0.9 * len(places) * _BYTES / size)


def _worst(rows: JudgedRows, comparisons: Sequence[Comparison], most: int) -> Any:
    """The places of the rows that lists of samples begin with, in the order of the file."""
    listed = [*rows.lists(), *(each for comparison in comparisons for each in rows.lists(comparison))]
    chosen = [rows.worst(each, most // len(listed)).places for each in listed]
    return np.unique(np.concatenate([np.asarray(each, np.int64) for each in chosen] or [np.arange(most)]))


def _judged(rows: JudgedRows) -> Iterator[Column]:
    """Of a run: target, prediction, right or wrong, confidence, measure."""
    judged = rows.judged()
    for name in (TARGET, PREDICTION):
        if name in judged.columns:
            yield _named(rows, name, judged.columns[name])
    if judged.right is not None:
        yield _of_texts("right", ["wrong", "right"], np.nan_to_num(judged.right, nan=-1).astype(np.int32))
    if CONFIDENCE in judged.columns:
        yield _of_numbers(CONFIDENCE, judged.columns[CONFIDENCE])
    if judged.measured is not None and rows.measure is not None:
        yield _of_numbers(rows.measure.name, judged.measured, judged.has_number, is_high=rows.measure.high)


def _named(rows: JudgedRows, name: str, values: npt.NDArray[np.float64]) -> Column:
    """Classes by their names."""
    if not rows.has_classes:
        return _of_numbers(name, values)
    known = {-1: "NaN"} | {place: each for place, each in enumerate(rows.class_names) if each is not None}
    there = np.isfinite(values)
    used, places = np.unique(values[there], return_inverse=True)
    of_rows = np.full(len(values), -1, np.int32)
    of_rows[there] = places
    return _of_texts(name, [known.get(int(each), str(int(each))) for each in used], of_rows)


def _wrong_pixels(rows: JudgedRows) -> Iterator[Column]:
    """Of masks by class: how many pixels are of it or predicted as it, and not both."""
    import pyarrow.compute

    if not {*_MASK_COUNTS} <= {*rows.rows.names} - {*rows.data_names}:
        return
    counts = [rows.rows.whole(name) for name in _MASK_COUNTS]
    [classes, *others] = {getattr(each.type, "list_size", 0) for each in counts}
    for number in range(classes if not others and classes <= _MASK_CLASSES else 0):
        right, target, predicted = (
            np.asarray(pyarrow.compute.list_element(each, number).cast("float64")) for each in counts
        )
        name = dict(enumerate(rows.class_names)).get(number)
        name = str(number) if name is None else name
        yield Column(name=f"{WRONG_PIXELS}{name}", values=target + predicted - 2 * right, filters=False)


def _of_file(rows: JudgedRows, name: str) -> Column | None:
    """A further column as it is in the file; None for one without a number or a text a sample."""
    import pyarrow

    column = rows.rows.whole(name)
    if rows.rows.kinds[name]:
        try:
            # A column of the data has NaN where it has nothing.
            there = None if name in rows.data_names else np.asarray(column.is_valid())
            return _of_numbers(name, np.asarray(column.cast(pyarrow.float64())), there)
        except pyarrow.ArrowInvalid:  # whole numbers beyond those that floats and a browser have
            column = column.cast(pyarrow.large_string())
    if not pyarrow.types.is_large_string(column.type):
        return None
    return _of_texts(name, column, np.arange(len(column), dtype=np.int32))


def _of_numbers(
    name: str,
    values: npt.NDArray[np.float64],
    there: npt.NDArray[np.bool_] | None = None,
    *,
    is_high: bool = True,
) -> Column:
    """``there`` says which rows have a number, NaN or not; ``is_high``, whether high ones are worse."""
    nans = None if there is None else there & np.isnan(values)
    if nans is None or not nans.any():
        return Column(name=name, values=values)
    return Column(name=name, values=np.where(nans, np.inf if is_high else -np.inf, values), nans=nans)


def _of_texts(name: str, texts: Any, places: npt.NDArray[np.int32]) -> Column:
    """A column from texts of which some may be equal or None, and the place of each row's."""
    import pyarrow

    encoded = pyarrow.array(texts, pyarrow.large_string()).dictionary_encode()
    known = np.asarray(encoded.indices.fill_null(-1)).astype(np.int32)
    return Column(name=name, values=np.append(known, np.int32(-1))[places], texts=encoded.dictionary)


def _begun(text: str, letters: int | None) -> str:
    return text if letters is None or len(text) <= letters else f"{text[:letters]}…"


def _number(value: float) -> float | int | str | None:
    """A number with all digits of 32 bits: a page rounds what it shows, and not what it finds."""
    if value != value:
        return None
    if value in (np.inf, -np.inf):
        return "inf" if value > 0 else "-inf"
    return int(value) if value.is_integer() else float(f"{value:.9g}")
