"""Several names of one tensor, such as an embedding that is also the weight of the output.

A file may have one of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dualeval.errors import UsageError
from dualeval.models.checkpoints.late import LateTensor

_PIECE_BYTES = 1 << 22


def with_tied_names(model: nn.Module, state: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """A state_dict with the names that a file has left out because another name has the same tensor."""
    left_out: dict[str, Any] = {}
    for names in tied(model):
        there = [name for name in names if isinstance(state.get(name), Tensor)]
        for name in there[1:]:
            if not are_equal(state[there[0]], state[name]):
                raise UsageError(
                    f"{source} have different values for {there[0]} and {name}, which are one tensor in the "
                    f"model {type(model).__name__}. Give weights of a model that ties them, or a model that "
                    "does not."
                )
        if there:
            left_out |= {name: state[there[0]] for name in names if name not in state}
    if not left_out:
        return state
    whole: OrderedDict[str, Any] = OrderedDict({**state, **left_out})
    if hasattr(state, "_metadata"):
        whole._metadata = state._metadata  # type: ignore[attr-defined]
    return whole


def tied(model: nn.Module) -> list[list[str]]:
    """The names in the state_dict of each tensor that has more than one."""
    kept = model.state_dict(keep_vars=True)
    by_place: dict[object, list[str]] = {}
    for name, value in kept.items():
        if isinstance(value, Tensor):
            by_place.setdefault(_place(value), []).append(name)
    return [names for names in by_place.values() if len(names) > 1]


def _place(value: Tensor) -> object:
    """What two names of one tensor have in common; two parameters may lie in the same memory."""
    if isinstance(value, LateTensor) or value.layout != torch.strided or nn.parameter.is_lazy(value):
        return id(value)
    begin = value.data_ptr() if value.numel() else 0
    return (begin, value.dtype, value.shape, value.stride()) if begin else id(value)


def are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether the bits are equal; NaN is equal to itself."""
    if one is other or one.shape != other.shape or one.dtype != other.dtype:
        return one is other
    if isinstance(one, LateTensor) and isinstance(other, LateTensor) and one.source == other.source:
        return True
    # Some rows at a time: two large tensors of files are not held for it.
    rows = max(1, _PIECE_BYTES * len(one) // max(1, one.nbytes)) if one.ndim else 1
    count = len(one) if one.ndim else 1
    return all(
        torch.equal(_bytes_of(one, first, min(first + rows, count)), _bytes_of(other, first, first + rows))
        for first in range(0, count, rows)
    )


def _bytes_of(value: Tensor, first: int, last: int) -> Tensor:
    """Some rows; a tensor without dimensions is one."""
    if isinstance(value, LateTensor):
        last = min(last, len(value)) if value.ndim else 1
        rows = torch.empty((last - first, *value.shape[1:]), dtype=value.dtype)
        value.read_rows(first, last, rows)
    else:
        rows = value.detach()[first:last] if value.ndim else value.detach()
    return rows.contiguous().view(-1).view(torch.uint8)
