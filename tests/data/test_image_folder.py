"""Folders of images: order, decoding, and what is said of folders that hold none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from dualeval.data.image_paths import EXTENSIONS, PassedOver
from dualeval.data.image_sets.class_folders import ImageFolder, class_folders
from dualeval.data.preprocessing import OwnPreprocessing, Preprocessing
from dualeval.data.set_names import kind_at
from dualeval.errors import EXIT_USAGE, UsageError
from dualeval.vision_library import torchvision
from tests.engine.test_evaluator import evaluate
from tests.vehicles.tiny import TinyDataset, TinyTask

SMALL = Preprocessing(resize=20, crop=16)
TORCHVISION = torchvision()


def noise(width: int, height: int, channels: int = 3) -> np.ndarray:
    """Random pixels, smooth enough to survive JPEG."""
    coarse = np.random.default_rng(0).integers(0, 256, (height // 4 + 1, width // 4 + 1, channels))
    return np.kron(coarse, np.ones((4, 4, 1)))[:height, :width].astype(np.uint8)


def save(path: Path, mode: str = "RGB", size: tuple[int, int] = (40, 30)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise(*size)).convert(mode).save(path)
    return path


def ids(data: ImageFolder) -> list[str]:
    return [data.id(index) for index in range(len(data))]


def targets(data: ImageFolder) -> list[int]:
    return [target for _, target in data.__getitems__(range(len(data)))]


def test_samples_and_targets_are_those_of_torchvision(tmp_path: Path) -> None:
    """By name, in code points: as in torchvision, and the same under every locale and file system."""
    for name in ("b/2.png", "b/10.png", "b/1.png", "a/x.png", "B/z.png", "c/sub/deep/1.png", "c/sub.png"):
        save(tmp_path / name)
    (tmp_path / "empty").mkdir()
    save(tmp_path / "z/0.PNG")
    save(tmp_path / "z/1.Jpeg")
    (tmp_path / "a/notes.txt").write_text("no image")
    data = ImageFolder(tmp_path, SMALL)
    assert data.classes == ["B", "a", "b", "c", "empty", "z"]
    assert data.labels.num_classes == 6
    assert data.sample_shape == (3, 16, 16)
    reference = TORCHVISION.datasets.ImageFolder(tmp_path, allow_empty=True)
    found = zip(ids(data), targets(data), strict=True)
    assert [(str(tmp_path / name), target) for name, target in found] == reference.samples
    assert data.classes == reference.classes
    assert set(EXTENSIONS) == set(TORCHVISION.datasets.folder.IMG_EXTENSIONS)


def test_a_damaged_first_picture_leaves_the_size_to_the_next(tmp_path: Path) -> None:
    """What --on-error skip leaves out, as any other; where none can be prepared the first is named."""
    for name in ("a/1.png", "a/2.png"):
        save(tmp_path / name)
    own = OwnPreprocessing(function=lambda picture: torch.zeros(3, *picture.size))
    (tmp_path / "a/1.png").write_bytes((tmp_path / "a/1.png").read_bytes()[:60])
    assert ImageFolder(tmp_path, own).sample_shape == (3, 40, 30)
    (tmp_path / "a/2.png").write_bytes(b"")
    with pytest.raises(UsageError, match=r"the first picture, a/1\.png, cannot be prepared \(OSError: "):
        ImageFolder(tmp_path, own).sample_shape  # noqa: B018


def test_links_are_followed(tmp_path: Path) -> None:
    save(tmp_path / "store/folder/1.png")
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (root / "a/linked.png").symlink_to(tmp_path / "store/folder/1.png")
    (root / "b").symlink_to(tmp_path / "store/folder")
    data = ImageFolder(root, SMALL)
    assert ids(data) == ["a/linked.png", "b/1.png"]
    assert len(data.__getitems__([0, 1])) == 2


def test_of_two_links_to_one_folder_the_first_by_name_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever order the disk gives."""
    save(tmp_path / "store/1.png")
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    for name in ("x", "y"):
        (root / "a" / name).symlink_to(tmp_path / "store")
    (root / "a/loop").symlink_to(root / "a")
    real = os.walk

    def turned(top: Path, **options: Any) -> Iterator[tuple[str, list[str], list[str]]]:
        for folder, inner, names in real(top, **options):
            inner.sort(reverse=True)
            yield folder, inner, names

    for walk in (real, turned):
        monkeypatch.setattr(os, "walk", walk)
        data = ImageFolder(root, SMALL)
        assert ids(data) == ["a/x/1.png"]
        assert str(data.passed_over) == "passed over: 2 links to a folder that was read already"


