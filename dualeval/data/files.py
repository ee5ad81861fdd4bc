"""Many files: their names in little room, and what tells two of them apart."""

from __future__ import annotations

import hashlib
import os
import stat
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

# The size that stands for a file that is not there.
MISSING = -1
_END_BYTES = 4096
_PIECE_BYTES = 2**20
# A file system behind a network answers many questions at a time, each after a while.
_THREADS = 8
_FILES_A_TURN = 64
# All of them are handed out at once.
_MOST_TURNS = 4096

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class FileNames:
    """Names of files, in an order; by index each one as Python's functions of files take it.

    In one buffer a million paths take their bytes and 8 MB, not 100 MB of objects.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._bytes = bytearray()
        self._ends = array("q", (0,))
        for name in names:
            self.append(name)

    def append(self, name: str) -> None:
        """Add a name behind the others."""
        self._bytes += os.fsencode(name)
        self._ends.append(len(self._bytes))

    def __len__(self) -> int:
        return len(self._ends) - 1

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
        found = FileNames()
        for index in np.asarray(indices, np.int64).tolist():
            found._bytes += self._bytes[self._ends[index] : self._ends[index + 1]]
            found._ends.append(len(found._bytes))
        return found


def on_threads(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> Iterator[_Result]:
    """Call a function for each item, several at a time; gives its results in the order of the items."""
    size = max(_FILES_A_TURN, -(-len(items) // _MOST_TURNS))
    turns = (items[first : first + size] for first in range(0, len(items), size))
    if len(items) <= size:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(_THREADS, "dualeval-files") as pool:
        for results in pool.map(lambda turn: [*map(function, turn)], turns):
            yield from results


def size_and_time(file: Path | str | int) -> tuple[int, int]:
    """A file's size in bytes and time of change in ns; (MISSING, 0) where it cannot be had."""
    try:
        found = os.stat(file)  # noqa: PTH116 - of a descriptor, too
    except OSError:
        return MISSING, 0
    return found.st_size, found.st_mtime_ns


def digest_of_file(path: Path | str, *, whole: bool) -> bytes:
    """sha256 over a file's size and its first and last 4 KiB, or over all its bytes; one digest for all files
    that cannot be read."""
    for _ in range(2):
        try:
            return _digest_of_file(path, whole)
        except OSError:
            # Reading the sample fails, too, and is handled there.
            continue
    return hashlib.sha256(b"unreadable").digest()


def _digest_of_file(path: Path | str, whole: bool) -> bytes:
    # A pipe is not waited for: reading the sample does that, and the run's watch sees it.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError("no regular file")
        size = found.st_size
        digest = hashlib.sha256(f"{size}\0".encode())
        if whole:
            while piece := os.read(descriptor, _PIECE_BYTES):
                digest.update(piece)
            return digest.digest()
        if hasattr(os, "posix_fadvise"):
            # Else the kernel reads ahead, which for pictures is nearly the whole file.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        if size <= 2 * _END_BYTES:
            digest.update(os.pread(descriptor, 2 * _END_BYTES, 0))
        else:
            digest.update(os.pread(descriptor, _END_BYTES, 0))
            digest.update(os.pread(descriptor, _END_BYTES, size - _END_BYTES))
        return digest.digest()
    finally:
        os.close(descriptor)
