"""What is in samples: pixels count, times and places do not, and a file that changes meanwhile is named."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dualeval.data.image_sets.class_folders import ImageFolder
from dualeval.data.image_sets.idx import IdxImages
from dualeval.engine.identity.hasher import SampleHasher, same_bits
from dualeval.errors import UsageError
from dualeval.options.job import Job
from dualeval.tasks.image_classification import ImageClassification
from tests.data.test_idx import fill, idx, write
from tests.data.test_image_folder import SMALL, noise, save
from tests.engine.test_evaluator import evaluate

PIXELS = 100  # a side of a BMP: 30,054 bytes


def bmp(path: Path, change: tuple[int, int] | None = None) -> Path:
    """An uncompressed picture; ``change`` is a pixel that is black instead."""
    pixels = noise(PIXELS, PIXELS) | 1
    if change is not None:
        pixels[change] = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def contents(root: Path, *, whole: bool = False, samples: range = range(2)) -> str:
    data = ImageFolder(root, SMALL, whole_files=whole)
    return data.fingerprint(len(data)) + data.content_fingerprint(samples)


def test_a_picture_counts_by_its_pixels(tmp_path: Path) -> None:
    """Whether it lies in memory or in a file that is not read yet; it counted by its mode and size."""
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    picture, other = Image.fromarray(pixels), Image.fromarray(pixels + 1)
    picture.save(tmp_path / "a.png")
    of_file = SampleHasher().digest(Image.open(tmp_path / "a.png"))
    assert of_file == SampleHasher().digest(picture) != SampleHasher().digest(other)


def small_task(folder: Path, **options: Any) -> ImageClassification:
    given = {"preprocessing": {"resize": 40, "crop": 32}, **options}
    return ImageClassification(model="resnet18", weights="random:0", data=folder, **given)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a/0.bmp", "b/1.bmp"):
        bmp(tmp_path / "val" / name)
    return tmp_path / "val"


def test_pixels_at_the_ends_of_a_file_of_equal_size_count(folder: Path) -> None:
    found = [contents(folder)]
    size = (folder / "a/0.bmp").stat().st_size
    for change in ((0, 0), (PIXELS - 1, PIXELS - 1)):
        bmp(folder / "a/0.bmp", change)
        assert (folder / "a/0.bmp").stat().st_size == size
        found.append(contents(folder))
    bmp(folder / "a/0.bmp")
    assert len(set(found)) == 3
    assert contents(folder) == found[0]


def test_all_bytes_count_where_that_is_asked_for(folder: Path) -> None:
    ends, whole = contents(folder), contents(folder, whole=True)
    bmp(folder / "a/0.bmp", (PIXELS // 2, 0))
    assert contents(folder) == ends, "the midst of a file is in no checksum of its ends"
    assert contents(folder, whole=True) != whole


def test_small_files_count_whole(tmp_path: Path) -> None:
    path = save(tmp_path / "a/0.png")
    content = path.read_bytes() + bytes(8192 - path.stat().st_size)
    found = set()
    for place in (0, 4095, 4096, 8191):
        path.write_bytes(content[:place] + b"x" + content[place + 1 :])
        found.add(contents(tmp_path, samples=range(1)))
    assert len(found) == 4


def test_idx_pixels_and_labels_count(tmp_path: Path) -> None:
    data = IdxImages(fill(tmp_path))
    base = data.content_fingerprint(range(7))
    assert IdxImages(fill(tmp_path)).content_fingerprint(range(7)) == base
    images, labels = np.arange(42, dtype=np.uint8).reshape(7, 3, 2), np.arange(7, dtype=np.uint8) % 3
    found = [base, data.content_fingerprint(range(6)), data.content_fingerprint(range(1, 7))]
    write(tmp_path / "t10k-images-idx3-ubyte.gz", idx(255 - images))
    found.append(IdxImages(tmp_path).content_fingerprint(range(7)))
    write(tmp_path / "t10k-images-idx3-ubyte.gz", idx(images))
    write(tmp_path / "t10k-labels-idx1-ubyte.gz", idx(labels[::-1].copy()))
    found.append(IdxImages(tmp_path).content_fingerprint(range(7)))
    assert len(set(found)) == 5


# A file that changes after the fingerprint

CHANGES: dict[str, Callable[[Path], object]] = {
    "size": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "time": lambda path: os.utime(path, ns=(1, 1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_after_the_start_is_not_read(folder: Path, change: str) -> None:
    data = ImageFolder(folder, SMALL)
    data.fingerprint(2)
    data.__getitems__([0, 1])
    CHANGES[change](folder / "a/0.bmp")
    expected = r"a/0\.bmp has changed since the run started: 30,054 bytes of .* UTC then, 30,05[45] bytes of"
    # As reading processes get it that are not forked.
    for seen in (data, copy.deepcopy(data)):
        with pytest.raises(OSError, match=expected):
            seen.__getitems__([0])
        assert len(seen.__getitems__([1])) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_changed_picture_is_a_failed_sample(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """Reading processes know what the fingerprint has seen, too."""
    task = small_task(folder)
    fingerprint = ImageFolder.content_fingerprint

    def then_change(data: ImageFolder, samples: range) -> str:
        found = fingerprint(data, samples)
        CHANGES["size"](folder / "a/0.bmp")
        return found

    monkeypatch.setattr(ImageFolder, "content_fingerprint", then_change)
    result = evaluate(task, tmp_path / "out", on_error="skip", workers=workers)
    [failed] = result.failed
    assert failed["id"] == "a/0.bmp"
    assert "has changed since the run started" in failed["error"]


# The option


def test_a_job_takes_data_fingerprint_and_refuses_wrong_values(tmp_path: Path) -> None:
    assert Job.of(data_fingerprint="content").options.data_fingerprint == "content"
    with pytest.raises(
        UsageError, match=r"--data-fingerprint 'contents': .*ends, content\. Did you mean content"
    ):
        Job.of(data_fingerprint="contents")
    with pytest.raises(UsageError, match="--data-fingerprint belongs to --task image-classification"):
        Job.of(task="question-answering", data_fingerprint="content")
    (tmp_path / "job.toml").write_text('data-fingerprint = "content"')
    assert Job.read(tmp_path / "job.toml", {}).options.data_fingerprint == "content"


def test_the_result_holds_both_fingerprints(folder: Path, tmp_path: Path) -> None:
    result = evaluate(small_task(folder), tmp_path / "out")
    job = json.loads((tmp_path / "out/job.json").read_text())["job"]
    assert result.data["fingerprint"] == job["data"] == ImageFolder(folder, SMALL).fingerprint(2)
    assert result.data["contents"] == job["contents"]
    assert len(job["contents"]) == 64


def test_columns_are_compared_by_their_bits() -> None:
    ones, nan, turned = torch.ones(2), torch.tensor([float("nan")]), torch.complex(*torch.eye(2)).conj()
    for one, same in ((nan, nan.clone()), (turned, turned.resolve_conj()), (ones[::2], torch.ones(1))):
        assert same_bits(one, same)
    for one, other in (
        (ones * 0, ones * -0.0),
        (ones, ones.double()),
        (turned.imag, -turned.imag),
        (ones, None),
    ):
        assert not same_bits(one, other)
