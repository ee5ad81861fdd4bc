"""Samples in files that lie in stores: those of a batch are asked for together."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dualeval.data.packed import FilePieces
from dualeval.data.stores.requests import read_all
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
        """Without a request, but where all bytes are to be read: of the file's mark and the place in it."""
        if whole:
            return super().digest(index, whole=True)
        file, _, first = self.find(index)
        return hashlib.sha256(f"{self.found[file].mark}\0{first}\0{self.lengths[index]}".encode()).digest()
