"""Rows of tables and from Python: the same rows, with where each of them is."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from dualeval.data.table import Rows, column_of, read_rows
from dualeval.errors import UsageError

ROWS = [
    {"other": 1.5, "text": "größe, and\ta tab", "idx": 7},
    {"other": 2.5, "text": 'a "quoted"\nline', "idx": 4},
    {"other": 3.5, "text": " plain ", "idx": 9},
]
EXAMPLE = {"text": "a text"}


def choose(found: Sequence[str]) -> tuple[str, ...]:
    return (column_of("DATA", found, None, ["text"], "--text", "the texts"),)


def written(folder: Path, kind: str, rows: Sequence[dict[str, Any]] = ROWS) -> Path:
    path = folder / f"rows{kind}"
    if kind == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    elif kind == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        mark = {".csv": ",", ".tsv": "\t"}[kind]
        quoted = [['"{}"'.format(str(value).replace('"', '""')) for value in row.values()] for row in rows]
        path.write_text("\n".join(mark.join(line) for line in [list(rows[0]), *quoted]), "utf-8")
    return path


def contents(rows: Rows) -> tuple[Any, ...]:
    return list(rows.ids), rows.column("text"), [rows.text(place, "text") for place in range(len(rows))]


@pytest.mark.parametrize("kind", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_the_same_rows_of_every_table_and_from_python(tmp_path: Path, kind: str) -> None:
    texts = [row["text"] for row in ROWS]
    from_python = read_rows(ROWS, choose, EXAMPLE)
    path = written(tmp_path, kind)
    found = read_rows(path, choose, EXAMPLE)
    assert contents(found) == contents(from_python) == (["7", "4", "9"], texts, texts)
    assert (found.of, found.source) == (str(path), str(path.absolute()))
    assert (from_python.of, from_python.source) == ("rows of a list", "list")
    last = {".csv": "line 5", ".tsv": "line 5", ".jsonl": "line 3", ".parquet": "row 3"}[kind]
    assert found.where(2) == f"{path}, {last}"
    assert from_python.where(2) == "rows of a list, row 2"


def test_the_fingerprint_is_of_ids_and_contents_of_the_first_rows() -> None:
    def fingerprint(count: int, **changed: Any) -> str:
        rows = [*ROWS[:2], {**ROWS[2], **changed}]
        return read_rows(rows, choose, EXAMPLE).fingerprint(count)

    assert fingerprint(3) == fingerprint(3, other=9)  # it is not read
    assert len({fingerprint(3), fingerprint(3, text="x"), fingerprint(3, idx=8), fingerprint(2)}) == 4
    assert fingerprint(2) == fingerprint(2, text="x")


@pytest.mark.parametrize(
    "ids", [["a", "a", "b"], ["a", "", "b"], ["a", "\ud800", "b"]], ids=["twice", "empty", "surrogate"]
)
def test_ids_that_are_no_rows_own_are_left(ids: list[str]) -> None:
    rows = [{"text": "x", "id": each} for each in ids]
    assert read_rows(rows, choose, EXAMPLE).ids == ["0", "1", "2"]


def test_names_of_classes_that_a_data_set_of_hugging_face_has(tmp_path: Path) -> None:
    features = {
        "text": {"dtype": "string", "_type": "Value"},
        "label": {"names": ["no", "yes"], "_type": "ClassLabel"},
    }
    table = pyarrow.table({"text": ["x"], "label": [1]})
    metadata = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), tmp_path / "rows.parquet")
    found = read_rows(tmp_path / "rows.parquet", choose, EXAMPLE)
    assert found.class_names == {"label": ("no", "yes")}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        (None, "is empty"),
        (3, "is 3 (int)"),
        ("half \ud800", "is 'half \\ud800' (str)"),
    ],
)
def test_what_is_no_text_is_named_with_its_row(value: Any, said: str) -> None:
    rows = read_rows([*ROWS, {"text": value, "idx": 1}], choose, EXAMPLE)
    with pytest.raises(
        UsageError, match=re.escape(f"rows of a list, row 3: the column 'text' {said}, expected")
    ):
        rows.text(3, "text")


def test_refusals(tmp_path: Path) -> None:
    page = tmp_path / "page.csv"
    page.write_text("<!DOCTYPE html><html></html>")
    only_headings = tmp_path / "headings.csv"
    only_headings.write_text("text,label\n")
    (tmp_path / "rows.txt").touch()
    refusals: list[tuple[Any, str]] = [
        (tmp_path / "none.csv", "does not exist. Expected a file .csv, .tsv, .jsonl, .parquet."),
        (tmp_path / "rows.txt", "is no table. Expected a file .csv, .tsv, .jsonl, .parquet."),
        (tmp_path, "is no table"),
        (page, "is a web page"),
        (only_headings, "headings.csv holds no row"),
        ([], "the rows of the list are empty"),
        (
            ["a", "b"],
            "the list are strs: expected mappings of column to value, as {'text': 'a text'}",
        ),
        ({"train": ROWS, "test": ROWS}, "the rows are in parts (train, test): give one, as data['validat"),
        ([*ROWS, {"idx": 3}], "row 3 of the list has no 'text'"),
        ([{"words": "x"}], "has the columns words: expected one of the texts (text"),
    ]
    for data, said in refusals:
        with pytest.raises(UsageError, match=re.escape(said)):
            read_rows(data, choose, EXAMPLE)
