"""The idx format and the data set made of it."""

from __future__ import annotations

import gzip
import hashlib
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from dualeval.data.image_sets.idx import IdxImages
from dualeval.data.set_names import has_idx
from dualeval.data.small_images import read_idx
from dualeval.errors import UsageError


def idx(values: np.ndarray, kind: int = 8) -> bytes:
    """The unpacked content of an idx file."""
    return struct.pack(f">4B{values.ndim}I", 0, 0, kind, values.ndim, *values.shape) + values.tobytes()


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content, 1))
    return path


def fill(folder: Path, count: int = 7, labels: int | None = None, split: str = "t10k") -> Path:
    """A folder of ``count`` images of 3x2 pixels and labels 0, 1, 2, 0, ..."""
    images = np.arange(count * 6, dtype=np.uint8).reshape(count, 3, 2)
    targets = np.arange(count if labels is None else labels, dtype=np.uint8) % 3
    write(folder / f"{split}-images-idx3-ubyte.gz", idx(images))
    write(folder / f"{split}-labels-idx1-ubyte.gz", idx(targets))
    return folder


@pytest.mark.parametrize("shape", [(5,), (2, 3), (2, 3, 4), (0, 28, 28)])
def test_a_file_is_read_as_it_was_written(tmp_path: Path, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    read = read_idx(write(tmp_path / "file.gz", idx(values)))
    assert read.dtype == np.uint8
    assert np.array_equal(read, values)
    assert read.shape == shape
    assert read.flags.writeable


GOOD = idx(np.zeros((4, 3, 2), np.uint8))
WRONG = {
    "values cut short": (GOOD[:-1], "39 bytes after unpacking, expected 40"),
    "too many values": (GOOD + b"\0", "41 bytes after unpacking, expected 40"),
    "header cut short": (GOOD[:9], "9 bytes after unpacking, expected a header of 16"),
    "magic cut short": (GOOD[:3], "not an idx file of unsigned bytes (starts with 000008)"),
    "empty": (b"", "not an idx file"),
    "other magic": (b"\x01" + GOOD[1:], "starts with 01000803"),
    "other type": (idx(np.zeros(4, np.uint8), kind=0x0D), "starts with 00000d01"),
    # The product of these is 0 in 64 bits.
    "vast shape": (struct.pack(">4B4I", 0, 0, 8, 4, *[2**31] * 4), f"expected {2**124 + 20}"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_content_is_refused(tmp_path: Path, name: str) -> None:
    content, message = WRONG[name]
    path = write(tmp_path / "file.gz", content)
    with pytest.raises(UsageError) as caught:
        read_idx(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_damaged_gzip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.gz"
    packed = gzip.compress(idx(np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8)))
    damaged = [b"no gzip", packed[:-9], packed[:20], packed[:12] + b"\xff" * 40 + packed[52:]]
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(UsageError, match="not a complete gzip file"):
            read_idx(path)


def test_batches_are_views_with_their_targets(tmp_path: Path) -> None:
    data = IdxImages(fill(tmp_path))
    assert (len(data), data.sample_shape, data.largest_target) == (7, (1, 3, 2), 2)
    assert data.labels.num_classes is None
    assert (data.id(0), data.id(6)) == ("t10k-00000", "t10k-00006")
    batch = data.__getitems__(range(2, 5))
    assert batch["images"].shape == (3, 1, 3, 2)
    assert batch["images"].dtype == torch.uint8
    assert batch["images"][0, 0].tolist() == [[12, 13], [14, 15], [16, 17]]
    assert batch["targets"].tolist() == [2, 0, 1]
    assert batch["targets"].dtype == torch.int64
    assert batch["images"].data_ptr() == data.__getitems__(range(2, 3))["images"].data_ptr(), "a view"
    chosen = data.__getitems__([2, 3, 4])
    assert torch.equal(chosen["images"], batch["images"])
    assert torch.equal(chosen["targets"], batch["targets"])
    assert data.__getitems__(range(6, 0, -3))["targets"].tolist() == [0, 0]


def test_the_test_split_is_taken(tmp_path: Path) -> None:
    fill(tmp_path, count=3, split="train")
    assert IdxImages(tmp_path).id(1) == "train-00001"
    fill(tmp_path, count=5)
    assert IdxImages(tmp_path).id(1) == "t10k-00001"
    assert len(IdxImages(tmp_path)) == 5
    assert has_idx(tmp_path) and not has_idx(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("splits", "taken"),
    [
        (["x-test", "x-train"], "x-test"),
        (["digits-train"], "digits-train"),
        (["t10k", "train", "val"], "t10k"),
        (
            ["balanced-test", "balanced-train", "bymerge-test"],
            "2 sets of idx files: balanced-test, bymerge-test. ",
        ),
        (["train", "val"], "2 sets of idx files: train, val. "),
    ],
)
def test_of_several_sets_in_a_folder_the_only_test_set_is_taken(
    tmp_path: Path, splits: list[str], taken: str
) -> None:
    for split in splits:
        fill(tmp_path, split=split)
    if taken in splits:
        assert IdxImages(tmp_path).id(1) == f"{taken}-00001"
        return
    with pytest.raises(UsageError, match=taken) as raised:
        IdxImages(tmp_path)
    typed, _, folder = str(raised.value).partition("such as: ")[2].partition("; and type --data ")
    subprocess.run(["sh", "-c", typed], check=True)
    assert len(IdxImages(Path(folder))) == 7


def test_numbers_of_images_and_labels_must_agree(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"images of shape \(7, 3, 2\) and labels of shape \(6,\)"):
        IdxImages(fill(tmp_path, labels=6))
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(UsageError, match=r"t10k-labels-idx1-ubyte\.gz is missing"):
        IdxImages(tmp_path)


def test_a_file_without_images_has_no_samples(tmp_path: Path) -> None:
    data = IdxImages(fill(tmp_path, count=0))
    assert (len(data), data.largest_target) == (0, -1)
    assert data.fingerprint(0) == hashlib.sha256().hexdigest()


def test_the_fingerprint_is_of_ids_sizes_and_targets(tmp_path: Path) -> None:
    data = IdxImages(fill(tmp_path))
    lines = "t10k-00000\0006\0000\nt10k-00001\0006\0001\n"
    assert data.fingerprint(2) == hashlib.sha256(lines.encode()).hexdigest()
    assert data.fingerprint(7) == data.fingerprint(100) != data.fingerprint(6)
