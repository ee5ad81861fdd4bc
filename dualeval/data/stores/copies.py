"""Files of stores that are read whole, and by more than one process: copies in the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from pathlib import Path, PosixPath

from dualeval.data.stores.path import StorePath
from dualeval.data.stores.requests import IN_FLIGHT, PART_BYTES, at_once
from dualeval.errors import UsageError
from dualeval.process.status_line import doing

# Where copies of this process come from, by their paths.
_ADDRESSES: dict[str, str] = {}


class CopyPath(PosixPath):
    """The path of a copy, which people see as the address that they gave."""

    def __str__(self) -> str:
        return _ADDRESSES.get(super().__str__(), super().__str__())

    def __fspath__(self) -> str:
        return super().__str__()


def local_copy(what: str, url: str) -> Path:
    """A file as it is now, fetched once by all processes of a machine; older copies of it are removed."""
    path = StorePath(url)
    if url.endswith(".index.json"):
        raise UsageError(
            f"{what} {url} is an index of several files. Copy all to a disk, and give its folder."
        )
    if not path.is_file():
        folder = "is a folder. Give one file of it, or copy the folder to a disk, and give that"
        raise UsageError(f"{what} {url} {folder if path.is_dir() else 'does not exist'}.")
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dualeval" / "stores"
    home = base / hashlib.sha256(url.encode()).hexdigest()[:40]
    copy = home / path.digest().hex()[:40] / path.name
    try:
        home.mkdir(parents=True, exist_ok=True)
        with (home / "lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not copy.exists():
                for older in home.glob("*/"):
                    shutil.rmtree(older)
                copy.parent.mkdir()
                _fetch(path, copy.with_name(f"{copy.name}.partial"))
                copy.with_name(f"{copy.name}.partial").replace(copy)
    except OSError as error:
        raise UsageError(
            f"{what} {url} cannot be copied to {home}: {error.strerror or error}. XDG_CACHE_HOME=DIR takes "
            "another folder."
        ) from error
    _ADDRESSES[str(copy)] = url
    return CopyPath(copy)


def _fetch(path: StorePath, into: Path) -> None:
    size, step = path.found.size, PART_BYTES * IN_FLIGHT
    with doing(f"fetching {path}") as fetching, into.open("wb") as file:
        for first in range(0, size, step):
            starts = range(first, min(first + step, size), PART_BYTES)
            for data in at_once(lambda start: path.read(PART_BYTES, start), starts):
                file.write(data)
            fetching.count = file.tell()
        path.check()
        file.flush()
        os.fsync(file.fileno())
