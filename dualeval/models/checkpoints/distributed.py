"""Folders of torch.distributed.checkpoint: read on each rank by itself, without a process group.

The file .metadata is a pickle that says which tensors there are and where their parts lie. Nothing that it
names is imported: for each object stands one that does nothing. Each part is a stream of ``torch.save``,
which is read as a plain tensor. Entries that are no tensors are pickles, which torch's own reader loads
without protection: they are never read.
"""

from __future__ import annotations

import io
import os
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from dualeval.errors import UsageError
from dualeval.models.checkpoints.finding import METADATA, PassedOver
from dualeval.models.checkpoints.late import Chunks, FilePart, LateTensor, StampedFile
from dualeval.models.checkpoints.torch_files import NotInPlace, part_of, records_of
from dualeval.models.model_errors import first_line


class _MetadataObject:
    """Stands for an object of the metadata: it keeps what the file says of it, and does nothing."""

    __slots__ = ("state",)

    def __new__(cls, *_: object) -> _MetadataObject:
        made = object.__new__(cls)
        made.state = {}
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """What stands for a name in the file; no code of it runs."""
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        plain = {("torch", "Size"): tuple, ("collections", "OrderedDict"): OrderedDict}
        return plain.get((module, name)) or type(name, (_MetadataObject,), {"__slots__": ()})


class DistributedFolder:
    """A checkpoint that ``torch.distributed.checkpoint.save`` has written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, StampedFile] = {}
        # What was saved, nested as it was; tensors have only shape and dtype.
        self.tree: dict[str | int, Any] = {}
        # Name and parts of each tensor in the tree, by its id.
        self._saved: dict[int, tuple[str, Any]] = {}
        # Where the parts lie, by the name of the tensor and where a part begins.
        self._stored: dict[tuple[str, tuple[int, ...] | None], Any] = {}
        with self._read_as_metadata(), (folder / METADATA).open("rb") as file:
            content = _Unpickler(file).load().state
            for index, info in content["storage_data"].items():
                self._stored[index.state["fqn"], index.state.get("offset")] = info.state
            self._nest(content)

    def late_state_dict(self, tensors: Mapping[str, Any]) -> OrderedDict[str, Any]:
        """A state_dict of the tree, with tensors that are read when they are used."""
        return OrderedDict(
            (name, self._opened(*self._saved[id(value)], value) if id(value) in self._saved else value)
            for name, value in tensors.items()
        )

    @contextmanager
    def _read_as_metadata(self) -> Iterator[None]:
        path = self._folder / METADATA
        try:
            yield
        except UsageError:
            raise
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
        except Exception as error:  # a damaged stream raises whatever its bytes happen to ask for
            message = f"{path} is damaged: {first_line(error)}. Copy or save the checkpoint again."
            raise UsageError(message) from error

    def _nest(self, content: Mapping[str, Any]) -> None:
        keys = content.get("planner_data")  # from torch 2.0 on
        for name, saved in content["state_dict_metadata"].items():
            inner = self.tree
            *above, last = (isinstance(keys, dict) and keys.get(name)) or (name,)
            for key in above:
                inner = inner.setdefault(key, {})
            if last in inner:
                raise ValueError(f"two entries are at {name}")
            inner[last] = PassedOver()
            if type(saved).__name__ == "TensorStorageMetadata":
                properties = saved.state["properties"].state
                # As the present writer leaves it, and as that of torch 1.13 did.
                dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
                inner[last] = made = torch.empty(saved.state["size"], dtype=dtype, device="meta")
                self._saved[id(made)] = name, saved.state["chunks"]

    def _opened(self, name: str, chunks: Any, tensor: Tensor) -> LateTensor:
        with self._read_as_metadata():
            shapes = {chunk.state["offsets"]: chunk.state["sizes"] for chunk in chunks}
            is_inside = all(
                0 <= begin <= begin + size <= whole
                for begins, shape in shapes.items()
                for begin, size, whole in zip(begins, shape, tensor.shape, strict=True)
            )
            # What has no part would be left at random.
            if not is_inside or sum(map(prod, shapes.values())) != tensor.numel():
                raise ValueError(f"the parts of {name} are not the whole tensor")
            parts = []
            for begins, shape in shapes.items():
                stored = self._stored.get((name, begins))
                if stored is None and len(shapes) == 1:
                    stored = self._stored.get((name, None))
                if stored is None:
                    raise ValueError(f"it does not say where {name} lies")
                parts.append((begins, self._part(name, shape, tensor.dtype, stored)))
        return LateTensor(Chunks(shape=tuple(tensor.shape), dtype=tensor.dtype, parts=tuple(parts)))

    def _part(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, stored: Mapping[str, Any]
    ) -> FilePart:
        file, offset, length = self._file(stored["relative_path"]), stored["offset"], stored["length"]
        if offset + length > file.size:
            raise UsageError(f"{file.path} is cut short: {name} lies beyond its end. Copy the folder again.")
        try:
            with file.opened() as descriptor:
                stream = cast(BinaryIO, io.BufferedReader(_Window(descriptor, offset, length)))
                records = records_of(stream)
                if not records:  # of the other byte order, for example, where torch would crash
                    raise NotInPlace
                stream.seek(0)
                value = torch.load(stream, map_location="meta", weights_only=True)
            if not isinstance(value, Tensor) or tuple(value.shape) != shape or value.dtype != dtype:
                raise NotInPlace
            return part_of(value, file, records, offset)
        except UsageError:
            raise
        except Exception as error:  # a damaged stream raises whatever its bytes happen to ask for
            raise UsageError(
                f"{file.path} is damaged, or holds more than plain tensors: {name} cannot be read. It is not "
                "read in another way, because it could run code. Copy the folder again; parts that were "
                "compressed have to be saved without extensions."
            ) from error

    def _file(self, relative: str) -> StampedFile:
        if relative not in self._files:
            path = self._folder / relative
            if not path.is_file():
                raise UsageError(f"{path} is missing, which {METADATA} names. Copy the whole folder.")
            self._files[relative] = StampedFile.of(path)
        return self._files[relative]


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        self._descriptor = descriptor
        self._offset = offset
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer)[: max(0, self._length - self._position)]
        count = os.preadv(self._descriptor, [room], self._offset + self._position)
        self._position += count
        return count
