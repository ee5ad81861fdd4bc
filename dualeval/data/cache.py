"""What the tasks of one run have read of their data, so that each of it is read once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

_T = TypeVar("_T")


class DataCache:
    """Remembers what was read; the caller makes one, and gives it to each task of its run."""

    def __init__(self) -> None:
        self._read: dict[Hashable, Any] = {}

    def once(self, key: Hashable, read: Callable[[], _T]) -> _T:
        """What was read under a key, read now where it was not; an error is not remembered."""
        if key not in self._read:
            self._read[key] = read()
        value: _T = self._read[key]
        return value
