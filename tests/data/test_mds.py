"""MosaicML's shards: read like the folder, packed or not; and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from dualeval.data.image_sets import mds
from dualeval.data.image_sets.class_folders import ImageFolder
from dualeval.data.packed import PackedImages
from dualeval.data.preprocessing import Preprocessing
from dualeval.data.set_names import kind_at
from dualeval.tasks.labels import FolderLabels
from tests.vehicles.packed_pictures import Pictures, as_folder, as_mds, fashion, refusal

SMALL = Preprocessing(resize=20, crop=16)
COUNT = 40


@pytest.fixture(scope="module")
def pictures() -> Pictures:
    return fashion(COUNT)


def opened(at: Path, **options: Any) -> PackedImages:
    label = FolderLabels(class_map=None, order=None, num_classes=None, of_weights=None)
    usual: dict[str, Any] = {"path_column": None, "label_column": None, "whole_files": False}
    images = mds.open_images(at, label=label, cache=None, **{**usual, **options})
    images.preprocessing = SMALL
    return images


refused = partial(refusal, opened)


@pytest.mark.parametrize("packed", [False, True])
def test_shards_are_read_as_the_folder(tmp_path: Path, pictures: Pictures, packed: bool) -> None:
    at, folder = as_mds(pictures, tmp_path, packed=packed), ImageFolder(as_folder(pictures, tmp_path), SMALL)
    assert kind_at(at).module == "mds"
    data = opened(at)
    assert [data.id(index) for index in range(COUNT)] == [str(index) for index in range(COUNT)]
    assert data.targets.tolist() == folder.targets.tolist()
    for (one, target), (other, same) in zip(
        data.__getitems__(range(COUNT)), folder.__getitems__(range(COUNT)), strict=True
    ):
        assert one.equal(other)
        assert target == same
    assert data.content_fingerprint(range(COUNT)) == folder.content_fingerprint(range(COUNT))
    assert data.select([30]).__getitems__([0])[0][0].equal(folder.__getitems__([30])[0][0])
    (file,) = at.glob("shard.00001.*")
    os.utime(file, (1, 1))
    data.__getitems__([16])
    with pytest.raises(OSError, match=r"shard\.00001\.mds.* has changed since the run started"):
        data.__getitems__([17])


def change(at: Path, **entries: Any) -> None:
    """Change what the index says of the second shard."""
    index = json.loads((at / "index.json").read_text())
    index["shards"][1].update(entries)
    (at / "index.json").write_text(json.dumps(index))


def test_what_is_not_understood_is_refused(tmp_path: Path, pictures: Pictures) -> None:
    at = as_mds(pictures, tmp_path)
    assert refused(at, label_column="kind").startswith(f"--label-column kind: {at} has the columns label")
    shard = at / "shard.00001.mds"
    shard.unlink()
    assert refused(at) == f"data folder {at}: its index.json names {shard}, which is missing. Fetch it."
    change(at, zip_data={"basename": "shard.00001.mds.br", "bytes": 0})
    (at / "shard.00001.mds.br").touch()
    assert refused(at).startswith(f"{at}/shard.00001.mds.br is packed")


@pytest.mark.parametrize(
    "entries",
    [
        {"column_names": ["image", "class"]},
        {"column_names": ["label", "image"]},
        {"column_encodings": ["png", "int32"], "column_sizes": [None, 4]},
        {"column_encodings": ["png", "uint64"]},
        {"column_encodings": ["png", "str"], "column_sizes": [None, None]},
    ],
)
def test_shards_of_other_columns_are_refused(
    tmp_path: Path, pictures: Pictures, entries: dict[str, Any]
) -> None:
    """Those of the first shard were taken for all: labels of other numbers, or tracebacks."""
    at = as_mds(pictures, tmp_path)
    change(at, **entries)
    said = refused(at)
    assert said.startswith(f"{at}/index.json: the shard shard.00001.mds has the columns ")
    assert "expected those of shard.00000.mds: image (png), label (int, 8 bytes)." in said


@pytest.mark.parametrize("packed", [False, True])
def test_torn_shards_are_refused(tmp_path: Path, pictures: Pictures, packed: bool) -> None:
    at = as_mds(pictures, tmp_path, packed=packed)
    (shard,) = at.glob("shard.00001.*")
    content = shard.read_bytes()
    is_not = f"{shard} is not as {at}/index.json has it ("
    for size in (0, 2, 6, 20, 200, len(content) - 1):
        shard.write_bytes(content[:size])
        assert refused(at) == (
            f"{is_not}{size:,} bytes, expected {len(content):,}): fetch or write the shard again"
        )
    shard.write_bytes(content[:-9] + bytes(9))  # of zstd its end, else of the last label
    if packed:
        assert refused(at).startswith(is_not)
    plain = (as_mds(pictures, tmp_path) / "shard.00001.mds").read_bytes()
    for torn in (plain[:4] + b"\xff" * 4 + plain[8:], plain[:8] + b"\xff" * 4 + plain[12:]):
        stored = pyarrow.compress(torn, codec="zstd", asbytes=True) if packed else torn
        shard.write_bytes(stored)
        change(at, zip_data={"basename": shard.name, "bytes": len(stored)} if packed else None)
        assert refused(at).startswith(is_not)
    if packed:
        stored = pyarrow.compress(plain, codec="zstd", asbytes=True)
        shard.write_bytes(stored)
        change(at, zip_data={"basename": shard.name, "bytes": len(stored)})
        change(at, raw_data={"basename": shard.stem, "bytes": len(plain) + 1})
        assert refused(at).startswith(f"{is_not}{len(plain):,} bytes unpacked, expected {len(plain) + 1:,})")


def test_sizes_within_a_sample_are_checked(tmp_path: Path, pictures: Pictures) -> None:
    at = as_mds(pictures, tmp_path)
    shard = at / "shard.00001.mds"
    content = shard.read_bytes()
    first = int.from_bytes(content[4:8], "little")
    shard.write_bytes(content[:first] + b"\xff\xff\xff\x7f" + content[first + 4 :])
    assert "(its samples do not follow each other)" in refused(at)


def test_an_old_shard_beside_a_newer_packed_one_is_refused(tmp_path: Path, pictures: Pictures) -> None:
    """It was read, as it needs no unpacking."""
    at, older = as_mds(pictures, tmp_path, packed=True), as_mds(pictures[1:], tmp_path)
    shutil.copy(older / "shard.00001.mds", at)
    assert refused(at).startswith(f"{at}/shard.00001.mds is not as {at}/index.json has it (")
    (at / "shard.00001.mds").unlink()
    opened(at)


@pytest.mark.parametrize("content", ["", "{", '{"shards": [', '{"shards": [{"format": "csv"}]}', "[1]"])
def test_a_torn_index_is_refused(tmp_path: Path, pictures: Pictures, content: str) -> None:
    at = as_mds(pictures, tmp_path)
    (at / "index.json").write_text(content)
    assert kind_at(at).module == "mds"
    assert refused(at).startswith(f"{at}/index.json is not as streaming writes it (")
    (at / "index.json").write_text('{"shards": []}')
    assert refused(at) == f"--data {at} holds no sample: its index.json names no shard."


def encoded(at: Path, kinds: list[str], label: Callable[[int], bytes]) -> None:
    """Make it a shard of a picture of three bytes, a label of no fixed size each."""
    samples = [
        b"".join(len(each).to_bytes(4, "little") for each in (b"png", label(number))) + b"png" + label(number)
        for number in range(3)
    ]
    ends = [20]
    for sample in samples:
        ends.append(ends[-1] + len(sample))
    content = b"".join(each.to_bytes(4, "little") for each in (3, *ends)) + b"".join(samples)
    (at / "shard.00000.mds").write_bytes(content)
    shard = {
        "column_encodings": kinds,
        "column_names": ["image", "label"],
        "column_sizes": [None, None],
        "format": "mds",
        "samples": 3,
        "raw_data": {"basename": "shard.00000.mds", "bytes": len(content)},
        "zip_data": None,
    }
    (at / "index.json").write_text(json.dumps({"shards": [shard], "version": 2}))


def test_labels_are_texts_or_whole_numbers(tmp_path: Path) -> None:
    encoded(tmp_path, ["jpeg:90", "str_int"], lambda number: str(2 - number).encode())
    assert opened(tmp_path).targets.tolist() == [2, 1, 0]
    encoded(tmp_path, ["bytes", "str"], lambda number: b"bca"[number : number + 1])
    assert opened(tmp_path).targets.tolist() == [1, 2, 0]
    encoded(tmp_path, ["png", "json"], lambda number: b"1")
    assert "the labels 'label' are json; expected one of int, " in refused(tmp_path)
    encoded(tmp_path, ["png", "str"], lambda number: b"\xff")
    assert "can't decode byte 0xff" in refused(tmp_path)
    encoded(tmp_path, ["pkl", "int"], lambda number: b"1")
    assert "has the columns image (pkl), label (int): expected one of jpeg, png, bytes" in refused(tmp_path)
