"""MosaicML's shards: read like the folder, packed or not; and what is refused."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

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


def test_what_is_not_understood_is_refused(tmp_path: Path, pictures: Pictures) -> None:
    at = as_mds(pictures, tmp_path)
    assert refused(at, label_column="kind").startswith(f"--label-column kind: {at} has the columns label")
    shard = at / "shard.00001.mds"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    assert refused(at) == f"{shard} is not as {at}/index.json has it: fetch or write the shard again"
    shard.unlink()
    assert refused(at) == f"data folder {at}: its index.json names {shard}, which is missing. Fetch it."
    index = json.loads((at / "index.json").read_text())
    index["shards"][1]["zip_data"] = {"basename": "shard.00001.mds.br"}
    (at / "index.json").write_text(json.dumps(index))
    (at / "shard.00001.mds.br").touch()
    assert refused(at).startswith(f"{at}/shard.00001.mds.br is packed")
    index["shards"][0]["column_encodings"] = ["pkl", "int"]
    (at / "index.json").write_text(json.dumps(index))
    assert "expected one of jpeg, png or bytes" in refused(at)
