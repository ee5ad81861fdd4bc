"""Pictures in columns, as Hugging Face's library writes them: read like the folder; and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from dualeval.data.image_sets import hugging_face
from dualeval.data.image_sets.class_folders import ImageFolder
from dualeval.data.packed import PackedImages
from dualeval.data.preprocessing import Preprocessing
from dualeval.data.set_names import kind_at
from dualeval.errors import UsageError
from dualeval.tasks.image_classification import ImageClassification
from dualeval.tasks.labels import FolderLabels
from tests.vehicles.packed_pictures import (
    FORMS,
    Pictures,
    as_dataset,
    as_folder,
    as_parquet,
    as_saved,
    fashion,
    refusal,
)

SMALL = Preprocessing(resize=20, crop=16)
COUNT = 40
COLUMNS = {"parquet": as_parquet, "saved": as_saved}


@pytest.fixture(scope="module")
def pictures() -> Pictures:
    return fashion(COUNT)


def opened(at: Path, **options: Any) -> PackedImages:
    classes = options.pop("num_classes", None)
    label = FolderLabels(class_map=None, order=None, num_classes=classes, of_weights=None)
    usual: dict[str, Any] = {"path_column": None, "label_column": None, "keep": (), "whole_files": False}
    images = hugging_face.open_images(at, label=label, cache=None, **{**usual, **options})
    images.preprocessing = SMALL
    return images


refused = partial(refusal, opened)


@pytest.mark.parametrize("form", COLUMNS)
def test_columns_are_read_as_the_folder(tmp_path: Path, pictures: Pictures, form: str) -> None:
    at, folder = COLUMNS[form](pictures, tmp_path), ImageFolder(as_folder(pictures, tmp_path), SMALL)
    assert kind_at(at).module == "hugging_face"
    data = opened(at)
    assert [data.id(index) for index in range(COUNT)] == [folder.id(index) for index in range(COUNT)]
    assert data.targets.tolist() == folder.targets.tolist()
    assert data.labels.names == {number: f"kind {number}" for number in range(10)}
    backwards = [*range(COUNT)][::-1]
    for (one, target), (other, same) in zip(
        data.__getitems__(backwards), folder.__getitems__(backwards), strict=True
    ):
        assert one.equal(other)
        assert target == same
    whole, of_files = opened(at, whole_files=True), ImageFolder(tmp_path / "val", SMALL, whole_files=True)
    assert whole.content_fingerprint(range(COUNT)) == of_files.content_fingerprint(range(COUNT))
    if form == "saved":
        assert data.fingerprint(COUNT) == folder.fingerprint(COUNT)
        assert data.content_fingerprint(range(COUNT)) == folder.content_fingerprint(range(COUNT))
    assert data.columns([0, 39])["shop"] == [name[-5:-4] for name, _ in (pictures[0], pictures[39])]
    some = data.select([30, 2])
    assert [some.id(0), some.id(1)] == [folder.id(30), folder.id(2)]
    assert some.columns([1]) == data.columns([2])
    assert some.__getitems__([0])[0][0].equal(data.__getitems__([30])[0][0])
    assert data.path(39) == f"{data._pieces.where(39)}, {folder.id(39)}"


def test_names_that_are_wnids_say_which_classes_they_are(tmp_path: Path, pictures: Pictures) -> None:
    """As the folders that datasets made them of: the second of two is not ImageNet's class 1."""
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["n01440764", "n02099601", "n15075141"]),
        }
    )
    rows = [{"image": {"bytes": pictures[0][1], "path": str(label)}, "label": label} for label in (2, 1)]
    table = datasets.Dataset.from_list(rows, features=features).data.table
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    assert opened(tmp_path / "x.parquet").targets.tolist() == [2, 1]
    assert opened(tmp_path / "x.parquet", num_classes=1000).targets.tolist() == [999, 207]


def test_files_with_other_orders_of_classes_are_refused(tmp_path: Path, pictures: Pictures) -> None:
    """Index 0 of the second file was read as the first file's class 0."""
    for number, names in enumerate((["ant", "bee"], ["bee", "ant"])):
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
        rows = [{"image": {"bytes": pictures[0][1], "path": f"{number}.png"}, "label": 0}]
        table = datasets.Dataset.from_list(rows, features=features).data.table
        pyarrow.parquet.write_table(table, tmp_path / f"{number}.parquet")
    said = refused(tmp_path)
    assert "1.parquet: the classes of the column 'label' are bee, ant; expected those of" in said
    assert "0.parquet: ant, bee." in said


