"""The rows of a manifest, a file that lists pictures with their labels: CSV, TSV, JSON lines or Parquet."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualeval.errors import UsageError

SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")
PATH_COLUMNS = ("path", "image_path", "file_path", "filepath", "file_name", "filename", "file", "image")
LABEL_COLUMNS = ("label", "class", "target", "y")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
# Of questions on texts, as SQuAD has them.
_OF_QUESTIONS = {"question", "questions", "context", "answers"}
_ROWS_AT_ONCE = 1 << 14
_NAMED_AT_MOST = 12

# A row: its number, as ``ManifestRows.where`` takes it, its path and its label.
Row = tuple[int, Any, Any]


@dataclass(frozen=True, kw_only=True)
class ManifestRows:
    """The rows of a manifest, which can be read once."""

    path: Path
    # What a row's number counts: "line" or "row".
    unit: str
    # The names of the two columns that are read.
    columns: tuple[str, str]
    rows: Iterator[Row]

    def where(self, number: int) -> str:
        """Where a row is, for messages."""
        return f"{self.path}, {self.unit} {number}"


def is_manifest(path: Path) -> bool:
    """Whether a path is that of a manifest, by its suffix."""
    return path.suffix.lower() in SUFFIXES and not path.is_dir()


def read_rows(path: Path, path_column: str | None, label_column: str | None) -> ManifestRows:
    """Open a manifest; its rows are read when they are asked for."""
    wanted = (path_column, label_column)
    kind = path.suffix.lower()
    if not path.is_file():
        raise UsageError(f"--data {path} does not exist: expected a manifest, or a folder of images.")
    if kind == ".parquet":
        return _of_parquet(path, wanted)
    return _of_json_lines(path, wanted) if kind == ".jsonl" else _of_csv(path, wanted, _DELIMITERS[kind])


_Wanted = tuple[str | None, str | None]


def _columns(path: Path, found: Sequence[str], wanted: _Wanted) -> tuple[str, str]:
    """The columns of paths and labels among those that a manifest has."""
    asked_path, asked_label = wanted
    return (
        _column(path, found, asked_path, PATH_COLUMNS, "--path-column", "the pictures' paths"),
        _column(path, found, asked_label, LABEL_COLUMNS, "--label-column", "their labels"),
    )


def _column(
    path: Path, found: Sequence[str], asked: str | None, usual: Sequence[str], flag: str, what: str
) -> str:
    there = ", ".join(found[:_NAMED_AT_MOST]) + (", ..." if len(found) > _NAMED_AT_MOST else "")
    if asked is not None:
        if asked not in found:
            raise UsageError(f"{flag} {asked}: {path} has the columns {there}")
        return asked
    spelt = [_spelt(found, name) for name in usual]
    present = [name for names in spelt for name in names]
    if not present:
        hint = ""
        if _OF_QUESTIONS & {name.casefold() for name in found}:
            hint = (
                " For questions on texts type: dualeval run --task question-answering --model DIR --data "
                f"{path}"
            )
        raise UsageError(
            f"{path} has the columns {there}: expected one of {what}, {', '.join(usual)}, in its first line "
            f"or as its keys. Or say which it is with {flag} NAME.{hint}"
        )
    if len(present) > 1 and len(spelt[0]) != 1:
        raise UsageError(
            f"{path} has the columns {' and '.join(present)}, and each may be that of {what}. Say which with "
            f"{flag} NAME."
        )
    return present[0]


def _check_once(path: Path, found: Sequence[str], columns: Sequence[str]) -> None:
    if twice := next((name for name in columns if found.count(name) > 1), None):
        raise UsageError(f"{path} has two columns {twice!r}: leave one out")


def _spelt(found: Sequence[str], name: str) -> list[str]:
    """The columns of a name in small or capital letters; in small ones alone if there is one."""
    return [name] if name in found else [each for each in dict.fromkeys(found) if each.casefold() == name]


# -- CSV -------------------------------------------------------------------------------------------------


def _of_csv(path: Path, wanted: _Wanted, delimiter: str) -> ManifestRows:
    lines = _guarded(path, _csv_cells(path, delimiter))
    try:
        _, header = next(lines)
    except StopIteration:
        raise UsageError(f"{path} is empty: expected a line of headings, path and label") from None
    names = [name.strip() for name in header]
    columns = _columns(path, names, wanted)
    _check_once(path, names, columns)
    places = names.index(columns[0]), names.index(columns[1])
    rows = _csv_rows(path, lines, len(names), *places)
    return ManifestRows(path=path, unit="line", columns=columns, rows=rows)


def _csv_cells(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        for cells in reader:
            if cells:
                yield reader.line_num, cells


def _csv_rows(
    path: Path, lines: Iterator[tuple[int, list[str]]], width: int, at_path: int, at_label: int
) -> Iterator[Row]:
    for number, cells in lines:
        if len(cells) != width:
            raise UsageError(
                f"{path}, line {number} has {len(cells)} columns, expected {width} as in the first line. A "
                "text with a delimiter in it stands in double quotes."
            )
        yield number, cells[at_path], cells[at_label].strip()


def _guarded(path: Path, rows: Iterator[Any]) -> Iterator[Any]:
    """The same, with what is wrong with the file as a message."""
    try:
        yield from rows
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: {error}") from error
    except csv.Error as error:
        raise UsageError(f"{path} is not {path.suffix[1:].upper()}: {error}") from error


# -- JSON lines ------------------------------------------------------------------------------------------


def _of_json_lines(path: Path, wanted: _Wanted) -> ManifestRows:
    objects = _guarded(path, _json_objects(path))
    try:
        first = next(objects)
    except StopIteration:
        raise UsageError(f'{path} is empty: expected lines such as {{"path": "a.jpg", "label": 3}}') from None
    columns = _columns(path, list(first[1]), wanted)
    rows = _json_rows(path, first, objects, *columns)
    return ManifestRows(path=path, unit="line", columns=columns, rows=rows)


def _json_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UsageError(
                    f"{path}, line {number} is not JSON: {error}. Expected one object a line, such as "
                    '{"path": "a.jpg", "label": 3}'
                ) from error
            if not isinstance(value, dict):
                raise UsageError(
                    f"{path}, line {number} holds a {type(value).__name__}, expected an object such as "
                    '{"path": "a.jpg", "label": 3}'
                )
            yield number, value


def _json_rows(
    path: Path,
    first: tuple[int, dict[str, Any]],
    objects: Iterator[tuple[int, dict[str, Any]]],
    path_column: str,
    label_column: str,
) -> Iterator[Row]:
    pair = first
    while True:
        number, value = pair
        try:
            yield number, value[path_column], value[label_column]
        except KeyError as error:
            raise UsageError(f"{path}, line {number} has no {error.args[0]!r}") from error
        try:
            pair = next(objects)
        except StopIteration:
            return


# -- Parquet ---------------------------------------------------------------------------------------------


def _of_parquet(path: Path, wanted: _Wanted) -> ManifestRows:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise UsageError(f"{path} cannot be read as Parquet: {error}") from error
    schema = file.schema_arrow
    columns = _columns(path, schema.names, wanted)
    _check_once(path, schema.names, columns)
    types, kinds = pyarrow.types, [schema.field(name).type for name in columns]
    if types.is_struct(kinds[0]) or types.is_binary(kinds[0]) or types.is_large_binary(kinds[0]):
        raise UsageError(
            f"{path}: the column {columns[0]!r} holds {kinds[0]}, expected texts, the paths of picture files."
            " Pictures inside a Parquet file are not read."
        )
    rows = _parquet_rows(path, file, columns, pyarrow.ArrowException)
    return ManifestRows(path=path, unit="row", columns=columns, rows=rows)


def _parquet_rows(
    path: Path, file: Any, columns: tuple[str, str], arrow_error: type[Exception]
) -> Iterator[Row]:
    number = 0
    try:
        # One thread: reading processes are forked later, and have none of a pool's.
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=list(columns), use_threads=False):
            texts, labels = (batch.column(name).to_pylist() for name in columns)
            for text, label in zip(texts, labels, strict=True):
                number += 1
                yield number, text, label
    except (OSError, arrow_error) as error:
        raise UsageError(f"{path}, after row {number}, cannot be read: {error}") from error
    finally:
        file.close()
