"""Nests: the dicts, lists, tuples and dataclasses in which samples and batches keep their values."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from enum import Enum
from pathlib import PurePath
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

_Nest = TypeVar("_Nest")

_PLAIN = (bool, int, float, complex, str, bytes, bytearray)


def map_values(function: Callable[[Any], Any], nest: Any) -> Any:
    """Make a nest of the same structure from what a function makes of each value."""
    if isinstance(nest, Mapping):
        return _mapping(nest, {key: map_values(function, value) for key, value in nest.items()})
    if isinstance(nest, tuple):
        values = [map_values(function, value) for value in nest]
        # A namedtuple takes its values one by one, and may want more of its own constructor.
        return nest._make(values) if hasattr(nest, "_make") else tuple(values)
    if isinstance(nest, list):
        return [map_values(function, value) for value in nest]
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        return _dataclass(nest, {field.name for field in dataclasses.fields(nest)}, function)
    return function(nest)


def map_tensors(function: Callable[[Tensor], Any], nest: Any) -> Any:
    """The same for the tensors of a nest; other values stay as they are."""
    return map_values(lambda value: function(value) if isinstance(value, Tensor) else value, nest)


def zeros_like(sample: _Nest) -> _Nest:
    """A sample of the same structure, shapes and dtypes that holds only zeros (empty text for text).

    None and the members of an Enum stay as they are.

    Raises:
        TypeError: a value has no zero; names its type.
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
    kind = type(value)
    raise TypeError(f"{kind.__module__}.{kind.__qualname__}")


def _mapping(nest: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """A mapping of the same type where that is one to write into."""
    if type(nest) is dict or not isinstance(nest, MutableMapping):
        return values
    found = copy.copy(nest)
    for key, value in values.items():
        found[key] = value
    return found


def _dataclass(nest: Any, names: set[str], function: Callable[[Any], Any]) -> Any:
    found = copy.copy(nest)
    for name in names:
        # Frozen ones too; and their own constructors may want other arguments.
        object.__setattr__(found, name, map_values(function, getattr(nest, name)))
    return found
