"""Columns that no task reads: which are kept, of what type, from each kind of table; and the data sets."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from dualeval.columns import of_data as further_columns
from dualeval.columns.of_data import FurtherColumns, KeptColumns, Texts
from dualeval.data.cache import DataCache
from dualeval.data.image_sets.manifest import ManifestImages
from dualeval.data.labels import indices_of_classes
from dualeval.data.language_rows import read_language_data
from dualeval.data.masks import LabelRule, open_masked
from dualeval.data.preprocessing import Preprocessing
from dualeval.data.table import DataRows, TableOptions, column_of, open_table, read_rows
from dualeval.data.token_groups import DocumentWindows, EncodedTexts
from dualeval.errors import UsageError
from tests.data.test_image_folder import save
from tests.vehicles.made_tokenizers import byte_level


def kept_of(path: Path, keep: Sequence[str] = ()) -> KeptColumns:
    table = open_table(path, lambda found: ("path",), {"path": "a.jpg"}, options=TableOptions(tuple(keep)))
    assert [name for _, name in table.rows] == ["a", "b", "c"]
    return table.further.kept()


def plain(kept: KeptColumns) -> dict[str, tuple[str, list[Any]]]:
    """By column its type, and its values."""
    values = kept.of(range(3))
    return {
        name: ("text", values[name])
        if isinstance(column, Texts)
        else (str(column.dtype), values[name].tolist())
        for name, column in kept.values.items()
    }


CELLS = {
    "whole": (["1", "-2", "0"], "int64", [1, -2, 0]),
    "number": (["1", "2.5", "-1e3"], "float64", [1.0, 2.5, -1000.0]),
    "gaps": (["1", "", "3"], "float64", [1.0, math.nan, 3.0]),
    "ids": (
        ["9007199254740993", "", "9007199254740992"],
        "text",
        ["9007199254740993", "", "9007199254740992"],
    ),
    "code": (["001", "002", "010"], "text", ["001", "002", "010"]),
    "mixed": (["1", "b", ""], "text", ["1", "b", ""]),
    "grouped": (["1_0", "2", "3"], "text", ["1_0", "2", "3"]),
    "versions": (["1.1", "1.10", "1.2"], "text", ["1.1", "1.10", "1.2"]),
    "sites": (["1E2", "100", ""], "text", ["1E2", "100", ""]),
    "signs": (["+1", "1", "2"], "text", ["+1", "1", "2"]),
    "measured": (["-0.0", "0", "0.0"], "float64", [-0.0, 0.0, 0.0]),
    "padded": (["1.10", "-1.10", "nan"], "float64", [1.1, -1.1, math.nan]),
    "huge": (["12345678901234567890123", "1", "2"], "text", ["12345678901234567890123", "1", "2"]),
}


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_cells_are_what_all_of_them_are(tmp_path: Path, suffix: str) -> None:
    sign = {"csv": ",", "tsv": "\t"}[suffix]
    lines = [["path", *CELLS, "", "twice", "twice"]]
    lines += [[name, *(CELLS[each][0][at] for each in CELLS), "", "1", "2"] for at, name in enumerate("abc")]
    (tmp_path / f"t.{suffix}").write_text("".join(f"{sign.join(line)}\n" for line in lines))
    found = plain(kept_of(tmp_path / f"t.{suffix}"))
    assert repr(found) == repr({name: (kind, values) for name, (_, kind, values) in CELLS.items()})


VALUES: Mapping[str, tuple[list[Any], str, list[Any]]] = {
    "bools": ([True, False, True], "bool", [True, False, True]),
    "whole": ([1, 2**62, -3], "int64", [1, 2**62, -3]),
    "number": ([1.5, 2.0, 0.1], "float64", [1.5, 2.0, 0.1]),
    "gaps": ([1, None, 3], "float64", [1.0, math.nan, 3.0]),
    "ids": ([2**53 + 1, None, -(2**53)], "text", ["9007199254740993", "", "-9007199254740992"]),
    "texts": (["x", None, "z"], "text", ["x", "", "z"]),
    "unsure": ([True, None, False], "text", ["True", "", "False"]),
}


def test_values_of_json_lines_and_parquet_have_the_same_types(tmp_path: Path) -> None:
    columns = {"path": [*"abc"], **{name: values for name, (values, _, _) in VALUES.items()}}
    lines = [{name: values[at] for name, values in columns.items()} for at in range(3)]
    # A key that a later line lacks is a gap.
    lines[1].pop("gaps")
    lines[0] |= {"mixed": 1, "huge": 2**64, "nested": [1, 2]}
    lines[1] |= {"mixed": "b", "huge": 1, "nested": [3]}
    lines[2] |= {"mixed": 2.5, "huge": 2, "nested": []}
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    kept = kept_of(tmp_path / "t.jsonl")
    expected = {name: (kind, values) for name, (_, kind, values) in VALUES.items()}
    more = {"mixed": ("text", ["1", "b", "2.5"]), "huge": ("text", [str(2**64), "1", "2"])}
    assert repr(plain(kept)) == repr({**expected, **more})
    assert kept.left_out == {"nested": "it holds values of the type list"}
    table = pyarrow.table({**columns, "day": [date(2024, 1, 2)] * 3, "nested": [[1], [], [2]]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    kept = kept_of(tmp_path / "t.parquet")
    assert repr(plain(kept)) == repr({**expected, "day": ("text", ["2024-01-02"] * 3)})
    assert kept.left_out == {"nested": "it holds list<element: int64>"}


def test_what_is_named_is_kept_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.csv").write_text(
        f"path,report,id2,scanner\na,{'x' * 101},u,A\nb,,v,B\nc,short,w,A\n", encoding="utf-8"
    )
    monkeypatch.setattr(further_columns, "_MOST_TEXTS", 2)
    kept = kept_of(tmp_path / "t.csv")
    assert list(kept.values) == ["scanner"]
    assert kept.left_out == {
        "report": "it has texts of 101 letters, and more than 100 are not kept",
        "id2": "it has more than 2 different texts",
    }
    kept = kept_of(tmp_path / "t.csv", ("report", "path", "id2", "absent"))
    assert plain(kept) == {
        "path": ("text", [*"abc"]),
        "report": ("text", ["x" * 101, "", "short"]),
        "id2": ("text", [*"uvw"]),
    }
    assert kept.left_out == {"scanner": "--keep does not name it"}
    assert not kept_of(tmp_path / "t.csv", ("none",)).values


def test_columns_of_many_rows_are_arrays_and_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block ends at any row; what one block shows to be text is text in all."""
    monkeypatch.setattr(further_columns, "_ROWS_AT_ONCE", 7)
    further = FurtherColumns(["age", "scanner", "late"], cells=True)
    rows = [(at, "p", str(at), "AB"[at % 2], "x" if at == 99 else str(at)) for at in range(100)]
    assert list(further.split_off(iter(rows), 1)) == [(at, "p") for at in range(100)]
    kept = further.kept()
    scanner, age = kept.values["scanner"], kept.values["age"]
    assert isinstance(scanner, Texts) and isinstance(age, np.ndarray)
    assert (scanner.places.nbytes, scanner.distinct, age.nbytes) == (400, ["A", "B"], 800)
    assert kept.of([3, 99])["late"] == ["3", "x"]
    chosen = kept.select(np.array([98, 1]))
    assert chosen.of([0, 1])["scanner"] == ["A", "B"] and chosen.of([0])["age"].tolist() == [98]


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("split", ["train", "test", "train"], "2 of train and 1 of test"),
        ("Subset", ["Training", "Validation", "Training"], "2 of Training and 1 of Validation"),
        ("is_valid", ["True", "False", "False"], "1 of True and 2 of False"),
        ("is_test", [True, False, False], "2 of False and 1 of True"),
        ("split", ["test", "test", "val"], None),
        (
            "fold",
            [1, 2, 3],
            "rows of 3 folds (1, 2, 3), of which a model is usually trained with all but one",
        ),
        ("kfold", [*"aba"], "rows of 2 folds (a, b), of which a model is usually trained with all but one"),
        ("cv_fold", [*range(21)], None),
        ("fold", [2, 2, 2], None),
        ("folder", [1, 2, 3], None),
        ("fold", ["train", "test", "train"], "2 of train and 1 of test"),
        ("is_valid", [True, True, True], None),
        ("label", ["train", "test", "train"], None),
    ],
)
def test_rows_of_training_beside_others_are_said(name: str, values: list[Any], said: str | None) -> None:
    further = FurtherColumns([name])
    further.take({name: values})
    kept = further.kept()
    assert [*kept.train_beside_test()] == ([(name, said)] if said else [])
    of_one_part = kept.select(np.flatnonzero([value == values[0] for value in values]))
    assert not [*of_one_part.train_beside_test()]


