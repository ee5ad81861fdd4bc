"""Rows of named columns in memory: of a table (CSV, TSV, JSON lines, Parquet), or from Python."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualeval.data.contents import what_it_is
from dualeval.data.table import SUFFIXES, Choose, Row, Table, is_table, is_unicode, open_table
from dualeval.errors import UsageError
from dualeval.further_columns import NO_COLUMNS, FurtherColumns, KeptColumns

# The column of a row's id, where there is one; GLUE's is the second.
_IDS = ("id", "idx")

# Rows from Python: a sequence of mappings, such as a data set of Hugging Face.
PythonRows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The chosen columns of all rows, at least one."""

    # What they are of, for messages and descriptions: the path as it was given, or "rows of a list".
    of: str
    # The same for the options as they are used: the absolute path, or the type.
    source: str
    # The chosen names of columns, and their values, a row each.
    columns: tuple[str, ...]
    values: Sequence[tuple[Any, ...]]
    # Unique: those of a column id or idx, or else the rows' places from 0 on.
    ids: Sequence[str]
    # What the rows' numbers count, "line" or "row", and these.
    unit: str
    numbers: Sequence[int]
    # The names of classes by column, where the data says them.
    class_names: Mapping[str, tuple[str, ...]]
    # Other columns, which no task reads.
    kept: KeptColumns = NO_COLUMNS

    def __len__(self) -> int:
        return len(self.values)

    def column(self, name: str) -> list[Any]:
        """All values of a column."""
        place = self.columns.index(name)
        return [row[place] for row in self.values]

    def where(self, index: int) -> str:
        """Where a row is, for messages: "dev.csv, line 12"."""
        return f"{self.of}, {self.unit} {self.numbers[index]}"

    def text(self, index: int, column: str) -> str:
        """The text in a column of a row; UsageError where there is none."""
        value = self.values[index][self.columns.index(column)]
        if isinstance(value, str) and value.strip() and is_unicode(value):
            return value
        empty = value is None or (isinstance(value, str) and not value.strip())
        found = "is empty" if empty else f"is {value!a} ({type(value).__name__})"
        raise UsageError(f"{self.where(index)}: the column {column!r} {found}, expected a text")

    def fingerprint(self, count: int) -> str:
        """sha256, in hex, over ids and contents of the first ``count`` rows."""
        digest = hashlib.sha256()
        for name, row in zip(self.ids[:count], self.values, strict=False):
            digest.update(json.dumps([name, *row], default=str).encode())
        return digest.hexdigest()


def read_rows(
    data: str | Path | PythonRows, choose: Choose, example: Mapping[str, Any], keep: Sequence[str] = ()
) -> Rows:
    """Read the chosen columns of all rows of a table, or take them from Python; ``keep`` is of others."""
    if not isinstance(data, str | Path):
        return _of_python(data, choose, example, keep)
    path = Path(data)
    if not path.is_file() or not is_table(path):
        found = "does not exist" if not path.exists() else "is no table"
        raise UsageError(f"--data {data} {found}. Expected a file {', '.join(SUFFIXES)}.")
    if (other := what_it_is(path)) is not None:
        raise UsageError(f"--data {data} {other}.")
    table = open_table(path, lambda found: _with_id(found, choose), example, keep=keep)
    return _rows(str(data), str(path.absolute()), table)


def _of_python(data: PythonRows, choose: Choose, example: Mapping[str, Any], keep: Sequence[str]) -> Rows:
    kind = type(data).__name__
    if isinstance(data, Mapping):
        raise UsageError(
            f"the rows are in parts ({', '.join(map(str, data))}): give one, as data['validation']"
        )
    first = next(iter(data), None)
    if not isinstance(first, Mapping):
        found = "empty" if first is None else f"{type(first).__name__}s"
        raise UsageError(
            f"the rows of the {kind} are {found}: expected mappings of column to value, as {dict(example)}. "
            "A table of pandas gives them with to_dict('records')."
        )
    columns = _with_id(list(first), choose)
    features = getattr(data, "features", None) or {}
    names = {column: tuple(each.names) for column, each in features.items() if getattr(each, "names", None)}
    further = FurtherColumns(list(first), columns, keep)
    rows = further.taken(_python_rows(data, columns, further.names, kind), len(columns))
    table = Table(path=Path(kind), unit="row", columns=columns, rows=rows, class_names=names, further=further)
    return _rows(f"rows of a {kind}", kind, table)


def _python_rows(
    data: PythonRows, columns: Sequence[str], further: Sequence[str], kind: str
) -> Iterator[Row]:
    for number, row in enumerate(data):
        try:
            yield (number, *(row[name] for name in columns), *(row.get(name) for name in further))
        except KeyError as error:
            raise UsageError(f"row {number} of the {kind} has no {error.args[0]!r}") from error


def _with_id(found: Sequence[str], choose: Choose) -> tuple[str, ...]:
    """The chosen columns, and behind them that of the ids."""
    chosen = choose(found)
    return (*chosen, *[name for name in _IDS if name in found and name not in chosen][:1])


def _rows(of: str, source: str, table: Table) -> Rows:
    numbers: list[int] = []
    values: list[tuple[Any, ...]] = []
    for number, *row in table.rows:
        numbers.append(number)
        values.append(tuple(row))
    if not values:
        raise UsageError(f"{of} holds no row")
    ids = [str(place) for place in range(len(values))]
    if table.columns[-1] in _IDS:
        own = [str(row[-1]) for row in values]
        # One that rows share, as that of a product, is no row's.
        ids = own if len({*own}) == len(own) and all(own) and all(map(is_unicode, own)) else ids
    return Rows(
        of=of,
        source=source,
        columns=table.columns,
        values=values,
        ids=ids,
        unit=table.unit,
        numbers=numbers,
        class_names=table.class_names,
        kept=table.further.kept(),
    )
