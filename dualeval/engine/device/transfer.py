"""The copies of batches to the device, and of their columns back to the host, during the computation.

Copies go through pinned memory, which torch keeps and reuses when a copy is done: allocating it takes longer
than the copy. Batches for a CPU are not copied.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping
from operator import methodcaller
from typing import Any

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


class Uploads:
    """Brings batches to the device."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._copies = None if accelerator.is_host else accelerator.new_stream()

    def start(self, data: Any) -> Any:
        """Start the copies of a batch's tensors; later work of the current stream waits for them."""
        if self._copies is None:
            return data
        # A tensor that is in the batch twice is copied once.
        on_device: dict[int, Tensor] = {}

        def copied(tensor: Tensor) -> Tensor:
            if id(tensor) not in on_device:
                on_device[id(tensor)] = self._copied(tensor)
            return on_device[id(tensor)]

        # Objects with a ``to`` are moved in the computing stream: only they know which memory they allocate.
        moved = map_batch(copied, data, methodcaller("to", self._accelerator.device))
        if on_device:
            computing = self._accelerator.current_stream()
            computing.wait_stream(self._copies)
            for copy in on_device.values():
                # Otherwise the allocator reuses the memory while the computing stream still reads it.
                self._accelerator.keep_for(copy, computing)
        return moved

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
    """Start the copies of a batch's columns to the host, after the work queued in the current stream."""
    if isinstance(columns, LateColumns):
        download = start_download(accelerator, columns.given)
        return lambda: columns.of(download())

    def begin(part: Any) -> Any:
        if not is_plain(part, accelerator.device):
            return part.cpu() if isinstance(part, Tensor) else part
        # Torch conjugates or negates some views only when it reads them; a raw copy would miss that.
        part = part.resolve_conj().resolve_neg()
        pinned = accelerator.pinned(part)
        accelerator.start_copy(part, pinned)
        return pinned

    kinds = {name: type(column) for name, column in columns.items()}
    # By name, the tensors that each column is made of.
    parts = {name: [*map(begin, parts_of(column))] for name, column in columns.items()}
    arrived = accelerator.record_event()

    def wait() -> Columns:
        arrived.synchronize()
        # Copied out of pinned memory, for some columns are held until a run ends.
        return {name: of_parts(kinds[name], [*map(_cloned, tensors)]) for name, tensors in parts.items()}

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
