"""Digests of plain values: numbers, text, bytes, paths and devices; and which attributes of objects count."""

from __future__ import annotations

import enum
import functools
import hashlib
import os
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path, PurePath
from types import EllipsisType, MemberDescriptorType
from typing import Any

import torch

from dualeval.engine.nests import own_attributes
from dualeval.errors import UsageError

# In a class or an object: the names of attributes that decide no number.
IGNORES = "dualeval_identity_ignores"
_INCIDENTAL = {
    # Where a thing was found, and not what it is.
    "name_or_path",
    # A hash that Python has salted, another in each process; transformers keeps one of a model's options.
    "original_object_hash",
}
_SHOWN = 16  # characters of a hash in job.json: it tells jobs apart, and nobody forges one
_DEVICE = re.compile(r"(cpu|cuda|xpu|mps|hpu|npu|tpu|xla)(:\d+)?")
# The plain value in one of a class that derives from a plain one's.
_DERIVED: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, int.__int__),
    (float, float.__float__),
    (str, str.__str__),
    (bytes, lambda value: bytes.__add__(value, b"")),
)


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
    """A module's name; of the script that runs, that by which it can be imported."""
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
    """sha256 of a value that holds no other, 32 bytes; None for any other."""
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
    # Which of them it is says the machine, not the job.
    if kind is torch.device:
        return sha256_of("device")
    if issubclass(kind, PurePath):
        return sha256_of("path", b"" if value.is_absolute() else value.as_posix().encode())
    if issubclass(kind, enum.Enum):
        return None
    # A class derived from one: its value counts, and its name.
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
    """Whether a text is an absolute path: its first folder is there, as that of a prompt "/think" is not."""
    first = value.split("/", 2)[1] if value.startswith("/") else ""
    if not first or not _is_folder(f"/{first}"):
        return False
    # What has spaces is a text that begins with a path, unless it is there. Path.exists raises if it is long.
    return len(value.split()) == 1 or os.path.exists(value)  # noqa: PTH110


# A vocabulary may have many such texts.
_is_folder = functools.lru_cache(os.path.isdir)


def is_device(value: str) -> bool:
    """Whether a text names a device."""
    return _DEVICE.fullmatch(value) is not None


def is_incidental(name: str) -> bool:
    """Whether an attribute of that name says where a thing lies, and not what it is."""
    return name.strip("_").lower() in _INCIDENTAL


def attributes_of(value: Any) -> dict[str, Any]:
    """What stands in an object's ``__dict__`` and slots, less what it ignores; no attribute that computes."""
    found = own_attributes(value)
    left_out = {*ignored_by(type(value)), *_names_in(found.get(IGNORES, ()), type(value))}
    return {name: item for name, item in found.items() if name not in left_out}


def ignored_by(kind: type) -> set[str]:
    """The attributes that a class, and what it derives from, leaves out of the identity."""
    bodies = [type.__dict__["__dict__"].__get__(base) for base in type.__dict__["__mro__"].__get__(kind)]
    named = {name for body in bodies for name in _names_in(body.get(IGNORES, ()), kind)}
    return {IGNORES, *named}


def _names_in(names: Any, kind: type) -> set[str]:
    if type(names) is str:
        return {names}
    if type(names) in (tuple, list, set, frozenset) and all(type(name) is str for name in names):
        return set(names)
    # A slot or property of that name says it for each object, where it is found.
    if type(names) is MemberDescriptorType:
        return set()
    raise UsageError(
        f"{IGNORES} of {kind.__module__}.{kind.__qualname__} is of type {type(names).__name__}; expected a "
        f'tuple of attribute names, such as {IGNORES} = ("started_at",)'
    )
