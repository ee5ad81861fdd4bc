"""Tensors that lie in files: where their values are, and tensors that read these when they are used."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_leaves, tree_map_only

from dualeval.errors import UsageError

# What is read at once where values are converted or checked on their way.
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class StampedFile:
    """A file, and by what it is seen that another one has taken its place."""

    path: Path
    # Its inode, size in bytes and time of its last change in nanoseconds.
    stamp: tuple[int, int, int]

    @classmethod
    def of(cls, path: Path) -> StampedFile:
        """The file as it is now."""
        try:
            with path.open("rb") as file:
                return cls(path=path, stamp=_stamp(file.fileno()))
        except OSError as error:
            raise UsageError(f"weights file {path} cannot be read: {error.strerror or error}") from error

    @property
    def size(self) -> int:
        return self.stamp[1]

    @contextmanager
    def opened(self) -> Iterator[int]:
        """A descriptor of the file, which is still the same when it is closed."""
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
                f"weights file {self.path} has changed while it was read. Start again when it is complete."
            )

    def read_into(self, descriptor: int, offset: int, values: Tensor) -> None:
        """Fill a contiguous tensor of the CPU with the bytes at an offset.

        They are read into the tensor's own memory. A mapped file would count as memory, change the numbers
        when a training writes to it, and end the process (SIGBUS) when it is cut.
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


@dataclass(frozen=True, kw_only=True)
class ZipRecord:
    """A record of a zip file: where its bytes lie in the file, and their CRC32; 0 where none was computed."""

    name: str
    begin: int
    size: int
    crc: int


@dataclass(frozen=True, kw_only=True)
class FilePart:
    """The values of a tensor as they lie in one file."""

    file: StampedFile
    # Of the first value, in bytes.
    offset: int
    shape: tuple[int, ...]
    # Of the tensor, in values.
    strides: tuple[int, ...]
    dtype: torch.dtype
    # Of the zip file that they are in; None in another file.
    record: ZipRecord | None = None

    @property
    def extent(self) -> int:
        """How many values lie between the first and the last one, both counted."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def nbytes(self) -> int:
        return self.extent * self.dtype.itemsize

    def rows(self, first: int, last: int) -> FilePart:
        """Some rows, as they lie in the file."""
        offset = self.offset + first * self.strides[0] * self.dtype.itemsize
        return replace(self, offset=offset, shape=(last - first, *self.shape[1:]))

    def copy_to(self, target: Tensor) -> None:
        """Write the values into a tensor of this shape, in its dtype."""
        if 0 in self.shape:
            return
        with self.file.opened() as descriptor:
            self._check_crc(descriptor)
            if self.strides != contiguous_strides(self.shape) or not target.is_contiguous():
                values = torch.empty(self.extent, dtype=self.dtype)
                self.file.read_into(descriptor, self.offset, values)
                target.copy_(values.as_strided(self.shape, self.strides))
            elif target.dtype == self.dtype and target.device.type == "cpu":
                self.file.read_into(descriptor, self.offset, target)
            else:
                self._convert(descriptor, target.view(-1))

    def _convert(self, descriptor: int, target: Tensor) -> None:
        """In pieces: a tensor in another dtype is not held whole beside the target."""
        offset = self.offset
        for into in torch.split(target, _PIECE_BYTES // self.dtype.itemsize):
            values = torch.empty(len(into), dtype=self.dtype)
            self.file.read_into(descriptor, offset, values)
            into.copy_(values)
            offset += values.nbytes

    def _check_crc(self, descriptor: int) -> None:
        """Compare the CRC32 of the record, where all of it is read."""
        record = self.record
        if record is None or not record.crc or (self.offset, self.nbytes) != (record.begin, record.size):
            return
        crc = 0
        for begin in range(record.begin, record.begin + record.size, _PIECE_BYTES):
            size = min(_PIECE_BYTES, record.begin + record.size - begin)
            crc = zlib.crc32(os.pread(descriptor, size, begin), crc)
        if crc != record.crc:
            raise UsageError(
                f"weights file {self.file.path} is damaged: its record {record.name} does not fit its "
                "CRC32. Fetch or save it again."
            )


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """The values of a tensor that was saved in parts."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    # Each with the index at which it begins in each dimension; together they are the tensor.
    parts: tuple[tuple[tuple[int, ...], FilePart], ...]

    def copy_to(self, target: Tensor) -> None:
        """Write the values into a tensor of this shape, in its dtype."""
        for begins, part in self.parts:
            view = target
            for dimension, (begin, size) in enumerate(zip(begins, part.shape, strict=True)):
                view = view.narrow(dimension, begin, size)
            part.copy_to(view)

    def rows(self, first: int, last: int) -> Chunks:
        """Some rows; parts that have none of them are left out."""
        parts = []
        for begins, part in self.parts:
            start, stop = max(first, begins[0]), min(last, begins[0] + part.shape[0])
            if start < stop:
                inside = part.rows(start - begins[0], stop - begins[0])
                parts.append(((start - first, *begins[1:]), inside))
        return Chunks(shape=(last - first, *self.shape[1:]), dtype=self.dtype, parts=tuple(parts))


