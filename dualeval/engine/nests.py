"""Nests: the dicts, lists, tuples and dataclasses in which samples and batches keep their values."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import UserDict, defaultdict
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import PurePath
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

_Nest = TypeVar("_Nest")


class NestError(TypeError):
    """A nest cannot be made anew; ``str()`` is the name of the type that stands in the way."""


_PLAIN = (bool, int, float, complex, str, bytes, bytearray)


def map_values(
    function: Callable[[Any], Any],
    nest: Any,
    *,
    is_leaf: Callable[[Any], bool] = lambda value: False,
    beside: Callable[[Any], Any] | None = None,
) -> Any:
    """Make a nest of the same structure from what a function makes of each value; the nest stays as it is.

    A mapping of a type that cannot be made anew from its items becomes a plain dict. A list or tuple of
    a type of its own becomes a plain one; a namedtuple stays one. What an object has beside its items or
    fields, in attributes, it keeps.
    """

    if type(nest) is Tensor:
        return function(nest)  # most values are one: what follows asks for everything else

    # No function inside that calls itself: it would keep what the others hold, until the next collection.
    def inner(value: Any) -> Any:
        return map_values(function, value, is_leaf=is_leaf, beside=beside)

    def attribute(value: Any) -> Any:
        if beside is not None:
            return map_values(beside, value, is_leaf=is_leaf, beside=beside)
        return map_values(lambda part: function(part) if isinstance(part, Tensor) else part, value)

    if is_leaf(nest):
        return function(nest)
    if isinstance(nest, Mapping):
        return _mapping(nest, {key: inner(value) for key, value in nest.items()}, attribute)
    if isinstance(nest, tuple):
        values = [inner(value) for value in nest]
        if not hasattr(nest, "_make"):
            return tuple(values)
        # A namedtuple takes its values one by one, and may want more of its own constructor.
        found = nest._make(values)
        _set_attributes(found, nest, attribute)
        return found
    if isinstance(nest, list):
        return [inner(value) for value in nest]
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        return _dataclass(nest, {field.name for field in dataclasses.fields(nest)}, inner, attribute)
    return function(nest)


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


def _mapping(nest: Mapping[Any, Any], values: dict[Any, Any], attribute: Callable[[Any], Any]) -> Any:
    """A mapping of the same type where that can be made anew from its items, else a plain dict.

    A copy is not written into: a class of somebody's own may share its storage with it.
    """
    kind: Any = type(nest)
    if kind is defaultdict:
        return defaultdict(nest.default_factory, values)  # type: ignore[attr-defined]
    if kind is dict or not isinstance(nest, (dict, UserDict)):
        return values
    try:
        found = kind(values)
        if not _holds(found, values):
            return values
        _set_attributes(found, nest, attribute)
        # An attribute may be where the items are.
        return found if type(found) is kind and _holds(found, values) else values
    except NestError:
        raise
    except Exception:  # noqa: BLE001 - a class of its own, which may want anything
        return values


def _holds(found: Mapping[Any, Any], values: Mapping[Any, Any]) -> bool:
    return list(found) == list(values) and all(found[key] is value for key, value in values.items())


def _set_attributes(found: Any, nest: Any, attribute: Callable[[Any], Any]) -> None:
    """Give an object what another one of its type has beside its items."""
    for name, value in _attributes(nest).items():
        object.__setattr__(found, name, attribute(value))


def _attributes(nest: Any) -> dict[str, Any]:
    """What an object has beside its items, by name."""
    if getattr(nest, "__dict__", None) is nest:
        return {}  # a dict that is its own attributes
    # A UserDict's items are in one of them.
    holds_items = ("data",) if isinstance(nest, UserDict) else ()
    return {name: value for name, value in own_attributes(nest).items() if name not in holds_items}


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


def _dataclass(
    nest: Any, names: set[str], function: Callable[[Any], Any], attribute: Callable[[Any], Any]
) -> Any:
    for name in names:
        # A slot is the object's own; any other descriptor stores the value where it likes.
        field = inspect.getattr_static(type(nest), name, None)
        if hasattr(type(field), "__set__") and not isinstance(field, MemberDescriptorType):
            raise NestError(name_of_type(nest))
    found = copy.copy(nest)
    if found is nest or (hasattr(nest, "__dict__") and found.__dict__ is nest.__dict__):
        raise NestError(name_of_type(nest))
    for name in names:
        # Frozen ones too; and their own constructors may want other arguments.
        object.__setattr__(found, name, function(getattr(nest, name)))
    for name, value in _attributes(nest).items():
        if name not in names:
            object.__setattr__(found, name, attribute(value))
    return found
