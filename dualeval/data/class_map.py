"""A class map: a file that says which class each folder is, as JSON or CSV."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualeval.errors import UsageError

_EXPECTED = 'expected {"FOLDER": INDEX, ...} in a .json file or lines FOLDER,INDEX in a .csv file'


@dataclass(frozen=True, kw_only=True)
class ClassMap:
    """Which class each folder is."""

    path: Path
    # Index of the class by name of the folder; None for a folder that is left out.
    classes: dict[str, int | None]


def read_class_map(path: Path) -> ClassMap:
    """Read a class map.

    JSON: one object, folder to index; null leaves a folder out. CSV: two columns, folder and index, in UTF-8,
    with or without a line of headings; an empty index leaves a folder out.
    """
    kind = path.suffix.lower()
    if kind not in (".json", ".csv"):
        raise UsageError(f"--class-map {path}: {_EXPECTED}")
    try:
        text = path.read_text("utf-8-sig")
    except OSError as error:
        raise UsageError(f"--class-map {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--class-map {path} is not UTF-8: {error}") from error
    entries = _of_json(path, text) if kind == ".json" else _of_csv(path, text)
    classes: dict[str, int | None] = {}
    for where, folder, index in entries:
        if folder in classes:
            raise UsageError(f"{where} is there twice. Leave one out.")
        classes[folder] = index
    if not classes:
        raise UsageError(f"--class-map {path} is empty: {_EXPECTED}")
    return ClassMap(path=path, classes=classes)


_Entries = list[tuple[str, str, int | None]]


def _of_json(path: Path, text: str) -> _Entries:
    where = f"--class-map {path}"
    try:
        # Pairs: of a key that stands there twice, a dict would keep the last value without a word.
        pairs = json.loads(text, object_pairs_hook=_Pairs)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}") from error
    if not isinstance(pairs, _Pairs):
        raise UsageError(f"{where} holds a {type(pairs).__name__}: {_EXPECTED}")
    found: _Entries = []
    for folder, index in pairs:
        named = f"{where}: {folder!r}"
        found.append((named, folder, _index(named, index, "null")))
    return found


class _Pairs(list[tuple[str, Any]]):
    """The entries of a JSON object."""


def _of_csv(path: Path, text: str) -> _Entries:
    found: _Entries = []
    try:
        for number, cells in _rows(text):
            where = f"--class-map {path}, line {number}"
            if len(cells) != 2:
                raise UsageError(f"{where} has {len(cells)} columns, expected 2: FOLDER,INDEX")
            folder, index = cells
            named = f"{where}: {folder!r}"
            try:
                found.append((named, folder, _number(index) if index else None))
            except ValueError:
                if found or number > 1:
                    _index(named, index, "an empty one")
                continue  # a line of headings
            _index(named, found[-1][2], "an empty one")
    except csv.Error as error:
        raise UsageError(f"--class-map {path} is not CSV: {error}") from error
    return found


def _number(text: str) -> int:
    # int() takes 1_0 for 10, too.
    if re.fullmatch(r"[+-]?[0-9]+", text, re.ASCII) is None:
        raise ValueError(text)
    return int(text)


def _rows(text: str) -> Iterable[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    for cells in reader:
        if any(cells):
            yield reader.line_num, [cell.strip() for cell in cells]


def _index(where: str, index: Any, left_out: str) -> int | None:
    if index is None or (type(index) is int and index >= 0):
        return index
    turned = " A map of index to folder has to be turned round." if isinstance(index, str | list) else ""
    raise UsageError(
        f"{where} is mapped to {json.dumps(index, ensure_ascii=False)}: expected the class's index, a whole "
        f"number from 0, or {left_out} to leave the folder out.{turned}"
    )