def test_a_row_group_is_read_once_for_its_samples(
    tmp_path: Path, pictures: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = opened(as_parquet(pictures, tmp_path))
    hugging_face._row_group.cache_clear()
    for index in range(COUNT):
        data.__getitems__([index])
    assert hugging_face._row_group.cache_info().misses == -(-17 // 7) + -(-(COUNT - 17) // 7)
    assert hugging_face._row_group.cache_info().currsize == 2


def test_other_pictures_have_another_fingerprint(tmp_path: Path, pictures: Pictures) -> None:
    """Of Parquet the ends of each row group are looked at, as the ends of files are."""
    first = opened(as_parquet(pictures, tmp_path)).content_fingerprint(range(COUNT))
    others = [(name, content[:-12] + b"\0" * 12) for name, content in pictures]
    second = opened(as_parquet([*pictures[:20], *others[20:]], tmp_path / "b"))
    assert second.content_fingerprint(range(COUNT)) != first
    assert second.content_fingerprint(range(14)) == opened(tmp_path / "parquet").content_fingerprint(
        range(14)
    )


@pytest.mark.parametrize("form", COLUMNS)
def test_a_file_that_changes_is_an_error_of_its_samples(
    tmp_path: Path, pictures: Pictures, form: str
) -> None:
    at = COLUMNS[form](pictures, tmp_path)
    data = opened(at)
    for file in at.iterdir():
        os.utime(file, (1, 1))
    with pytest.raises(OSError, match=r"has changed since the run started: .* 1970-01-01"):
        data.__getitems__([0])


def test_without_paths_that_tell_them_apart_ids_are_numbers(tmp_path: Path, pictures: Pictures) -> None:
    rows = [(None, content) for _, content in pictures[:3]]
    table = pyarrow.table(
        {
            "image": [
                {"bytes": content, "path": name} for name, content in [*rows, ("a", b"x"), ("a", b"y")]
            ],
            "label": [1, 0, 1, 0, 0],
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    data = opened(tmp_path / "x.parquet")
    assert [data.id(index) for index in range(5)] == ["0", "1", "2", "3", "4"]
    assert data.targets.tolist() == [1, 0, 1, 0, 0]
    bare = pyarrow.table({"image": [{"bytes": content} for _, content in rows], "label": ["b", "a", "b"]})
    pyarrow.parquet.write_table(bare, tmp_path / "bare.parquet")
    named = opened(tmp_path / "bare.parquet")
    assert ([named.id(0), named.id(2)], named.targets.tolist()) == (["0", "2"], [1, 0, 1])


def test_a_row_without_bytes_is_a_sample_that_cannot_be_read(tmp_path: Path, pictures: Pictures) -> None:
    rows = [{"bytes": pictures[0][1], "path": "a"}, {"bytes": None, "path": "b"}, None]
    kind = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    table = pyarrow.table({"image": pyarrow.array(rows, kind), "label": [0, 1, 0]})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    data = opened(tmp_path / "x.parquet")
    data.__getitems__([0])
    for index in (1, 2):
        with pytest.raises(OSError, match=rf"x\.parquet, row {index + 1} has no bytes"):
            data.__getitems__([index])


def test_pictures_that_are_named_alone_are_refused(tmp_path: Path, pictures: Pictures) -> None:
    """As to_parquet of datasets writes those of a folder."""
    table = pyarrow.table({"image": [{"bytes": None, "path": "val/a.png"}], "label": [0]})
    kind = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    pyarrow.parquet.write_table(
        table.set_column(0, "image", table["image"].cast(kind)), tmp_path / "x.parquet"
    )
    assert "names its pictures by paths, such as val/a.png, and does not hold them" in refused(
        tmp_path / "x.parquet"
    )


def test_what_is_not_understood_is_refused(tmp_path: Path, pictures: Pictures) -> None:
    parts = datasets.DatasetDict({"train": as_dataset(pictures[:2]), "test": as_dataset(pictures[2:4])})
    parts.save_to_disk(tmp_path / "both")
    assert refused(tmp_path / "both").endswith(
        f"holds the parts train, test of a data set. Give one: --data {tmp_path}/both/test"
    )
    folder = as_parquet(pictures, tmp_path)
    assert refused(folder, label_column="kind").startswith("--label-column kind: ")
    assert refused(folder, path_column="shop").startswith("--path-column shop: ")
    (folder / "train-00000-of-00001.parquet").write_bytes(
        (folder / "test-00000-of-00002.parquet").read_bytes()
    )
    assert refused(folder).endswith(
        "2 of test and 1 of train. Give those of one: --data "
        f"'{folder}/test-{{00000..00001}}-of-00002.parquet'"
    )
    (folder / "train-00000-of-00001.parquet").unlink()
    pyarrow.parquet.write_table(pyarrow.table({"x": [1]}), folder / "test-2.parquet")
    assert f"{folder}/test-2.parquet has the columns x, expected those of" in refused(folder)
    said = refused(folder / "test-{2..2}.parquet")
    assert said.startswith(f"{folder}/test-2.parquet has the columns x (int64): expected one of pictures")
    (folder / "test-2.parquet").write_bytes(b"PAR1")
    assert refused(folder).startswith(f"{folder}/test-2.parquet cannot be read: ")
    (folder / "test-2.parquet").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert refused(folder).startswith(f"{folder}/test-2.parquet is a pointer of Git LFS")


def test_rows_that_were_selected_by_a_list_of_indices_are_refused(tmp_path: Path, pictures: Pictures) -> None:
    """All rows were evaluated: datasets before November 2021 wrote them all, and which of them are meant."""
    at = as_saved(pictures, tmp_path)
    state = at / "state.json"
    content = json.loads(state.read_text())
    state.write_text(json.dumps({**content, "_indices_data_files": None}))
    assert len(opened(at)) == COUNT
    state.write_text(json.dumps({**content, "_indices_data_files": [{"filename": "indices.arrow"}]}))
    said = refused(at)
    assert said.startswith(f"data folder {at} holds all rows of a data set, and a list of those that are")
    assert said.endswith("dataset.flatten_indices().save_to_disk(DIR)")


@pytest.mark.parametrize("content", ["", "{", "null", "[]", "{}", '{"_data_files": [{}], "splits": []}'])
@pytest.mark.parametrize("name", ["state.json", "dataset_dict.json"])
def test_a_torn_list_of_files_is_refused(tmp_path: Path, pictures: Pictures, name: str, content: str) -> None:
    at = as_saved(pictures, tmp_path)
    (at / name).write_text(content)
    assert refused(at).startswith(f"{at}/{name} is not as save_to_disk writes it (")
    (at / name).write_text('{"_data_files": [], "splits": ["test"]}')
    said = "its state.json names no file" if name == "state.json" else f"Give one: --data {at}/test"
    assert said in refused(at)


def test_columns_of_other_types_are_refused(tmp_path: Path, pictures: Pictures) -> None:
    """Plain bytes were a traceback, and labels of the second file names beside the indices of the first."""
    folder = as_parquet(pictures, tmp_path)
    second = folder / "test-00001-of-00002.parquet"
    table = pyarrow.parquet.read_table(second)
    plain = pyarrow.array([row["bytes"] for row in table["image"].to_pylist()], pyarrow.binary())
    names = table["label"].cast(pyarrow.string())
    for column, values, holds in (("image", plain, "binary"), ("label", names, "string")):
        place = table.column_names.index(column)
        pyarrow.parquet.write_table(table.set_column(place, column, values), second)
        said = refused(folder)
        assert said.startswith(f"{second}: the column {column!r} holds {holds}, expected ")
        assert said.endswith("in 'test-00000-of-00002.parquet'. Write the files anew, together.")
    pyarrow.parquet.write_table(table.set_column(0, "image", plain), second)
    said = refused(folder / "test-{00001..00001}-of-00002.parquet")
    assert f"{second} has the columns image (binary), label (int64), shop (string): expected one of" in said
    assert "a plain column of bytes becomes one: datasets.load_dataset(" in said


def test_row_groups_that_are_too_large_are_refused(
    tmp_path: Path, pictures: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow reads 2 GiB at once, or any number of bytes where their type counts them with 64 bits."""
    monkeypatch.setattr(hugging_face, "_MOST", 100)
    at = as_parquet(pictures, tmp_path)
    said = refused(at)
    assert "-of-00002.parquet has a row group of 0.0 GiB of pictures, and Arrow reads 2 GiB at most." in said
    assert said.endswith("row_group_size=100)")
    large = pyarrow.struct({"bytes": pyarrow.large_binary(), "path": pyarrow.string()})
    for path in at.iterdir():
        table = pyarrow.parquet.read_table(path)
        pyarrow.parquet.write_table(table.set_column(0, "image", table["image"].cast(large)), path)
    opened(at).__getitems__([0, COUNT - 1])


@pytest.mark.long
def test_a_real_row_group_above_2_gib_is_refused(tmp_path: Path) -> None:
    """It was refused in the words of Arrow, when its first picture was read. It takes 1.4 GiB of memory."""
    one = pyarrow.array([bytes(100 << 20)], pyarrow.binary())
    rows = [
        pyarrow.StructArray.from_arrays([one, pyarrow.array([f"{n}"])], ["bytes", "path"]) for n in range(22)
    ]
    table = pyarrow.table({"image": pyarrow.chunked_array(rows), "label": list(range(22))})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet", compression="zstd", use_dictionary=False)
    said = refused(tmp_path / "x.parquet")
    assert said.startswith(f"{tmp_path}/x.parquet has a row group of 2.1 GiB of pictures")


def test_folders_of_parts_say_which_to_give(tmp_path: Path, pictures: Pictures) -> None:
    """Also those of a repository of Hugging Face: README.md beside data/."""
    source = as_parquet(pictures, tmp_path / "source")
    one, two = sorted(source.iterdir())
    hub = tmp_path / "hub"
    (hub / "data").mkdir(parents=True)
    (hub / "README.md").touch()
    shutil.copy(one, hub / "data/train-00000-of-00001.parquet")
    said = refusal(opened_anyhow, hub)
    assert said.endswith(f"but other data in data. Give one folder: --data {hub}/data")
    shutil.copy(two, hub / "data/test-00000-of-00001.parquet")
    assert refusal(opened_anyhow, hub) == (
        f"data folder {hub}/data holds shards of several parts of a data set: 1 of test and 1 of train. Give "
        f"those of one: --data '{hub}/data/test-{{00000..00000}}-of-00001.parquet'"
    )
    for form in FORMS:
        of_parts = tmp_path / form
        for part in ("train", "test"):
            made = FORMS[form](pictures, tmp_path / "made" / form / part)
            shutil.copytree(made if made.is_dir() else made.parent, of_parts / part)
        said = refusal(opened_anyhow, of_parts)
        assert said.endswith(
            f"are parts of a data set, not classes. Give one of them: --data {of_parts}/test"
        )
    saved = tmp_path / "saved/test"
    for file, folder in ((next(saved.glob("*.arrow")), saved), (tmp_path / "x.arrow", "DIR")):
        file.touch()
        assert refusal(opened_anyhow, file).endswith(f"instead: --data {folder}")


def opened_anyhow(at: Path | str) -> object:
    usual: Any = {"model": "resnet18", "weights": "random:0", "preprocessing": "imagenet"}
    return ImageClassification(**usual, data=at).dataset()


def test_options_of_columns_alone_are_taken(tmp_path: Path, pictures: Pictures) -> None:
    at = as_parquet(pictures, tmp_path)
    usual: Any = {"model": "resnet18", "weights": "random:0", "preprocessing": "imagenet"}
    task = ImageClassification(**usual, data=at, label_column="label", path_column="image")
    assert len(task.dataset()) == COUNT
    others: Any = {"image_root": "a manifest", "label_key": "tar shards"}
    for option, what in others.items():
        flag = f"--{option.replace('_', '-')}"
        with pytest.raises(UsageError, match=f"{flag} does not apply to .*: it is for {what}"):
            ImageClassification(**{**usual, "data": at, option: "x"})
    assert np.array_equal(task.dataset().targets, opened(at).targets)
    assert set(FORMS) > set(COLUMNS)
