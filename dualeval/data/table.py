"""Rows of named columns: of a file (CSV, TSV, JSON lines, Parquet), read once and in order; or in memory."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from dualeval.columns.of_data import NO_COLUMNS, FurtherColumns, KeptColumns
from dualeval.data.contents import what_it_is
from dualeval.data.set_names import TABLES, has_rows, is_tar
from dualeval.data.stores.path import path_at
from dualeval.errors import UsageError
from dualeval.messages import first_of, is_unicode
from dualeval.process.status_line import doing
from dualeval.urls import command_on

_NAMED_AT_MOST = 12

# A row: its number, as ``Table.where`` takes it, and its values in the order of ``Table.columns``.
Row = tuple[Any, ...]
# Which columns are read, of those that a file has.
Choose = Callable[[Sequence[str]], tuple[str, ...]]


class TableOptions(NamedTuple):
    """How a table is read."""

    # Of other columns than the task's, as ``FurtherColumns`` has it.
    keep: tuple[str, ...] = ()
    # What a quotation mark at the beginning of a cell is; None where nobody said it.
    quoting: str | None = None

    def refuse_quoting(self, of: object) -> None:
        """Refuse an option that only CSV and TSV have."""
        if self.quoting is not None:
            raise UsageError(f"--quoting is for .csv and .tsv files, and {of} is not one. Leave it out.")


AS_USUAL = TableOptions()


@dataclass(frozen=True, kw_only=True)
class Table:
    """The rows of a file, which can be read once."""

    path: Path
    # What a row's number counts: "line" or "row".
    unit: str
    # The names of the columns that are read.
    columns: tuple[str, ...]
    rows: Iterator[Row]
    # The names of classes by column, where the file says them, in the order of their indices.
    class_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Those that are kept for the rows of a run; they are all there when `rows` have come to their end.
    further: FurtherColumns = field(default_factory=FurtherColumns)

    def where(self, number: int) -> str:
        """Where a row is, for messages."""
        return f"{self.path}, {self.unit} {number}"


def open_table(
    path: Path, choose: Choose, example: Mapping[str, Any], of_texts: str = "", *, options: TableOptions
) -> Table:
    """Open a table; its rows are read when they are asked for."""
    module = "tar" if is_tar(path) else TABLES[path.suffix.lower()]
    form = import_module(f"dualeval.data.tables.{module}")
    table: Table = form.open_table(path, choose, example, of_texts, options)
    return table


def column_of(
    path: Path | str,
    columns: Sequence[str],
    asked: str | None,
    usual: Sequence[str],
    flag: str,
    what: str,
    hint: str = "",
) -> str:
    """The column that holds ``what``: the one that was asked for, or one of the usual names."""
    there = first_of(columns, _NAMED_AT_MOST)
    if asked is not None:
        if asked not in columns:
            raise UsageError(f"{flag} {asked}: {path} has the columns {there}. Give one of these.")
        return asked
    spelt = [_spelt(columns, name) for name in usual]
    present = [name for names in spelt for name in names]
    if not present:
        raise UsageError(
            f"{path} has the columns {there}: expected one for {what}, named {' or '.join(usual)}, in its "
            f"first line or as its keys. Or say which it is with {flag} NAME.{hint}"
        )
    if len(present) > 1 and len(spelt[0]) != 1:
        raise UsageError(
            f"{path} has the columns {' and '.join(present)}, and each may be that of {what}. Say which with "
            f"{flag} NAME."
        )
    return present[0]


def check_once(path: Path, found: Sequence[str], columns: Sequence[str]) -> None:
    """Refuse a file with two columns of a name that is read."""
    if twice := next((name for name in columns if found.count(name) > 1), None):
        raise UsageError(f"{path} has two columns {twice!r}: leave one out")


def _spelt(columns: Sequence[str], name: str) -> list[str]:
    """The columns of a name in small or capital letters; in small ones alone if there is one."""
    return [name] if name in columns else [each for each in dict.fromkeys(columns) if each.casefold() == name]


def class_names_in(metadata: Mapping[bytes, bytes]) -> dict[str, tuple[str, ...]]:
    """The names of classes by column, as Hugging Face's library writes them beside the rows."""
    content = json.loads(metadata.get(b"huggingface", b"{}"))
    features = content.get("info", {}).get("features", {})
    return {
        column: tuple(feature["names"])
        for column, feature in features.items()
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
    }


def guarded(path: Path, rows: Iterator[Any]) -> Iterator[Any]:
    """The same, with what is wrong with the file as a message."""
    try:
        yield from rows
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        near = error.object[max(0, error.start - 20) : error.end]
        if other := what_it_is(path):
            raise UsageError(f"{path} {other}.") from error
        command = f"iconv -f WINDOWS-1252 -t UTF-8 {{}} > new{path.suffix} (or -f UTF-16)"
        advice = f"Write it anew: {command_on(command.format, path)}"
        raise UsageError(f"{path} is not UTF-8, at {near!r}. {advice}") from error


