"""Small images that are held in memory, and the reader of idx files, as those of the embedded job are."""

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
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, as_tensor

from dualeval.data.labels import Labels, indices_of_classes
from dualeval.data.preprocessing import Normalisation, OwnPreprocessing, Preprocessing, shape_of
from dualeval.errors import UsageError


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


_UNSIGNED_BYTE = 0x08
_GZIP = b"\x1f\x8b"
FASHION_MNIST_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)


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
