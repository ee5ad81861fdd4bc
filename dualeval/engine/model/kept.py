"""What objects keep between batches: attributes, names and containers, to compare and to put back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from operator import is_
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from dualeval.engine.identity.source import is_own
from dualeval.engine.values.nests import held_by

OF_TASK = ("collate", "forward", "observe", "postprocess")
OF_METRIC = ("update", "compute")
_PLAIN = (bool, int, float, complex, str, bytes)
_LISTS = (list, set, deque)
_NO_CONFIGS = (nn.Module, Tensor, type, ModuleType, FunctionType)
VALUES = (*_PLAIN, *_LISTS, type(None), tuple, dict, frozenset, torch.dtype, torch.device)
# What a value of these holds does not change.
_HOLD_NONE = (*_PLAIN, type(None), tuple, frozenset)
# Most bytes of an array that is compared by content; most attributes of an object.
_CONTENT, _MOST_ATTRIBUTES = 1 << 16, 1 << 10


# A value, what it holds, and a function that binds another one in its place.
_Noted: TypeAlias = tuple[Any, list[Any], Callable[[Any], object]]


def put_back(dicts: Iterable[tuple[dict[Any, Any], dict[Any, Any]]]) -> None:
    """Restore the entries of dicts, and their order, to those before."""
    for now, before in dicts:
        if list(now) != list(before) or not all(map(is_, now.values(), before.values())):
            now.clear()
            now.update(before)


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written in place; 0 if it does not count this."""
    return 0 if tensor.is_inference() else tensor._version


class Kept:
    """An object's attributes, the outside names of its functions, and what their values hold, as of now.

    Only one level is inspected. A change further down shows in the columns, if it matters. For models, see
    ``Snapshot``.
    """

    def __init__(self, owner: Any, methods: Sequence[str], model: nn.Module | None = None) -> None:
        self._owner, self._methods = owner, methods
        self._of_model = set() if model is None else {id(module) for module in model.modules()}
        self._attributes = dict(_attributes(owner))
        self._before = self._places()

    def changes(self) -> list[str]:
        """The places of values that were replaced, or now hold other values."""
        before, now = self._before, self._places()
        both = [place for place in before if place in now and _are_same(before[place], now[place])]
        return [place for place in {**before, **now} if place not in both]

    def put_back(self) -> None:
        """Restore attributes, names and containers, but no object's own attributes: they may be related."""
        put_back([(_attributes(self._owner), self._attributes)])
        for value, inside, bind in self._before.values():
            bind(value)
            if issubclass(type(value), dict):
                half = len(inside) // 2
                put_back([(value, dict(zip(inside[:half], inside[half:], strict=True)))])
            elif type(value) in _LISTS:
                value.clear()
                (value.update if type(value) is set else value.extend)(inside)

    def _places(self) -> dict[str, _Noted]:
        """The values by their places, what each holds, and a function that binds another value there."""
        owner, held, of_model = self._owner, _attributes(self._owner), self._of_model
        places = list[tuple[str, Any, Callable[[Any], object]]]()
        for name, value in list(held.items()):
            places.append((f"{type(owner).__name__}.{name}", value, partial(held.__setitem__, name)))
        for each in (*map(partial(getattr, owner), self._methods), *held.values()):
            function = getattr(each, "__func__", each)
            if type(function) is not FunctionType or not is_own(function):
                continue
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                with suppress(ValueError):  # an empty cell
                    bind = partial(setattr, cell, "cell_contents")
                    places.append((f"{name} of {function.__qualname__}", cell.cell_contents, bind))
            read, module = function.__globals__, function.__module__
            for name in [each for each in function.__code__.co_names if each in read]:
                places.append((f"{name} of the module {module}", read[name], partial(read.__setitem__, name)))
        return {
            place: (value, [] if type(value) in _HOLD_NONE or id(value) in of_model else _inside(value), bind)
            for place, value, bind in places
        }


def _attributes(owner: Any) -> dict[str, Any]:
    try:  # not by getattr: a proxy answers for the object that it stands for
        attributes = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}
    return attributes if type(attributes) is dict else {}


def plain_values(model: nn.Module) -> dict[str, Any]:
    """The plain values among the attributes of a model's modules and their configs, by name."""
    values, configs = dict[str, Any](), set[int]()
    for name, module in model.named_modules():
        for attribute, value in list(vars(module).items()):
            held = {f"{name}.{attribute}".lstrip("."): value}
            if id(value) not in configs and is_config(value):
                configs.add(id(value))
                held = {f"{place}.{key}": each for place in held for key, each in _attributes(value).items()}
            for place, each in held.items():
                # Transformers keeps a length as a tensor of one number.
                is_number = type(each) is Tensor and each.ndim == 0 and not each.is_meta
                plain = each.item() if is_number else each
                if _is_plain(plain):
                    values[place] = plain
    return values


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN or isinstance(value, Enum)


def is_config(value: Any) -> bool:
    """Whether an object holds only values, as transformers' configs do: no module, tensor or handle."""
    held = {} if type(value) in VALUES or issubclass(type(value), _NO_CONFIGS) else _attributes(value)
    return bool(held) and all(
        type(each) in VALUES or (bool(_attributes(each)) and not issubclass(type(each), _NO_CONFIGS))
        for each in held.values()
    )


def _inside(value: Any) -> list[Any]:
    """What a value holds: a tensor's version, an array's bytes; empty for objects of a library's class."""
    kind = type(value)
    if issubclass(kind, Tensor):
        return [version_of(value)]
    if kind is np.ndarray:
        return [value.tobytes()] if value.nbytes <= _CONTENT and not value.dtype.hasobject else []
    if issubclass(kind, dict):
        return [*dict.keys(value), *held_by(value, len(value))]
    return (
        held_by(value, len(value))
        if kind in _LISTS
        else held_by(value, _MOST_ATTRIBUTES)
        if is_own(kind)
        else []
    )


def _are_same(before: _Noted, now: _Noted) -> bool:
    one, other = [before[0], *before[1]], [now[0], *now[1]]
    if len(one) != len(other):
        return False
    return all(map(is_, one, other)) or all(
        a is b or (type(a) is type(b) and type(a) in _PLAIN and a == b)
        for a, b in zip(one, other, strict=True)
    )