@dataclass(frozen=True, kw_only=True, eq=False)
class InMemory:
    """The values of a tensor that a file's format has already brought into memory."""

    values: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def copy_to(self, target: Tensor) -> None:
        target.copy_(self.values)

    def rows(self, first: int, last: int) -> InMemory:
        return InMemory(values=self.values[first:last])


# Where the values of a tensor are.
Source = FilePart | Chunks | InMemory


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, as torch gives them."""
    return torch.empty(shape, device="meta").stride()


# -- tensors that read their values --------------------------------------------------------------------

_ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize", "_version", "is_leaf"),
    *("is_quantized", "is_sparse", "is_meta", "is_cuda", "is_nested", "requires_grad", "retains_grad"),
    *("grad", "grad_fn", "_backward_hooks", "_base"),
)
# What is known without the values.
_KNOWN = {
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
    *(Tensor.requires_grad.__set__, Tensor.requires_grad_),  # type: ignore[attr-defined]
    *(Tensor.dim, Tensor.size, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.stride),
    *(Tensor.is_contiguous, Tensor.storage_offset, Tensor.element_size, Tensor.get_device),
    *(Tensor.is_inference, Tensor.__len__),
}
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_DATA_SET = Tensor.data.__set__  # type: ignore[attr-defined]


class LateTensor(Tensor):
    """A tensor whose values stay in their file.

    It has shape and dtype. ``parameter.copy_(late)`` reads the values into the parameter's own memory; any
    other operation reads them for itself, and does not keep them. It is never written. A model may have one
    as a parameter.
    """

    # As above.
    source: Source
    # Why they could not be copied; a module's `load_state_dict` tells only its text.
    failure: UsageError | None

    @staticmethod
    def __new__(
        cls, source: Source, dtype: torch.dtype | None = None, strides: tuple[int, ...] | None = None
    ) -> LateTensor:
        made: LateTensor = Tensor._make_wrapper_subclass(
            cls, source.shape, strides, dtype=dtype or source.dtype, device=torch.device("cpu")
        )
        made.source = source
        made.failure = None
        return made

    __hash__ = object.__hash__

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

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
        if func in (Tensor.detach, _DATA):
            return cls(args[0].source, args[0].dtype, args[0].stride())
        if func == _DATA_SET:
            raise NotWritten
        if func is torch._has_compatible_shallow_copy_type:
            return False  # Module.to and its like put new parameters in the place of late ones
        if func is Tensor.copy_ and not kwargs and not isinstance(args[0], LateTensor):
            args[1]._copy_to(args[0])
            if not args[0].is_inference():
                increment_version(args[0])  # the bytes were read into its memory without torch
            return args[0]
        return _with_values(func, args, kwargs or {})

    # As above, where torch calls its own functions from C++.
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _with_values(func, args, kwargs or {})

    def read(self) -> Tensor:
        """The values, in memory of their own."""
        values = torch.empty(self.source.shape, dtype=self.dtype)
        self._copy_to(values)
        return values

    def read_rows(self, first: int, last: int, into: Tensor) -> None:
        """Read some rows, which are indices of the first dimension; a tensor of no dimensions is one row.

        Only the parts of the files that hold them are read.
        """
        if first == last:
            return
        source = self.source.rows(first, last) if self.ndim else self.source
        self._copy_from(source, into.view(source.shape))

    def _copy_to(self, target: Tensor) -> None:
        if tuple(target.shape) != self.source.shape:
            target.copy_(self.read())  # broadcast
            return
        self._copy_from(self.source, target)

    def _copy_from(self, source: Source, target: Tensor) -> None:
        try:
            if self.dtype in (source.dtype, target.dtype):
                source.copy_to(target)
                return
            # Not in one step: the tensor's own dtype may round.
            values = torch.empty(source.shape, dtype=self.dtype)
            source.copy_to(values)
            target.copy_(values)
        except UsageError as error:
            self.failure = error
            raise


class NotWritten(NotImplementedError):
    """Something writes to a tensor whose values stay in their file."""

    def __init__(self) -> None:
        super().__init__(
            "this tensor's values are in a file (a model that is built late), which is never written to. "
            "Read them first, for instance with model.to('cpu'), then change them."
        )


def _with_values(func: Any, args: Any, kwargs: Any) -> Any:
    late = {id(each): each for each in tree_leaves((args, kwargs)) if isinstance(each, LateTensor)}
    read = {name: each.read() for name, each in late.items()}
    before = {name: _version(each) for name, each in read.items()}
    args, kwargs = tree_map_only(LateTensor, lambda each: read[id(each)], (args, kwargs))
    result = func(*args, **kwargs)
    if any(_version(each) != before[name] for name, each in read.items()):
        raise NotWritten
    return tree_map_only(Tensor, lambda made: _never_written(made, read.values()), result)


def _never_written(made: Tensor, read: Iterable[Tensor]) -> Tensor:
    """A result; if it is a view of values that were read, what is written to it would be lost."""
    is_view = any(made._base is each and made is not each for each in read)
    return LateTensor(InMemory(values=made), made.dtype, made.stride()) if is_view else made


def _version(values: Tensor) -> int:
    """How often something was written to a tensor; what inference mode makes does not count."""
    return 0 if values.is_inference() else values._version
