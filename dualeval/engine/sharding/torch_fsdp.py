"""What torch's FSDP does not let itself be told: strides of what it gathers, outputs, host rows, reads.

The first two decide last bits. All reach into what torch has not declared stable; tests compare the bits.

Torch refuses to mix a divided parameter with other tensors. A number that is read from one
(``float(w.sum())``) is that of the rank's own rows, without a word: another one on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from dualeval.engine.nests import map_tensors
from dualeval.engine.sharding.detect import class_of
from dualeval.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# The first version whose FSDP has been tried here.
_FIRST = "2.13"
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


def check_torch(version: str = torch.__version__) -> None:
    """Check that this torch's FSDP is one that is known here."""
    if TorchVersion(version) < _FIRST:
        raise UsageError(
            f"shard needs torch {_FIRST} or newer, and this is torch {version}, whose FSDP keeps its "
            "parameters in another way. Install a newer torch; or call fully_shard in build_model, and leave "
            "shard out."
        )


def set_strides(unit: nn.Module, convert: Callable[[Tensor], Tensor]) -> None:
    """Have a unit's gathered parameters lie in memory as those of a whole model do.

    Gathered are the ranks' rows one behind the other, each as it lies in its rank's memory. Torch takes that
    for contiguous. Of ``in_memory_order`` it is another layout of the same numbers.
    """
    state: Any = unit._get_fsdp_state()  # type: ignore[operator]
    group = state._fsdp_param_group
    for parameter in () if group is None else group.fsdp_params:
        whole = torch.empty(parameter._orig_size, dtype=parameter.sharded_param.dtype, device="meta")
        parameter._contiguous_orig_stride = convert(whole).stride()


def in_memory_order(rows: Tensor) -> Tensor:
    """Rows as a contiguous tensor of the same shape, whose memory is that of the rows in their layout."""
    if rows.is_contiguous():
        return rows
    # By their strides, the widest first; that of rows is.
    order = sorted(range(rows.ndim), key=rows.stride, reverse=True)
    return rows.permute(order).contiguous().view(rows.shape)


def of_rows(rows: Tensor, mesh: DeviceMesh, shape: torch.Size) -> Tensor:
    """A divided tensor of this rank's rows; ``from_local`` would move offloaded ones to the GPU."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), rows.dtype)
    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)
    return DTensor(in_memory_order(rows), spec, requires_grad=False)  # type: ignore[no-untyped-call]


def refuse_own_rows(module: Any) -> None:
    """Refuse a unit that gives its parameters, or views of them: their memory is let go behind its forward.

    A table of positions may return its first rows. Reading them then gives any numbers, or ends the process.
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
                    "memory is let go when its forward ends. Return a copy of them (weight.clone()); or call "
                    "torch.distributed.fsdp.fully_shard where the model is built, on the part that uses "
                    "them, and leave --shard out."
                )
            return tensor

        map_tensors(check, outputs)
        return let_go(module, inputs, outputs)

    hooks[number] = checked


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
