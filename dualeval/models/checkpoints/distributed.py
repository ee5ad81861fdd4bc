"""Folders of torch.distributed.checkpoint: read on each rank by itself, without a process group."""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from torch import Tensor

from dualeval.errors import UsageError
from dualeval.models.checkpoints.distributed_metadata import Part, SavedTensor, read_metadata
from dualeval.models.checkpoints.file_parts import Chunks, FilePart, StampedFile
from dualeval.models.checkpoints.folders import METADATA
from dualeval.models.checkpoints.late import LateTensor
from dualeval.models.checkpoints.places import NotInPlace, part_of, records_of
from dualeval.models.passed_over import PassedOver

# More cells than a grid of parts has in any layout of devices.
_MOST_CELLS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class _NotOpened:
    """A tensor of which only the metadata is known."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def copy_to(self, target: Tensor) -> None:
        """Nothing is read before the state_dict is chosen."""
        raise AssertionError(f"{self.name} was not taken")

    def rows(self, first: int, last: int) -> _NotOpened:
        """As above."""
        raise AssertionError(f"{self.name} was not taken")


class DistributedFolder:
    """A checkpoint that ``torch.distributed.checkpoint.save`` has written.

    Its metadata says which tensors there are and where their parts lie. Each part is a stream of
    ``torch.save``, which is read as plain tensors. Entries that are no tensors are pickles: they are never
    read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metadata = read_metadata(folder / METADATA)
        # What was saved, nested as it was; tensors have only shape and dtype.
        self.tree = self._nested()
        self._files: dict[str, StampedFile] = {}

    def late_state_dict(self, tensors: Mapping[str, Any]) -> OrderedDict[str, Any]:
        """A state_dict of the tree, with tensors that are read when they are used."""
        return OrderedDict(
            (name, self._opened(value) if isinstance(value, LateTensor) else value)
            for name, value in tensors.items()
        )

    def _nested(self) -> dict[str | int, Any]:
        tree: dict[str | int, Any] = {}
        for name, saved in self._metadata.entries.items():
            inner = tree
            *above, last = self._metadata.keys.get(name, (name,))
            for key in above:
                inner = inner.setdefault(key, {})
                if not isinstance(inner, dict):
                    raise self._damaged(f"{name} lies below something that is no mapping")
            if last in inner:
                raise self._damaged(f"two entries are at {name}")
            inner[last] = (
                PassedOver()
                if saved is None
                else LateTensor(_NotOpened(name=name, shape=saved.shape, dtype=saved.dtype))
            )
        return tree

    def _opened(self, tensor: LateTensor) -> LateTensor:
        assert isinstance(tensor.source, _NotOpened)
        name = tensor.source.name
        saved = self._metadata.entries[name]
        assert saved is not None
        shapes = dict(saved.parts)
        if not _cover(saved.shape, shapes):
            raise self._damaged(f"the parts of {name} are not the whole tensor")
        parts = tuple((begins, self._part(name, begins, sizes, saved)) for begins, sizes in shapes.items())
        return LateTensor(Chunks(shape=saved.shape, dtype=saved.dtype, parts=parts))

    def _part(
        self, name: str, begins: tuple[int, ...], sizes: tuple[int, ...], saved: SavedTensor
    ) -> FilePart:
        part = self._metadata.parts.get((name, begins))
        if part is None and len(saved.parts) == 1:
            part = self._metadata.parts.get((name, None))
        if part is None:
            raise self._damaged(f"it does not say where {name} lies")
        if part.transformed:
            raise UsageError(
                f"{self._folder} has compressed parts ({', '.join(part.transformed)}), which are not read. "
                "Save it again without extensions."
            )
        file = self._file(part)
        if part.offset + part.length > file.size:
            raise UsageError(f"{file.path} is cut short: {name} lies beyond its end. Copy the folder again.")
        try:
            with file.opened() as descriptor:
                stream = cast(BinaryIO, io.BufferedReader(_Window(descriptor, part.offset, part.length)))
                records = records_of(stream)
                if not records:  # of the other byte order, for example, where torch would crash
                    raise NotInPlace
                stream.seek(0)
                value = torch.load(stream, map_location="meta", weights_only=True)
            if not isinstance(value, Tensor) or tuple(value.shape) != sizes or value.dtype != saved.dtype:
                raise NotInPlace
            return part_of(value, file, records, part.offset)
        except UsageError:
            raise
        except Exception as error:  # a damaged stream raises whatever its bytes happen to ask for
            raise UsageError(
                f"{file.path} is damaged, or holds more than plain tensors: {name} cannot be read. It is not "
                "read in another way, because it could run code. Copy the folder again."
            ) from error

    def _file(self, part: Part) -> StampedFile:
        found = self._files.get(part.path)
        if found is None:
            found = self._files[part.path] = StampedFile.of(self._inside(part.path))
        return found

    def _inside(self, relative: str) -> Path:
        """The path of a file in the folder."""
        named = PurePosixPath(relative)
        path = self._folder / relative
        outside = named.is_absolute() or ".." in named.parts or "\0" in relative
        if outside or not path.resolve().is_relative_to(self._resolved):
            raise UsageError(
                f"{self._folder / METADATA} names the file {relative!r}, which lies outside of the folder. "
                "It is not read. Copy the checkpoint into one folder, without links."
            )
        if not path.is_file():
            raise UsageError(f"{path} is missing, which {METADATA} names. Copy the whole folder.")
        return path

    @cached_property
    def _resolved(self) -> Path:
        return self._folder.resolve()

    def _damaged(self, what: str) -> UsageError:
        return UsageError(f"{self._folder / METADATA} is damaged: {what}. Copy or save the checkpoint again.")


def _cover(shape: tuple[int, ...], parts: Mapping[tuple[int, ...], tuple[int, ...]]) -> bool:
    """Whether boxes cover all of a tensor, and no value twice."""
    if 0 in shape:
        return True
    boxes = [(begins, sizes) for begins, sizes in parts.items() if 0 not in sizes]
    for begins, sizes in boxes:
        if not len(begins) == len(sizes) == len(shape):
            return False
        if any(b < 0 or s < 0 or b + s > whole for b, s, whole in zip(begins, sizes, shape, strict=True)):
            return False
    # Cells between all the bounds of boxes: each box is some of them.
    bounds = [
        sorted(
            {0, size, *(begins[d] for begins, _ in boxes), *(begins[d] + sizes[d] for begins, sizes in boxes)}
        )
        for d, size in enumerate(shape)
    ]
    cells = [len(bound) - 1 for bound in bounds]
    if np.prod(cells, dtype=object) > _MOST_CELLS:
        return False
    counts = np.zeros(cells, dtype=np.int32)
    for begins, sizes in boxes:
        box = tuple(
            slice(bound.index(begin), bound.index(begin + size))
            for bound, begin, size in zip(bounds, begins, sizes, strict=True)
        )
        counts[box] += 1
    return bool((counts == 1).all())


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        self._descriptor = descriptor
        self._offset = offset
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As for a file."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """As for a file."""
        room = memoryview(buffer)[: max(0, self._length - self._position)]
        count = os.preadv(self._descriptor, [room], self._offset + self._position)
        self._position += count
        return count
