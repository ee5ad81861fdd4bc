"""Samples in files that lie in stores: those of a batch are asked for together."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dualeval.data.image_files import digest_of
from dualeval.data.packed import FilePieces
from dualeval.data.stores.requests import read_all
from dualeval.data.stores.store import Found


@dataclass(frozen=True, kw_only=True)
class StorePieces(FilePieces):
    """As ``FilePieces``; the second of the states stands for the file's mark."""

    found: Sequence[Found]

    def together(self, indices: Sequence[int]) -> Callable[[int], bytes]:
        places = [self._place(index) for index in indices]
        read = read_all([(self.found[file], first, size) for file, first, size in places])
        return dict(zip(indices, read, strict=True)).__getitem__

    def read(self, index: int) -> bytes:
        return self.together([index])(index)

    def digest(self, index: int, *, whole: bool) -> bytes:
        """Without a request, but where all bytes are to be read: by the file's ETag and the place in it."""
        file, first, size = self._place(index)
        if not whole:
            return hashlib.sha256(f"{self.found[file].mark}\0{first}\0{size}".encode()).digest()
        data = self.read(index)
        return digest_of(size, lambda count, offset: data[offset : offset + count], whole=True)
