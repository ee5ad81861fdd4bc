"""Nests: the dicts, lists, tuples and dataclasses in which samples and batches keep their values.

One walk for all who go through them: ``map_values`` makes a nest anew, ``tensors_in`` says what lies where.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from itertools import islice
from pathlib import PurePath
from types import GetSetDescriptorType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_Nest = TypeVar("_Nest")
# Where the parts of a nest are, as ".logits" or "[0]"; the parts; and what makes a nest of others.
_Opened: TypeAlias = tuple[Sequence[str], Sequence[Any], Callable[[Sequence[Any]], Any]]

_PLAIN = (bool, int, float, complex, str, bytes, bytearray)


def map_values(
    function: Callable[[Any], Any], nest: Any, *, is_leaf: Callable[[Any], bool] = lambda value: False
) -> Any:
    """Make a nest of the same structure from what a function makes of each value; the nest stays as it is.

    Nests are what ``torch.utils._pytree`` knows, dataclasses, and other dicts, lists and tuples. Attributes
    that these have beside their items or fields are values, too. What cannot be copied is a value itself.
    """
    opened = None if is_leaf(nest) else opened_nest(nest)
    if opened is None:
        return function(nest)
    _, parts, made_of = opened
    # No function inside that calls itself: it would keep what the others hold, until the next collection.
    return made_of([map_values(function, part, is_leaf=is_leaf) for part in parts])


def map_tensors(function: Callable[[Tensor], Tensor], nest: Any) -> Any:
    """As ``map_values``, of the tensors alone: all other values stay as they are."""
    return map_values(lambda value: function(value) if isinstance(value, Tensor) else value, nest)


def tensors_in(nest: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a nest, with where they are, as ``.logits`` or ``[0]``."""
    if isinstance(nest, Tensor):
        yield path, nest
    elif (opened := opened_nest(nest)) is not None:
        names, parts, _ = opened
        for name, part in zip(names, parts, strict=True):
            yield from tensors_in(part, path + name)


def zeros_like(sample: _Nest) -> _Nest:
    """A sample of the same structure, shapes and dtypes that holds only zeros (empty text for text).

    None and the members of an Enum stay as they are.
    """
    zeros: _Nest = map_values(_zero, sample)
    return zeros


def _zero(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        found = np.empty_like(value)
        for place in np.ndindex(value.shape):
            found[place] = zeros_like(value[place])
        return found
    if isinstance(value, np.ndarray):
        return np.zeros_like(value)
    if isinstance(value, np.generic):
        return np.zeros_like(value)[()]
    if value is None or isinstance(value, Enum):
        return value
    for plain in _PLAIN:
        if isinstance(value, plain):
            return plain()
    if isinstance(value, PurePath):
        return type(value)()
    raise TypeError(name_of_type(value))


def name_of_type(value: Any) -> str:
    """The type of a value, with its module."""
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def opened_nest(nest: Any) -> _Opened | None:
    """The parts of a nest; None where a value is none, or cannot be made anew."""
    kind: Any = type(nest)
    if kind is Tensor:
        return None  # most values are one: what follows asks for everything else
    if isinstance(nest, tuple) and hasattr(nest, "_make"):
        return _of_object(nest, _keys(kind._fields), list(nest), kind._make)
    if (known := pytree.SUPPORTED_NODES.get(kind)) is not None:
        # Not by pytree's own walk, whose function calls itself.
        given, context = known.flatten_fn(nest)
        parts = [*given]
        names = _keys(nest) if isinstance(nest, Mapping) else _numbers(parts)
        return names, parts, lambda values: known.unflatten_fn(values, context)
    if isinstance(nest, (dict, UserDict)) or (dataclasses.is_dataclass(nest) and not isinstance(nest, type)):
        try:
            copied = copy.copy(nest)
        except Exception:  # noqa: BLE001 - a class of somebody's own, which may want anything
            return None
        if copied is nest:
            return None
        items = dict(dict.items(nest)) if isinstance(nest, dict) else {}
        return _of_object(nest, _keys(items), [*items.values()], partial(_with_items, copied))
    if isinstance(nest, Mapping):  # of a class that may want anything: a plain one
        items = dict(nest)
        return _keys(items), [*items.values()], lambda values: dict(zip(items, values, strict=True))
    if isinstance(nest, list | tuple):
        return _numbers(nest), nest, list if isinstance(nest, list) else tuple
    return None


def _keys(keys: Iterable[Any]) -> list[str]:
    return [f".{key}" for key in keys]


def _numbers(parts: Sequence[Any]) -> list[str]:
    return [f"[{number}]" for number in range(len(parts))]


def _with_items(copied: Any, values: Sequence[Any]) -> Any:
    """A copy of an object with other items, where it has some."""
    if isinstance(copied, dict):
        # By dict's own method: one of the class may store elsewhere, too, in what it shares with its copies.
        for key, value in zip(dict.keys(copied), values, strict=True):
            dict.__setitem__(copied, key, value)
    return copied


def _of_object(
    nest: Any, names: list[str], items: list[Any], of_items: Callable[[Sequence[Any]], Any]
) -> _Opened:
    """An object's items, and behind them its attributes."""
    attributes = own_attributes(nest)

    def made_of(parts: Sequence[Any]) -> Any:
        found = of_items(parts[: len(items)])
        for name, value in zip(attributes, parts[len(items) :], strict=True):
            if name in getattr(found, "__dict__", ()):
                found.__dict__[name] = value
            else:  # a slot, of a frozen one too; or there is none yet
                object.__setattr__(found, name, value)
        return found

    # A UserDict's items are in an attribute.
    of_data = "data" if isinstance(nest, UserDict) else None
    named = ["" if name == of_data else f".{name}" for name in attributes]
    return [*names, *named], [*items, *attributes.values()], made_of


def held_by(value: Any, at_most: int) -> list[Any]:
    """What a value holds: entries of a container, parts of a call, else an object's attributes; the first."""
    kind = type(value)  # a proxy answers isinstance with what it stands for
    if issubclass(kind, (Tensor, type, ModuleType)) or inspect.isbuiltin(value):
        return []
    if kind is MethodType:
        return [value.__self__, value.__func__]
    if issubclass(kind, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if issubclass(kind, dict):
        return [*islice(dict.values(value), at_most)]
    for base in (list, tuple, set, frozenset, deque):
        if issubclass(kind, base):
            return [*islice(base.__iter__(value), at_most)]
    return [*islice(own_attributes(value).values(), at_most)]


def own_attributes(value: Any) -> dict[str, Any]:
    """What stands in an object's ``__dict__`` and slots, by name; no attribute that computes."""
    found: dict[str, Any] = {}
    for kind in reversed(type.__dict__["__mro__"].__get__(type(value))):
        space = type.__dict__["__dict__"].__get__(kind)
        holder = space.get("__dict__")
        # A class may define a __dict__ of its own, and that computes.
        if type(holder) is GetSetDescriptorType or type(holder) is MemberDescriptorType:
            content = holder.__get__(value)
            found.update((name, item) for name, item in dict.items(content) if type(name) is str)
        slots = space.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{kind.__name__.lstrip('_')}{name}"
            slot = space.get(name)
            if type(slot) is MemberDescriptorType:
                try:
                    found[name] = slot.__get__(value)
                except AttributeError:  # an empty one
                    continue
    return found
