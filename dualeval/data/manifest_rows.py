"""The rows of a manifest, a table that lists pictures with their labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dualeval.data.table import Table, column_of, open_table
from dualeval.errors import UsageError

PATH_COLUMNS = ("path", "image_path", "file_path", "filepath", "file_name", "filename", "file", "image")
LABEL_COLUMNS = ("label", "class", "target", "y")
# Of questions on texts, as SQuAD has them.
_OF_QUESTIONS = {"question", "questions", "context", "answers"}
_EXAMPLE = {"path": "a.jpg", "label": 3}
_PICTURES = ", the paths of picture files. Pictures inside a Parquet file are not read."


def read_rows(
    path: Path, path_column: str | None, label_column: str | None, keep: Sequence[str] = ()
) -> Table:
    """Open a manifest: rows of path and label; ``keep`` is that of ``FurtherColumns``."""
    if not path.is_file():
        raise UsageError(f"--data {path} does not exist: expected a manifest, or a folder of images.")

    def choose(found: Sequence[str]) -> tuple[str, str]:
        hint = ""
        if _OF_QUESTIONS & {name.casefold() for name in found}:
            hint = (
                " For questions on texts type: dualeval run --task question-answering --model DIR --data "
                f"{path}"
            )
        return (
            column_of(path, found, path_column, PATH_COLUMNS, "--path-column", "the pictures' paths", hint),
            column_of(path, found, label_column, LABEL_COLUMNS, "--label-column", "their labels", hint),
        )

    table = open_table(path, choose, _EXAMPLE, _PICTURES, keep)
    if path.suffix.lower() in (".csv", ".tsv"):
        return replace(table, rows=((number, name, label.strip()) for number, name, label in table.rows))
    return table
