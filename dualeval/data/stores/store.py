"""What a kind of store has to do, and in which errors it says what went wrong."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dualeval.errors import StoreError


@dataclass(frozen=True, kw_only=True)
class Found:
    """A file in a store, in the state in which it was found."""

    url: str
    # In bytes.
    size: int
    # Another one where its bytes are others: the ETag, or the time of its change.
    mark: str


class Store(Protocol):
    """A kind of store; each method sends one request where nothing else is said.

    Raises:
        Again: the same request may succeed later.
        StoreError: it will not.
        FileNotFoundError: there is no such file.
        OSError: the file is another one than it was.
    """

    def look(self, url: str) -> Found:
        """The state that a file is in."""

    def read(self, file: Found, offset: int, count: int) -> bytes:
        """Some of its bytes, which are there."""

    def check(self, file: Found) -> None:
        """Check that it was in this state while it was read; no request where each answer says so."""

    def whole(self, url: str, size: int, time: int) -> bytes:
        """All bytes of a file that is as ``entries`` has said; two requests."""

    def is_folder(self, url: str) -> bool:
        """Whether files lie below an address."""

    def entries(self, url: str) -> list[tuple[str, int, int]]:
        """Of all files below a folder the path from there, size, and time of change in ns; many requests."""


class Again(Exception):
    """A request failed, in words, in a way that passes."""

    def __init__(self, what: str, after_s: float = 0.0) -> None:
        super().__init__(what)
        # For how long the store asks not to be asked.
        self.after_s = after_s


def changed(file: Found, now: str) -> OSError:
    """The error of a file that is another one by now."""
    return OSError(f"{file.url} has changed since the run started: {file.mark} then, {now} now")


def certificates(*names: str) -> str | None:
    """The file of certificates that the first of some variables names, which is there."""
    name = next((name for name in names if os.environ.get(name)), None)
    if name is None:
        return None
    if not Path(os.environ[name]).is_file():
        raise StoreError(
            f"{name} is {os.environ[name]!r}, expected a file of certificates. Set it to one, or unset it."
        )
    return os.environ[name]
