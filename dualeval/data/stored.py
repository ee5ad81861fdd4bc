"""Samples in files that lie in stores, or that are files there: those of a batch are asked for together."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from dualeval.data.image_files import MISSING, FileNames
from dualeval.data.packed import FilePieces, Pieces
from dualeval.data.stores.path import StorePath
from dualeval.data.stores.requests import asked, at_once, read_all, store_of
from dualeval.data.stores.store import Found


@dataclass(frozen=True, kw_only=True)
class StorePieces(FilePieces):
    """As ``FilePieces``; the second of the states stands for the file's mark."""

    # By address.
    found: Mapping[str, Found]

    def part(self, index: int) -> tuple[int, Callable[[int, int], bytes]]:
        data = self.read(index)
        return len(data), lambda count, offset: data[offset : offset + count]

    def read(self, index: int) -> bytes:
        return self.together([index])(index)

    def together(self, indices: Sequence[int]) -> Callable[[int], bytes]:
        files = [self.find(index) for index in indices]
        lengths = self.lengths[list(indices)].tolist()
        read = read_all(
            [(self.found[file], first, size) for (file, _, first), size in zip(files, lengths, strict=True)]
        )
        return dict(zip(indices, read, strict=True)).__getitem__

    def digest(self, index: int, *, whole: bool) -> bytes:
        """Without a request: the file's mark stands for all its bytes."""
        file, _, first = self.find(index)
        return hashlib.sha256(f"{self.found[file].mark}\0{first}\0{self.lengths[index]}".encode()).digest()


@dataclass(frozen=True, kw_only=True)
class ObjectPieces(Pieces):
    """Samples that are an object each, in the states that the list of their folder has said."""

    @classmethod
    def below(cls, root: Path, names: FileNames) -> ObjectPieces:
        """Those of some paths below a folder; of one that is not there the size is ``MISSING``."""
        assert isinstance(root, StorePath)
        there = {name: (size, time) for name, size, time in root.entries}
        # Of a million files it takes more room than all else.
        del root.entries
        numbers = np.arange(len(names))
        return cls(
            # In little room.
            files=cast("Sequence[str]", FileNames(f"{root}/{name}" for name in names)),
            states=np.array([there.get(name, (MISSING, 0)) for name in names], np.int64).reshape(-1, 2),
            ends=numbers + 1,
            places=numbers,
        )

    @property
    def are_missing(self) -> bool:
        """Whether none of them is there."""
        return bool((self.states[:, 0] == MISSING).all())

    def part(self, index: int) -> tuple[int, Callable[[int, int], bytes]]:
        data = self.together([index])(index)
        return len(data), lambda count, offset: data[offset : offset + count]

    def together(self, indices: Sequence[int]) -> Callable[[int], bytes]:
        return dict(zip(indices, at_once(self._whole, indices), strict=True)).__getitem__

    def _whole(self, index: int) -> bytes:
        url, (size, time), _ = self.find(index)
        if size == MISSING:
            raise FileNotFoundError(2, "No such object", url)
        return asked(url, lambda: store_of(url).whole(url, size, time))

    def sizes(self, count: int) -> list[int]:
        sizes: list[int] = self.states[self.places[:count], 0].tolist()
        return sizes

    def seen(self, samples: range) -> bytes:
        return self.states[self.places[samples.start : samples.stop]].tobytes()

    def digest(self, index: int, *, whole: bool) -> bytes:
        """Without a request, but where all bytes are to be read: of size and time."""
        if whole:
            return super().digest(index, whole=True)
        return hashlib.sha256(self.seen(range(index, index + 1))).digest()
