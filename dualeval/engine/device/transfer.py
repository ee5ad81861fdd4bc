"""The copies of batches to the device, and of their columns back to the host, during the computation.

Copies go through pinned memory, which torch keeps and reuses when a copy is done: allocating it takes longer
than the copy. A batch's columns leave the device as one tensor of bytes, as starting a copy takes the host
longer than the device needs for it. Batches for a CPU are not copied.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dualeval.columns.late import LateColumns
from dualeval.columns.ragged import Column, of_parts, parts_of
from dualeval.engine.device.accelerator import Accelerator
from dualeval.engine.values.nests import map_values

Columns = Mapping[str, Column]
# Waits until a batch's columns are complete, and returns them.
Pending = Callable[[], Columns]
HOST = torch.device("cpu")
# Bytes of a column from which on packing it takes the device longer than starting its copy takes the host.
_LARGE = 1 << 20


class Begun(NamedTuple):
    """A batch on its way to the device."""

    data: Any
    # Its tensors there, and the event behind their copies; None without any.
    copies: list[Tensor]
    done: Any
    # Whether it has objects that move themselves, which are still where they were.
    moves: bool


class Uploads:
    """Brings batches to the device."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._copies = None if accelerator.is_host else accelerator.new_stream()

    def start(self, data: Any) -> Any:
        """Start the copies of a batch's tensors; later work of the current stream waits for them."""
        return data if self._copies is None else self.hand_over(self.begin(data))

    def begin(self, data: Any) -> Begun:
        """Write a batch into pinned memory and start its copies, in any thread, but one batch at a time."""
        # A tensor that is in the batch twice is copied once.
        on_device: dict[int, Tensor] = {}
        others: list[Any] = []

        def copied(tensor: Tensor) -> Tensor:
            if id(tensor) not in on_device:
                on_device[id(tensor)] = self._copied(tensor)
            return on_device[id(tensor)]

        def left(value: Any) -> Any:
            others.append(value)
            return value

        there = map_batch(copied, data, left)
        done = self._copies.record_event() if on_device and self._copies is not None else None
        return Begun(there, [*on_device.values()], done, bool(others))

    def hand_over(self, begun: Begun) -> Any:
        """The batch for the current stream, whose later work waits for the copies."""
        if begun.done is not None:
            computing = self._accelerator.current_stream()
            # Not for the stream, in which the next batch's copies may be queued by now.
            computing.wait_event(begun.done)
            for copy in begun.copies:
                # Otherwise the allocator reuses the memory while the computing stream still reads it.
                self._accelerator.keep_for(copy, computing)
        if not begun.moves:
            return begun.data
        # In the computing stream, as only they know which memory they allocate.
        return map_batch(lambda tensor: tensor, begun.data, methodcaller("to", self._accelerator.device))

    @torch.no_grad()
    def _copied(self, tensor: Tensor) -> Tensor:
        pinned = self._accelerator.pinned(tensor)
        pinned.copy_(tensor)
        assert self._copies is not None
        with self._copies:
            copy = self._accelerator.empty(pinned)
            self._accelerator.start_copy(pinned, copy)
        return copy


@torch.no_grad()
def start_download(accelerator: Accelerator, columns: Columns) -> Pending:
    """Start the copy of a batch's columns to the host, after the work queued in the current stream."""
    if isinstance(columns, LateColumns):
        # Not the columns themselves, which hold the device's memory.
        of, download = columns.of, start_download(accelerator, columns.given)
        return lambda: of(download())
    # Of each column its kind, and the tensors that it is made of; soon their copies on the host.
    made = {name: (type(column), [*parts_of(column)]) for name, column in columns.items()}
    packed: list[tuple[list[Any], int, Tensor]] = []
    for parts, place, part in ((of, *each) for _, of in made.values() for each in enumerate(of)):
        if not is_plain(part, accelerator.device):
            if isinstance(part, Tensor):
                # The user may write the next batch into this memory of the host. Into pinned memory a copy
                # of the user's own may still be on its way, for which ``wait`` waits.
                parts[place] = part if part.is_pinned() else part.cpu().clone()
            continue
        # Torch conjugates or negates some views only when it reads them; a raw copy would miss that.
        part = part.resolve_conj().resolve_neg()
        if part.is_contiguous() and part.nbytes < _LARGE:
            packed.append((parts, place, part))
        else:
            parts[place] = accelerator.pinned(part)
            accelerator.start_copy(part, parts[place])
    # The widest numbers first: so each part begins at a multiple of its numbers' width.
    packed.sort(key=lambda each: -each[2].itemsize)
    forms = [(parts, place, part.nbytes, part.dtype, part.shape) for parts, place, part in packed]
    package = torch.empty(0)
    if packed:
        # Torch calls one number, and none, contiguous whatever their strides are, and keeps these in a view.
        flat = [part.as_strided((part.numel(),), (1,)) for *_, part in packed]
        on_device = accelerator.joined([part.view(torch.uint8) for part in flat])
        package = accelerator.pinned(on_device)
        accelerator.start_copy(on_device, package)
        for parts, place, _ in packed:
            parts[place] = None  # it would hold the device's memory
    arrived = accelerator.record_event()

    def wait() -> Columns:
        arrived.synchronize()
        start = 0
        for parts, place, size, dtype, shape in forms:
            parts[place] = package[start : start + size].view(dtype).view(shape)
            start += size
        # Copied out of pinned memory, for some columns are held until a run ends.
        return {name: of_parts(kind, [*map(_cloned, parts)]) for name, (kind, parts) in made.items()}

    return wait


def _cloned(part: Any) -> Any:
    return part.clone() if isinstance(part, Tensor) else part


def map_batch(
    tensor: Callable[[Tensor], Any], batch: Any, moving: Callable[[Any], Any] = lambda value: value
) -> Any:
    """Make a batch of the same structure, in the same way on every device.

    ``moving`` is called with objects that have a ``to``, and with tensors that are not plain.
    """

    def leaf(value: Any) -> Any:
        if type(value) is Tensor and is_plain(value, HOST):
            return tensor(value)
        return moving(value) if isinstance(value, Tensor) or _moves_itself(value) else value

    return map_values(leaf, batch, is_leaf=_moves_itself)


def is_plain(value: Any, device: torch.device) -> bool:
    """Whether a value is a tensor of torch's own class, fully described by its numbers in memory."""
    return (
        type(value) is Tensor
        and value.device.type == device.type
        and device.index in (None, value.device.index)
        and value.layout is torch.strided
        and not value.is_quantized
        and not value.is_nested
    )


def _moves_itself(value: Any) -> bool:
    """Whether an object has a method ``to``, as a tensor does.

    A batch of transformers does not count: its ``to`` would wait for the device, so its items are copied.
    """
    method = getattr(type(value), "to", None)
    of_batch = isinstance(value, UserDict) and str(getattr(method, "__module__", "")).startswith(
        "transformers."
    )
    return callable(method) and not isinstance(value, Tensor) and not of_batch
