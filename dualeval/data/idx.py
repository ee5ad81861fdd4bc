"""The idx file format of MNIST and its relatives."""

from __future__ import annotations

import gzip
import hashlib
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dualeval.errors import UsageError

_UNSIGNED_BYTE = 0x08
_IMAGES = "{}-images-idx3-ubyte.gz"
_LABELS = "{}-labels-idx1-ubyte.gz"


def read_idx(path: Path) -> np.ndarray:
    """Read a gzipped idx file of unsigned bytes.

    Format: two zero bytes, a type code, the number of dimensions, one big-endian uint32 per dimension,
    then the values in C order (http://yann.lecun.com/exdb/mnist/).

    Returns:
        A writable uint8 array of the shape that the file states.

    Raises:
        UsageError: the file is no such idx file, or is cut short.
    """
    try:
        content = gzip.decompress(path.read_bytes())
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UsageError(f"{path}: not a complete gzip file ({error})") from error
    if len(content) < 4 or content[:3] != bytes((0, 0, _UNSIGNED_BYTE)):
        raise UsageError(f"{path}: not an idx file of unsigned bytes (starts with {content[:4].hex()})")
    dimensions = content[3]
    header = 4 + 4 * dimensions
    if len(content) < header:
        raise UsageError(f"{path}: {len(content)} bytes after unpacking, expected a header of {header}")
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    expected = header + math.prod(shape)
    if len(content) != expected:
        raise UsageError(
            f"{path}: {len(content)} bytes after unpacking, expected {expected} for shape {shape}"
        )
    return np.frombuffer(bytearray(content[header:]), dtype=np.uint8).reshape(shape)


class IdxImages:
    """Grey images of one or more pairs of idx files, held in memory.

    Args:
        folder: holds ``*-images-idx3-ubyte.gz`` and the ``*-labels-idx1-ubyte.gz`` that go with it; the
            test split (t10k) is taken where there are several.

    Attributes:
        num_classes: None; the files do not tell.

    Raises:
        UsageError: a file is missing or damaged, or images and labels differ in number.
    """

    num_classes: int | None = None

    def __init__(self, folder: Path) -> None:
        found = sorted(folder.glob(_IMAGES.format("*")))
        split = "t10k" if folder / _IMAGES.format("t10k") in found else found[0].name.split("-images-")[0]
        labels = folder / _LABELS.format(split)
        if not labels.is_file():
            raise UsageError(f"{labels} is missing: the images of {folder} have no labels")
        self._split = split
        images = torch.from_numpy(read_idx(folder / _IMAGES.format(split)))
        self._targets = torch.from_numpy(read_idx(labels)).long()
        if images.ndim != 3 or self._targets.ndim != 1 or len(images) != len(self._targets):
            raise UsageError(
                f"{folder}: images of shape {tuple(images.shape)} and labels of shape "
                f"{tuple(self._targets.shape)}, expected (n, height, width) and (n,)"
            )
        self._images = images.unsqueeze(1)

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Whether a folder holds idx images."""
        return any(folder.glob(_IMAGES.format("*")))

    def __len__(self) -> int:
        return len(self._images)

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every sample."""
        return 1, self._images.shape[2], self._images.shape[3]

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

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """One ready batch: images uint8 (n, 1, height, width) and targets int64 (n,); a view for a range."""
        if isinstance(indices, range) and indices.step == 1:
            rows = slice(indices.start, indices.stop)
            return {"images": self._images[rows], "targets": self._targets[rows]}
        chosen = torch.as_tensor(indices)
        return {"images": self._images[chosen], "targets": self._targets[chosen]}

    def fingerprint(self, count: int) -> str:
        """sha256, in hex, over id, size in bytes and label of the first ``count`` samples."""
        size = math.prod(self.sample_shape)
        digest = hashlib.sha256()
        for index, target in enumerate(self._targets[:count].tolist()):
            digest.update(f"{self.id(index)}\0{size}\0{target}\n".encode())
        return digest.hexdigest()

    def content_fingerprint(self, samples: range) -> str:
        """sha256, in hex, over the pixels and labels of consecutive samples."""
        rows = slice(samples.start, samples.stop)
        digest = hashlib.sha256(str(tuple(self._images[rows].shape)).encode())
        digest.update(self._images[rows].numpy().data)
        digest.update(self._targets[rows].numpy().data)
        return digest.hexdigest()
