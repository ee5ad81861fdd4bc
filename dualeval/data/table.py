"""Rows of named columns: of a file (CSV, TSV, JSON lines, Parquet), read once and in order; or in memory."""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dualeval.columns.of_data import NO_COLUMNS, FurtherColumns, KeptColumns
from dualeval.data.contents import what_it_is
from dualeval.errors import UsageError
from dualeval.messages import first_of, is_unicode
from dualeval.options.choices import STANDARD_QUOTES
from dualeval.process.status_line import doing

SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_ROWS_AT_ONCE = 1 << 14
_NAMED_AT_MOST = 12
_WITH_COMMAS = (
    "write it with commas: python -c \"import csv; csv.writer(open('new.csv', 'w', newline='')).writerows("
    "csv.reader(open('%s', newline='', encoding='utf-8-sig'), delimiter='%s'))\""
)
_LONGEST_CELL = 2**31 - 1

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


def is_table(path: Path) -> bool:
    """Whether a path is that of a table, by its suffix."""
    return path.suffix.lower() in SUFFIXES and not path.is_dir()


def open_table(
    path: Path, choose: Choose, example: Mapping[str, Any], of_texts: str = "", *, options: TableOptions
) -> Table:
    """Open a table; its rows are read when they are asked for."""
    kind = path.suffix.lower()
    if kind in _DELIMITERS:
        return _of_csv(path, choose, options, " and ".join(example))
    options.refuse_quoting(path)
    if kind == ".parquet":
        return _of_parquet(path, choose, of_texts, options.keep)
    return _of_json_lines(path, choose, json.dumps(example), options.keep)


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
            f"{path} has the columns {there}: expected one of {what} ({', '.join(usual)}) in its first line "
            f"or as its keys. Or say which it is with {flag} NAME.{hint}"
        )
    if len(present) > 1 and len(spelt[0]) != 1:
        raise UsageError(
            f"{path} has the columns {' and '.join(present)}, and each may be that of {what}. Say which with "
            f"{flag} NAME."
        )
    return present[0]


def _check_once(path: Path, names: Sequence[str], columns: Sequence[str]) -> None:
    if twice := next((name for name in columns if names.count(name) > 1), None):
        raise UsageError(f"{path} has two columns {twice!r}: leave one out")


def _spelt(columns: Sequence[str], name: str) -> list[str]:
    """The columns of a name in small or capital letters; in small ones alone if there is one."""
    return [name] if name in columns else [each for each in dict.fromkeys(columns) if each.casefold() == name]


# -- CSV -------------------------------------------------------------------------------------------------


def _of_csv(path: Path, choose: Choose, options: TableOptions, headings: str) -> Table:
    delimiter = _DELIMITERS[path.suffix.lower()]
    lines = _guarded(path, _csv_cells(path, delimiter, options.quoting))
    if (header := next(lines, None)) is None:
        raise UsageError(f"{path} is empty: expected a line of headings, {headings}")
    names = [name.strip() for name in header[1]]
    _check_delimiter(path, names, delimiter)
    columns = choose(names)
    _check_once(path, names, columns)
    further = FurtherColumns(names, columns, options.keep, cells=True)
    places = [names.index(name) for name in (*columns, *further.names)]
    rows = further.split_off(_csv_rows(path, lines, len(names), places), len(columns))
    return Table(path=path, unit="line", columns=columns, rows=rows, further=further)


def _check_delimiter(path: Path, names: Sequence[str], delimiter: str) -> None:
    """Refuse a file whose columns something else separates."""
    if names[0].startswith("sep="):
        raise UsageError(f"{path}, line 1 is {names[0]!r}, which only Excel reads. Remove it.")
    other = next((each for each in ",\t;|" if each != delimiter and each in names[0]), None)
    if other is not None and len(names) == 1:
        suffix = {mark: suffix for suffix, mark in _DELIMITERS.items()}.get(other)
        advice = f"rename it to {path.with_suffix(suffix).name}" if suffix else _WITH_COMMAS % (path, other)
        raise UsageError(f"{path} has one column, {names[0]!r}. Where {other!r} separates columns, {advice}")


