"""What a model holds besides its parameters: buffers, and the values in the attributes of its modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dualeval.models.tied import are_equal

# Of a module's attributes: what holds tensors by name, or only what a training needs.
_BOOKKEEPING = {"_parameters", "_buffers", "_modules"}


def tensors_and_devices(model: nn.Module) -> Iterator[tuple[str, Tensor | torch.device]]:
    """All buffers, and the tensors and devices in plain attributes, each with its name."""
    for name, value in _values(model):
        if isinstance(value, (Tensor, torch.device)):
            yield name, value


def differing(one: nn.Module, other: nn.Module) -> str | None:
    """The first buffer or plain value in which two models of one constructor differ; None for none."""
    values, others = dict(_values(one)), dict(_values(other))
    if values.keys() != others.keys():
        return next(iter(values.keys() ^ others.keys()))
    return next((name for name in values if not _equal(values[name], others[name])), None)


def _values(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for prefix, module in model.named_modules():
        above = f"{prefix}." if prefix else ""
        for name, buffer in module._buffers.items():
            yield f"{above}{name}", buffer
        for name, value in vars(module).items():
            if name not in _BOOKKEEPING:
                yield from _inside(f"{above}{name}", value, set())


def _inside(name: str, value: Any, above: set[int]) -> Iterator[tuple[str, Any]]:
    """A value, or the values in a list or mapping."""
    if id(value) in above:
        return
    if isinstance(value, Mapping):
        items = [(str(key), inner) for key, inner in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(str(place), inner) for place, inner in enumerate(value)]
    else:
        if isinstance(value, (Tensor, torch.device, np.ndarray, np.generic, int, float, complex, str, bytes)):
            yield name, value
        return
    for key, inner in items:
        yield from _inside(f"{name}.{key}", inner, above | {id(value)})


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, nn.Parameter):
        return isinstance(other, nn.Parameter)
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and _has_bits(one) and _has_bits(other) and are_equal(one, other)
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and one.tobytes() == other.tobytes()
    return bool(one == other) or (one != one and other != other)  # NaN


def _has_bits(value: Tensor) -> bool:
    return value.layout == torch.strided and not value.is_meta
