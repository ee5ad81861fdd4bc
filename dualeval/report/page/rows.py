"""Every sample of a run as a row of its page's table; of more than there is room for, those that matter."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dualeval.comparison.worst import CONFIDENCE, PREDICTION, TARGET, JudgedRows

if TYPE_CHECKING:
    from dualeval.comparison.compared import Comparison

MOST = 100_000
# Of the rows in a page, as JSON.
_BYTES = 4_500_000
# Of a text: of more a row says the beginning.
_LETTERS = 60


def rows_of(
    rows: JudgedRows, others: Mapping[str, JudgedRows], comparisons: Sequence[Comparison] = ()
) -> dict[str, Any]:
    """The table of a page: ``columns``, and how many rows there are in ``of``.

    A column has a ``name`` and ``values``, numbers or None; those of texts are places in its ``texts``, or
    there are none, and each row has its own text.
    """
    of = rows.rows.count
    most = MOST
    while True:
        places = np.arange(of) if of <= most else _worst(rows, comparisons, most)
        columns = [*_columns(rows, places), *_of_others(rows, others, places)]
        size = len(json.dumps(columns, separators=(",", ":")))
        if size <= _BYTES or not len(places):
            return {"of": of, "columns": columns}
        most = int(0.9 * len(places) * _BYTES / size)


def _worst(rows: JudgedRows, comparisons: Sequence[Comparison], most: int) -> Any:
    """The places of the rows that lists of samples begin with, in the order of the file."""
    listed = [*rows.lists(), *(each for comparison in comparisons for each in rows.lists(comparison))]
    chosen = [rows.worst(each, most // len(listed)).places for each in listed]
    return np.unique(np.concatenate([np.asarray(each, np.int64) for each in chosen] or [np.arange(most)]))


def _columns(rows: JudgedRows, places: Any) -> Iterator[dict[str, Any]]:
    """Of a run: id, target, prediction, right or wrong, confidence, measure, and the columns of the data."""
    table = rows.judged(places)
    yield _column("id", table.ids)
    for name in (TARGET, PREDICTION):
        if name in table.columns:
            yield _column(name, _named(rows, table.columns[name]))
    if table.right is not None:
        yield _column(
            "right", [None if each is None else "right" if each else "wrong" for each in table.right]
        )
    if CONFIDENCE in table.columns:
        yield _column(CONFIDENCE, table.columns[CONFIDENCE])
    if table.measured is not None and rows.measure is not None:
        yield _column(rows.measure.name, table.measured)
    for name in rows.further:
        if (values := rows.rows.some(name, places)) is not None:
            yield _column(name, values)


def _named(rows: JudgedRows, values: Sequence[Any]) -> Sequence[Any]:
    """Classes by their names."""
    if not rows.has_classes:
        return values
    names = rows.class_names
    named = {-1: "NaN"} | {place: name for place, name in enumerate(names) if name is not None}
    return [None if each is None else named.get(int(each), str(int(each))) for each in values]


def _of_others(rows: JudgedRows, others: Mapping[str, JudgedRows], places: Any) -> Iterator[dict[str, Any]]:
    """What other runs say of the same samples: prediction, right or wrong, the measure."""
    if not others:
        return
    ids = rows.rows.whole("id").take(places)
    for run, other in others.items():
        there = other.places_of(ids)
        # Those that the other run lacks are read as its first row, and left out.
        of = [*_columns(other, np.maximum(there, 0))] if other.rows.count else []
        for column in of:
            if column["name"] in (PREDICTION, "right", CONFIDENCE, other.measure and other.measure.name):
                own = column.get("values", range(len(there)))
                values = [
                    value if place >= 0 else None for value, place in zip(own, there.tolist(), strict=True)
                ]
                yield {**column, "name": f"{column['name']}, {run}", "values": values}


def _column(name: str, values: Sequence[Any]) -> dict[str, Any]:
    if not any(isinstance(each, str) for each in values):
        return {"name": name, "values": [_number(each) for each in values]}
    places: dict[str, int] = {}
    texts = [None if each is None else str(each)[:_LETTERS] for each in values]
    found = [None if each is None else places.setdefault(each, len(places)) for each in texts]
    column = {"name": name, "texts": [*places]}
    return column if found == [*range(len(found))] else {**column, "values": found}


def _number(value: Any) -> float | int | None:
    if value is None or not math.isfinite(value):
        return None
    return int(value) if isinstance(value, (bool, int)) else float(f"{value:.4g}") + 0.0  # no -0.0
