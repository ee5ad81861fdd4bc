"""Sharded models: each rank holds a part of each parameter, and its forward waits for all other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dualeval.engine.accelerator import is_out_of_memory
from dualeval.errors import BackendError, UsageError, text_of
from dualeval.world import World

# By its name: torch.distributed.fsdp takes a second to import, and a model that is sharded has imported it.
_UNIT = "FSDPModule"
_FLAT = "FullyShardedDataParallel"
_OF_FSDP = "torch.distributed.fsdp"


def is_unit(module: nn.Module) -> bool:
    """Whether ``fully_shard`` (FSDP2) was called with a module: a call of it gathers its parameters."""
    return _UNIT in _names(module)


def is_sharded(model: nn.Module) -> bool:
    """Whether a model, or a part of it, is sharded by ``fully_shard``: its forward holds collectives."""
    return any(is_unit(module) for module in model.modules())


def class_of(value: object) -> type[Any]:
    """The class of an object; of a module that ``fully_shard`` was called with, the one it had before."""
    kind = type(value)
    if _UNIT not in _names(value):
        return kind
    # FSDPLinear: FSDPLinear, FSDPModule, Linear, ...
    return next(base for base in kind.__mro__[1:] if not base.__module__.startswith("torch.distributed"))


def is_of_fsdp(hook: Any) -> bool:
    """Whether a hook of a module is FSDP's own."""
    function = getattr(hook, "func", hook)
    return str(getattr(function, "__module__", "")).startswith(_OF_FSDP)


def is_state_of_fsdp(name: str) -> bool:
    """Whether an attribute of a module has the name of what FSDP keeps there."""
    return name.startswith(("_is_fsdp", "_fsdp", "__composable_api_state_key"))


def whole(
    tensor: Tensor, around_gather: Callable[[], AbstractContextManager[object]] = nullcontext
) -> Tensor:
    """A tensor with all its values: those of one that is divided over ranks are gathered, a collective."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return tensor
    divided: Any = tensor.detach()
    if divided.device.type != mesh.device_type:
        # One that is kept in host memory: the group may send from devices alone.
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


def has_forward(module: nn.Module) -> bool:
    """Whether a module has a forward of its own."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def reshard(modules: Iterable[nn.Module]) -> None:
    """Have each unit free what it has gathered, and keep its own part alone; no collective."""
    for module in modules:
        if is_unit(module):
            unit: Any = module
            unit.reshard()


def check_sharded(model: nn.Module, world: World) -> None:
    """Check that a sharded model can be evaluated here."""
    if world.size == 1:
        return
    flat = [type(module).__name__ for module in model.modules() if _FLAT in _names(module)]
    if flat:
        raise UsageError(
            f"the model is sharded by {flat[0]} (FSDP1), which keeps no parameter by itself. Shard it with "
            "torch.distributed.fsdp.fully_shard (FSDP2), which is evaluated as it is; or gather its "
            "state_dict (torch.distributed.checkpoint.state_dict.get_model_state_dict with "
            "full_state_dict=True) and load it into a plain copy."
        )
    units = is_sharded(model)
    for name, parameter in model.named_parameters():
        placements = getattr(parameter, "placements", ())
        shards = [placement for placement in placements if not placement.is_replicate()]
        if shards and (not units or len(shards) > 1):
            raise UsageError(
                f"the parameter {name!r} is divided over ranks as {tuple(placements)} (tensor parallelism, "
                "for instance): such a forward wants the same samples on several ranks, and each rank has "
                "other ones here. Shard the model with torch.distributed.fsdp.fully_shard alone, or give a "
                "model that is whole on each rank."
            )


def _names(value: object) -> set[str]:
    return {kind.__name__ for kind in type(value).__mro__}