def test_hidden_folders_and_files_are_passed_over(tmp_path: Path) -> None:
    """.ipynb_checkpoints was class 0, and moved all others."""
    for name in (".ipynb_checkpoints/0.png", "a/.ipynb_checkpoints/1.png", "a/1.png", "a/._1.png", "b/2.png"):
        save(tmp_path / name)
    (tmp_path / ".DS_Store").touch()
    data = ImageFolder(tmp_path, SMALL)
    assert data.classes == ["a", "b"]
    assert ids(data) == ["a/1.png", "b/2.png"]
    assert targets(data) == [0, 1]
    assert str(data.passed_over) == "passed over: 2 files (hidden); 2 hidden folders"
    assert not data.passed_over.holds_pictures
    # Those of systems: a NAS's previews were samples.
    for name in (
        "@eaDir/1.png",
        "a/@eaDir/1.png/SYNOPHOTO_THUMB_S.jpg",
        "__MACOSX/a/1.png",
        "$RECYCLE.BIN/1.png",
    ):
        save(tmp_path / name)
    data = ImageFolder(tmp_path, SMALL)
    assert (data.classes, ids(data)) == (["a", "b"], ["a/1.png", "b/2.png"])
    assert str(data.passed_over) == "passed over: 2 files (hidden); 6 hidden folders"


def test_files_that_are_passed_over_are_counted(tmp_path: Path) -> None:
    for name in ("a/1.png", "b/2.jpg", "loose.PNG"):
        save(tmp_path / name)
    for name in ("a/1.gif", "b/deep/2.HEIC"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    data = ImageFolder(tmp_path, SMALL)
    assert data.passed_over.holds_pictures
    assert data.passed_over.to_json() == {
        "files": {".gif": 1, ".heic": 1, ".png": 1},
        "hidden_folders": 0,
        "repeated_folders": 0,
    }
    assert str(data.passed_over) == (
        "passed over: 3 files (.gif, .heic, .png), 1 of them images beside the class folders"
    )
    (tmp_path / "loose.PNG").unlink()
    assert str(ImageFolder(tmp_path, SMALL).passed_over) == "passed over: 2 files (.gif, .heic)"


@pytest.mark.parametrize(
    ("files", "root", "said"),
    [
        ("", "nowhere", "nowhere does not exist.*--data"),
        ("image.png", "image.png", r"image\.png is a file.*--data"),
        ("", "", "found 0 class folders without images and 0 images beside them"),
        ("a/notes.txt b/", "", "found 2 class folders without images and 0 images"),
        ("1.png 2.PNG 3.txt", "", "0 class folders.* and 2 images beside them; expected .*/CLASS/IMAGE"),
        ("a/1.heic", "", r"holds no sample: .*\. passed over: 1 file \(\.heic\)\."),
    ],
)
def test_a_folder_without_samples_is_refused(tmp_path: Path, files: str, root: str, said: str) -> None:
    for name in files.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).touch()
    with pytest.raises(UsageError, match=said) as caught:
        kind_at(tmp_path / root)
        ImageFolder(tmp_path / root, SMALL)
    assert caught.value.exit_code == EXIT_USAGE


def only(path: Path, preprocessing: Preprocessing = SMALL) -> Tensor:
    """The one image of the folder in which ``path`` is CLASS/IMAGE."""
    [(image, _)] = ImageFolder(path.parent.parent, preprocessing).__getitems__([0])
    assert image.dtype == torch.uint8
    assert image.shape == (preprocessing.channels, preprocessing.crop, preprocessing.crop)
    return image


def reference(path: Path, wanted: Preprocessing) -> Tensor:
    """What torchvision makes of a file: its ImageFolder's loader and the transforms of its references."""
    transforms = TORCHVISION.transforms
    steps = transforms.Compose(
        [
            transforms.Resize(
                wanted.resize, interpolation=transforms.InterpolationMode(wanted.interpolation)
            ),
            transforms.CenterCrop(wanted.crop),
            transforms.PILToTensor(),
        ]
    )
    pixels: Tensor = steps(TORCHVISION.datasets.folder.default_loader(str(path)))
    return pixels


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        *(("L", "i.jpg"), ("CMYK", "i.jpg"), ("CMYK", "i.tiff"), ("P", "i.png"), ("RGBA", "i.png")),
        *(("LA", "i.png"), ("1", "i.bmp"), ("RGBA", "i.webp"), ("L", "i.pgm"), ("RGB", "i.ppm")),
    ],
)
def test_every_kind_of_image_becomes_three_channels(tmp_path: Path, mode: str, name: str) -> None:
    path = tmp_path / "a" / name
    path.parent.mkdir()
    pixels = Image.fromarray(noise(40, 30)).convert(mode)
    if mode.endswith("A"):
        pixels.putalpha(Image.fromarray(noise(40, 30, 1)[:, :, 0]))
    pixels.save(path)
    with Image.open(path) as opened:
        assert opened.mode == mode
    image = only(path)
    assert torch.equal(image, reference(path, SMALL))
    assert image.float().std() > 10
    if mode in ("L", "1", "LA"):
        assert torch.equal(image[0], image[1])
        assert torch.equal(image[0], image[2])


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_pixels_without_a_known_range_are_refused(tmp_path: Path, dtype: type) -> None:
    path = tmp_path / "a/i.tif"
    path.parent.mkdir()
    Image.fromarray(np.full((30, 30), 0.5).astype(dtype)).save(path)
    with pytest.raises(ValueError, match="32 bits"):
        only(path)


