"""Whether a model's parameters are divided over the ranks by torch's FSDP, told by names alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from dualeval.engine.device.accelerator import is_out_of_memory
from dualeval.errors import BackendError, text_of

# By name: importing torch.distributed.fsdp takes a second, and a sharded model has imported it.
_UNIT = "FSDPModule"
_OF_FSDP = "torch.distributed.fsdp"
NOT_GATHERED = (
    "the forward computes with the weights of a part without calling it, but they are gathered only in its "
    "call. Call the part (self.part(x)); or shard the model yourself where it is built "
    "(torch.distributed.fsdp.fully_shard on the part that uses them), and leave --shard out"
)


def is_unit(module: nn.Module) -> bool:
    """Whether ``fully_shard`` (FSDP2) was called on a module, so that a call of it gathers its parameters."""
    return _UNIT in names_of_classes(module)


def is_sharded(model: nn.Module) -> bool:
    """Whether a model, or a part of it, is sharded by ``fully_shard``: its forward holds collectives."""
    return any(map(is_unit, model.modules()))


def class_of(value: object) -> type[Any]:
    """The class of an object; for a module that ``fully_shard`` was called on, its earlier class."""
    kind = type(value)
    if _UNIT not in names_of_classes(value):
        return kind
    # FSDPLinear: FSDPLinear, FSDPModule, Linear, ...
    return next(base for base in kind.__mro__[1:] if not base.__module__.startswith("torch.distributed"))


def is_of_fsdp(hook: Any) -> bool:
    """Whether a hook of a module is FSDP's own."""
    function = getattr(hook, "func", hook)
    return str(getattr(function, "__module__", "")).startswith(_OF_FSDP)


def is_state_of_fsdp(name: str) -> bool:
    """Whether FSDP keeps state in an attribute of this name."""
    return name.startswith(("_is_fsdp", "_fsdp", "__composable_api_state_key"))


def whole(
    tensor: Tensor, around_gather: Callable[[], AbstractContextManager[object]] = nullcontext
) -> Tensor:
    """A tensor with all its values; if it is divided over ranks, a collective gathers them."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return tensor
    divided: Any = tensor.detach()
    if divided.device.type != mesh.device_type:
        # A tensor in host memory: the group may only be able to send from devices.
        divided = divided.to(mesh.device_type)
    try:
        with torch.no_grad(), around_gather():
            gathered: Tensor = divided.full_tensor()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise BackendError(
            f"torch.distributed broke while gathering a parameter: {text_of(error).strip().rstrip('.')}. "
            "Where another rank failed first, its message has the cause."
        ) from error
    return gathered


def reshard(modules: Iterable[nn.Module]) -> None:
    """Have each unit free its gathered parameters, and keep only its own part; no collective."""
    for module in modules:
        if is_unit(module):
            unit: Any = module
            unit.reshard()


def names_of_classes(value: object) -> set[str]:
    return {*map(attrgetter("__name__"), type(value).__mro__)}
