"""Idx files, the format of MNIST: of a folder, or of MNIST and FashionMNIST as torchvision keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import from_numpy

from dualeval.data.set_names import NamedSet
from dualeval.data.small_images import FASHION_MNIST_CLASSES, SmallImages, read_idx
from dualeval.errors import UsageError
from dualeval.messages import first_of

_IMAGES = "{}-images-idx3-ubyte"
_LABELS = "{}-labels-idx1-ubyte"
# torchvision keeps the archives beside what it has unpacked.
_SUFFIXES = ("", ".gz")
# As MNIST's files name its splits.
_SPLITS = {"test": "t10k", "train": "train"}
MNIST_CLASSES = (
    *("0 - zero", "1 - one", "2 - two", "3 - three", "4 - four"),
    *("5 - five", "6 - six", "7 - seven", "8 - eight", "9 - nine"),
)
_CLASSES = {"FashionMNIST": FASHION_MNIST_CLASSES, "MNIST": MNIST_CLASSES}


def open_images(at: NamedSet | Path, *, split: str | None = None) -> IdxImages:
    """Read those of a folder, or a set by its name, which has its split."""
    if isinstance(at, Path):
        return IdxImages(at, None if split is None else _SPLITS[split])
    # torchvision's place; then that of the files where nobody gave them a folder of their own.
    places = (at.root / at.name / "raw", at.root / "raw", at.root)
    folder = next(filter(_splits, places), None)
    named = _SPLITS[at.split]
    if folder is None:
        raise UsageError(
            f"{places[0] / f'{named}-images-idx3-ubyte.gz'} is missing: --data {at.name}:DIR takes {at.name} "
            f"as torchvision keeps it, DIR/{at.name}/raw, with .gz or without. Nothing is downloaded."
        )
    return IdxImages(folder, named, classes=_CLASSES[at.name])


class IdxImages(SmallImages):
    """Grey images of one or more pairs of idx files."""

    def __init__(self, folder: Path, split: str | None = None, *, classes: Sequence[str] = ()) -> None:
        splits = _splits(folder)
        if split is None:
            split = _only_split(folder, splits)
        images = from_numpy(read_idx(_idx_file(folder, _IMAGES.format(split))))
        targets = from_numpy(read_idx(_idx_file(folder, _LABELS.format(split)))).long()
        if images.ndim != 3 or targets.ndim != 1 or len(images) != len(targets):
            raise UsageError(
                f"{folder}: images of shape {tuple(images.shape)} and labels of shape "
                f"{tuple(targets.shape)}, expected (n, height, width) and (n,)"
            )
        if classes and len(targets) and int(targets.max()) >= len(classes):
            raise UsageError(f"{folder}: labels up to {int(targets.max())}, expected 0 to {len(classes) - 1}")
        super().__init__(images.unsqueeze(1), targets, split, classes=classes)


def _splits(folder: Path) -> list[str]:
    """The splits whose images are in a folder, sorted."""
    files = [path for suffix in _SUFFIXES for path in folder.glob(_IMAGES.format("*") + suffix)]
    return sorted({path.name.split("-images-")[0] for path in files})


def _only_split(folder: Path, splits: Sequence[str]) -> str:
    """The test split; another one where it is alone."""
    tests = [split for split in splits if split == _SPLITS["test"] or split.endswith("test")] or [*splits]
    if len(tests) > 1:
        inner = folder / tests[0]
        raise UsageError(
            f"{folder} holds {len(tests)} sets of idx files: {first_of(tests, 8)}. Move one into a folder of "
            f"its own, such as: mkdir {inner}; mv {inner}-*ubyte* {inner}; and type --data {inner}"
        )
    return tests[0] if tests else _SPLITS["test"]


def _idx_file(folder: Path, name: str) -> Path:
    for suffix in _SUFFIXES:
        if (folder / f"{name}{suffix}").is_file():
            return folder / f"{name}{suffix}"
    raise UsageError(f"{folder / name}.gz is missing (and so is {name}): images and labels go together")
