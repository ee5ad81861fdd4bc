"""The bytes of a tensor, of whatever kind, as one digest; never more than a piece of it is copied."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dualeval.errors import UsageError

_PIECE_BYTES = 64 * 2**20

# What torch itself takes apart, to save it.
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_bsr, torch.sparse_csc, torch.sparse_bsc)


def tensor_digest(name: str, tensor: Tensor, plain: Callable[[Any], bytes]) -> bytes:
    """sha256 over kind, dtype, shape and values of a tensor; the same on every device and for any strides."""
    if is_lazy(tensor):
        raise UsageError(
            f"the model's tensor {name} has no values yet: it belongs to a lazy module. Run the model once "
            "where it is built."
        )
    tensor = tensor.detach()
    if tensor.is_meta:
        raise UsageError(
            f"the model's tensor {name} is on the meta device and has no values. Build the model on a real "
            "device, and load its weights."
        )
    digest = _opened(tensor.dtype, _shape(tensor), tensor.layout)
    parts = _parts(tensor)
    if parts is None:
        for piece in _pieces(tensor):
            digest.update(_bytes_of(piece))
    else:
        for label, part in parts.items():
            content = tensor_digest(name, part, plain) if isinstance(part, Tensor) else plain(part)
            digest.update(label.encode() + b"\0" + content + b"\0")
    return digest.digest()


def rows_digest(dtype: torch.dtype, shape: tuple[int, ...], rows: Iterable[Tensor]) -> bytes:
    """As ``tensor_digest`` of one strided tensor that comes in parts."""
    digest = _opened(dtype, shape, torch.strided)
    for part in rows:
        if part.numel():
            digest.update(_bytes_of(part))
    return digest.digest()


def _opened(dtype: torch.dtype, shape: tuple[int, ...], layout: torch.layout) -> hashlib._Hash:
    return hashlib.sha256(f"{dtype} {shape} {layout}\0".encode())


def _shape(tensor: Tensor) -> tuple[int, ...]:
    # A nested tensor has no shape to ask for.
    return () if tensor.is_nested else tuple(tensor.shape)


def _parts(tensor: Tensor) -> dict[str, Any] | None:
    """What a tensor is made of that is not simply strided values; None for one that is."""
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        names, context = wrapper.__tensor_flatten__()
        return {"": (type(tensor), context), **{name: getattr(tensor, name) for name in names}}
    if tensor.is_nested or tensor.layout in _SPARSE:
        return {"parts": wrapper.__reduce_ex__(2)[1]}
    if tensor.layout == torch._mkldnn:  # type: ignore[attr-defined]
        return {"dense": tensor.to_dense()}
    if not tensor.is_quantized:
        return None
    scheme = tensor.qscheme()
    if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        scale: dict[str, Any] = {"scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}
    else:
        scale = {
            "scale": tensor.q_per_channel_scales(),
            "zero_point": tensor.q_per_channel_zero_points(),
            "axis": tensor.q_per_channel_axis(),
        }
    return {"scheme": str(scheme), **scale, "values": tensor.int_repr()}


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor in parts that follow each other in C order; whole where that takes no copy."""
    small = tensor.numel() * tensor.itemsize <= _PIECE_BYTES
    if small or (tensor.device.type == "cpu" and tensor.is_contiguous()):
        yield tensor
    elif len(tensor) == 1:
        yield from _pieces(tensor[0])
    else:
        rows = max(1, _PIECE_BYTES * len(tensor) // (tensor.numel() * tensor.itemsize))
        for part in torch.split(tensor, rows):
            yield from _pieces(part)


def _bytes_of(tensor: Tensor) -> memoryview:
    # A plain one: a subclass may have an idea of its own of what these operations mean.
    plain = tensor.as_subclass(Tensor).resolve_conj().resolve_neg().cpu().contiguous()
    # Not reshape: a dimension of one may have any stride, and keeps it.
    flat = plain.as_strided((plain.numel(),), (1,))
    content: memoryview = flat.view(torch.uint8).numpy().data
    return content
