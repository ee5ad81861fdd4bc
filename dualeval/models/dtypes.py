"""Which dtypes of a file's tensors may be put into a model's, where copying changes them without a word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# Not the eighth-size ones: these go with scales, as integers do.
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def changed_kinds(own: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    """Tensors whose values would become others in the model's dtype, by more than rounding."""
    return [
        f"{name} {value.dtype}, the model has {own[name].dtype}"
        for name, value in state.items()
        if isinstance(value, Tensor) and isinstance(own.get(name), Tensor)
        if not _keeps_its_kind(value, own[name].dtype)
    ]


def _keeps_its_kind(value: Tensor, wanted: torch.dtype) -> bool:
    if value.dtype == wanted:
        return True
    if value.is_quantized:
        return False
    if wanted in _FLOATS or wanted.is_complex:
        return value.dtype in _FLOATS or (wanted.is_complex and value.is_complex())
    if value.is_complex() or wanted.is_floating_point:
        return False
    # Whole numbers that fit: an older library's uint8 for bool, or a counter that was cast with all the rest.
    return bool(torch.equal(value.to(wanted).to(value.dtype), value))
