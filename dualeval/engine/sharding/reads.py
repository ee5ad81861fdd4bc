"""Reads of divided parameters in a forward: a rank would compute with the rows that it has, and say nothing.

Torch refuses to mix a divided parameter with other tensors. A number that is read from one
(``float(w.sum())``) is that of the rank's own rows, without a word: another one on each rank.
"""

from __future__ import annotations

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
# They give numbers of the rows themselves, or compare them.
_NUMBERS = {
    *(Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.__index__),
    *(Tensor.__complex__, Tensor.__contains__, Tensor.is_nonzero, torch.is_nonzero),
    *(torch.equal, Tensor.equal, Tensor.__dlpack__),
}


@contextmanager
def reads_refused(*, owned: bool) -> Iterator[None]:
    """In a forward of a sharded model: an error where numbers of a divided parameter are used."""
    from torch.distributed.tensor import DTensor

    def checked(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            read = [each for each in args if isinstance(each, DTensor)] if func in _NUMBERS else []
            if any(owned or _is_divided(each) for each in read):
                raise UsageError(f"--shard fsdp: {NOT_GATHERED}." if owned else _ONE_NUMBER)
            return func(*args, **(kwargs or {}))

    kind: Any = DTensor
    before = vars(DTensor)["__torch_function__"]
    kind.__torch_function__ = classmethod(checked)
    try:
        yield
    finally:
        kind.__torch_function__ = before


def _is_divided(tensor: Any) -> bool:
    return not all(place.is_replicate() for place in tensor.placements)
