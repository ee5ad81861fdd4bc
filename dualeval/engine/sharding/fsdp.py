"""torch's FSDP: whether it shards a model, and how to make it do what it has no settings for.

Each rank of a sharded model holds a part of each parameter, and its forward waits for all other ranks.

FSDP has no settings for the strides of gathered parameters, for outputs, host rows and reads. The first two
decide last bits. The code for all of them uses internals that torch has not declared stable; tests compare
the bits. Torch refuses to mix a divided parameter with other tensors. But a number that is read from one
(``float(w.sum())``) silently comes from the rank's own rows, and differs between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.torch_version import TorchVersion

from dualeval.engine.device.divided import NOT_GATHERED, class_of
from dualeval.engine.values.nests import map_tensors
from dualeval.errors import UsageError

# The first torch version whose FSDP is tested here.
_FIRST = "2.13"
_ONE_NUMBER = (
    "outside of the unit that gathers it, the forward reads numbers of a parameter that is divided over the "
    "ranks: each rank would read only its own part. Read them in the forward of that unit, or of the whole "
    "parameter (parameter.full_tensor(), on all ranks)."
)
# Operations that return numbers of the rows themselves, or compare them.
_NUMBERS = {
    *(Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.__index__),
    *(Tensor.__complex__, Tensor.__contains__, Tensor.is_nonzero, torch.is_nonzero),
    *(torch.equal, Tensor.equal, Tensor.__dlpack__),
}


def has_forward(module: nn.Module) -> bool:
    """Whether a module has a forward of its own."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def check_torch(version: str = torch.__version__) -> None:
    """Check that this torch's FSDP is new enough."""
    if TorchVersion(version) < _FIRST:
        raise UsageError(
            f"shard needs torch {_FIRST} or newer, and this is torch {version}, whose FSDP keeps its "
            "parameters differently. Install a newer torch; or call fully_shard in build_model, and leave "
            "shard out."
        )


def set_strides(unit: nn.Module, convert: Callable[[Tensor], Tensor]) -> None:
    """Give a unit's gathered parameters the strides of those of a whole model.

    A gather puts the memory of the ranks' rows one after the other, and torch takes the result for
    contiguous. The rows are in ``_in_memory_order``, so the result has the same numbers in the layout of a
    whole model.
    """
    state: Any = unit._get_fsdp_state()  # type: ignore[operator]
    group = state._fsdp_param_group
    for parameter in () if group is None else group.fsdp_params:
        whole = torch.empty(parameter._orig_size, dtype=parameter.sharded_param.dtype, device="meta")
        parameter._contiguous_orig_stride = convert(whole).stride()


def _in_memory_order(rows: Tensor) -> Tensor:
    """A contiguous tensor of the rows' shape, whose memory has the rows in the order of their own layout."""
    if rows.is_contiguous():
        return rows
    # The dimensions by stride, widest first; the widest is that of the rows.
    order = sorted(range(rows.ndim), key=rows.stride, reverse=True)
    return rows.permute(order).contiguous().view(rows.shape)


def of_rows(rows: Tensor, mesh: DeviceMesh, shape: torch.Size) -> Tensor:
    """A divided tensor of this rank's rows; ``from_local`` would move offloaded rows to the GPU."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), rows.dtype)
    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)
    return DTensor(_in_memory_order(rows), spec, requires_grad=False)  # type: ignore[no-untyped-call]


def refuse_own_rows(module: Any) -> None:
    """Refuse a unit that returns its parameters or views of them, which are freed after its forward.

    A table of positions may return its first rows. Reading freed rows gives any numbers, or crashes.
    """
    state = module._get_fsdp_state()
    hooks, number = module._forward_hooks, state._post_forward_hook_handle.id
    let_go = hooks[number]

    @wraps(let_go)
    def checked(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        group = state._fsdp_param_group
        gathered = () if group is None else group.fsdp_params
        memory = {each.unsharded_param.untyped_storage()._cdata for each in gathered}

        def check(tensor: Tensor) -> Tensor:
            try:
                is_own = tensor.untyped_storage()._cdata in memory
            except NotImplementedError:
                return tensor  # of torch.vmap, sparse, ...
            if is_own:
                raise UsageError(
                    f"--shard fsdp: a {class_of(module).__name__} returns its own parameters, and their "
                    "memory is freed when its forward ends. Return a copy of them (weight.clone()); or call "
                    "torch.distributed.fsdp.fully_shard where the model is built, on the part that uses "
                    "them, and leave --shard out."
                )
            return tensor

        map_tensors(check, outputs)
        return let_go(module, inputs, outputs)

    hooks[number] = checked


@contextmanager
def reads_refused(*, owned: bool) -> Iterator[None]:
    """Around a forward of a sharded model: an error if it uses numbers of a divided parameter."""
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
