"""Picture files: many, their names in little room, what tells two of them apart, and how they are read."""

from __future__ import annotations

import copy
import functools
import hashlib
import os
import stat
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dualeval.data.cache import DataCache
from dualeval.data.labels import Labels
from dualeval.data.pictures import left_out_of, picture_in, read_pixels
from dualeval.data.preprocessing import Normalisation, shape_of
from dualeval.data.stores.path import StorePath
from dualeval.messages import counted
from dualeval.vision_library import torchvision

# The size that stands for a file that is not there.
MISSING = -1
# The columns of a manifest that may have the paths.
PATH_COLUMNS = ("path", "image_path", "file_path", "filepath", "file_name", "filename", "file", "image")
_END_BYTES = 4096
_PIECE_BYTES = 2**20
_LARGEST_END = 2**32 - 1
# Of so many files what is left out is looked for.
_LOOKED_INTO = 32
# A file system behind a network answers many questions at a time, each after a while.
_THREADS = 8
_FILES_A_TURN = 64
# All of them are handed out at once.
_MOST_TURNS = 4096

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class FileNames:
    """Names of files, in an order; by index each one as Python's functions of files take it.

    In one buffer a million paths take their bytes and 4 MB, not 100 MB of objects.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._bytes = bytearray()
        # Of four bytes as long as that is enough.
        self._ends = array("I", (0,))
        for name in names:
            self.append(name)

    def append(self, name: str) -> None:
        """Add a name behind the others."""
        self.append_stored(os.fsencode(name))

    def append_stored(self, name: bytes) -> None:
        """The same of a name as the file system has it."""
        self._grow(name)
        self._ends.append(len(self._bytes))

    def _grow(self, stored: bytes) -> None:
        self._bytes += stored
        if len(self._bytes) > _LARGEST_END and self._ends.typecode == "I":
            self._ends = array("q", self._ends)

    def extend(self, stored: bytes, ends: npt.NDArray[np.int64]) -> None:
        """Add names as the file system has them, one behind the other, and where each ends in that."""
        before = len(self._bytes)
        self._grow(stored)
        self._ends.frombytes((ends.astype(np.int64) + before).astype(self._ends.typecode).tobytes())

    def stored_all(self) -> tuple[bytes, npt.NDArray[np.int64]]:
        """What ``extend`` takes."""
        return bytes(self._bytes), np.array(self._ends[1:], np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def repeated(self) -> int | None:
        """The place of a name that stands before that, too; None where each is there once."""
        hashes = np.fromiter((hash(self.stored(place)) for place in range(len(self))), np.int64, len(self))
        values, counts = np.unique(hashes, return_counts=True)
        # Names of one hash need not be equal.
        seen: set[bytes] = set()
        for place in np.flatnonzero(np.isin(hashes, values[counts > 1])).tolist():
            if (name := self.stored(place)) in seen:
                return int(place)
            seen.add(name)
        return None

    def stored(self, index: int) -> bytes:
        """A name as the file system has it."""
        return bytes(self._bytes[self._ends[index] : self._ends[index + 1]])

    def __getitem__(self, index: int) -> str:
        return os.fsdecode(self.stored(index))

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def shown(self, index: int) -> str:
        """A name for text files: bytes that are no UTF-8 as ``\\xNN``."""
        return self.stored(index).decode("utf-8", "backslashreplace")

    def select(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> FileNames:
        """Some of the names, in this order."""
        names = FileNames()
        for index in np.asarray(indices, np.int64).tolist():
            names.append_stored(self.stored(index))
        return names


def _on_threads(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> Iterator[_Result]:
    """Call a function for each item, several at a time; gives its results in the order of the items."""
    size = max(_FILES_A_TURN, -(-len(items) // _MOST_TURNS))
    turns = (items[first : first + size] for first in range(0, len(items), size))
    if len(items) <= size:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(_THREADS, "dualeval-files") as pool:
        for results in pool.map(lambda turn: [*map(function, turn)], turns):
            yield from results


def _size_and_time(file: Path | str | int) -> tuple[int, int]:
    """A file's size in bytes and time of change in ns; (MISSING, 0) where it cannot be had."""
    try:
        status = os.stat(file)  # noqa: PTH116 - of a descriptor, too
    except OSError:
        return MISSING, 0
    return status.st_size, status.st_mtime_ns


def digest_of_file(path: Path | str, *, whole: bool) -> bytes:
    """sha256 over a file's size and its first and last 4 KiB, or over all its bytes; one digest for all files
    that cannot be read. In a store its ETag stands for it."""
    if isinstance(path, StorePath):
        return path.digest()
    return digest_or_unreadable(partial(_digest_of_file, path, whole))


