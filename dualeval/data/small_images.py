"""Small images that are held in memory: idx files (the format of MNIST), and torchvision's sets by name."""

from __future__ import annotations

import copy
import functools
import gzip
import hashlib
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, as_tensor

from dualeval.data.labels import Labels, indices_of_classes
from dualeval.data.preprocessing import Normalisation, OwnPreprocessing, Preprocessing, shape_of
from dualeval.data.set_names import SETS, NamedSet
from dualeval.errors import UsageError
from dualeval.messages import first_of


class SmallImages:
    """Images of one size, in memory."""

    in_memory = True

    def __init__(self, images: Tensor, targets: Tensor, split: str, *, classes: Sequence[str] = ()) -> None:
        self._images = images
        self._targets = targets
        self._split = split
        # Indices of classes, and their names.
        largest = int(targets.argmax()) if len(targets) else 0
        at = f"{self.id(largest)}: the label is {int(targets[largest])}" if len(targets) else ""
        self.labels: Labels = replace(indices_of_classes(classes), largest_at=at)

    def __len__(self) -> int:
        return len(self._images)

    def with_labels(self, labels: Labels) -> SmallImages:
        """The same images with other names of classes."""
        images = copy.copy(self)
        images.labels = replace(labels, largest_at=self.labels.largest_at)
        return images

    def prepared(self, preprocessing: Normalisation) -> SmallImages:
        """The same images, brought to another size where that is wanted, or through the user's function."""
        if isinstance(preprocessing, Preprocessing | OwnPreprocessing):
            return ResizedImages(self, preprocessing)
        return self

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every sample."""
        channels, height, width = self._images.shape[1:]
        return channels, height, width

    @property
    def targets(self) -> Tensor:
        """The label of each image, int64 (images,)."""
        return self._targets

    @property
    def largest_target(self) -> int:
        """The largest label; -1 where there are no samples."""
        return int(self._targets.max()) if len(self._targets) else -1

    def id(self, index: int) -> str:
        """Split and number, such as ``t10k-00017``."""
        return f"{self._split}-{index:05d}"

    def notes(self) -> list[str]:
        """Nothing: the files hold images and labels alone."""
        return []

    def warnings(self) -> list[str]:
        """Nothing, as ``notes``."""
        return []

    def labels_used(self, num_classes: int) -> dict[str, Any]:
        """The names of the classes, as in result.json; empty where they are not known."""
        return self.labels.to_json(num_classes)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """One ready batch: images uint8 (n, channels, height, width), targets int64 (n,)."""
        if isinstance(indices, range) and indices.step == 1:
            rows = slice(indices.start, indices.stop)
            return {"images": self._images[rows], "targets": self._targets[rows]}
        chosen = as_tensor(indices)
        return {"images": self._images[chosen], "targets": self._targets[chosen]}

    def picture(self, index: int) -> Any:
        """The picture in its own size, for people."""
        from dualeval.data.pictures import picture_of

        return picture_of(self._images[index])

    def fingerprint(self, count: int) -> str:
        """sha256, in hex, over id, size in bytes and label of the first ``count`` samples."""
        size = math.prod(self._images.shape[1:])
        digest = hashlib.sha256()
        for index, target in enumerate(self._targets[:count].tolist()):
            digest.update(f"{self.id(index)}\0{size}\0{target}\n".encode())
        return digest.hexdigest()

    def content_fingerprint(self, samples: range) -> str:
        """sha256, in hex, over the pixels and labels of consecutive samples."""
        rows = slice(samples.start, samples.stop)
        digest = hashlib.sha256(str(tuple(self._images[rows].shape)).encode())
        digest.update(self._images[rows].contiguous().numpy().data)
        digest.update(self._targets[rows].numpy().data)
        return digest.hexdigest()


class ResizedImages(SmallImages):
    """Small images that are brought to other channels and another size, with the bits of a picture file.

    Ids, labels and fingerprints are those of the small images: the preprocessing is the job's.
    """

    # Pillow resizes one at a time: reading processes are worth their start.
    in_memory = False

    def __init__(self, images: SmallImages, preprocessing: Preprocessing | OwnPreprocessing) -> None:
        from dualeval.vision_library import torchvision

        torchvision()  # not in each reading process anew
        super().__init__(images._images, images._targets, images._split)
        self.labels = images.labels
        self._preprocessing = preprocessing

    @functools.cached_property
    def sample_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every sample, as they are evaluated."""
        return shape_of(self._preprocessing, self.id(0), lambda at: self.__getitems__([at])[0][0], len(self))

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """(uint8 (channels, height, width), label) for each index."""
        from dualeval.data.pictures import picture_of, prepare  # Pillow, which other small images do without

        batch = super().__getitems__(indices)
        pictures = (prepare(picture_of(image), self._preprocessing) for image in batch["images"])
        return list(zip(pictures, batch["targets"].tolist(), strict=True))


# -- idx files -----------------------------------------------------------------------------------------

