"""A folder of images with one sub-folder a class, as torchvision's ImageFolder lays it out."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from dualeval.data.contents import what_it_is
from dualeval.data.files import MISSING, digest_of_file, on_threads, size_and_time
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
        whole_files: take all bytes of a file for its contents; else its size, its head and its tail.

    Attributes:
        classes: the names of the class folders, in order; a target is an index into them.

    Raises:
        UsageError: the folder is missing, or holds no class folders or no images.
    """

    def __init__(self, root: Path, preprocessing: Preprocessing, *, whole_files: bool = False) -> None:
        if not root.is_dir():
            found = "is a file" if root.exists() else "does not exist"
            raise UsageError(
                f"data folder {root} {found}. Give a folder with one sub-folder a class with --data."
            )
        self._root = root
        self._preprocessing = preprocessing
        self._whole_files = whole_files
        # Size and time of change, in ns, of the files that the fingerprint covers: (count, 2).
        self._first_seen: npt.NDArray[np.int64] = np.empty((0, 2), np.int64)
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
            OSError: a file cannot be read, is no whole image, or has changed since ``fingerprint``. Pillow
                raises others on damaged files.
            ValueError: pixels are 32-bit integers or floats.
        """
        return [(self._image(index), self._samples[index][1]) for index in indices]

    def _image(self, index: int) -> Tensor:
        transforms: Any = torchvision().transforms
        wanted = self._preprocessing
        with (self._root / self._samples[index][0]).open("rb") as file, self._opened(file) as image:
            self._check_unchanged(index, file.fileno())
            image = transforms.functional.resize(
                _eight_bits(image).convert("RGB"),
                wanted.resize,
                interpolation=transforms.InterpolationMode(wanted.interpolation),
            )
        pixels: Tensor = transforms.functional.pil_to_tensor(
            transforms.functional.center_crop(image, wanted.crop)
        )
        return pixels

    def _opened(self, file: BinaryIO) -> Image.Image:
        try:
            return Image.open(file)
        except UnidentifiedImageError as error:
            said = what_it_is(Path(file.name)) or "holds no picture that Pillow knows, or a damaged one"
            raise UnidentifiedImageError(f"the file {said}") from error

    def _check_unchanged(self, index: int, descriptor: int) -> None:
        if index >= len(self._first_seen):
            return
        (size, time), (now, now_time) = self._first_seen[index].tolist(), size_and_time(descriptor)
        if (size, time) == (now, now_time):
            return
        then = "it was missing" if size == MISSING else f"{size:,} bytes of {_date(time)}"
        raise OSError(
            f"{self.id(index)} has changed since the run started: {then} then, {now:,} bytes of "
            f"{_date(now_time)} now"
        )

    def fingerprint(self, count: int) -> str:
        """sha256, in hex, over path, size in bytes and target of the first ``count`` images.

        A file that changes after this is not read any more.
        """
        chosen = self._samples[:count]
        # A link to nowhere has no size; reading it fails later, and is handled there.
        found = on_threads(lambda sample: size_and_time(self._path(sample[0])), chosen)
        seen = np.empty((len(chosen), 2), np.int64)
        digest = hashlib.sha256()
        for index, ((_, target), (size, time)) in enumerate(zip(chosen, found, strict=True)):
            seen[index] = size, time
            digest.update(f"{self.id(index)}\0{size}\0{target}\n".encode())
        self._first_seen = seen
        return digest.hexdigest()

    def _path(self, name: str) -> str:
        # A Path takes ten times the room, which a million files feel.
        return f"{self._root}/{name}"

    def content_fingerprint(self, samples: range) -> str:
        """sha256, in hex, over the files of consecutive samples: size, first and last 4 KiB, or all bytes."""
        paths = [self._path(self._samples[index][0]) for index in samples]
        found = on_threads(lambda path: digest_of_file(path, whole=self._whole_files), paths)
        return hashlib.sha256(b"".join(found)).hexdigest()


def _date(nanoseconds: int) -> str:
    return f"{datetime.fromtimestamp(nanoseconds / 1e9, timezone.utc):%Y-%m-%d %H:%M:%S.%f} UTC"


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
