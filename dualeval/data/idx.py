"""The idx file format of MNIST and its relatives."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from dualeval.data.small_images import SmallImages
from dualeval.errors import UsageError

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
            split = SPLITS["test"] if SPLITS["test"] in splits or not splits else splits[0]
        images = torch.from_numpy(read_idx(_found(folder, _IMAGES.format(split))))
        targets = torch.from_numpy(read_idx(_found(folder, _LABELS.format(split)))).long()
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


def _found(folder: Path, name: str) -> Path:
    for suffix in _SUFFIXES:
        if (folder / f"{name}{suffix}").is_file():
            return folder / f"{name}{suffix}"
    raise UsageError(f"{folder / name}.gz is missing (and so is {name}): images and labels go together")
