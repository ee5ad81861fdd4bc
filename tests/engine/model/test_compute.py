"""Compute: batches at the same time on a CPU, with the bits of one at a time."""

from __future__ import annotations

import ctypes
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dualeval import evaluate
from dualeval.engine.model.compute import Compute, usable_threads
from dualeval.errors import UsageError
from dualeval.metrics import Mean
from dualeval.options.precision import FP32, PRECISIONS
from tests.vehicles.tiny import CLASSES, FEATURES, TinyTask

CPU = torch.device("cpu")


class Remembering(nn.Module):
    """A model that is not made for threads: it keeps its input between two lines of forward."""

    def __init__(self, both: threading.Barrier) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self._both = [both]

    def __deepcopy__(self, memo: dict[int, Any]) -> Remembering:
        copied = Remembering(self._both[0])
        copied.linear = memo.get(id(self.linear), self.linear)
        return copied

    def forward(self, features: Tensor) -> Tensor:
        self.kept = features
        self._both[0].wait(10)  # both threads have stored their input, and neither has read it
        logits: Tensor = self.linear(self.kept)
        return logits


def batch(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {
        "features": torch.rand(8, FEATURES, generator=generator),
        "targets": torch.zeros(8, dtype=torch.int64),
    }


def losses(model: nn.Module, threads: int, batches: int = 6) -> list[list[float]]:
    with Compute(TinyTask(1), model, CPU, FP32, threads) as compute:
        pending = [compute.start(batch(number)) for number in range(batches)]
        return [columns()["loss"].tolist() for columns in pending]


def test_threads_give_the_same_bits_in_order() -> None:
    model = TinyTask(1).build_model(CPU)
    assert losses(model, 3) == losses(model, 1)


def test_what_a_forward_stores_stays_with_its_thread() -> None:
    torch.manual_seed(0)
    model = Remembering(threading.Barrier(2))
    found = losses(model, 2)
    model = Remembering(threading.Barrier(1))
    torch.manual_seed(0)
    model.linear = Remembering(threading.Barrier(1)).linear
    assert found == losses(model, 1)


class WritesBuffer(nn.Module):
    """Writes its input into a buffer, as longrope does its frequencies."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("seen", torch.zeros(8, FEATURES))

    def forward(self, features: Tensor) -> Tensor:
        self.seen.copy_(features)
        BOTH[0].wait(10)
        logits: Tensor = self.linear(self.seen)
        return logits


BOTH = [threading.Barrier(2)]


def test_what_a_forward_writes_into_a_small_buffer_stays_with_its_thread() -> None:
    model = WritesBuffer()
    found = losses(model, 2)
    BOTH[0] = threading.Barrier(1)
    assert found == losses(model, 1)


def test_an_error_in_a_thread_is_raised_where_it_is_waited_for() -> None:
    with Compute(TinyTask(1), nn.Linear(FEATURES + 1, CLASSES), CPU, FP32, 2) as compute:
        pending = compute.start(batch(0))
        with pytest.raises(UsageError, match=r"the layer Linear\(.*cannot take a tensor.*mat1 and mat2"):
            pending()


class Lock(nn.Module):
    """A model that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def hooked() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_forward_hook(lambda module, inputs, output: None)
    return nn.Sequential(model)


@pytest.mark.parametrize(
    ("model", "threads", "batches", "expected"),
    [
        (nn.Linear(2, 2), 4, 100, 4),
        (nn.Linear(2, 2), 4, 3, 3),
        (nn.Linear(2, 2), 64, 100, 16),
        (nn.Linear(2, 2), 1, 100, 1),
        (nn.Linear(2, 2), 4, 0, 1),
        (Lock(), 4, 100, 1),
        (hooked(), 4, 100, 4),
    ],
)
def test_a_model_has_as_many_threads_as_it_and_its_batches_allow(
    model: nn.Module, threads: int, batches: int, expected: int
) -> None:
    assert usable_threads(TinyTask(1), model, CPU, threads, batches) == expected


def test_a_task_may_want_one_at_a_time() -> None:
    task = TinyTask(1)
    task.thread_safe = False
    assert usable_threads(task, nn.Linear(2, 2), CPU, 4, 100) == 1
    assert usable_threads(TinyTask(1), nn.Linear(2, 2), torch.device("cuda"), 4, 100) == 1


def test_a_kernel_has_one_thread() -> None:
    seen = []
    mapped = Path("/proc/self/maps").read_text().split()
    # Torch's own: scikit-learn, where a test has imported it, brings another.
    openmp = ctypes.CDLL(next(name for name in mapped if "/torch" in name and re.search("lib[gi]omp", name)))

    class Watching(TinyTask):
        def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            # What OpenMP says: a new thread begins with all cores, and asking torch would already set it.
            seen.append(openmp.omp_get_max_threads())
            return super().forward(model, batch)

    task = Watching(1)
    with Compute(task, task.build_model(CPU), CPU, FP32, 2) as compute:
        compute.start(batch(0))()
    assert seen == [1]


def test_autocast_reaches_the_threads() -> None:
    seen = []

    class Watching(TinyTask):
        def observe(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            seen.append((outputs.dtype, torch.is_inference_mode_enabled()))
            return super().observe(outputs, batch)

    task = Watching(1)
    for threads in (1, 2):
        with Compute(task, task.build_model(CPU), CPU, PRECISIONS["amp-bf16"], threads) as compute:
            compute.start(batch(0))()
    assert seen == [(torch.bfloat16, True)] * 2


class _Reuses(nn.Module):
    """Gives the same tensor for every batch, with other values in it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.zeros(4)

    def forward(self, values: Tensor) -> Tensor:
        return self.kept.copy_(values) if len(values) == 4 else values


@pytest.mark.parametrize("thread_safe", [True, False])
def test_a_model_may_write_each_batch_into_the_same_memory(thread_safe: bool) -> None:
    values = torch.arange(16.0)
    result = evaluate(
        model=_Reuses().eval(),
        data=values,
        metrics=[Mean("prediction")],
        batch_size=4,
        thread_safe=thread_safe,
        workers=0,
    )
    assert result.metrics["prediction"] == 7.5
