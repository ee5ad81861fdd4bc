"""Pictures and masks in tar shards: the run of the folders; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dualeval.errors import UsageError
from dualeval.tasks.segmentation import Segmentation
from tests.engine.test_evaluator import evaluate
from tests.vehicles.masked_pictures import Exact, write_pictures
from tests.vehicles.packed_pictures import pack


def task(data: Path, **options: Any) -> Segmentation:
    return Segmentation(model=Exact(), data=data, preprocessing="none", **options)


def members(home: Path, mask: str) -> dict[str, bytes]:
    """The pictures of a folder, and their masks under other suffixes."""
    found = {}
    for path in sorted((home / "img").iterdir()):
        found[path.name] = path.read_bytes()
        found[path.stem + mask] = (home / "masks" / path.name).read_bytes()
    return found


@pytest.mark.parametrize("mask", [".mask.png", ".seg.png"])
def test_shards_with_masks_have_the_digests_of_the_folders(tmp_path: Path, mask: str) -> None:
    write_pictures(tmp_path)
    packed = [*members(tmp_path, mask).items()]
    for number, part in enumerate((packed[:4], packed[4:])):
        pack(tmp_path / f"shards/{number}.tar", dict(part))
    folders = task(tmp_path / "img", masks=tmp_path / "masks")
    shards = task(tmp_path / "shards")
    one, other = (evaluate(each, tmp_path / f"{id(each)}", batch_size=4) for each in (folders, shards))
    assert (one.metrics_digest, one.samples_digest) == (other.metrics_digest, other.samples_digest)
    assert other.samples["failed"] == 0
    files, shard = (each.dataset() for each in (folders, shards))
    assert files.fingerprint(13) == shard.fingerprint(13)
    assert files.content_fingerprint(range(13)) == shard.content_fingerprint(range(13))
    assert files.placeholder(2)[0].shape == shard.placeholder(2)[0].shape
    assert files.picture(2)[1].tobytes() == shard.picture(2)[1].tobytes()


def test_a_png_beside_a_jpeg_is_its_mask(tmp_path: Path) -> None:
    path = pack(tmp_path / "x.tar", {"a.jpg": b"picture", "a.png": b"mask", "b.tif": b"m", "b.webp": b"p"})
    data = task(path).dataset()
    assert [data.id(0), data.id(1)] == ["a.jpg", "b.webp"]
    with data.masks.opened(0) as mask, data.pictures.opened(1) as picture:
        assert (mask.read(), picture.read()) == (b"mask", b"p")


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"a.png": b""}, "the sample 'a' has .png and no mask (.png, .mask.png)"),
        ({"a.seg.png": b""}, "the sample 'a' has .seg.png and no picture"),
        (
            {"a.jpg": b"", "a.png": b"", "a.v2.jpg": b"", "a.v2.png": b""},
            "the member 'a.v2.jpg' is no picture of",
        ),
        ({"a.jpg": b"", "a.jpeg": b"", "a.png": b""}, "the member 'a.jpeg' is a second picture of 'a'"),
    ],
)
def test_a_sample_without_a_part_is_named(tmp_path: Path, members: dict[str, bytes], said: str) -> None:
    path = pack(tmp_path / "x.tar", members)
    with pytest.raises(UsageError) as caught:
        task(path)
    assert said in str(caught.value)


def test_masks_elsewhere_are_refused(tmp_path: Path) -> None:
    path = pack(tmp_path / "x.tar", {"a.jpg": b"", "a.png": b""})
    with pytest.raises(UsageError, match="in it a mask lies beside its picture"):
        task(path, masks=tmp_path)