def test_exif_rotation_is_left_alone(tmp_path: Path) -> None:
    """As torchvision's loader leaves it: published accuracies are of such pixels."""
    path = tmp_path / "a/turned.jpg"
    path.parent.mkdir()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(noise(40, 30)).save(path, exif=exif)
    plain = save(tmp_path / "plain/a/turned.jpg")
    assert torch.equal(only(path), reference(path, SMALL))
    assert torch.equal(only(path), only(plain))


def test_a_dangling_link_does_not_break_the_fingerprint(tmp_path: Path) -> None:
    save(tmp_path / "a/0.png")
    link = tmp_path / "a/1.png"
    link.symlink_to(tmp_path / "later.png")
    data = ImageFolder(tmp_path, SMALL)
    dangling = data.fingerprint(2)
    save(tmp_path / "later.png")
    assert data.fingerprint(2) != dangling


def test_fingerprint_knows_name_size_and_label(tmp_path: Path) -> None:
    for name in ("a/0.png", "b/1.png"):
        save(tmp_path / name)

    def fingerprint(count: int = 2) -> str:
        return ImageFolder(tmp_path, SMALL).fingerprint(count)

    seen = {fingerprint(1), fingerprint(2)}
    assert fingerprint() == fingerprint(100) == fingerprint()
    # Of the names below the root.
    other = ImageFolder(shutil.copytree(tmp_path, tmp_path.with_name("copy")), SMALL)
    assert other.fingerprint(2) == fingerprint()
    with (tmp_path / "b/1.png").open("ab") as file:
        file.write(b"\0")
    seen.add(fingerprint())  # size
    (tmp_path / "b/1.png").rename(tmp_path / "b/2.png")
    seen.add(fingerprint())  # name
    (tmp_path / "aa").mkdir()
    seen.add(fingerprint())  # label: an empty class moves the others
    assert len(seen) == 5


def test_names_that_are_no_utf8_are_escaped_in_ids(tmp_path: Path) -> None:
    """An id goes into JSON and Parquet; the file is still found."""
    plain = save(tmp_path / "a/plain.png")
    plain.rename(plain.with_name(os.fsdecode(b"caf\xe9-\xc3\xa9.png")))
    data = ImageFolder(tmp_path, SMALL)
    assert ids(data) == ["a/caf\\xe9-é.png"]
    assert len(data.fingerprint(1)) == 64
    assert len(data.__getitems__([0])) == 1


def test_parts_of_a_data_set_are_no_classes(tmp_path: Path) -> None:
    for part in ("train", "val"):
        (tmp_path / part / "cat").mkdir(parents=True)
    with pytest.raises(
        UsageError, match=f"train and val, which are parts .* one of them: --data {tmp_path}/val"
    ):
        class_folders(tmp_path, PassedOver())
    save(tmp_path / "flat/val/1.png")
    with pytest.raises(
        UsageError, match=f"no class folder in {tmp_path}/flat/val: expected {tmp_path}/flat/val/CLASS"
    ):
        class_folders(tmp_path / "flat", PassedOver())
    shutil.rmtree(tmp_path / "flat")
    (tmp_path / "cat").mkdir()
    assert class_folders(tmp_path, PassedOver()) == ["cat", "train", "val"]


class Noting(TinyDataset):
    def reading_notes(self) -> list[str]:
        return ["the disk is slow"]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_data_set_says_of_reading_is_said_once(tmp_path: Path, workers: int) -> None:
    """Also where two reading processes read."""
    task, notes = TinyTask(40), list[str]()
    task._dataset = Noting(40)
    result = evaluate(task, tmp_path / "out", batch_size=4, workers=workers, note=notes.append)
    assert notes.count("the disk is slow") == 1
    assert "the disk is slow" not in result.warnings
