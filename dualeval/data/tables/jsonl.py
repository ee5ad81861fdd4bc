"""JSON lines: an object a row."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dualeval.data.table import Choose, Table, TableOptions, guarded, table_of_objects
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