_UNSIGNED_BYTE = 0x08
_GZIP = b"\x1f\x8b"
_IMAGES = "{}-images-idx3-ubyte"
_LABELS = "{}-labels-idx1-ubyte"
# torchvision keeps the archives beside what it has unpacked.
_SUFFIXES = ("", ".gz")
# As MNIST's files name its splits.
SPLITS = {"test": "t10k", "train": "train"}


def read_idx(path: Path) -> np.ndarray:
    """Read an idx file of unsigned bytes, gzipped or not.

    Format: two zero bytes, a type code, the number of dimensions, one big-endian uint32 per dimension,
    then the values in C order (http://yann.lecun.com/exdb/mnist/).
    """
    content = path.read_bytes()
    if path.suffix == ".gz" or content.startswith(_GZIP):
        try:
            content = gzip.decompress(content)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UsageError(f"{path}: not a complete gzip file ({error})") from error
    unpacked = " after unpacking" if path.suffix == ".gz" else ""
    if len(content) < 4 or content[:3] != bytes((0, 0, _UNSIGNED_BYTE)):
        raise UsageError(f"{path}: not an idx file of unsigned bytes (starts with {content[:4].hex()})")
    dimensions = content[3]
    header = 4 + 4 * dimensions
    if len(content) < header:
        raise UsageError(f"{path}: {len(content)} bytes{unpacked}, expected a header of {header}")
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    expected = header + math.prod(shape)
    if len(content) != expected:
        raise UsageError(f"{path}: {len(content)} bytes{unpacked}, expected {expected} for shape {shape}")
    return np.frombuffer(bytearray(content[header:]), dtype=np.uint8).reshape(shape)


class IdxImages(SmallImages):
    """Grey images of one or more pairs of idx files."""

    def __init__(self, folder: Path, split: str | None = None, *, classes: Sequence[str] = ()) -> None:
        splits = _splits(folder)
        if split is None:
            split = _only_split(folder, splits)
        images = torch.from_numpy(read_idx(_idx_file(folder, _IMAGES.format(split))))
        targets = torch.from_numpy(read_idx(_idx_file(folder, _LABELS.format(split)))).long()
        if images.ndim != 3 or targets.ndim != 1 or len(images) != len(targets):
            raise UsageError(
                f"{folder}: images of shape {tuple(images.shape)} and labels of shape "
                f"{tuple(targets.shape)}, expected (n, height, width) and (n,)"
            )
        if classes and len(targets) and int(targets.max()) >= len(classes):
            raise UsageError(f"{folder}: labels up to {int(targets.max())}, expected 0 to {len(classes) - 1}")
        super().__init__(images.unsqueeze(1), targets, split, classes=classes)

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Whether a folder holds idx images."""
        return bool(_splits(folder))


def _splits(folder: Path) -> list[str]:
    """The splits whose images are in a folder, sorted."""
    files = [path for suffix in _SUFFIXES for path in folder.glob(_IMAGES.format("*") + suffix)]
    return sorted({path.name.split("-images-")[0] for path in files})


def _only_split(folder: Path, splits: Sequence[str]) -> str:
    """The test split; another one where it is alone."""
    tests = [split for split in splits if split == SPLITS["test"] or split.endswith("test")] or [*splits]
    if len(tests) > 1:
        inner = folder / tests[0]
        raise UsageError(
            f"{folder} holds {len(tests)} sets of idx files: {first_of(tests, 8)}. Move one into a folder of "
            f"its own, such as: mkdir {inner}; mv {inner}-*ubyte* {inner}; and type --data {inner}"
        )
    return tests[0] if tests else SPLITS["test"]


def _idx_file(folder: Path, name: str) -> Path:
    for suffix in _SUFFIXES:
        if (folder / f"{name}{suffix}").is_file():
            return folder / f"{name}{suffix}"
    raise UsageError(f"{folder / name}.gz is missing (and so is {name}): images and labels go together")


# -- torchvision's data sets by name -------------------------------------------------------------------

FASHION_MNIST_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
MNIST_CLASSES = (
    *("0 - zero", "1 - one", "2 - two", "3 - three", "4 - four"),
    *("5 - five", "6 - six", "7 - seven", "8 - eight", "9 - nine"),
)
_IDX_CLASSES = {"FashionMNIST": FASHION_MNIST_CLASSES, "MNIST": MNIST_CLASSES}


def read_small(wanted: NamedSet) -> SmallImages:
    """Read one of those whose images are held in memory: all but ImageNet."""
    if reader := SETS[wanted.name][1]:
        images: SmallImages = import_module(f"{__package__}.{reader}").read_set(wanted)
        return images
    # torchvision's place; then that of the files where nobody gave them a folder of their own.
    places = (wanted.root / wanted.name / "raw", wanted.root / "raw", wanted.root)
    folder = next((place for place in places if IdxImages.is_in(place)), None)
    split = SPLITS[wanted.split]
    if folder is None:
        raise UsageError(
            f"{places[0] / f'{split}-images-idx3-ubyte.gz'} is missing: --data {wanted.name}:DIR takes "
            f"{wanted.name} as torchvision keeps it, DIR/{wanted.name}/raw, with .gz or without. Nothing is "
            "downloaded."
        )
    return IdxImages(folder, split, classes=_IDX_CLASSES[wanted.name])
