"""One start of a cell that trains: steps on batches in memory, each stage of a step timed by each rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from time import monotonic, perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from dualeval.backends.base import Backend
from dualeval.engine import numerics
from dualeval.engine.accelerator import accelerator_of
from dualeval.engine.compute import Uploads
from dualeval.engine.options import run_options_of
from dualeval.engine.parts import drawn
from dualeval.engine.samples import as_dataset
from dualeval.engine.session import Session
from dualeval.errors import UsageError
from dualeval.tasks import Task
from dualeval.tools.bench.evaluation import facts_of_ranks, split_batches
from dualeval.tools.bench.plan import DATAPARALLEL, OF_RANKS, STAGES, CellStart

# Kept in memory by each rank, which takes them in turns.
_MOST_BATCHES = 8
_LEAST_STEPS, _MOST_STEPS = 3, 10_000
# Small: what is measured is the time of a step, and weights that become NaN change it.
_LEARNING_RATE, _MOMENTUM = 1e-4, 0.9
# What an evaluation sets for equal bits, and a training does not.
_LEFT = (
    "torch.get_num_threads()",
    "torch.get_deterministic_debug_mode()",
    "torch.backends.cudnn.deterministic",
)


def measure_training(
    session: Session, task: Task, options: Mapping[str, Any], start: CellStart
) -> dict[str, Any]:
    """Time training steps; a collective, every rank gets the same.

    A step is: forward and cross entropy; backward; the sum of all gradients over the ranks, as one tensor,
    which then replaces them as their mean; SGD with momentum. The stages follow each other.
    """
    device = session.backend.device
    if start.mode == DATAPARALLEL:
        split_batches(task, start.processes)
    with numerics.settings(start.precision, device, leave=_LEFT):
        model = task.build_model(device).to(device).train()
        batches = _batches(session, task, options, start)
        training = _Training(session.backend, task, model, start)
        startup_s = monotonic() - start.begun
        for number in range(start.warmup):
            training.step(batches[number % len(batches)])
        session.backend.barrier()
        began = perf_counter()
        training.step(batches[0])
        one_s = perf_counter() - began
        wanted = math.ceil(start.min_seconds / one_s)
        steps = session.backend.broadcast_json(min(max(wanted, _LEAST_STEPS), _MOST_STEPS))
        training.seconds = dict.fromkeys(STAGES, 0.0)
        session.backend.barrier()
        began = perf_counter()
        for number in range(steps):
            training.step(batches[number % len(batches)])
        seconds = perf_counter() - began
        ranks = facts_of_ranks(session)
    times = session.backend.all_gather_json({"seconds": seconds, "stages": training.seconds})
    return {
        "startup_s": startup_s,
        "seconds": max(one["seconds"] for one in times),
        "samples": steps * start.batch_size * session.world.size,
        "batches": steps * session.world.size,
        "ranks": [{**one["stages"], **own} for one, own in zip(times, ranks, strict=True)],
        "description": dict(task.description()),
    }


def _batches(session: Session, task: Task, options: Mapping[str, Any], start: CellStart) -> list[Any]:
    """This rank's batches, whole ones alone, on its device."""
    dataset = drawn(as_dataset(task.dataset()), run_options_of(options), lambda sentence: None)
    count = min(len(dataset), options.get("limit") or len(dataset))
    whole = count // start.batch_size
    if whole < session.world.size:
        raise UsageError(
            f"{count} samples make {whole} whole batches of {start.batch_size}, and each of "
            f"{session.world.size} processes needs one. Give more samples or a smaller --batch-size."
        )
    uploads = Uploads(accelerator_of(session.backend.device))
    taken = range(session.world.rank, whole, session.world.size)[:_MOST_BATCHES]
    found = []
    for batch in taken:
        first = batch * start.batch_size
        samples = dataset.__getitems__(range(first, first + start.batch_size))
        found.append(uploads.start(task.collate(samples)))
    return found


class _Training:
    """A model that is trained on batches, one step at a time."""

    def __init__(self, backend: Backend, task: Task, model: nn.Module, start: CellStart) -> None:
        self._backend = backend
        self._task = task
        self._model = model
        self._precision = start.precision
        self._reduces = start.mode in OF_RANKS
        self._optimiser = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE, momentum=_MOMENTUM)
        # float16 has too small a range for gradients; the scaler does nothing for the others.
        self._scaler = torch.amp.GradScaler(backend.device.type, enabled=start.precision == "amp-fp16")
        # By stage, of all steps since it was set.
        self.seconds = dict.fromkeys(STAGES, 0.0)

    def step(self, batch: Mapping[str, Tensor]) -> None:
        """Train on one batch; each stage is waited for before the next one begins."""
        marks = [perf_counter()]
        with numerics.autocast(self._precision, self._backend.device):
            logits = self._task.forward(self._model, batch)
            loss = nn.functional.cross_entropy(logits, batch["targets"])
        self._mark(marks)
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self._mark(marks)
        if self._reduces:
            self._average([each.grad for each in self._model.parameters() if each.grad is not None])
        self._mark(marks)
        self._scaler.step(self._optimiser)
        self._scaler.update()
        self._optimiser.zero_grad()
        self._mark(marks)
        for stage, begin, end in zip(STAGES, marks, marks[1:], strict=False):
            self.seconds[stage] += end - begin

    def _mark(self, marks: list[float]) -> None:
        if self._backend.device.type == "cuda":
            torch.cuda.synchronize(self._backend.device)
        marks.append(perf_counter())

    def _average(self, gradients: Sequence[Tensor]) -> None:
        together = torch.cat([gradient.reshape(-1) for gradient in gradients])
        mean = self._backend.all_reduce(together).div_(self._backend.world.size)
        first = 0
        for gradient in gradients:
            gradient.copy_(mean[first : first + gradient.numel()].view_as(gradient))
            first += gradient.numel()
