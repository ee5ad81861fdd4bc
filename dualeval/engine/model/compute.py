"""From a batch to its columns on the host: forward and observe, several batches at a time.

On a CPU a kernel may split a sum over its threads, so that the last bits depend on the number of threads:
oneDNN does so in many 1x1 convolutions. Therefore a kernel always gets one thread here, and each of a rank's
threads computes its own batch.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from dualeval.columns.late import LateColumns
from dualeval.columns.ragged import all_copied, as_columns
from dualeval.engine.device import numerics
from dualeval.engine.device.accelerator import accelerator_of, is_out_of_memory
from dualeval.engine.device.transfer import HOST, Columns, Pending, is_plain, start_download
from dualeval.errors import UsageError
from dualeval.options.precision import Precision
from dualeval.tasks import Task

# Each batch under way holds its own activations; to use more cores than this, start more ranks.
_MOST_THREADS = 16
# Largest buffer, in bytes, of which each thread gets its own copy.
_SMALL = 1 << 20
# The names of compute threads begin with this.
THREADS = "dualeval-compute"


def is_compiled(model: nn.Module) -> bool:
    """Whether a part of a model is compiled: the compiler changes and restores settings."""
    parts = [*model.modules()]
    kinds = [type(part).__name__ for part in parts]
    return "OptimizedModule" in kinds or any(map(attrgetter("_compiled_call_impl"), parts))


def usable_threads(task: Task, model: nn.Module, device: torch.device, threads: int, batches: int) -> int:
    """How many batches may be computed at the same time, as far as is known before the first one."""
    if not accelerator_of(device).is_host or task.thread_safe is False or min(threads, batches) < 2:
        return 1
    if is_compiled(model):
        return 1  # a copy would not be compiled
    try:
        copy_sharing_tensors(model)
    except Exception:  # noqa: BLE001 - whatever stands in the way, one thread needs no copy
        return 1
    return min(threads, batches, _MOST_THREADS)


class Compute:
    """Runs batches on one device."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        device: torch.device,
        precision: Precision,
        threads: int,
        *,
        inference: bool = True,
        explain: Callable[[BaseException], str | None] = lambda error: None,
        around_forward: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._around_forward = around_forward
        self._explain = explain
        self._gradients_off = torch.inference_mode if inference else torch.no_grad
        self._task = task
        self._autocast = precision.forward_context(device)
        self._model = model
        # The models that compute: one for each thread.
        self.models = [model]
        self._pool: ThreadPoolExecutor | None = None
        self._of_thread = threading.local()
        # Settings that the model's code changed in the threads, for `NumericSettings.check_after_loop`.
        self.changed_settings: set[str] = set()
        self._accelerator = accelerator_of(device)
        # Batches that may be under way before the host waits for the oldest.
        self.ahead = self._accelerator.batches_ahead
        if threads > 1:
            self.models = [copy_sharing_tensors(model) for _ in range(threads)]
            copies: queue.SimpleQueue[nn.Module] = queue.SimpleQueue()
            for each in self.models:
                copies.put(each)
            caches = torch.is_autocast_cache_enabled()
            self._pool = ThreadPoolExecutor(threads, THREADS, self._take_copy, (copies, caches))
            # With one more batch than threads, no thread waits while this one records a batch.
            self.ahead = threads

    def _take_copy(self, copies: queue.SimpleQueue[nn.Module], caches_casts: bool) -> None:
        # A new thread does not inherit these settings.
        numerics.set_thread()
        # In a caller's autocast: leaving a thread's outermost autocast would empty the caller's cache.
        if not caches_casts:
            torch.set_autocast_cache_enabled(False)
            torch.autocast_increment_nesting()
        self._of_thread.model = copies.get_nowait()

    def __enter__(self) -> Compute:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def start(self, data: Any) -> Pending:
        """Start to compute a batch that is on the device."""
        if self._pool is not None:
            return self._pool.submit(self._columns_in_pool, data).result
        columns = self._columns(self._model, data)
        return (lambda: columns) if self._accelerator.is_host else start_download(self._accelerator, columns)

    def _columns_in_pool(self, data: Any) -> Columns:
        columns = self._columns(self._of_thread.model, data)
        self.changed_settings.update(numerics.check_thread())
        return columns

    def _columns(self, model: nn.Module, data: Any) -> Columns:
        # These modes and autocast are set per thread, and the pool's threads start without them.
        with self._gradients_off():
            try:
                with self._around_forward(), self._autocast():
                    outputs = self._task.forward(model, data)
                observed = self._task.observe(outputs, data)
            except (RuntimeError, IndexError, TypeError, ValueError) as error:
                why = None if is_out_of_memory(error) else self._why(error, model)
                if why is None:
                    raise
                raise UsageError(f"this batch cannot be computed: {why}.") from error
            if not isinstance(observed, Mapping):
                raise UsageError(
                    f"observe returned a {type(observed).__name__}, expected a dict of columns, one row per "
                    f"sample, such as {{'loss': losses}}"
                )
            if isinstance(observed, LateColumns):
                return observed
            columns: Columns = as_columns(observed)
            # Copied on the host, as the thread's next batch may write into this memory. A GPU's are anyway.
            return all_copied(columns) if self._accelerator.is_host else columns

    def _why(self, error: Exception, model: nn.Module) -> str | None:
        from dualeval.models.model_errors import why_model_failed  # where one has failed

        return self._explain(error) or why_model_failed(error, model)


def copy_sharing_tensors(model: nn.Module) -> nn.Module:
    """Copy the modules, so that a forward stores values for its own thread alone; share the tensors.

    Small buffers are copied, too: a forward may write into them, as longrope does into its frequencies.
    """
    known = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    small = [each for each in model.buffers() if is_plain(each, HOST) and each.nbytes <= _SMALL]
    # A copy with another alignment could change last bits.
    alike = [each for each in small if each.is_contiguous() and each.data_ptr() % 64 == 0]
    return copy.deepcopy(model, known | {id(buffer): buffer.detach().clone() for buffer in alike})
