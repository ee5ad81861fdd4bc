"""Reads of divided parameters in a forward: a rank would compute with the rows that it has, and say nothing.

Torch refuses to mix a divided parameter with other tensors. A number that is read from one
(``float(w.sum())``) is that of the rank's own rows, without a word: another one on each rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dualeval.errors import UsageError

NOT_GATHERED = (
    "the forward computes with the weights of a part without calling it, and they are gathered where it is "
    "called. Call the part (self.part(x)); or shard the model yourself where it is built "
    "(torch.distributed.fsdp.fully_shard on the part that uses them), and leave --shard out"
)
_ONE_NUMBER = (
    "the forward reads numbers of a parameter that is divided over the ranks, outside of the unit that "
    "gathers it: each rank would read those of its own part. Read them in the forward of that unit, or of "
    "the whole parameter (parameter.full_tensor(), on all ranks)."
)
# Another view of the same rows.
_SAME = {Tensor.detach, Tensor.requires_grad_, Tensor.data.__get__}  # type: ignore[attr-defined]
# They take only dtype and device of the tensor.
_MADE_LIKE = {Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty, Tensor.new_tensor}
# They give numbers of the rows themselves, or compare them.
_OF_VALUES = {torch.equal, Tensor.equal, Tensor.__dlpack__}
_NUMBERS = {
    *(Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.__index__),
    *(Tensor.__complex__, Tensor.__contains__, Tensor.is_nonzero, torch.is_nonzero),
}


@contextmanager
def reads_refused(*, owned: bool) -> Iterator[None]:
    """In a forward of a sharded model: an error where numbers of a divided parameter are used."""
    from torch.distributed.tensor import DTensor

    def checked(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if str(sys._getframe(1).f_globals.get("__name__")).startswith("torch.distributed"):
                return func(*args, **named)
            if args and isinstance(args[0], DTensor):
                if owned and func in _MADE_LIKE:
                    return func(args[0].to_local(), *args[1:], **named)
                if func in _NUMBERS and (owned or _is_divided(args[0])):
                    raise UsageError(f"--shard fsdp: {NOT_GATHERED}." if owned else _ONE_NUMBER)
            made = func(*args, **named)
            parts = made if isinstance(made, tuple | list) else [made]
            is_new = func not in _SAME and any(isinstance(part, DTensor) for part in parts)
            if owned and (is_new or func in _OF_VALUES):
                raise UsageError(f"--shard fsdp: {NOT_GATHERED}.")
            return made

    kind: Any = DTensor
    before = vars(DTensor)["__torch_function__"]
    kind.__torch_function__ = classmethod(checked)
    try:
        yield
    finally:
        kind.__torch_function__ = before


def _is_divided(tensor: Any) -> bool:
    places = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return any(size > 1 and not place.is_replicate() for place, size in places)
