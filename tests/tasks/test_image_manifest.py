"""Manifests: what is read of each format, what is refused with its line, and that they equal a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from dualeval.data.image_files import FileNames
from dualeval.data.image_sets import manifest
from dualeval.data.image_sets.class_folders import ImageFolder
from dualeval.data.image_sets.manifest import ManifestImages
from dualeval.data.labels import KnownClasses
from dualeval.data.preprocessing import Preprocessing
from dualeval.data.set_names import TABLES, kind_at
from dualeval.errors import EXIT_USAGE, UsageError
from dualeval.tasks.labels import FolderLabels
from dualeval.user_code.origin import own_code
from tests.conftest import working_module
from tests.engine.test_evaluator import evaluate
from tests.tasks.test_image_labels import MODELS, class_map, lay_out, task

SMALL = Preprocessing(resize=20, crop=16)
PICTURES = {"ant": 0, "bee": 1, "cow": 2}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with ``val``, three classes of a picture each, and models that see the class."""
    lay_out(tmp_path / "val", PICTURES)
    with working_module(tmp_path, "reds", MODELS, monkeypatch):
        yield tmp_path


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A manifest of the rows, in the format of its suffix."""
    names = list(rows[0])
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        mark = "\t" if path.suffix == ".tsv" else ","
        lines = [names, *([str(row[name]) for name in names] for row in rows)]
        path.write_text("".join(mark.join(line) + "\r\n" for line in lines), "utf-8-sig")
    return path


def rows_of(label: str = "label", *, named: bool = False) -> list[dict[str, Any]]:
    return [
        {"split": "val", "path": f"val/{name}/0.png", label: name if named else index}
        for name, index in PICTURES.items()
    ]


def opened(
    path: Path, *, classes: Path | None = None, order: str | None = None, **options: Any
) -> ManifestImages:
    known = options.pop("known", None)
    label = FolderLabels(class_map=classes, order=order, num_classes=None, of_weights=known)
    return ManifestImages(path, SMALL, label=label, **options)


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        opened(path, **options)
    assert caught.value.exit_code == EXIT_USAGE
    return str(caught.value)


def text(folder: Path, content: str, name: str = "m.csv") -> Path:
    path = folder / name
    path.write_text(content)
    return path


# -- what is read ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
@pytest.mark.parametrize("named", [False, True])
def test_a_manifest_of_each_format_reads_as_the_folder(home: Path, suffix: str, named: bool) -> None:
    data = opened(write(home / f"m{suffix}", rows_of(named=named)))
    folder = ImageFolder(home / "val", SMALL)
    assert [data.id(index) for index in range(3)] == [f"val/{folder.id(index)}" for index in range(3)]
    assert data.targets.tolist() == folder.targets.tolist() == [0, 1, 2]
    assert data.targets.dtype == np.int32
    for (one, target), (other, same) in zip(
        data.__getitems__(range(3)), folder.__getitems__(range(3)), strict=True
    ):
        assert one.equal(other)
        assert target == same
    assert data.labels.names == (folder.labels.names if named else {})
    assert data.content_fingerprint(range(3)) == folder.content_fingerprint(range(3))


def test_columns_of_a_manifest_are_chosen_by_name(home: Path) -> None:
    rows = [{"a": "val/ant/0.png", "b": 4, "path": "nowhere", "label": 9}]
    data = opened(write(home / "m.csv", rows), path_column="a", label_column="b")
    assert (data.id(0), data.targets.tolist()) == ("val/ant/0.png", [4])
    said = refused(write(home / "m.csv", rows), path_column="c")
    assert "--path-column c: " in said
    assert "has the columns a, b, path, label" in said


def test_label_is_taken_before_class(home: Path) -> None:
    """A number and its name side by side."""
    rows = [{"image": f"val/{name}/0.png", "label": 7, "class": name} for name in PICTURES]
    assert opened(write(home / "m.csv", rows)).targets.tolist() == [7, 7, 7]
    del rows[0]["label"], rows[1:]
    assert "may be that of their labels" in refused(write(home / "m.csv", [{**rows[0], "y": 1}]))


def test_a_name_in_other_letters_is_never_taken_before_the_usual_one(home: Path) -> None:
    rows = [{"Label": 7, "path": f"val/{name}/0.png", "label": index} for name, index in PICTURES.items()]
    assert opened(write(home / "m.csv", rows)).targets.tolist() == [0, 1, 2]
    rows = [{"Label": 7, "LABEL": 8, "path": "val/ant/0.png"}]
    assert "has the columns Label and LABEL" in refused(write(home / "m.csv", rows))


def test_labels_and_columns_beyond_what_parquet_holds_are_refused(home: Path) -> None:
    said = refused(text(home, f"path,label\nval/ant/0.png,{'9' * 5000}\nval/bee/0.png,1\n"))
    assert "999, beyond any index, expected a whole number from 0 or a class's name. If the labels" in said
    said = refused(text(home, '{"path": "val/ant/0.png", "label": "\\ud800"}\n', "m.jsonl"))
    assert "line 1: the label (column 'label') is '\\ud800' (half a surrogate pair), expected a" in said
    said = refused(text(home, '{"path": "a", "label": ' + "[" * 100_000 + "}\n", "m.jsonl"))
    assert "line 1 is not JSON" in said
    columns = [pyarrow.array([value]) for value in ("val/ant/0.png", 0, 1)]
    table = pyarrow.Table.from_arrays(columns, names=["path", "label", "label"])
    pyarrow.parquet.write_table(table, home / "m.parquet")
    assert "has two columns 'label': leave one out" in refused(home / "m.parquet")


def test_files_of_other_suffixes_are_no_manifests(home: Path) -> None:
    with pytest.raises(UsageError, match=r"is a file\. .*, a manifest \(\.csv, \.tsv, \.jsonl"):
        kind_at(text(home, "path,label\n", "m.csv.gz"))


def test_a_librarys_own_lines_are_not_shown_as_the_users(home: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read as Parquet") as caught:
        opened(text(home, "no Parquet", "m.parquet"))
    assert ".pyx" not in own_code(caught.value)


def test_paths_count_from_the_manifest_or_the_root(home: Path) -> None:
    (home / "lists").mkdir()
    path = write(home / "lists/m.csv", rows_of())
    assert "its rows name 3 files, and none exists" in refused(path)
    assert str(home / "lists/val/ant/0.png") in refused(path)
    assert len(opened(path, image_root=home).__getitems__([2])) == 1
    assert "is not a folder" in refused(path, image_root=home / "none")
    absolute = text(home / "lists", f"path,label\n{home}/val/ant/0.png,1\n")
    assert opened(absolute).__getitems__([0])[0][1] == 1


def test_a_file_that_is_missing_is_a_sample_that_cannot_be_read(home: Path) -> None:
    rows = [*rows_of(), {"split": "val", "path": "val/gone.png", "label": 0}]
    data = opened(write(home / "m.csv", rows))
    with pytest.raises(FileNotFoundError):
        data.__getitems__([3])
    result = evaluate(task(home / "m.csv", num_classes=3), home / "out", on_error="skip")
    assert (result.samples["failed"], result.metrics["top1"]) == (1, 1)
    assert result.failed[0]["id"] == "val/gone.png"


def test_a_quoted_cell_may_hold_quotes_commas_and_newlines(home: Path) -> None:
    Image.new("RGB", (40, 40)).save(home / 'a, "b"\nc.png')
    path = text(home, 'path,note,label\n"a, ""b""\nc.png","x\ny",2\n')
    data = opened(path)
    assert data.id(0) == 'a, "b"\nc.png'
    assert data.__getitems__([0])[0][1] == 2
    # The lines are counted as an editor counts them.
    path = text(home, 'path,note,label\n"a, ""b""\nc.png","x\ny",2\nz.png,,\n')
    assert "line 5: the label (column 'label') is empty" in refused(path)


# -- labels ----------------------------------------------------------------------------------------------


def test_names_in_a_manifest_are_classes_by_the_rules_of_folders(home: Path) -> None:
    path = write(home / "m.csv", rows_of(named=True))
    known = KnownClasses(of="Farm_V1", names=("pig", "cow", "bee", "ant"))
    data = opened(path, known=known)
    assert data.targets.tolist() == [3, 2, 1]
    assert data.labels.rule == "names of the classes of Farm_V1"
    assert data.notes() == ["classes: 3 labels by names of the 4 classes of Farm_V1"]
    used = data.labels_used(4)
    assert used["labels"] == {"ant": 3, "bee": 2, "cow": 1}
    assert used["classes"] == ["pig", "cow", "bee", "ant"]
    other = KnownClasses(of="Farm_V2", names=("pig", "cow", "bee"))
    assert "1 of 3 labels are not classes of Farm_V2, while the others are: ant" in refused(path, known=other)


def test_a_class_map_says_what_labels_are(home: Path) -> None:
    path = write(home / "m.csv", rows_of(named=True))
    data = opened(path, classes=class_map(home, ant=5, bee=None, cow=2))
    assert data.targets.tolist() == [5, 2]
    assert [data.id(index) for index in range(len(data))] == ["val/ant/0.png", "val/cow/0.png"]
    assert data.labels.are_partial
    # Numbers are names where a map says what they stand for.
    numbers = write(home / "n.csv", rows_of())
    assert opened(numbers, classes=class_map(home, **{"0": 9, "1": 8, "2": 7})).targets.tolist() == [9, 8, 7]
    assert "does not name 1 of 3 labels: 2" in refused(numbers, classes=class_map(home, **{"0": 9, "1": 8}))


def test_names_of_indices_are_those_of_the_weights(home: Path) -> None:
    path = write(home / "m.csv", rows_of())
    known = KnownClasses(of="Farm_V1", names=("pig", "cow", "bee"))
    assert opened(path, known=known).labels.names == {0: "pig", 1: "cow", 2: "bee"}
    assert opened(path).labels_used(3) == {}


# -- what is refused -------------------------------------------------------------------------------------


WRONG = {
    "no header": (
        "val/ant/0.png,3\n",
        "has the columns val/ant/0.png, 3: expected one for the pictures' paths",
    ),
    "no label column": (
        "path,split\na,b\n",
        "expected one for their labels, named label or class or target or y",
    ),
    "questions": ("question,context\na,b\n", "dualeval run --task question-answering"),
    "empty": ("", "is empty: expected a line of headings"),
    "only its headings": ("path,label\n", "holds no sample"),
    "two columns of one name": ("path,label,label\na,1,2\n", "has two columns 'label'"),
    "a cell too many": ("path,label\na,1\nb,c,2\n", "line 3 has 3 columns, expected 2"),
    "empty label": ("path,label\na,1\nb,\n", "line 3: the label (column 'label') is empty"),
    "empty path": ("path,label\na,1\n,2\n", "line 3: the path is empty"),
    "zero byte": ("path,label\na\0b,1\n", "line 2: the path is 'a\\x00b'"),
    "address": (
        "path,label\ns3://bucket/a.jpg,1\n",
        "line 2: the path is the address s3://bucket/a.jpg, expected a path below one folder",
    ),
    "a path twice": ("path,label\na,1\nb,1\na,2\n", "lists 'a' more than once"),
    "negative": (
        "path,label\na,1\nb,-1\n",
        "is -1, expected a whole number from 0 or a class's name. Leave rows out",
    ),
    "too large": (
        "path,label\na,9999999999\n",
        "line 2: the label (column 'label') is 9999999999, beyond any",
    ),
    "decimal": ("path,label\na,1.5\nb,1.0\n", "line 2: the label (column 'label') is 1.5, expected"),
    "a decimal among numbers": ("path,label\na,1\nb,2.0\n", "line 3: the label (column 'label') is 2.0, exp"),
    "nan": ("path,label\na,1.0\nb,nan\n", "line 3: the label (column 'label') is nan, expected"),
    "open quote": ('path,label\n"a,1\n', "is not CSV"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_csv_is_refused_with_its_line(tmp_path: Path, name: str) -> None:
    content, said = WRONG[name]
    path = text(tmp_path, content)
    message = refused(path)
    assert said in message
    assert str(path) in message


WRONG_JSON = {
    "no json": ('{"path": "a", "label": 1}\nhello\n', "line 2 is not JSON"),
    "a list": ("[1, 2]\n", "line 1 holds a list, expected an object"),
    "empty": ("\n", "is empty: expected lines such as"),
    "a key is missing": ('{"path": "a", "label": 1}\n\n{"path": "b"}\n', "line 3 has no 'label'"),
    "a list as label": ('{"path": "a", "label": [1]}\n', "line 1: the label (column 'label') is [1] (list)"),
    "a decimal": ('{"path": "a", "label": 1.5}\n', "line 1: the label (column 'label') is 1.5, expected"),
    "null": ('{"path": "a", "label": null}\n', "line 1: the label (column 'label') is empty"),
    "path null": ('{"path": null, "label": 1}\n', "line 1: the path is empty"),
    "path a number": ('{"path": 3, "label": 1}\n', "line 1: the path is 3"),
    "no name of a file": ('{"path": "\\ud800", "label": 1}\n', "line 1: the path is '\\ud800'"),
    "SQuAD": ('{"id": 1, "question": "Who?", "context": "I."}\n', "--task question-answering"),
}


@pytest.mark.parametrize("name", WRONG_JSON)
def test_wrong_json_lines_are_refused(tmp_path: Path, name: str) -> None:
    content, said = WRONG_JSON[name]
    assert said in refused(text(tmp_path, content, "m.jsonl"))


def test_an_address_in_a_row_is_refused_without_its_signature(tmp_path: Path) -> None:
    said = refused(text(tmp_path, "path,label\ndog/1.jpg,1\nhttps://host/a.jpg?sig=hidden,1\n"))
    assert "m.csv, line 3: the path is the address https://host/a.jpg, expected a path below one" in said
    assert "hidden" not in said


def test_wrong_parquet_is_refused(tmp_path: Path) -> None:
    assert "cannot be read as Parquet" in refused(text(tmp_path, "no", "m.parquet"))
    path = write(tmp_path / "m.parquet", [{"path": "a", "label": 1}, {"path": None, "label": 1}])
    assert "row 2: the path is empty" in refused(path)
    path = write(tmp_path / "m.parquet", [{"image": b"x", "label": 1}])
    assert "Pictures in Parquet are a struct of bytes and path" in refused(path)
    path = write(tmp_path / "m.parquet", [{"jpg": b"x", "label": 1}])
    said = refused(path)
    assert "m.parquet has the columns jpg, label: expected one for the pictures' paths" in said
    assert "The column 'jpg' holds binary, expected texts, the paths of picture files." in said
    assert ".cast_column(NAME, datasets.Image()).save_to_disk(DIR)" in said
    assert "does not exist" in refused(tmp_path / "none.csv")
    (tmp_path / "latin.csv").write_bytes("path,label\n\xe4.png,1\n".encode("latin1"))
    assert "is not UTF-8" in refused(tmp_path / "latin.csv")


# -- rows of one path ------------------------------------------------------------------------------------


def test_a_column_of_the_manifest_says_which_samples_go_together(home: Path) -> None:
    path = write(home / "m.csv", [{**row, "patient": f"p{at}"} for at, row in enumerate(rows_of(named=True))])
    result = evaluate(task(path), None, cluster="patient")
    assert result.clusters == {"column": "patient", "count": result.samples["total"]}
    with pytest.raises(
        UsageError,
        match=r"--cluster 'patients'.* Columns of the data are those that --keep "
        r"names",
    ):
        evaluate(task(path), None, cluster="patients")


def test_rows_of_training_are_warned_of(home: Path) -> None:
    parts = ["train", "test", "test"]
    path = write(home / "m.csv", [{**row, "split": parts[n % 3]} for n, row in enumerate(rows_of())])
    assert "--by split gives metrics of each" in " ".join(evaluate(task(path, num_classes=3), None).warnings)
    assert "--by split" not in " ".join(evaluate(task(path, num_classes=3), None, by=("split",)).warnings)


def test_paths_of_one_hash_are_told_apart(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "hash", lambda text: 7, raising=False)
    assert opened(write(home / "m.csv", rows_of())).id(1) == "val/bee/0.png"
    assert "lists 'val/ant/0.png' more than once" in refused(
        write(home / "m.csv", [*rows_of(), rows_of()[0]])
    )


def test_names_of_files_are_kept_as_they_are() -> None:
    names = ["a", "", "\udcff\udcfe.png", "ä/b.png"]
    found = FileNames(names)
    assert [*found] == names
    assert found.shown(2) == "\\xff\\xfe.png"
    assert [*found.select([3, 0])] == ["ä/b.png", "a"]
    with pytest.raises(IndexError):
        found[4]
    with pytest.raises(UnicodeEncodeError):
        found.append("\ud800")


# -- runs ------------------------------------------------------------------------------------------------


def test_a_manifest_and_its_folder_have_the_same_metrics(home: Path) -> None:
    """By names, in the folder's order; ids are the folder's where paths count from it."""
    rows = [{"file": f"{name}/0.png", "class": name} for name in PICTURES]
    path = write(home / "m.jsonl", rows)
    folder = evaluate(task(home / "val"), home / "folder", batch_size=1)
    one = evaluate(task(path, image_root=home / "val"), home / "one", batch_size=1)
    assert (one.metrics, one.metrics["top1"]) == (folder.metrics, 1)
    assert one.metrics_digest == folder.metrics_digest
    assert all(one.data[name] == folder.data[name] for name in ("fingerprint", "contents"))
    assert one.labels["classes"] == folder.labels["classes"] == [*PICTURES]
    assert one.job["image_root"] == str(home / "val")
    table = one.predictions().to_pydict()
    assert table["id"] == [row["file"] for row in rows]
    assert table["target_name"] == table["prediction_name"] == [*PICTURES]


FORMS: dict[str, list[Any]] = {
    "leading zeros": ["001", "002", "003"],
    "names": ["ant", "bee", "cow"],
    "numbers": [0, 1, 2],
    "whole floats": [0.0, 1.0, 2.0],
    "bools": [False, True],
    "numbers and names": ["1", "2", "ant"],
}


QUICK = ("leading zeros", "bools")
LONG = [pytest.param(kind, marks=pytest.mark.long) for kind in FORMS if kind not in QUICK]


@pytest.mark.parametrize("kind", [*QUICK, *LONG])
def test_the_same_labels_have_the_same_digest_in_every_form(home: Path, kind: str) -> None:
    labels = FORMS[kind]
    names = [str(label).removesuffix(".0") for label in labels]
    lay_out(home / "same", {name: place for place, name in enumerate(names)})
    rows = [{"path": f"{name}/0.png", "label": label} for name, label in zip(names, labels, strict=True)]
    forms = [home / "same", *(write(home / f"m{suffix}", rows) for suffix in TABLES)]
    found = [
        evaluate(
            task(each, image_root=None if each.is_dir() else home / "same", num_classes=len(labels)), None
        )
        for each in forms
    ]
    assert {each.metrics["top1"] for each in found} == {1}
    assert len({each.metrics_digest for each in found}) == 1


def test_numbers_that_count_from_one_are_noticed(home: Path) -> None:
    """With a spare output all would be wrong, without a word."""
    rows = [{"path": f"val/{name}/0.png", "label": index + 1} for name, index in PICTURES.items()]
    path = write(home / "m.csv", rows)
    result = evaluate(task(path, "reds:thousand"), home / "out")
    assert result.metrics["top1"] == 0
    assert "indices 1 to 3 (as names of class folders they are other" in result.description["labels"]
    assert "--class-order name or number" in str(result)
    with pytest.raises(
        UsageError, match=r"line 4: the label .* is 3, but .* 3 classes \(labels 0 to 2\).*-order"
    ):
        task(path, "reds:three").build_model(torch.device("cpu"))
    for order in ("name", "number"):
        assert evaluate(task(path, "reds:three", class_order=order), None).metrics["top1"] == 1
