"""Nests: the dicts, lists, tuples and dataclasses in which samples and batches keep their values.

All modules walk through nests by these functions: ``map_values`` rebuilds a nest, ``tensors_in`` lists its
tensors.
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
# The positions of a nest's parts, as ".logits" or "[0]"; the parts; and a function that makes it from others.
_Opened: TypeAlias = tuple[Sequence[str], Sequence[Any], Callable[[Sequence[Any]], Any]]

_PLAIN = (bool, int, float, complex, str, bytes, bytearray)


def map_values(
    function: Callable[[Any], Any], nest: Any, *, is_leaf: Callable[[Any], bool] = lambda value: False
) -> Any:
    """Make a nest of the same structure from a function's result for each value, without changing the nest.

    Nests are the types that ``torch.utils._pytree`` knows, dataclasses, and other dicts, lists and tuples.
    Attributes beside their items or fields are values, too. A nest that cannot be copied counts as a value.
    """
    opened = None if is_leaf(nest) else opened_nest(nest)
    if opened is None:
        return function(nest)
    _, parts, made_of = opened
    # No recursive inner function: it would keep the values alive until the next garbage collection.
    return made_of([map_values(function, part, is_leaf=is_leaf) for part in parts])


def map_tensors(function: Callable[[Tensor], Tensor], nest: Any) -> Any:
    """Like ``map_values``, for tensors only: all other values stay as they are."""
    return map_values(lambda value: function(value) if isinstance(value, Tensor) else value, nest)


def tensors_in(nest: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a nest with their positions, as ``.logits`` or ``[0]``."""
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
        zeros = np.empty_like(value)
        for place in np.ndindex(value.shape):
            zeros[place] = zeros_like(value[place])
        return zeros
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
    """The parts of a nest; None if the value is not a nest, or cannot be rebuilt."""
    kind: Any = type(nest)
    if kind is Tensor:
        return None  # first, because most values are tensors
    if isinstance(nest, tuple) and hasattr(nest, "_make"):
        return _of_object(nest, _keys(kind._fields), list(nest), kind._make)
    if (known := pytree.SUPPORTED_NODES.get(kind)) is not None:
        # Not by pytree's own walk, whose inner function is recursive.
        children, context = known.flatten_fn(nest)
        parts = [*children]
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
    if isinstance(nest, Mapping):  # a class with unknown arguments becomes a dict
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
    """Give a copied object other items, if it is a dict."""
    if isinstance(copied, dict):
        # By dict's own method: the class's may also store into something that it shares with its copies.
        for key, value in zip(dict.keys(copied), values, strict=True):
            dict.__setitem__(copied, key, value)
    return copied


def _of_object(
    nest: Any, names: list[str], items: list[Any], of_items: Callable[[Sequence[Any]], Any]
) -> _Opened:
    """An object's items, followed by its attributes."""
    attributes = own_attributes(nest)

    def made_of(parts: Sequence[Any]) -> Any:
        made = of_items(parts[: len(items)])
        for name, value in zip(attributes, parts[len(items) :], strict=True):
            if name in getattr(made, "__dict__", ()):
                made.__dict__[name] = value
            else:  # a slot, also of a frozen object; or not set yet
                object.__setattr__(made, name, value)
        return made

    # A UserDict's items are in an attribute.
    of_data = "data" if isinstance(nest, UserDict) else None
    named = ["" if name == of_data else f".{name}" for name in attributes]
    return [*names, *named], [*items, *attributes.values()], made_of


def held_by(value: Any, at_most: int) -> list[Any]:
    """The first few of a container's entries, of a call's parts, or of any other object's attributes."""
    kind = type(value)  # by type: a proxy answers isinstance for another object
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
    """The values in an object's ``__dict__`` and slots, by name; without computed attributes."""
    attributes: dict[str, Any] = {}
    for kind in reversed(type.__dict__["__mro__"].__get__(type(value))):
        space = type.__dict__["__dict__"].__get__(kind)
        holder = space.get("__dict__")
        # A class may define a __dict__ that is computed.
        if type(holder) is GetSetDescriptorType or type(holder) is MemberDescriptorType:
            content = holder.__get__(value)
            attributes.update((name, item) for name, item in dict.items(content) if type(name) is str)
        slots = space.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{kind.__name__.lstrip('_')}{name}"
            slot = space.get(name)
            if type(slot) is MemberDescriptorType:
                try:
                    attributes[name] = slot.__get__(value)
                except AttributeError:  # an empty slot
                    continue
    return attributes