def digest_or_unreadable(read: Callable[[], bytes]) -> bytes:
    """What a function returns; where that cannot be read, what stands for all that cannot be."""
    for _ in range(2):
        try:
            return read()
        except OSError:
            # Reading the sample fails, too, and is handled there.
            continue
    return hashlib.sha256(b"unreadable").digest()


def _digest_of_file(path: Path | str, whole: bool) -> bytes:
    # A pipe is not waited for: reading the sample does that, and the run's watch sees it.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("no regular file")
        if hasattr(os, "posix_fadvise") and not whole:
            # Else the kernel reads ahead, which for pictures is nearly the whole file.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return digest_of(status.st_size, partial(os.pread, descriptor), whole=whole)
    finally:
        os.close(descriptor)


def digest_of(size: int, read: Callable[[int, int], bytes], *, whole: bool) -> bytes:
    """``digest_of_file`` of what ``read(count, offset)`` gives, wherever it lies."""
    digest = hashlib.sha256(f"{size}\0".encode())
    if whole:
        offset = 0
        while piece := read(_PIECE_BYTES, offset):
            digest.update(piece)
            offset += len(piece)
    elif size <= 2 * _END_BYTES:
        digest.update(read(2 * _END_BYTES, 0))
    else:
        digest.update(read(_END_BYTES, 0))
        digest.update(read(_END_BYTES, size - _END_BYTES))
    return digest.digest()


_Own = TypeVar("_Own", bound="ImageFiles")


