"""Parquet: columns by row groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dualeval.columns.of_data import FurtherColumns
from dualeval.data.parquet_file import opened_parquet
from dualeval.data.set_names import is_picture_type
from dualeval.data.table import Choose, Row, Table, TableOptions, check_once, class_names_in
from dualeval.errors import UsageError

_ROWS_AT_ONCE = 1 << 14


def open_table(
    path: Path, choose: Choose, example: Mapping[str, Any], of_texts: str, options: TableOptions
) -> Table:
    """Open a file of columns, of which those that are read are."""
    options.refuse_quoting(path)
    import pyarrow

    try:
        with opened_parquet(path) as file:
            schema, types = file.schema_arrow, pyarrow.types
    except (OSError, pyarrow.ArrowException) as error:
        raise UsageError(f"{path} cannot be read as Parquet: {error}") from error
    # Pictures, or other bytes.
    pictures = [
        each
        for each in schema
        if types.is_binary(each.type) or types.is_large_binary(each.type) or is_picture_type(each.type)
    ]
    try:
        columns = choose(schema.names)
    except UsageError as error:
        if not pictures or not of_texts:
            raise
        raise UsageError(f"{error}{_not_texts(pictures[0], of_texts)}") from error
    check_once(path, schema.names, columns)
    chosen = schema.field(columns[0])
    if types.is_struct(chosen.type) or chosen in pictures:
        raise UsageError(f"{path}:{_not_texts(chosen, of_texts)}")
    unfit = {
        each.name: f"it holds {each.type}"
        for each in schema
        if types.is_nested(each.type) or each in pictures
    }
    further = FurtherColumns(schema.names, columns, options.keep, unfit=unfit)
    rows = _parquet_rows(path, schema, (*columns, *further.names), pyarrow.ArrowException)
    return Table(
        path=path,
        unit="row",
        columns=columns,
        rows=further.split_off(rows, len(columns)),
        class_names=class_names_in(schema.metadata or {}),
        further=further,
    )


def _not_texts(column: Any, of_texts: str) -> str:
    return f" The column {column.name!r} holds {column.type}, expected texts{of_texts}"


def _parquet_rows(
    path: Path, schema: Any, columns: Sequence[str], arrow_error: type[Exception]
) -> Iterator[Row]:
    number = 0
    try:
        with opened_parquet(path) as file:
            if not file.schema_arrow.equals(schema, check_metadata=True):
                raise OSError("it has changed meanwhile")
            # One thread: reading processes are forked later, and have none of a pool's.
            for batch in file.iter_batches(
                _ROWS_AT_ONCE, columns=list(dict.fromkeys(columns)), use_threads=False
            ):
                for values in zip(*(batch.column(name).to_pylist() for name in columns), strict=True):
                    number += 1
                    yield (number, *values)
    except (OSError, arrow_error) as error:
        raise UsageError(f"{path}, after row {number}, cannot be read: {error}") from error
