"""JSON lines: an object a row."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dualeval.columns.of_data import FurtherColumns
from dualeval.data.table import Choose, Row, Table, TableOptions, guarded
from dualeval.errors import UsageError


def open_table(
    path: Path, choose: Choose, example: Mapping[str, Any], of_texts: str, options: TableOptions
) -> Table:
    """Open a file of objects."""
    options.refuse_quoting(path)
    shown = json.dumps(example)
    objects = guarded(path, _json_objects(path, shown))
    return table_of_objects(
        path, "line", objects, f"is empty: expected lines such as {shown}", choose, options
    )


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
    rows = _rows(path, unit, itertools.chain([first], objects), columns, further.names)
    return Table(
        path=path, unit=unit, columns=columns, rows=further.split_off(rows, len(columns)), further=further
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


def _rows(
    path: Path,
    unit: str,
    objects: Iterable[tuple[int, dict[str, Any]]],
    columns: Sequence[str],
    further: Sequence[str],
) -> Iterator[Row]:
    for number, value in objects:
        try:
            yield (number, *(value[name] for name in columns), *(value.get(name) for name in further))
        except KeyError as error:
            raise UsageError(f"{path}, {unit} {number} has no {error.args[0]!r}") from error
