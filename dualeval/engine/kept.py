"""What a task or metric and its functions keep between batches: what a call changes, and its way back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
from torch import Tensor, nn

from dualeval.engine.guest import put_back, version_of
from dualeval.engine.identity.source import is_own
from dualeval.engine.nests import held_by

OF_TASK = ("collate", "forward", "observe", "postprocess")
OF_METRIC = ("update", "compute")

_PLAIN = (bool, int, float, complex, str, bytes)
_LISTS = (list, set, deque)
# Bytes of an array that is compared by content; attributes of an object.
_CONTENT, _MOST = 1 << 16, 1 << 10


class Kept:
    """An object's attributes, the names outside of its functions, and what their values hold: as of now.

    Values of values are not looked at: what those decide, the columns show. Of a model see ``Snapshot``.
    """

    def __init__(self, owner: Any, methods: Sequence[str], model: nn.Module | None = None) -> None:
        self._owner, self._methods = owner, methods
        self._of_model = set() if model is None else {id(module) for module in model.modules()}
        self._attributes = dict(_attributes(owner))
        self._before = {place: (value, self._inside(value), bind) for place, value, bind in self._places()}

    def changes(self) -> list[str]:
        """The places of values that are others now, or hold others."""
        now = {place: [value, *self._inside(value)] for place, value, _ in self._places()}
        then = {place: [value, *inside] for place, (value, inside, _) in self._before.items()}
        return [place for place in {**then, **now} if not _are_same(then.get(place), now.get(place))]

    def put_back(self) -> None:
        """Put back all but what other objects hold: their parts may belong together."""
        put_back(_attributes(self._owner), self._attributes)
        for value, inside, bind in self._before.values():
            bind(value)
            if issubclass(type(value), dict):
                half = len(inside) // 2
                put_back(value, dict(zip(inside[:half], inside[half:], strict=True)))
            elif type(value) in _LISTS:
                value.clear()
                (value.update if type(value) is set else value.extend)(inside)

    def _places(self) -> Iterator[tuple[str, Any, Callable[[Any], object]]]:
        """Where the values are, the values, and what binds others there."""
        owner, held = self._owner, _attributes(self._owner)
        for name, value in list(held.items()):
            yield f"{type(owner).__name__}.{name}", value, partial(held.__setitem__, name)
        methods = [getattr(owner, name) for name in self._methods]
        for function in [getattr(each, "__func__", each) for each in (*methods, *held.values())]:
            if type(function) is not FunctionType or not is_own(function):
                continue
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                with suppress(ValueError):  # an empty one
                    bind = partial(setattr, cell, "cell_contents")
                    yield f"{name} of {function.__qualname__}", cell.cell_contents, bind
            read, module = function.__globals__, function.__module__
            for name in [each for each in function.__code__.co_names if each in read]:
                yield f"{name} of the module {module}", read[name], partial(read.__setitem__, name)

    def _inside(self, value: Any) -> list[Any]:
        return [] if id(value) in self._of_model else _inside(value)


def _attributes(owner: Any) -> dict[str, Any]:
    found = getattr(owner, "__dict__", None)
    return found if type(found) is dict else {}


def _inside(value: Any) -> list[Any]:
    """What a value holds; a tensor's version, an array's bytes; nothing of an object of a library's class."""
    kind = type(value)
    if issubclass(kind, Tensor):
        return [version_of(value)]
    if kind is np.ndarray:
        return [value.tobytes()] if value.nbytes <= _CONTENT and not value.dtype.hasobject else []
    if issubclass(kind, dict):
        return [*dict.keys(value), *held_by(value, len(value))]
    return held_by(value, len(value)) if kind in _LISTS else held_by(value, _MOST) if is_own(kind) else []


def _are_same(before: list[Any] | None, now: list[Any] | None) -> bool:
    if before is None or now is None or len(before) != len(now):
        return False
    return all(
        one is other or (type(one) is type(other) and type(one) in _PLAIN and one == other)
        for one, other in zip(before, now, strict=True)
    )
