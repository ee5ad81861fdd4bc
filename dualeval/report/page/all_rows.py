"""All rows of a run for its page, searched, chosen and sorted as the page asks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from dualeval.report.page.rows import Column

# In one answer; a page shows fewer.
_AT_ONCE = 500


class AllRows:
    """The table of a page that has not all of its rows: it asks for those in sight."""

    def __init__(self, columns: Sequence[Column]) -> None:
        import pyarrow.compute

        self._columns = columns
        self._count = len(columns[0].values)
        # As they are searched.
        self._lowered = [
            (each, pyarrow.compute.utf8_lower(each.texts)) for each in columns if each.texts is not None
        ]
        # A key after the other asks for the same order; one takes 4 bytes a row.
        self._order = lru_cache(4)(self._sorted)
        self._found = lru_cache(1)(self._places)

    def head(self) -> dict[str, Any]:
        """What a page has of its table, as `rows.rows_of`: the columns, without their rows."""
        columns: list[dict[str, Any]] = []
        for column in self._columns:
            texts = column.texts.to_pylist() if column.is_choice else []
            of_texts = {"texts": texts, "choice": column.is_choice}
            of_numbers = {} if column.filters else {"plain": True}
            columns.append({"name": column.name, **(of_numbers if column.texts is None else of_texts)})
        return {"of": self._count, "columns": columns, "served": True}

    def rows(self, query: str, first: int, last: int) -> dict[str, Any]:
        """How many rows a query finds, and some of them: the place of each in the file, then its values.

        A query is the JSON of words to ``search``, of ``tests``, [column, from, to] with numbers (of texts,
        places in those of ``head``) or null, and of what it is ``sorted`` by, [column, 1 or -1]; -1: by none.
        Raises ValueError, TypeError, LookupError or AttributeError for any other.
        """
        found = self._found(query)
        places = found[max(first, 0) : min(last, first + _AT_ONCE)]
        columns = [column.some(places) for column in self._columns]
        return {"found": len(found), "rows": [*zip(places.tolist(), *columns, strict=True)]}

    def place_of(self, name: str) -> int:
        """The row of an id; -1 if there is none."""
        import pyarrow
        import pyarrow.compute

        ids = self._columns[0].texts
        return int(pyarrow.compute.index(ids, pyarrow.scalar(name, ids.type)).as_py())

    def _places(self, query: str) -> npt.NDArray[np.int32]:
        wanted = json.loads(query)
        at, way = wanted["sorted"]
        there = np.ones(self._count, np.bool_)
        for column, low, high in wanted["tests"]:
            values = self._columns[column].values
            there &= values >= (-np.inf if low is None else low)
            there &= values <= (np.inf if high is None else high)
        for word in wanted["search"].lower().split():
            there &= self._with(word)
        if at < 0:
            return np.flatnonzero(there).astype(np.int32)
        order = self._order(at, 1 if way > 0 else -1)
        return order[there[order]]

    def _with(self, text: str) -> npt.NDArray[np.bool_]:
        """Which rows have a text in one of their own."""
        import pyarrow.compute

        hits = np.zeros(self._count, np.bool_)
        for column, lowered in self._lowered:
            # At -1, the last one, is a row's that has no text.
            has = np.append(np.asarray(pyarrow.compute.match_substring(lowered, text)), False)
            hits |= has[column.values]
        return hits

    def _sorted(self, at: int, way: int) -> npt.NDArray[np.int32]:
        """The order by a column: equal ones as in the file, those without a value last."""
        import pyarrow.compute

        column = self._columns[at]
        keys = column.values
        if column.texts is not None:
            ranks = np.full(len(column.texts) + 1, np.nan)
            ranks[np.asarray(pyarrow.compute.array_sort_indices(column.texts))] = np.arange(len(column.texts))
            keys = ranks[keys]
        return np.argsort(way * keys, kind="stable").astype(np.int32)
