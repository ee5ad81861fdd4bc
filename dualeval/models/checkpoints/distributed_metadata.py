"""The metadata of a folder of torch.distributed.checkpoint, which is a pickle, read without its classes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dualeval.errors import UsageError
from dualeval.models.passed_over import PassedOver


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A tensor of the checkpoint."""

    # Of the whole tensor.
    shape: tuple[int, ...]
    dtype: torch.dtype
    # Where each part of it begins, and its shape.
    parts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Where a part lies."""

    # Of the file, as it is written in the metadata; nothing says that it stays in the folder.
    path: str
    # Of the first byte.
    offset: int
    # In bytes.
    length: int
    # What the bytes went through, such as a compression.
    transformed: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """What a checkpoint holds."""

    # By name; None for what is no tensor.
    entries: Mapping[str, SavedTensor | None]
    # The keys that lead to an entry in what was saved, by its name; not all entries have them.
    keys: Mapping[str, tuple[str | int, ...]]
    # By the name of the tensor and where the part begins; None for a tensor in one part.
    parts: Mapping[tuple[str, tuple[int, ...] | None], Part]


def read_metadata(path: Path) -> Metadata:
    """Read the file .metadata."""
    try:
        with path.open("rb") as file:
            content = _Unpickler(file).load()
        return _checked(content)
    except _Refused as error:
        raise UsageError(
            f"{path} holds {error}, which is no part of such metadata: it could run code, and is not read, "
            "with --trust-checkpoint neither."
        ) from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # a damaged stream raises whatever its bytes happen to ask for
        said = str(error) or type(error).__name__
        raise UsageError(
            f"{path} is damaged: {said.splitlines()[0]}. Copy or save the checkpoint again."
        ) from error


# -- unpickling ------------------------------------------------------------------------------------------


class _Refused(Exception):
    """A name that no metadata has."""


class _Record:
    """Takes the place of an object of torch's metadata: it keeps what the file says, and does nothing."""

    __slots__ = ("state",)

    def __new__(cls, *_: object) -> _Record:
        made = object.__new__(cls)
        made.state = {}
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Tensor(_Record):
    """TensorStorageMetadata."""

    __slots__ = ()


class _Bytes(_Record):
    """BytesStorageMetadata."""

    __slots__ = ()


def _size(values: Any = ()) -> tuple[int, ...]:
    return tuple(values)


def _mapping(*_: object) -> dict[Any, Any]:
    return {}


_METADATA = "torch.distributed.checkpoint.metadata"
_STORAGE = "torch.distributed.checkpoint.filesystem"
_OLDER = "torch.distributed._shard.sharded_tensor.metadata"  # up to torch 2.2
# All names in the metadata that torch writes, and what is made of each. No class of torch is used.
_ADMITTED: dict[tuple[str, str], Callable[..., object]] = {
    (_METADATA, "TensorStorageMetadata"): _Tensor,
    (_METADATA, "BytesStorageMetadata"): _Bytes,
    **{
        (module, name): _Record
        for module, names in {
            _METADATA: (
                "Metadata",
                "ChunkStorageMetadata",
                "MetadataIndex",
                "TensorProperties",
                "StorageMeta",
            ),
            _STORAGE: ("_StorageInfo", "_StoragePrefix"),
            _OLDER: ("TensorProperties",),
        }.items()
        for name in names
    },
    **dict.fromkeys(
        (
            (_METADATA, "_MEM_FORMAT_ENCODING"),
            (_OLDER, "MEM_FORMAT_ENCODING"),
            ("torch.serialization", "_get_layout"),
            ("builtins", "getattr"),  # how some versions of Python write a member of an enumeration
            *(
                (module, f"{kind}{system}Path")
                for module in ("pathlib", "pathlib._local")  # the latter in files of Python 3.13
                for kind in ("", "Pure")
                for system in ("Posix", "Windows")
            ),
        ),
        PassedOver,
    ),
    ("torch", "Size"): _size,
    ("collections", "OrderedDict"): _mapping,
}


class _Unpickler(pickle.Unpickler):
    """Knows the names of metadata, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        """What is made of a name in the file."""
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        made = _ADMITTED.get((module, name))
        if made is None:
            raise _Refused(f"{module}.{name}"[:200])
        return made


# -- checking --------------------------------------------------------------------------------------------


def _checked(content: Any) -> Metadata:
    entries, storage = _of(content, "state_dict_metadata", dict), _of(content, "storage_data", dict)
    keys = content.state.get("planner_data")
    return Metadata(
        entries={_expect(name, str): _entry(saved) for name, saved in entries.items()},
        keys={
            _expect(name, str): _key(path) for name, path in (keys if isinstance(keys, dict) else {}).items()
        },
        parts=dict(_stored(index, info) for index, info in storage.items()),
    )


def _entry(saved: Any) -> SavedTensor | None:
    if isinstance(saved, _Bytes):
        return None
    _expect(saved, _Tensor)
    properties = _of(saved, "properties", _Record).state
    # As the present writer leaves it, and as that of torch 1.13 did.
    dtype = properties.get("dtype") if isinstance(properties, dict) else properties[0]
    return SavedTensor(
        shape=_numbers(_of(saved, "size", tuple)),
        dtype=_expect(dtype, torch.dtype),
        parts=tuple(
            (_numbers(_of(chunk, "offsets", tuple)), _numbers(_of(chunk, "sizes", tuple)))
            for chunk in _of(saved, "chunks", list)
        ),
    )


def _key(path: Any) -> tuple[str | int, ...]:
    keys: tuple[str | int, ...] = _expect(path, tuple)
    if not keys or not all(type(key) in (str, int) for key in keys):
        raise ValueError(f"the keys {keys!r:.60} are no text and no numbers")
    return keys


def _stored(index: Any, info: Any) -> tuple[tuple[str, tuple[int, ...] | None], Part]:
    begins = _expect(index, _Record).state.get("offset")
    part = Part(
        path=_of(info, "relative_path", str),
        offset=_numbers((_of(info, "offset", int),))[0],
        length=_numbers((_of(info, "length", int),))[0],
        transformed=tuple(map(str, _expect(info, _Record).state.get("transform_descriptors") or ())),
    )
    return (_of(index, "fqn", str), None if begins is None else _numbers(_expect(begins, tuple))), part


def _of(record: Any, name: str, kind: type) -> Any:
    """A field of an object of the metadata."""
    return _expect(_expect(record, _Record).state.get(name), kind, name)


def _expect(value: Any, kind: type, name: str = "") -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"found a {type(value).__name__}, expected a {kind.__name__} {name}".rstrip())
    return value


def _numbers(values: tuple[Any, ...]) -> tuple[int, ...]:
    if not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise ValueError(f"found {values!r:.60}, expected whole numbers from 0")
    return values
