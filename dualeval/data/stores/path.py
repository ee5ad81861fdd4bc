"""A path in a store, for code that takes any path: it exists, has a size, is opened, and lists its folder."""

from __future__ import annotations

import fnmatch
import hashlib
import io
import os
import stat
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path, PosixPath
from typing import IO, Any

from dualeval.data.stores.requests import asked, read_all, store_of
from dualeval.data.stores.store import Found
from dualeval.errors import UsageError
from dualeval.urls import check_parts, is_plain, url_of

# What is read at once of a file that is read to its end, and of one that may not be.
_AHEAD_BYTES, _HEAD_BYTES = 4 << 20, 1 << 16


def path_at(value: str | Path, what: str = "--data") -> Path:
    """The path that a text names, on a disk or in a store."""
    if (url := url_of(value)) is None:
        return Path(value)
    check_parts(what, url)
    return StorePath(url)


class StorePath(PosixPath):
    """A path whose text is an address; what it is is asked once, when somebody wants to know."""

    _found: Found | None = None

    def __str__(self) -> str:
        return url_of(super().__str__()) or super().__str__()

    def __fspath__(self) -> str:
        return str(self)

    def absolute(self) -> StorePath:
        return self

    def resolve(self, strict: bool = False) -> StorePath:
        return self

    @property
    def found(self) -> Found:
        """The file as it was when this was first asked; FileNotFoundError where it is not there."""
        # Up to Python 3.11 a cached_property has one lock for all paths: they would be asked one by one.
        if self._found is None:
            self._found = asked(str(self), lambda: store_of(str(self)).look(str(self)))
        return self._found

    def exists(self, **_: Any) -> bool:
        return self.is_dir() or self.is_file()

    def is_file(self, **_: Any) -> bool:
        try:
            return self.found is not None
        except FileNotFoundError:
            return False

    def is_dir(self, **_: Any) -> bool:
        return self._is_folder

    @cached_property
    def _is_folder(self) -> bool:
        return asked(str(self), lambda: store_of(str(self)).is_folder(str(self)))

    @cached_property
    def entries(self) -> list[tuple[str, int, int]]:
        """Of all files below a folder the path from there, size, and time of change in ns, by path."""
        entries = sorted(asked(str(self), lambda: store_of(str(self)).entries(str(self))))
        if odd := next((name for name, *_ in entries if not is_plain(name)), None):
            raise UsageError(
                f"{self} holds an object {odd}, whose key has an empty part, . or .. in it, so that it is no "
                "path. Copy it to another key, or remove it."
            )
        return entries

    def glob(self, pattern: str, **_: Any) -> Iterator[Path]:  # type: ignore[override]
        """The files in the folder itself."""
        names = (name for name, *_ in self.entries if "/" not in name)
        return (self / name for name in names if fnmatch.fnmatchcase(name, pattern))

    def rglob(self, pattern: str, **_: Any) -> Iterator[Path]:  # type: ignore[override]
        """The files in the folder, and in the folders in it."""
        names = (name for name, *_ in self.entries)
        return (self / name for name in names if fnmatch.fnmatchcase(name.rpartition("/")[2], pattern))

    def iterdir(self) -> Iterator[Path]:  # type: ignore[override]
        return self.glob("*")

    def stat(self, **_: Any) -> os.stat_result:
        """Its size; its time is a number that stands for its mark."""
        mark = int.from_bytes(self.digest()[:7], "big")
        values = (stat.S_IFREG | 0o444, 0, 0, 1, 0, 0, self.found.size, 0, 0, 0)
        return os.stat_result(values, {"st_mtime_ns": mark})

    def digest(self) -> bytes:
        """What stands for its bytes: a hash of its size and mark."""
        return hashlib.sha256(f"{self.found.size}\0{self.found.mark}".encode()).digest()

    def open(self, mode: str = "r", buffering: int = -1, **options: Any) -> IO[Any]:  # type: ignore[override]
        if set(mode) - set("rbt"):
            raise OSError(f"{self} is read, never written")
        file = io.BufferedReader(_Reading(self, _HEAD_BYTES if "b" in mode else _AHEAD_BYTES))
        return file if "b" in mode else io.TextIOWrapper(file, **options)

    def read(self, count: int, offset: int) -> bytes:
        """Some of its bytes, fewer at its end; of this file once ``check`` has returned."""
        count = max(0, min(count, self.found.size - offset))
        return read_all([(self.found, offset, count)], check=False)[0]

    def check(self) -> None:
        """Check that it has not changed until now."""
        asked(str(self), lambda: store_of(str(self)).check(self.found))


class _Reading(io.RawIOBase):
    """A file in a store as Python's own are."""

    def __init__(self, path: StorePath, ahead: int) -> None:
        # Python's own buffers pass small reads on.
        self._path, self._position, self._ahead = path, 0, ahead
        self._block, self._begin = b"", 0
        path.found  # noqa: B018 - an error comes where the file is opened

    def close(self) -> None:
        if not self.closed and self._position:
            self._path.check()
        super().close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._path.found.size}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, room: Any) -> int:
        first = self._position - self._begin
        if not 0 <= first < len(self._block):
            self._block = self._path.read(max(len(room), self._ahead), self._position)
            self._begin, first = self._position, 0
        data = self._block[first : first + len(room)]
        room[: len(data)] = data
        self._position += len(data)
        return len(data)
