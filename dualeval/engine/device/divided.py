"""Where a model's parameters are, told by names alone: divided by torch's FSDP over ranks, or in a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from dualeval.engine.device.accelerator import is_out_of_memory
from dualeval.errors import BackendError, UsageError, text_of
from dualeval.world import World

# By name: importing torch.distributed.fsdp takes a second, and a sharded model has imported it.
_UNIT = "FSDPModule"
_OF_FSDP = "torch.distributed.fsdp"
_FLAT = "FullyShardedDataParallel"
NOT_GATHERED = (
    "the forward computes with the weights of a part without calling it, but they are gathered only in its "
    "call. Call the part (self.part(x)); or shard the model yourself where it is built "
    "(torch.distributed.fsdp.fully_shard on the part that uses them), and leave --shard out"
)


def is_unit(module: nn.Module) -> bool:
    """Whether ``fully_shard`` (FSDP2) was called on a module, so that a call of it gathers its parameters."""
    return _UNIT in names_of_classes(module)


def units_in(modules: Iterable[nn.Module]) -> dict[int, nn.Module]:
    """The modules that FSDP divides, by id; none where nobody has imported it, and then none is asked."""
    return {id(each): each for each in modules if is_unit(each)} if _OF_FSDP in sys.modules else {}


def is_sharded(model: nn.Module) -> bool:
    """Whether a model, or a part of it, is sharded by ``fully_shard``: its forward holds collectives."""
    return bool(units_in(model.modules()))


def check_sharded(model: nn.Module, world: World) -> None:
    """Check that a sharded model can be evaluated here."""
    if world.size == 1:
        return
    flat = [type(module).__name__ for module in model.modules() if _FLAT in names_of_classes(module)]
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
                "for instance): such a forward needs the same samples on several ranks, but here each rank "
                "has different ones. Shard the model with torch.distributed.fsdp.fully_shard alone, or give "
                "a model that is whole on each rank."
            )


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


def reshard(units: Iterable[Any]) -> None:
    """Have each unit free its gathered parameters, and keep only its own part; no collective."""
    for unit in units:
        unit.reshard()


def has_late(model: nn.Module) -> bool:
    """Whether a parameter of a model is still in a file (``model.late``)."""
    return any(hasattr(parameter, "read_rows") for parameter in model.parameters())


def names_of_classes(value: object) -> set[str]:
    return {*map(attrgetter("__name__"), type(value).__mro__)}
