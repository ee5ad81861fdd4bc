"""Batches to the device, and columns back to the host, beside the computation.

What is copied waits in pinned memory that is used again and again: asking the system for it takes longer than
the copy. Batches of a CPU take the same walk, and nothing of them is copied.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import cache
from itertools import islice
from operator import methodcaller
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualeval.columns import Column, of_parts, parts_of
from dualeval.engine.accelerator import Accelerator
from dualeval.engine.nests import map_values, name_of_type, opened_nest, own_attributes
from dualeval.errors import UsageError

Columns = Mapping[str, Column]
# Waits until a batch's columns are complete, and returns them.
Pending = Callable[[], Columns]

_HOST = torch.device("cpu")
# While a batch is copied from one buffer, the next is written into the other.
_UPLOAD_BUFFERS = 2
# Of the start of each tensor in a buffer, in bytes: more than any dtype needs.
_ALIGNMENT = 64
_SMALLEST_BUFFER = 4096

_WITHOUT_TENSORS = (str, bytes, bytearray, bool, int, float, complex, type(None), np.generic, Enum, PurePath)
# How much of an unknown object is looked through for tensors.
_LOOKED_AT = 32
_LOOKED_INTO = 3


class Uploads:
    """Brings batches to the device."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        if not accelerator.is_host:
            self._ring = PinnedRing(accelerator, _UPLOAD_BUFFERS)
            self._copies = accelerator.new_stream()

    def start(self, data: Any) -> Any:
        """Start the copies of a batch's tensors; later work of the current stream waits for them."""
        # In the computing stream: what memory it takes, only the object knows.
        moving = methodcaller("to", self._accelerator.device)
        if self._accelerator.is_host:
            return map_batch(lambda tensor: tensor, data, moving)
        on_host: dict[int, Tensor] = {}
        map_batch(lambda tensor: on_host.setdefault(id(tensor), tensor), data)
        on_device = dict(zip(on_host, self._copied(list(on_host.values())), strict=True))
        return map_batch(lambda tensor: on_device[id(tensor)], data, moving)

    @torch.no_grad()
    def _copied(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if not tensors:
            return []
        buffer = self._ring.take(tensors)
        for tensor, pinned in zip(tensors, buffer.tensors, strict=True):
            pinned.copy_(tensor)
        found = []
        with self._copies:
            for pinned in buffer.tensors:
                copy = self._accelerator.empty(pinned)
                self._accelerator.start_copy(pinned, copy)
                found.append(copy)
            buffer.free = self._accelerator.record_event().synchronize
        computing = self._accelerator.current_stream()
        computing.wait_stream(self._copies)
        for copy in found:
            # The allocator would hand the memory on while the computing stream still reads it.
            self._accelerator.keep_for(copy, computing)
        return found


class Downloads:
    """Brings columns to the host."""

    def __init__(self, accelerator: Accelerator, ahead: int) -> None:
        self._accelerator = accelerator
        self._ring = PinnedRing(accelerator, ahead + 1)

    @torch.no_grad()
    def start(self, columns: Columns) -> Pending:
        """Start the copies of a batch's columns behind what the current stream has been given.

        Where more batches are under way than were said to be, the oldest is waited for.
        """
        kinds = {name: type(column) for name, column in columns.items()}
        # By name, the tensors that each column is made of.
        parts: dict[str, list[Any]] = {name: parts_of(column) for name, column in columns.items()}
        device = self._accelerator.device
        pinned = [
            (name, place)
            for name, own in parts.items()
            for place, part in enumerate(own)
            if _is_plain(part, device)
        ]
        buffer = self._ring.take([parts[name][place] for name, place in pinned])
        for (name, place), memory in zip(pinned, buffer.tensors, strict=True):
            self._accelerator.start_copy(parts[name][place], memory)
            parts[name][place] = memory
        for own in parts.values():
            own[:] = [part.cpu() if isinstance(part, Tensor) else part for part in own]
        arrived = self._accelerator.record_event()

        def wait() -> Columns:
            # Out of the pinned memory, which another batch may then have.
            if pinned:
                arrived.synchronize()
            for name, place in pinned:
                parts[name][place] = parts[name][place].clone()
            pinned.clear()
            return {name: of_parts(kinds[name], own) for name, own in parts.items()}

        buffer.free = wait
        return wait


class _Buffer:
    """A piece of pinned memory that grows to what it has to hold."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._memory: Tensor | None = None
        # Views of it, of what it was last taken for.
        self.tensors: list[Tensor] = []
        # Called before it is written again: waits until nobody reads or writes it any more.
        self.free: Callable[[], object] = lambda: None

    def fill(self, like: Sequence[Tensor]) -> None:
        # Dense, in the order of the tensor's own strides: a model may compute otherwise in another order.
        shapes = [torch.empty_like(tensor, device="meta", requires_grad=False) for tensor in like]
        starts, size = [], 0
        for shape in shapes:
            starts.append(size)
            size += -(-shape.numel() * shape.itemsize // _ALIGNMENT) * _ALIGNMENT
        if self._memory is None or self._memory.numel() < size:
            self.tensors = []
            self._memory = None
            # PyTorch's own allocator of pinned memory rounds up to a power of two, too.
            self._memory = self._accelerator.pinned(max(_SMALLEST_BUFFER, 1 << (size - 1).bit_length()))
        self.tensors = [
            self._memory[start : start + shape.numel() * shape.itemsize]
            .view(shape.dtype)
            .as_strided(shape.shape, shape.stride())
            for start, shape in zip(starts, shapes, strict=True)
        ]


class PinnedRing:
    """Pinned buffers that are used in turns."""

    def __init__(self, accelerator: Accelerator, count: int) -> None:
        self._buffers = deque(_Buffer(accelerator) for _ in range(count))

    def take(self, like: Sequence[Tensor]) -> _Buffer:
        """The buffer that was taken longest ago, once it is free, with room for tensors like these.

        Who takes it starts the copies, and then says by ``free`` how to wait for them.
        """
        buffer = self._buffers[0]
        buffer.free()
        buffer.free = lambda: None
        buffer.fill(like)
        self._buffers.rotate(-1)
        return buffer


def map_batch(
    tensor: Callable[[Tensor], Any], batch: Any, moving: Callable[[Any], Any] = lambda value: value
) -> Any:
    """Make a batch of the same structure; on every device in the same way.

    ``moving`` is called with what moves itself, and with tensors that are no plain ones.
    """

    def leaf(value: Any) -> Any:
        if type(value) is Tensor and _is_plain(value, _HOST):
            return tensor(value)
        if isinstance(value, Tensor) or _moves_itself(value):
            return moving(value)
        if _holds_tensor(value, _LOOKED_INTO, set()):
            raise UsageError(
                f"the batch that the task's collate made holds a {name_of_type(value)} with tensors in it, "
                "and nothing tells how to bring these to a device (on a CPU neither, so that a batch works "
                "everywhere or nowhere). Give it a method to(device), whose parameter has this name, that "
                "returns it there, or make it a plain dataclass, or let collate return its tensors in a "
                "dict, list or tuple."
            )
        return value

    return map_values(leaf, batch, is_leaf=_moves_itself)


def _is_plain(value: Any, device: torch.device) -> bool:
    """Whether a value is a tensor that numbers in memory describe, and no class of somebody's own."""
    return (
        type(value) is Tensor
        and value.device.type == device.type
        and device.index in (None, value.device.index)
        and value.layout is torch.strided
        and not value.is_quantized
        and not value.is_nested
    )


def _moves_itself(value: Any) -> bool:
    kind: Any = type(value)
    return _has_to_of_devices(kind)


@cache
def _has_to_of_devices(kind: type) -> bool:
    """Whether a class has a method ``to(device)``: times and quantities have another ``to``."""
    method = getattr(kind, "to", None)
    if not callable(method) or issubclass(kind, Tensor):
        return False
    try:
        parameters = list(inspect.signature(method).parameters.values())[1:]
    except ValueError:  # written in C, without a signature
        return False
    if not parameters:
        return False
    first = parameters[0]
    return first.kind is first.VAR_POSITIONAL or (
        first.name == "device" and first.kind is not first.KEYWORD_ONLY
    )


def _holds_tensor(value: Any, depth: int, seen: set[int]) -> bool:
    """Whether an object that is no nest has tensors in it, as far as it is looked through."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, (*_WITHOUT_TENSORS, type)) or depth < 0 or id(value) in seen:
        return False
    seen.add(id(value))
    opened = opened_nest(value)
    parts: Iterable[Any] = own_attributes(value).values() if opened is None else opened[1]
    if isinstance(value, set | frozenset) or (isinstance(value, np.ndarray) and value.dtype.hasobject):
        parts = value.flat if isinstance(value, np.ndarray) else value
    return any(_holds_tensor(part, depth - 1, seen) for part in islice(parts, _LOOKED_AT))