# The column of a row's id, where there is one; GLUE's is the second.
_IDS = ("id", "idx")

# Rows from Python: a sequence of mappings, such as a data set of Hugging Face.
PythonRows = Sequence[Mapping[str, Any]]


def table_of_objects(
    path: Path,
    unit: str,
    objects: Iterator[tuple[int, dict[str, Any]]],
    no_row: str,
    choose: Choose,
    options: TableOptions,
) -> Table:
    """The table of numbered objects, whose keys are columns; ``no_row`` is the fault of one without any."""
    if (first := next(objects, None)) is None:
        raise UsageError(f"{path} {no_row}")
    names = list(first[1])
    columns = choose(names)
    further = FurtherColumns(names, columns, options.keep)
    rows = _rows_of_objects(path, unit, itertools.chain([first], objects), columns, further.names)
    return Table(
        path=path, unit=unit, columns=columns, rows=further.split_off(rows, len(columns)), further=further
    )


def _rows_of_objects(
    path: Path,
    unit: str,
    objects: Iterator[tuple[int, dict[str, Any]]],
    columns: Sequence[str],
    further: Sequence[str],
) -> Iterator[Row]:
    for number, value in objects:
        try:
            yield (number, *(value[name] for name in columns), *(value.get(name) for name in further))
        except KeyError as error:
            raise UsageError(f"{path}, {unit} {number} has no {error.args[0]!r}") from error


@dataclass(frozen=True, kw_only=True)
class DataRows:
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
        kind = "half a surrogate pair" if isinstance(value, str) else type(value).__name__
        fault = "is empty" if empty else f"is {value!a} ({kind})"
        raise UsageError(f"{self.where(index)}: the column {column!r} {fault}, expected a text")

    def fingerprint(self, count: int) -> str:
        """sha256, in hex, over ids and contents of the first ``count`` rows."""
        digest = hashlib.sha256()
        for name, row in zip(self.ids[:count], self.values, strict=False):
            digest.update(json.dumps([name, *row], default=str).encode())
        return digest.hexdigest()


def read_rows(
    data: str | Path | PythonRows,
    choose: Choose,
    example: Mapping[str, Any],
    options: TableOptions = AS_USUAL,
) -> DataRows:
    """Read the chosen columns of all rows of a table, or take them from Python."""
    if not isinstance(data, str | Path):
        options.refuse_quoting(f"a {type(data).__name__}")
        return _of_python(data, choose, example, options.keep)
    path = path_at(data)
    if not has_rows(path):
        found = "does not exist" if not path.exists() else "is not a table"
        raise UsageError(f"--data {data} {found}. Expected a file {', '.join(TABLES)}, or tar shards.")
    if not is_tar(path) and (other := what_it_is(path)) is not None:
        raise UsageError(f"--data {data} {other}.")
    table = open_table(path, lambda columns: _with_id(columns, choose), example, options=options)
    with doing(f"reading {data}"):
        return _rows(str(path), str(path.absolute()), table)


def _of_python(data: PythonRows, choose: Choose, example: Mapping[str, Any], keep: Sequence[str]) -> DataRows:
    kind = type(data).__name__
    if isinstance(data, Mapping):
        raise UsageError(
            f"the rows are in parts ({', '.join(map(str, data))}): give one, as data['validation']"
        )
    first = next(iter(data), None)
    if not isinstance(first, Mapping):
        fault = "empty" if first is None else f"{type(first).__name__}s"
        raise UsageError(
            f"the rows of the {kind} are {fault}: expected mappings of column to value, as {dict(example)}. "
            "A table of pandas gives them with to_dict('records')."
        )
    columns = _with_id(list(first), choose)
    features = getattr(data, "features", None) or {}
    names = {column: tuple(each.names) for column, each in features.items() if getattr(each, "names", None)}
    further = FurtherColumns(list(first), columns, keep)
    rows = further.split_off(_python_rows(data, columns, further.names, kind), len(columns))
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


def _with_id(columns: Sequence[str], choose: Choose) -> tuple[str, ...]:
    """The chosen columns, and behind them that of the ids."""
    chosen = choose(columns)
    return (*chosen, *[name for name in _IDS if name in columns and name not in chosen][:1])


def _rows(of: str, source: str, table: Table) -> DataRows:
    numbers: list[int] = []
    values: list[tuple[Any, ...]] = []
    for number, *row in table.rows:
        numbers.append(number)
        values.append(tuple(row))
    if not values:
        raise UsageError(f"{of} holds no row")
    ids = [str(place) for place in range(len(values))]
    if table.columns[-1] in _IDS:
        cells = [str(row[-1]) for row in values]
        # A value that rows share, such as a product's number, does not name a row.
        ids = cells if len({*cells}) == len(cells) and all(cells) and all(map(is_unicode, cells)) else ids
    return DataRows(
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