def test_texts_that_cannot_be_written_are_escaped() -> None:
    further = FurtherColumns(["a"])
    further.take({"a": ["\ud800x"]})
    assert further.kept().of([0]) == {"a": ["\\ud800x"]}


def manifest(tmp_path: Path) -> Path:
    for name in "abcd":
        save(tmp_path / f"{name}.png")
        save(tmp_path / "masks" / f"{name}.png")
    cells = zip("abcd", "xyxz", "ABAB", range(4), strict=True)
    lines = [f"{name}.png,masks/{name}.png,{label},{scanner},{age}" for name, label, scanner, age in cells]
    (tmp_path / "val.csv").write_text("path,mask,class,scanner,age\n" + "\n".join(lines))
    return tmp_path / "val.csv"


class Two:
    """Labels x and z; y is left out."""

    known, class_map, order = None, None, "name"

    def __call__(self, names: Sequence[str], noun: str, where: Any) -> Any:
        found = indices_of_classes()
        object.__setattr__(found, "classes", {"x": 0, "z": 1})
        return found


def test_data_sets_take_their_columns_along(tmp_path: Path) -> None:
    """Also where rows are left out, or drawn."""
    path = manifest(tmp_path)
    images = ManifestImages(path, Preprocessing(), label=Two(), label_column="class")
    assert images.columns([0, 1, 2])["scanner"] == ["A", "A", "B"]
    assert images.select([2, 0]).columns([0, 1])["age"].tolist() == [3, 0]
    masked = open_masked(
        path, None, LabelRule(ignore=(), reduce=False), Preprocessing(), columns=(None, None),
        whole_files=False, cache=DataCache(),
    )  # fmt: skip
    assert masked.select([3]).columns([0])["class"] == ["z"]
    rows = read_rows([{"text": "a", "label": 1, "source": "web"}] * 2, lambda _: ("text", "label"), {})
    assert EncodedTexts(rows, ("text",), None).columns([1]) == {"source": ["web"]}  # type: ignore[arg-type]
    table = tmp_path / "texts.jsonl"
    lines = [{"text": "a river", "year": 1990}, {"text": "the long way to the sea", "year": 2000}]
    table.write_text("\n".join(map(json.dumps, lines)))
    data = read_language_data(table, None)
    windows = DocumentWindows(
        data.documents, byte_level()[0], prefix=0, max_length=4, stride=4, kept=data.kept
    )
    years = windows.columns(range(len(windows)))["year"].tolist()
    assert years == [1990 if windows.document(at) == "0" else 2000 for at in range(len(windows))]
    assert len(years) > 2


