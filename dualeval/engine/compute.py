"""From a batch to its columns on the host: forward and observe, several batches at a time.

On a CPU a kernel may split a sum over its threads, and so give other last bits with another number of them:
oneDNN does so in many 1x1 convolutions. So a kernel gets one thread here, always, and the threads that a rank
has each compute a batch of their own.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dualeval.engine import numerics
from dualeval.errors import DualevalError

if TYPE_CHECKING:
    from dualeval.tasks import Task

Columns = Mapping[str, Tensor]
# Waits until a batch's columns are complete, and returns them.
Pending = Callable[[], Columns]

# Batches that may be under way on a GPU before the host waits for the oldest: bounds memory.
_AHEAD_ON_GPU = 2


class Compute:
    """Runs batches on one device.

    Args:
        task: does the work.
        model: its model, on the device.
        device: where.
        precision: a key of ``numerics.PRECISIONS``.
        threads: batches that a CPU computes at the same time; each thread has a copy of the model's modules,
            which shares their parameters and buffers. Without effect on a GPU.

    Attributes:
        ahead: batches that may be under way before the oldest is to be waited for.
    """

    def __init__(
        self, task: Task, model: nn.Module, device: torch.device, precision: str, threads: int
    ) -> None:
        self._task = task
        self._device = device
        self._dtype = numerics.PRECISIONS[precision]
        self._model = model
        self._pool: ThreadPoolExecutor | None = None
        self._own = threading.local()
        self.ahead = _AHEAD_ON_GPU if device.type == "cuda" else 0
        if device.type == "cpu" and threads > 1:
            copies: queue.SimpleQueue[nn.Module] = queue.SimpleQueue()
            for _ in range(threads):
                copies.put(_copy_sharing_tensors(model))
            self._pool = ThreadPoolExecutor(threads, "dualeval-compute", self._take_copy, (copies,))
            # One more than can run, so that no thread waits while this one handles a finished batch.
            self.ahead = threads

    def _take_copy(self, copies: queue.SimpleQueue[nn.Module]) -> None:
        self._own.model = copies.get_nowait()

    def __enter__(self) -> Compute:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def start(self, data: Any) -> Pending:
        """Begin with a batch that is on the device."""
        if self._pool is not None:
            return self._pool.submit(lambda: self._columns(self._own.model, data)).result
        columns = self._columns(self._model, data)
        if self._device.type != "cuda":
            return lambda: columns
        return self._on_its_way(columns)

    def _columns(self, model: nn.Module, data: Any) -> Columns:
        # Inference mode and autocast belong to a thread: a pool's thread is in neither.
        with torch.inference_mode():
            with torch.autocast(self._device.type, dtype=self._dtype, enabled=self._dtype is not None):
                outputs = self._task.forward(model, data)
            return self._task.observe(outputs, data)

    def _on_its_way(self, columns: Columns) -> Pending:
        """Start the columns' way from a GPU to the host; waiting is for this batch alone."""
        host = {
            name: torch.empty(column.shape, dtype=column.dtype, pin_memory=True).copy_(
                column, non_blocking=True
            )
            for name, column in columns.items()
        }
        arrived = torch.cuda.current_stream(self._device).record_event()

        def wait() -> Columns:
            arrived.synchronize()
            return host

        return wait


def _copy_sharing_tensors(model: nn.Module) -> nn.Module:
    """The modules copied, so that what a forward stores in them stays with its thread; the tensors shared."""
    shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    try:
        return copy.deepcopy(model, shared)
    except Exception as error:
        raise DualevalError(
            f"the model {type(model).__name__} cannot be copied for a second thread "
            f"({type(error).__name__}: {error}). Set OMP_NUM_THREADS=1 to compute one batch at a time."
        ) from error
