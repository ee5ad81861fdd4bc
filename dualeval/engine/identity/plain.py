"""Digests of plain values and of tensors' bytes; and which attributes of objects count."""

from __future__ import annotations

import enum
import functools
import hashlib
import os
import re
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePath
from types import EllipsisType, MemberDescriptorType
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dualeval.engine.values.nests import own_attributes
from dualeval.errors import UsageError

# The attribute in which a class or an object names its attributes that decide no number.
IGNORES = "dualeval_identity_ignores"
_INCIDENTAL = {
    # Where a thing was found, and not what it is.
    "name_or_path",
    # A hash that Python salts, different in each process; transformers keeps one of a model's options.
    "original_object_hash",
}
_SHOWN = 16  # characters of a hash in job.json: it tells jobs apart, and nobody forges one
_DEVICE = re.compile(r"(cpu|cuda|xpu|mps|hpu|npu|tpu|xla)(:\d+)?")
# Reads the plain value of an object whose class derives from a plain type.
_DERIVED: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, int.__int__),
    (float, float.__float__),
    (str, str.__str__),
    (bytes, lambda value: bytes.__add__(value, b"")),
)
_PIECE_BYTES = 64 * 2**20

# Layouts that torch itself takes apart, to save a tensor.
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_bsr, torch.sparse_csc, torch.sparse_bsc)


def sha256_of(kind: str, *parts: bytes | memoryview) -> bytes:
    """sha256 of a kind of value and of the parts that it is made of, 32 bytes."""
    digest = hashlib.sha256(kind.encode())
    for part in parts:
        # With its length: parts must not run into each other.
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()


def short_hex(digest: bytes) -> str:
    """The beginning of a digest, as it is shown."""
    return digest.hex()[:_SHOWN]


def module_name(name: str) -> str:
    """A module's name; for the script that runs, the name by which it can be imported."""
    if name != "__main__":
        return name
    space = vars(sys.modules[name])
    if space.get("__spec__") is not None:  # of python -m
        return str(space["__spec__"].name)
    return Path(space["__file__"]).stem if space.get("__file__") else name


def name_of(item: Any) -> bytes:
    """The module and the name of a class or a function."""
    return f"{module_name(str(item.__module__))}.{item.__qualname__}".encode()


def plain_digest(value: Any) -> bytes | None:
    """sha256 of a value that holds no other values, 32 bytes; None if it may hold some."""
    kind = type(value)
    if value is None or kind in (bool, EllipsisType, type(NotImplemented)):
        return sha256_of("constant", str(value).encode())
    if kind is int:
        return sha256_of("int", str(value).encode() if -(2**63) < value < 2**63 else hex(value).encode())
    if kind is float:
        return sha256_of("float", struct.pack(">d", value))
    if kind is str:
        return _text_digest(value)
    if kind in (bytes, bytearray):
        return sha256_of("bytes", bytes(value))
    # The machine decides which device it is, not the job.
    if kind is torch.device:
        return sha256_of("device")
    if issubclass(kind, PurePath):
        return sha256_of("path", b"" if value.is_absolute() else value.as_posix().encode())
    if issubclass(kind, enum.Enum):
        return None
    # A class derived from a plain type: its value counts, and its name.
    for base, content in _DERIVED:
        if issubclass(kind, base):
            plain = plain_digest(content(value))
            return None if plain is None else sha256_of("derived", name_of(kind), plain)
    return None


def _text_digest(value: str) -> bytes:
    if is_device(value):
        return sha256_of("device")
    # Where a file lies decides nothing: a folder may be moved.
    if is_path(value):
        return sha256_of("path", b"")
    return sha256_of("text", value.encode("utf-8", "surrogatepass"))


def is_path(value: str) -> bool:
    """Whether a text is an absolute path: its first folder exists, unlike that of a prompt "/think"."""
    first = value.split("/", 2)[1] if value.startswith("/") else ""
    if not first or not _is_folder(f"/{first}"):
        return False
    # A text with spaces only begins with a path, unless that path exists. Path.exists raises for long ones.
    return len(value.split()) == 1 or os.path.exists(value)  # noqa: PTH110


# Cached: a vocabulary may have many such texts.
_is_folder = functools.lru_cache(os.path.isdir)


def is_device(value: str) -> bool:
    """Whether a text names a device."""
    return _DEVICE.fullmatch(value) is not None


def is_incidental(name: str) -> bool:
    """Whether an attribute of this name decides no number."""
    return name.strip("_").lower() in _INCIDENTAL


def attributes_of(value: Any) -> dict[str, Any]:
    """An object's ``__dict__`` and slots, without ignored names and without computed attributes."""
    attributes = own_attributes(value)
    left_out = {*ignored_by(type(value)), *_names_in(attributes.get(IGNORES, ()), type(value))}
    return {name: item for name, item in attributes.items() if name not in left_out}


def ignored_by(kind: type) -> set[str]:
    """The attributes that a class and its bases leave out of the identity."""
    bodies = [type.__dict__["__dict__"].__get__(base) for base in type.__dict__["__mro__"].__get__(kind)]
    named = {name for body in bodies for name in _names_in(body.get(IGNORES, ()), kind)}
    return {IGNORES, *named}


def _names_in(names: Any, kind: type) -> set[str]:
    if type(names) is str:
        return {names}
    if type(names) in (tuple, list, set, frozenset) and all(type(name) is str for name in names):
        return set(names)
    # A slot: each object holds its own names, and they are read there.
    if type(names) is MemberDescriptorType:
        return set()
    raise UsageError(
        f"{IGNORES} of {kind.__module__}.{kind.__qualname__} is of type {type(names).__name__}; expected a "
        f'tuple of attribute names, such as {IGNORES} = ("started_at",)'
    )


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
    # A nested tensor has no shape to ask for.
    shape = () if tensor.is_nested else tuple(tensor.shape)
    digest = _opened(tensor.dtype, shape, tensor.layout)
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
    """Like ``tensor_digest``, for one strided tensor that comes in parts."""
    digest = _opened(dtype, shape, torch.strided)
    for part in rows:
        if part.numel():
            digest.update(_bytes_of(part))
    return digest.digest()


def _opened(dtype: torch.dtype, shape: tuple[int, ...], layout: torch.layout) -> hashlib._Hash:
    return hashlib.sha256(f"{dtype} {shape} {layout}\0".encode())


def _parts(tensor: Tensor) -> dict[str, Any] | None:
    """The parts of a tensor that is not simply strided values; None for a plain one."""
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
    """A tensor in parts that follow each other in C order; whole if that takes no large copy."""
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
    # As a plain tensor: a subclass may redefine these operations.
    plain = tensor.as_subclass(Tensor).resolve_conj().resolve_neg().cpu().contiguous()
    # Not reshape: a dimension of size 1 may have any stride, and keeps it.
    flat = plain.as_strided((plain.numel(),), (1,))
    content: memoryview = flat.view(torch.uint8).numpy().data
    return content
