"""A folder of images with one sub-folder a class, as torchvision's ImageFolder lays it out."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from dualeval.data.preprocessing import Preprocessing
from dualeval.errors import UsageError
from dualeval.vision_library import torchvision

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class ImageFolder:
    """Images below ``root/CLASS/``, classes and files in name order; sub-folders of a class count to it.

    A class folder may be empty: its class still has its number.

    Args:
        root: the folder of class folders.
        preprocessing: resize and crop are done here; normalisation is the task's, on the device.

    Attributes:
        classes: the names of the class folders, in order; a target is an index into them.

    Raises:
        UsageError: the folder is missing, or holds no class folders or no images.
    """

    def __init__(self, root: Path, preprocessing: Preprocessing) -> None:
        if not root.is_dir():
            found = "is a file" if root.exists() else "does not exist"
            raise UsageError(
                f"data folder {root} {found}. Give a folder with one sub-folder a class with --data."
            )
        self._root = root
        self._preprocessing = preprocessing
        self.classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        self._samples = [
            (path, target) for target, name in enumerate(self.classes) for path in _images(root, name)
        ]
        if not self._samples:
            loose = sum(entry.name.lower().endswith(EXTENSIONS) for entry in os.scandir(root))
            found = f"{len(self.classes)} class folders without images and {loose} images beside them"
            raise UsageError(
                f"data folder {root} holds no sample: found {found}; expected {root}/CLASS/IMAGE "
                f"({' '.join(EXTENSIONS)})."
            )
        # Not in the first reading: reading processes would each import it, for seconds without progress.
        torchvision()

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def num_classes(self) -> int:
        """Number of class folders."""
        return len(self.classes)

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every sample."""
        return 3, self._preprocessing.crop, self._preprocessing.crop

    def id(self, index: int) -> str:
        """The image's path below the root, for text files: bytes that are no UTF-8 as ``\\xNN``."""
        return os.fsencode(self._samples[index][0]).decode("utf-8", "backslashreplace")

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """Decode, resize and crop images: (uint8 (3, crop, crop), target) for each index.

        Raises:
            OSError: a file cannot be read, or is no whole image. Pillow raises others on damaged files.
            ValueError: pixels are 32-bit integers or floats.
        """
        return [(self._image(self._samples[i][0]), self._samples[i][1]) for i in indices]

    def _image(self, name: str) -> Tensor:
        transforms: Any = torchvision().transforms
        wanted = self._preprocessing
        with Image.open(self._root / name) as image:
            image = transforms.functional.resize(
                _eight_bits(image).convert("RGB"),
                wanted.resize,
                interpolation=transforms.InterpolationMode(wanted.interpolation),
            )
        pixels: Tensor = transforms.functional.pil_to_tensor(
            transforms.functional.center_crop(image, wanted.crop)
        )
        return pixels

    def fingerprint(self, count: int) -> str:
        """sha256, in hex, over path, size in bytes and target of the first ``count`` images."""
        digest = hashlib.sha256()
        for index, (name, target) in enumerate(self._samples[:count]):
            path = self._root / name
            # A link to nowhere has no size; reading it fails later, and is handled there.
            size = path.stat().st_size if path.exists() else -1
            digest.update(f"{self.id(index)}\0{size}\0{target}\n".encode())
        return digest.hexdigest()


def _eight_bits(image: Image.Image) -> Image.Image:
    """The image with 8 bits a channel: of 16 grey bits the higher ones, where Pillow would clip at 255."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):  # PNG: older Pillow
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of 32 bits (mode {image.mode}) have no known range, expected 8 or 16 bits")
    return image


def _images(root: Path, class_name: str) -> Iterable[str]:
    """Paths below the root of the images of a class, sorted."""

    def refuse(error: OSError) -> None:
        # Passed over, its images would be missing without a word.
        raise UsageError(f"data folder {error.filename} cannot be listed: {error.strerror}") from error

    found = []
    seen: set[tuple[int, int]] = set()
    for folder, inner, names in os.walk(root / class_name, onerror=refuse, followlinks=True):
        own = Path(folder).stat()
        if (own.st_dev, own.st_ino) in seen:
            inner.clear()  # a link back to where the walk has been
            continue
        seen.add((own.st_dev, own.st_ino))
        inside = Path(folder).relative_to(root).as_posix()
        found += [f"{inside}/{name}" for name in names if name.lower().endswith(EXTENSIONS)]
    return sorted(found)
