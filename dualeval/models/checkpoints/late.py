"""Tensors that lie in files: their shape and dtype are known, their values are read when they are used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from dualeval.errors import UsageError

# What is read at once where values are converted on their way.
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class StampedFile:
    """A file, and by what it is seen that another one has taken its place.

    Attributes:
        path: the file.
        stamp: its inode, size in bytes and time of its last change in nanoseconds.
    """

    path: Path
    stamp: tuple[int, int, int]

    @classmethod
    def of(cls, path: Path) -> StampedFile:
        """The file as it is now.

        Raises:
            UsageError: it cannot be read.
        """
        try:
            with path.open("rb") as file:
                return cls(path=path, stamp=_stamp(file.fileno()))
        except OSError as error:
            raise UsageError(f"weights file {path} cannot be read: {error.strerror or error}") from error

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stamp[1]

    @contextmanager
    def opened(self) -> Iterator[int]:
        """A descriptor of the file, which is still the same when it is closed.

        Raises:
            UsageError: the file cannot be read, or has changed.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                self._check(descriptor)
                yield descriptor
                self._check(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise UsageError(f"weights file {self.path} cannot be read: {error.strerror or error}") from error

    def _check(self, descriptor: int) -> None:
        if _stamp(descriptor) != self.stamp:
            raise UsageError(
                f"weights file {self.path} has changed while it was read. Start again when it is written to "
                "its end."
            )

    def read_into(self, descriptor: int, offset: int, values: Tensor) -> None:
        """Fill a contiguous tensor of the CPU with the bytes at an offset.

        The bytes are read into the tensor's own memory: nothing is mapped, and nothing is held twice.
        """
        room = values.detach().view(-1).view(torch.uint8).numpy().data
        while room:
            count = os.preadv(descriptor, [room], offset)
            if count == 0:
                raise UsageError(f"weights file {self.path} is cut short: {len(room):,} bytes are missing")
            room, offset = room[count:], offset + count


def _stamp(descriptor: int) -> tuple[int, int, int]:
    status = os.fstat(descriptor)
    return status.st_ino, status.st_size, status.st_mtime_ns


class Source(Protocol):
    """Where the values of a tensor are."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the values in the file."""

    def copy_to(self, target: Tensor) -> None:
        """Write the values into a tensor of this shape, in its dtype.

        Raises:
            UsageError: they cannot be read.
        """


@dataclass(frozen=True, kw_only=True)
class FilePart:
    """The values of a tensor as they lie in one file.

    Attributes:
        file: the file.
        offset: of the first value, in bytes.
        shape: of the tensor.
        strides: of the tensor, in values.
        dtype: of the values.
    """

    file: StampedFile
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def extent(self) -> int:
        """How many values lie between the first and the last one, both counted."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def nbytes(self) -> int:
        """How many bytes of the file the values are in."""
        return self.extent * self.dtype.itemsize

    @property
    def _is_contiguous(self) -> bool:
        return 0 in self.shape or self.strides == contiguous_strides(self.shape)

    def copy_to(self, target: Tensor) -> None:
        """Write the values into a tensor of this shape, in its dtype."""
        with self.file.opened() as descriptor:
            if not self._is_contiguous or not target.is_contiguous() or target.device.type != "cpu":
                values = torch.empty(self.extent, dtype=self.dtype)
                self.file.read_into(descriptor, self.offset, values)
                target.copy_(values.as_strided(self.shape, self.strides))
            elif target.dtype == self.dtype:
                self.file.read_into(descriptor, self.offset, target)
            else:
                self._convert_to(target.view(-1), descriptor)

    def _convert_to(self, flat: Tensor, descriptor: int) -> None:
        piece = _PIECE_BYTES // self.dtype.itemsize
        values = torch.empty(min(piece, len(flat)), dtype=self.dtype)
        for first in range(0, len(flat), piece):
            part = flat[first : first + piece]
            self.file.read_into(descriptor, self.offset + first * self.dtype.itemsize, values[: len(part)])
            part.copy_(values[: len(part)])


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """The values of a tensor that was saved in parts.

    Attributes:
        shape: of the tensor.
        dtype: of the values.
        parts: each with the index at which it begins in each dimension; together they are the tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[tuple[tuple[int, ...], FilePart], ...]

    def copy_to(self, target: Tensor) -> None:
        """Write the values into a tensor of this shape, in its dtype."""
        for begins, part in self.parts:
            view = target
            for dimension, (begin, size) in enumerate(zip(begins, part.shape, strict=True)):
                view = view.narrow(dimension, begin, size)
            part.copy_to(view)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, as torch gives them."""
    return tuple(prod(max(size, 1) for size in shape[dimension + 1 :]) for dimension in range(len(shape)))


# What is known without the values.
_KNOWN = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "nbytes")),
    *(getattr(Tensor, name).__get__ for name in ("is_quantized", "is_sparse", "is_meta", "requires_grad")),
    *(Tensor.dim, Tensor.size, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex),
}


class LateTensor(Tensor):
    """A tensor whose values stay in their file.

    It has shape and dtype. ``parameter.copy_(late)`` reads the values into the parameter's own memory; any
    other operation reads them for itself, and does not keep them.

    Attributes:
        source: where the values are.
        failure: why they could not be copied; a module's ``load_state_dict`` tells only its text.
    """

    source: Source
    failure: UsageError | None

    @staticmethod
    def __new__(cls, source: Source) -> LateTensor:
        made: LateTensor = Tensor._make_wrapper_subclass(
            cls, source.shape, dtype=source.dtype, device=torch.device("cpu"), requires_grad=False
        )
        made.source = source
        made.failure = None
        return made

    __hash__ = object.__hash__

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """Shape and dtype, without reading."""
        return f"LateTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: object) -> LateTensor:
        """Itself: it holds no values, and is never written."""
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Give torch the values, where it computes with them.

        Not only where it dispatches: at the first dispatch to a class of Python, torch imports its
        distributed tensors, which takes longer than to load most models.
        """
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is Tensor.copy_ and not kwargs and not isinstance(args[0], LateTensor):
            args[1]._copy_to(args[0])
            return args[0]
        return _with_values(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """As above, where torch calls its own functions from C++."""
        return _with_values(func, args, kwargs or {})

    def read(self) -> Tensor:
        """The values, in memory of their own."""
        values = torch.empty(self.source.shape, dtype=self.source.dtype)
        self._copy_to(values)
        return values

    def _copy_to(self, target: Tensor) -> None:
        if tuple(target.shape) != self.source.shape:
            target.copy_(self.read())  # broadcast
            return
        try:
            self.source.copy_to(target)
        except UsageError as error:
            self.failure = error
            raise


def _with_values(func: Any, args: Any, kwargs: Any) -> Any:
    read_args, read_kwargs = tree_map_only(LateTensor, LateTensor.read, (args, kwargs))
    return func(*read_args, **read_kwargs)
