"""A folder of images with one sub-folder a class, as torchvision's ImageFolder lays it out."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dualeval.data.class_folders import EXTENSIONS, PassedOver, class_folders, images_in, is_image, shown_name
from dualeval.data.decoding import Decoder
from dualeval.data.files import MISSING, digest_of_file, on_threads, size_and_time
from dualeval.data.labels import Labels, choose_labels
from dualeval.data.opened import Opened
from dualeval.data.pictures import read_pixels
from dualeval.data.preprocessing import Preprocessing
from dualeval.errors import UsageError
from dualeval.vision_library import torchvision


class ImageFolder:
    """Images below ``root/CLASS/``, folders and files in name order; sub-folders of a class count to it.

    A class folder may be empty. Files and folders whose names begin with a dot are passed over.

    Args:
        root: the folder of class folders.
        preprocessing: resize and crop are done here; normalisation is the task's, on the device.
        label: decides which class each folder is, of their names in order.
        whole_files: take all bytes of a file for its contents; else its size, its head and its tail.
        opened: what other tasks of the run have read; the folders are listed once for all of them, and
            files that have not changed are read for their contents once.

    Attributes:
        classes: the names of the class folders, in order.
        labels: which class each of them is.
        passed_over: what lies there and is no sample.

    Raises:
        UsageError: the folder is missing, or holds no class folders or no images; a folder has no class.
    """

    def __init__(
        self,
        root: Path,
        preprocessing: Preprocessing,
        *,
        label: Callable[[Sequence[str]], Labels] = choose_labels,
        whole_files: bool = False,
        opened: Opened | None = None,
    ) -> None:
        opened = opened or Opened()
        self._root = root
        self._preprocessing = preprocessing
        self._whole_files = whole_files
        self._decoder = Decoder()
        # Size and time of change, in ns, of the files that the fingerprint covers: (count, 2).
        self._first_seen: npt.NDArray[np.int64] = np.empty((0, 2), np.int64)
        # By all that tells the files of some samples from others.
        self._known_contents: dict[bytes, str] = opened.once(
            ("contents of images", root.absolute(), whole_files), dict
        )
        found, self.passed_over = opened.once(("class folders", root.absolute()), lambda: _listed(root))
        self.classes = list(found)
        if not any(found.values()):
            raise self._without_images()
        self.labels = label(self.classes)
        self._samples = [
            (path, target) for name, target in self.labels.classes.items() for path in found[name]
        ]
        if not self._samples:
            raise UsageError(
                f"data folder {root} holds no sample: the class map leaves out all folders that hold images."
            )
        # Not in the first reading: reading processes would each import it, for seconds without progress.
        torchvision()

    def _without_images(self) -> UsageError:
        loose = sum(is_image(path.name) for path in self._root.iterdir())
        folders = f"{len(self.classes)} class folders without images and {loose} images beside them"
        return UsageError(
            f"data folder {self._root} holds no sample: found {folders}; expected {self._root}/CLASS/IMAGE "
            f"({' '.join(EXTENSIONS)})." + (f" {self.passed_over}." if str(self.passed_over) else "")
        )

    def __len__(self) -> int:
        return len(self._samples)

    def select(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> ImageFolder:
        """The same folder with some of its images alone, in this order; classes and ids stay."""
        found = copy.copy(self)
        found._samples = [self._samples[index] for index in np.asarray(indices).tolist()]
        found._first_seen = np.empty((0, 2), np.int64)
        return found

    @property
    def targets(self) -> npt.NDArray[np.int64]:
        """The class of each image, shape (images,)."""
        return np.fromiter((target for _, target in self._samples), np.int64, len(self._samples))

    @property
    def num_classes(self) -> int | None:
        """Number of classes; None where a class map names single ones alone."""
        return self.labels.num_classes

    @property
    def largest_target(self) -> int:
        """The largest index of a class that a folder is."""
        return self.labels.largest

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every sample."""
        wanted = self._preprocessing
        return (wanted.channels, *wanted.crop_size)

    def id(self, index: int) -> str:
        """The image's path below the root, for text files: bytes that are no UTF-8 as ``\\xNN``."""
        return shown_name(self._samples[index][0])

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """Decode, resize and crop images: (uint8 (channels, height, width), target) for each index.

        Raises:
            OSError: a file cannot be read, is no whole image, or has changed since ``fingerprint``. Pillow
                raises others on damaged files.
            ValueError: pixels are 32-bit integers or floats.
        """
        return [(self._image(index), self._samples[index][1]) for index in indices]

    def _image(self, index: int) -> Tensor:
        with (self._root / self._samples[index][0]).open("rb") as file:
            self._check_unchanged(index, file.fileno())
            return read_pixels(file, self._preprocessing, self._decoder)

    def reading_notes(self) -> list[str]:
        """What the reader of a run should know of how this process has decoded, since the last call."""
        return self._decoder.notes()

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
        """sha256, in hex, over the files of consecutive samples: size, first and last 4 KiB, or all bytes.

        Files of the same sizes and times of change as when they were read before are not read again.
        """
        paths = [self._path(self._samples[index][0]) for index in samples]
        seen = self._first_seen[samples.start : samples.stop]
        is_seen = len(seen) == len(samples)
        names = "\0".join(paths).encode("utf-8", "surrogateescape")
        key = hashlib.sha256(names + b"\0" + seen.tobytes()).digest()
        if is_seen and key in self._known_contents:
            return self._known_contents[key]
        found = on_threads(lambda path: digest_of_file(path, whole=self._whole_files), paths)
        contents = hashlib.sha256(b"".join(found)).hexdigest()
        if is_seen:
            self._known_contents[key] = contents
        return contents


def _listed(root: Path) -> tuple[dict[str, list[str]], PassedOver]:
    """The images of each class folder, as paths below the root, and what lies there beside them."""
    passed_over = PassedOver()
    folders = {shown_name(name): name for name in class_folders(root, passed_over)}
    return {name: images_in(root, folder, passed_over) for name, folder in folders.items()}, passed_over


def _date(nanoseconds: int) -> str:
    return f"{datetime.fromtimestamp(nanoseconds / 1e9, timezone.utc):%Y-%m-%d %H:%M:%S.%f} UTC"
