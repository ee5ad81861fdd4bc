"""Tar shards of rows: a sample's texts and the keys of its .json are columns, and its key is its id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dualeval.data.table import Choose, Table, TableOptions, guarded, table_of_objects
from dualeval.data.tar import CLASS, JSON, TEXT, Member, TarReader, tars_at

# The columns of files that hold one value; an object of JSON has its own names.
_COLUMNS = {TEXT: "text", CLASS: "label"}


def open_table(
    path: Path, choose: Choose, example: Mapping[str, Any], of_texts: str, options: TableOptions
) -> Table:
    """Open tar files; each sample has the parts of the first one."""
    options.refuse_quoting(path)
    rows = guarded(path, enumerate(_rows(path), 1))
    no_row = "holds no sample: expected files such as a.txt and a.cls, or a.json"
    return table_of_objects(path, "sample", rows, no_row, choose, options)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    expected: list[str] = []
    for shard in tars_at(path):
        keys = set[str]()
        with TarReader(shard) as reader:
            for key, parts in reader.samples():
                if key in keys:
                    raise reader.repeated(key)
                keys.add(key)
                there = [suffix for suffix in (*_COLUMNS, JSON) if suffix in parts]
                expected = expected or there
                if not there or there != expected:
                    missing = [suffix for suffix in expected if suffix not in there]
                    raise reader.incomplete(key, parts, " and ".join(missing) or f"{TEXT} or {JSON}")
                yield _row(reader, key, parts)


def _row(reader: TarReader, key: str, parts: Mapping[str, Member]) -> dict[str, Any]:
    values = reader.object(parts[JSON]) if JSON in parts else {}
    for suffix, column in _COLUMNS.items():
        if suffix not in parts:
            continue
        if column in values:
            fault = f"has a key {column!r}, and {key}{suffix} is the same column"
            raise reader.refused(parts[JSON][0], fault, "Leave one of them out")
        text = reader.text(parts[suffix])
        values[column] = text.strip() if suffix == CLASS else text
    return {"id": key, **values}