def test_a_table_without_further_columns_is_read_as_before(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("path\na\nb\nc\n")
    assert kept_of(tmp_path / "t.csv") == KeptColumns()


# -- rows of tables and from Python: the same rows, with where each of them is ---------------------------


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


def contents(rows: DataRows) -> tuple[Any, ...]:
    return list(rows.ids), rows.column("text"), [rows.text(place, "text") for place in range(len(rows))]


@pytest.mark.parametrize("kind", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_every_table_and_a_list_have_the_same_rows(tmp_path: Path, kind: str) -> None:
    texts = [row["text"] for row in ROWS]
    from_python = read_rows(ROWS, choose, EXAMPLE)
    path = written(tmp_path, kind)
    quoting = "standard" if kind == ".tsv" else None
    found = read_rows(path, choose, EXAMPLE, TableOptions(quoting=quoting))
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
def test_ids_that_are_no_rows_own_are_not_taken(ids: list[str]) -> None:
    rows = [{"text": "x", "id": each} for each in ids]
    assert read_rows(rows, choose, EXAMPLE).ids == ["0", "1", "2"]


def test_names_of_classes_in_a_file_of_hugging_face_are_read(tmp_path: Path) -> None:
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
        ("half \ud800", "is 'half \\ud800' (half a surrogate pair)"),
    ],
)
def test_what_is_no_text_is_named_with_its_row(value: Any, said: str) -> None:
    rows = read_rows([*ROWS, {"text": value, "idx": 1}], choose, EXAMPLE)
    with pytest.raises(
        UsageError, match=re.escape(f"rows of a list, row 3: the column 'text' {said}, expected")
    ):
        rows.text(3, "text")


def test_files_and_rows_that_are_no_table_are_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.csv"
    page.write_text("<!DOCTYPE html><html></html>")
    only_headings = tmp_path / "headings.csv"
    only_headings.write_text("text,label\n")
    (tmp_path / "rows.txt").touch()
    refusals: list[tuple[Any, str]] = [
        (
            tmp_path / "none.csv",
            "does not exist. Expected a file .csv, .tsv, .jsonl, .parquet, or tar shards.",
        ),
        (
            tmp_path / "rows.txt",
            "is not a table. Expected a file .csv, .tsv, .jsonl, .parquet, or tar shards.",
        ),
        (tmp_path, "is not a table"),
        (page, "is a web page"),
        (only_headings, "headings.csv holds no row"),
        ([], "the rows of the list are empty"),
        (["a", "b"], "the list are strs: expected mappings of column to value, as {'text': 'a text'}"),
        ({"train": ROWS, "test": ROWS}, "the rows are in parts (train, test): give one, as data['validat"),
        ([*ROWS, {"idx": 3}], "row 3 of the list has no 'text'"),
        ([{"words": "x"}], "has the columns words: expected one for the texts, named text"),
    ]
    for data, said in refusals:
        with pytest.raises(UsageError, match=re.escape(said)):
            read_rows(data, choose, EXAMPLE)