class ImageFiles:
    """Pictures in files, in a fixed order."""

    in_memory = False
    unique_ids = True

    def __init__(
        self,
        root: Path,
        paths: FileNames,
        targets: npt.NDArray[np.int32],
        *,
        labels: Labels,
        preprocessing: Normalisation,
        whole_files: bool,
        cache: DataCache,
    ) -> None:
        self._root = root
        self._paths = paths
        self._targets = targets
        self.labels = labels
        self.preprocessing = preprocessing
        self._whole_files = whole_files
        # Size and time of change, in ns, of the files that the fingerprint covers: (count, 2).
        self._first_seen: npt.NDArray[np.int64] = np.empty((0, 2), np.int64)
        # By all that tells the files of some samples from others.
        self._known_contents: dict[bytes, str] = cache.once(
            ("contents of images", root.absolute(), whole_files), dict
        )
        # Not in the first reading: reading processes would each import it, for seconds without progress.
        torchvision()

    def __len__(self) -> int:
        return len(self._paths)

    def prepared(self, preprocessing: Normalisation) -> ImageFiles:
        """The same images with another preprocessing."""
        images = copy.copy(self)
        vars(images).pop("sample_shape", None)
        images.preprocessing = preprocessing
        return images

    def select(self: _Own, indices: Sequence[int] | npt.NDArray[np.int64]) -> _Own:
        """The same data with some of its images alone, in this order; classes and ids stay."""
        images = copy.copy(self)
        chosen = np.asarray(indices, np.int64)
        images._paths = self._paths.select(chosen)
        images._targets = self._targets[chosen]
        images._first_seen = np.empty((0, 2), np.int64)
        return images

    @property
    def targets(self) -> npt.NDArray[np.int32]:
        """The class of each image, shape (images,)."""
        return self._targets

    @property
    def largest_target(self) -> int:
        """The largest index of a class that a label is, also of one without images."""
        of_samples = int(self._targets.max()) if len(self._targets) else -1
        return max(self.labels.largest, of_samples)

    @functools.cached_property
    def sample_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every sample; those of the first one where nothing else says them."""
        return shape_of(self.preprocessing, self.id(0), self._image, len(self))

    def id(self, index: int) -> str:
        """The image's path, for text files: bytes that are no UTF-8 as ``\\xNN``."""
        return self._paths.shown(index)

    def notes(self) -> list[str]:
        """Which classes the labels are."""
        return [*self.labels.notes]

    def warnings(self) -> list[str]:
        """Where classes may be others than the model's."""
        return [*self.labels.warnings, *self.left_out()]

    def left_out(self) -> list[str]:
        """What some of the files have that is left out where they are read."""
        places = self._looked_into(_LOOKED_INTO)
        by_kind: dict[str, list[int]] = {}
        opened = self._openings(places)
        for place in places:
            # The loop names what cannot be read; a pipe is not waited for.
            if self._is_file(place):
                with suppress(OSError, ValueError), opened(place) as file:
                    for kind in left_out_of(file, self.preprocessing):
                        by_kind.setdefault(kind, []).append(place)
        of = f"of {counted(len(places), 'picture')} looked into"
        return [f"{len(some)} {of} have, as {self.id(some[0])}, {kind}" for kind, some in by_kind.items()]

    def _looked_into(self, most: int) -> range:
        return range(0, len(self), -(-len(self) // most) or 1)

    def labels_used(self, num_classes: int) -> dict[str, Any]:
        """How labels became classes, as in result.json."""
        return self.labels.to_json(num_classes)

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """Decode, resize and crop images: (uint8 (channels, height, width), target) for each index.

        With a function of the user's, it is what that returns.
        """
        return [(self._image(index), int(self._targets[index])) for index in indices]

    def _image(self, index: int) -> Tensor:
        with self.opened(index) as file:
            return read_pixels(file, self.preprocessing)

    def _openings(self, places: Sequence[int]) -> Callable[[int], AbstractContextManager[IO[bytes]]]:
        """``opened`` for these images, which may have been read at once."""
        return self.opened

    @contextmanager
    def opened(self, index: int) -> Iterator[IO[bytes]]:
        """The file of an image, as it was when the run started."""
        with self.as_it_is(index) as file:
            if index < len(self._first_seen):
                size, time = self._first_seen[index].tolist()
                check_unchanged(self.id(index), (size, time), file.fileno())
            yield file

    def as_it_is(self, index: int) -> AbstractContextManager[IO[bytes]]:
        """The file of an image, as it is now."""
        return Path(self.path(index)).open("rb")

    def _is_file(self, index: int) -> bool:
        return Path(self.path(index)).is_file()

    def picture(self, index: int) -> Any:
        """The picture as it stands in its file, for people."""
        with self.as_it_is(index) as file:
            return picture_in(file)

    def fingerprint(self, count: int) -> str:
        """sha256, in hex, over id, size in bytes and target of the first ``count`` images.

        A file that changes after this is not read any more.
        """
        digest = hashlib.sha256()
        for index, size in enumerate(self._sizes(range(min(count, len(self))))):
            digest.update(f"{self.id(index)}\0{size}\0{self._targets[index]}\n".encode())
        return digest.hexdigest()

    def _sizes(self, chosen: range) -> Iterator[int]:
        """The sizes of the first images; remembers what they are from now on."""
        # A link to nowhere has no size; reading it fails later, and is handled there.
        stats = _on_threads(lambda index: _size_and_time(self.path(index)), chosen)
        self._first_seen = np.empty((len(chosen), 2), np.int64)
        for index, seen in enumerate(stats):
            self._first_seen[index] = seen
            yield seen[0]

    def path(self, index: int) -> str:
        """Where an image is looked for."""
        # A Path takes ten times the room, which a million files feel.
        return os.path.join(self._root, self._paths[index])  # noqa: PTH118

    def content_fingerprint(self, samples: range) -> str:
        """sha256, in hex, over the files of consecutive samples: size, first and last 4 KiB, or all bytes.

        Files of the same sizes and times of change as when they were read before are not read again.
        """
        if (seen := self._seen(samples)) is None:
            return self._contents(samples)
        names = b"\0".join(os.fsencode(self.path(index)) for index in samples)
        key = hashlib.sha256(names + b"\0" + seen).digest()
        if key not in self._known_contents:
            self._known_contents[key] = self._contents(samples)
        return self._known_contents[key]

    def _seen(self, samples: range) -> bytes | None:
        """What the files of samples were when the run started; None where nobody has looked."""
        seen = self._first_seen[samples.start : samples.stop]
        return seen.tobytes() if len(seen) == len(samples) else None

    def _contents(self, samples: range) -> str:
        return hashlib.sha256(b"".join(_on_threads(self._digest, samples))).hexdigest()

    def _digest(self, index: int) -> bytes:
        return digest_of_file(self.path(index), whole=self._whole_files)


def check_unchanged(name: str, seen: tuple[int, int], file: str | int) -> None:
    """Refuse a file of another size or time than it had when the run started."""
    (size, time), (now, now_time) = seen, _size_and_time(file)
    if (size, time) == (now, now_time):
        return
    then = "it was missing" if size == MISSING else f"{size:,} bytes of {_date(time)}"
    raise OSError(
        f"{name} has changed since the run started: {then} then, {now:,} bytes of {_date(now_time)} now"
    )


def _date(nanoseconds: int) -> str:
    return f"{datetime.fromtimestamp(nanoseconds / 1e9, timezone.utc):%Y-%m-%d %H:%M:%S.%f} UTC"
