"""CSV and TSV: cells with a delimiter between."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dualeval.columns.of_data import FurtherColumns
from dualeval.data.table import Choose, Row, Table, TableOptions, check_once, guarded
from dualeval.errors import UsageError
from dualeval.options.choices import STANDARD_QUOTES

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_WITH_COMMAS = (
    "write it with commas: python -c \"import csv; csv.writer(open('new.csv', 'w', newline='')).writerows("
    "csv.reader(open('%s', newline='', encoding='utf-8-sig'), delimiter='%s'))\""
)
_LONGEST_CELL = 2**31 - 1


def open_table(
    path: Path, choose: Choose, example: Mapping[str, Any], of_texts: str, options: TableOptions
) -> Table:
    """Open a file whose first line has the headings."""
    delimiter = _DELIMITERS[path.suffix.lower()]
    lines = guarded(path, _csv_cells(path, delimiter, options.quoting))
    if (header := next(lines, None)) is None:
        raise UsageError(f"{path} is empty: expected a line of headings, {' and '.join(example)}")
    names = [name.strip() for name in header[1]]
    _check_delimiter(path, names, delimiter)
    columns = choose(names)
    check_once(path, names, columns)
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
        suffix = {separator: suffix for suffix, separator in _DELIMITERS.items()}.get(other)
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
