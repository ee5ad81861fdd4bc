"""Many short texts in one buffer: a million paths take their bytes and 8 MB, not 100 MB of objects."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt


class FileNames:
    """Names of files, in an order; by index each one as Python's functions of files take it."""

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