def _csv_cells(path: Path, delimiter: str, quoting: str | None) -> Iterator[tuple[int, list[str]]]:
    """The cells of each line that has any, behind its number."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        if quoting == STANDARD_QUOTES or (quoting is None and delimiter == ","):
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            while (cells := _next_cells(path, reader)) is not None:
                if cells:
                    yield reader.line_num, cells
            return
        for number, line in enumerate(file, 1):
            cells = line.rstrip("\r\n").split(delimiter)
            if quoting is None and '"' in line and any(cell.startswith('"') for cell in cells):
                raise UsageError(
                    f"{path}, line {number} has a cell that begins with a quotation mark. Say what it is: "
                    "--quoting none (part of the text, as in GLUE's files) or --quoting standard (it "
                    "encloses the cell, as pandas writes it)."
                )
            if cells != [""]:
                yield number, cells


def _next_cells(path: Path, reader: Any) -> list[str] | None:
    limit = csv.field_size_limit(_LONGEST_CELL)  # of the whole process
    try:
        return next(reader, None)
    except csv.Error as error:
        raise UsageError(
            f"{path}, line {reader.line_num} is not {path.suffix[1:].upper()}: {error}. A quotation mark "
            'in a quoted cell is written twice, as ""; where the file has \\", write it anew: '
            'pandas.read_csv(FILE, escapechar="\\\\").to_csv(NEW, index=False). Where no cell is quoted and '
            "the marks are part of the texts, give --quoting none."
        ) from error
    finally:
        csv.field_size_limit(limit)


def _csv_rows(
    path: Path, lines: Iterator[tuple[int, list[str]]], width: int, places: Sequence[int]
) -> Iterator[Row]:
    for number, cells in lines:
        if len(cells) != width:
            raise UsageError(
                f"{path}, line {number} has {len(cells)} columns, expected {width} as in the first line. Put "
                "a text with a delimiter in it in double quotes (--quoting standard)."
            )
        yield (number, *(cells[place] for place in places))


def _guarded(path: Path, rows: Iterator[Any]) -> Iterator[Any]:
    """The same, with what is wrong with the file as a message."""
    try:
        yield from rows
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        near = error.object[max(0, error.start - 20) : error.end]
        advice = f"Write it anew: iconv -f WINDOWS-1252 -t UTF-8 {path} > new{path.suffix} (or -f UTF-16)"
        raise UsageError(f"{path} is not UTF-8, at {near!r}. {advice}") from error


# -- JSON lines ------------------------------------------------------------------------------------------


def _of_json_lines(path: Path, choose: Choose, example: str, keep: Sequence[str]) -> Table:
    objects = _guarded(path, _json_objects(path, example))
    if (first := next(objects, None)) is None:
        raise UsageError(f"{path} is empty: expected lines such as {example}")
    columns = choose(list(first[1]))
    further = FurtherColumns(list(first[1]), columns, keep)
    rows = _json_rows(path, itertools.chain([first], objects), columns, further.names)
    return Table(
        path=path, unit="line", columns=columns, rows=further.split_off(rows, len(columns)), further=further
    )


def _json_objects(path: Path, example: str) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UsageError(
                    f"{path}, line {number} is not JSON: {error}. Expected one object per line, such as "
                    f"{example}"
                ) from error
            if not isinstance(value, dict):
                raise UsageError(
                    f"{path}, line {number} holds a {type(value).__name__}, expected an object such as "
                    f"{example}"
                )
            yield number, value


def _json_rows(
    path: Path, objects: Iterable[tuple[int, dict[str, Any]]], columns: Sequence[str], further: Sequence[str]
) -> Iterator[Row]:
    for number, value in objects:
        try:
            yield (number, *(value[name] for name in columns), *(value.get(name) for name in further))
        except KeyError as error:
            raise UsageError(f"{path}, line {number} has no {error.args[0]!r}") from error


# -- Parquet ---------------------------------------------------------------------------------------------


def _of_parquet(path: Path, choose: Choose, of_texts: str, keep: Sequence[str]) -> Table:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise UsageError(f"{path} cannot be read as Parquet: {error}") from error
    schema = file.schema_arrow
    columns = choose(schema.names)
    _check_once(path, schema.names, columns)
    types, kind = pyarrow.types, schema.field(columns[0]).type
    if types.is_struct(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        raise UsageError(f"{path}: the column {columns[0]!r} holds {kind}, expected texts{of_texts}")
    unfit = {
        each.name: f"it holds {each.type}"
        for each in schema
        if types.is_nested(each.type) or types.is_binary(each.type) or types.is_large_binary(each.type)
    }
    further = FurtherColumns(schema.names, columns, keep, unfit=unfit)
    rows = _parquet_rows(path, file, (*columns, *further.names), pyarrow.ArrowException)
    return Table(
        path=path,
        unit="row",
        columns=columns,
        rows=further.split_off(rows, len(columns)),
        class_names=_class_names(schema.metadata or {}),
        further=further,
    )


def _class_names(metadata: Mapping[bytes, bytes]) -> dict[str, tuple[str, ...]]:
    """The names of classes by column, as Hugging Face's library writes them beside the rows."""
    content = json.loads(metadata.get(b"huggingface", b"{}"))
    features = content.get("info", {}).get("features", {})
    return {
        column: tuple(feature["names"])
        for column, feature in features.items()
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
    }


def _parquet_rows(
    path: Path, file: Any, columns: Sequence[str], arrow_error: type[Exception]
) -> Iterator[Row]:
    number = 0
    try:
        # One thread: reading processes are forked later, and have none of a pool's.
        for batch in file.iter_batches(
            _ROWS_AT_ONCE, columns=list(dict.fromkeys(columns)), use_threads=False
        ):
            for values in zip(*(batch.column(name).to_pylist() for name in columns), strict=True):
                number += 1
                yield (number, *values)
    except (OSError, arrow_error) as error:
        raise UsageError(f"{path}, after row {number}, cannot be read: {error}") from error
    finally:
        file.close()


# The column of a row's id, where there is one; GLUE's is the second.
_IDS = ("id", "idx")

# Rows from Python: a sequence of mappings, such as a data set of Hugging Face.
PythonRows = Sequence[Mapping[str, Any]]


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
    path = Path(data)
    if not path.is_file() or not is_table(path):
        fault = "does not exist" if not path.exists() else "is not a table"
        raise UsageError(f"--data {data} {fault}. Expected a file {', '.join(SUFFIXES)}.")
    if (other := what_it_is(path)) is not None:
        raise UsageError(f"--data {data} {other}.")
    table = open_table(path, lambda columns: _with_id(columns, choose), example, options=options)
    with doing(f"reading {data}"):
        return _rows(str(data), str(path.absolute()), table)


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
