"""One start of a cell, which measures passes of an evaluation, or training steps; and the memory it takes.

Apart from what a cell is: this comes with torch, for which no help waits.
"""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic, perf_counter
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from dualeval.atomic_files import write_text
from dualeval.backends.base import Backend
from dualeval.cli.options import work_in_session
from dualeval.engine.device import numerics
from dualeval.engine.device.accelerator import accelerator_of
from dualeval.engine.device.transfer import Uploads
from dualeval.engine.samples.samples import as_dataset
from dualeval.engine.samples.subset import drawn
from dualeval.engine.session import Session
from dualeval.engine.values.options import run_options_of
from dualeval.errors import UsageError
from dualeval.launch import detect
from dualeval.options.job import Job
from dualeval.options.precision import PRECISIONS
from dualeval.process.signals import numbers_of
from dualeval.process.start import DEFAULT_SIGNALS, end_with_parent
from dualeval.result import TimedStage
from dualeval.tasks import Task
from dualeval.tools.bench.cell import DATAPARALLEL, OF_RANKS, STAGES, CellStart, own_part


def run_cell(job: Job, start: CellStart, launcher: str | None, command: Sequence[str]) -> int:
    """Measure a cell once; returns the exit code."""
    backend = start.mode if start.mode in OF_RANKS else "single"
    if launcher is None:
        # Where 'dualeval bench' is killed: what it measures next would be beside this.
        end_with_parent(signal.SIGTERM)
    if launcher is None and start.mode in OF_RANKS:
        return _start_ranks(job, start, command)
    # Before any library counts the cores.
    local_rank = detect(os.environ, launcher).local_rank
    each = start.cores * (start.processes if start.mode == DATAPARALLEL else 1)
    os.sched_setaffinity(0, own_part(sorted(os.sched_getaffinity(0)), each, local_rank))
    session = Session(backend=backend, device=job.device, launcher=launcher or "none")
    code, measured = work_in_session(session, lambda session: _measure(session, job, start))
    if measured is not None and session.world.is_main:
        write_text(Path(start.to), json.dumps(measured))
    return code


def _start_ranks(job: Job, start: CellStart, command: Sequence[str]) -> int:
    from dualeval.world.local_ranks import last_rank, start_ranks

    last = last_rank(start.processes, detect(os.environ), start.mode)
    return start_ranks(
        [*command, "--launcher", last.launcher],
        last,
        backend=start.mode,
        device=job.device,
        allow_shared_gpu=False,
        stop_signals=numbers_of(DEFAULT_SIGNALS),
        takes_signals=True,
    )


def _measure(session: Session, job: Job, start: CellStart) -> dict[str, Any]:
    if start.train:
        return measure_training(session, job.make_task(), job.run_options, start)
    return measure_evaluation(session, job.make_task, job.run_options, start)


# -- an evaluation -----------------------------------------------------------------------------------------

# A data set that is through in a moment is not repeated for ever: each pass is set up anew.
_MOST_PASSES = 20
# Seconds of a rank's part of a pass, as in ``Result.timing``.
_TIMES = ("evaluate", *(stage for stage in TimedStage if stage not in (TimedStage.LOOK, TimedStage.JOURNAL)))


def measure_evaluation(
    session: Session, make_task: Callable[[], Task], options: Mapping[str, Any], start: CellStart
) -> dict[str, Any]:
    """Evaluate until enough was measured; a collective, every rank gets the same."""

    def evaluate(**more: Any) -> Any:
        task = make_task()
        if start.mode == DATAPARALLEL:
            split_batches(task, start.processes)
        return session.evaluate(task, puts_back=False, **{**options, **more})

    before = monotonic()
    few = start.warmup * start.batch_size * session.world.size
    kind = "limit" if options.get("sample") is None else "sample"
    whole = options.get(kind)
    warm = evaluate(**{kind: few if whole is None else min(whole, few)})
    startup_s = before - start.begun + warm.timing["setup_s"]
    passes: list[float] = []
    ranks = [dict.fromkeys(_TIMES, 0.0) for _ in range(session.world.size)]
    samples = batches = 0
    while sum(passes) < start.min_seconds and len(passes) < _MOST_PASSES:
        result = evaluate()
        # Until the sums of all ranks are there: the same moment on each of them.
        times = result.timing["ranks"]
        passes.append(max(one["evaluate"] + one["meet"] + one["reduce"] for one in times))
        samples += result.samples["total"]
        batches += -(-result.samples["total"] // start.batch_size)
        for sums, one in zip(ranks, times, strict=True):
            for name in _TIMES:
                sums[name] += one.get(name, 0.0)
    return {
        "startup_s": startup_s,
        "passes": passes,
        "seconds": sum(passes),
        "samples": samples,
        "batches": batches,
        "ranks": [{**sums, **one} for sums, one in zip(ranks, _facts_of_ranks(session), strict=True)],
        "metrics_digest": result.metrics_digest,
        "description": result.description,
    }


def _facts_of_ranks(session: Session) -> list[dict[str, Any]]:
    """What each rank computed with, and the most memory that it has held; a collective."""
    return session.backend.all_gather_json(
        {
            "cores": session.cores,
            "threads": torch.get_num_threads(),
            "peak_bytes": peak_of_process(),
            "peak_gpu_bytes": _peak_of_gpus(session.backend.device),
        }
    )


class _SplitOverGpus(nn.DataParallel[nn.Module]):
    """Whose replicas have the forward of a prepared model as their own: it is bound to one object."""

    def replicate(self, module: Any, device_ids: Any) -> Any:
        replicas = super().replicate(module, device_ids)
        for replica in replicas:
            held = vars(replica).get("forward")
            if isinstance(held, MethodType):
                vars(replica)["forward"] = MethodType(held.__func__, replica)
        return replicas


def split_batches(task: Task, gpus: int) -> None:
    """Have a task's forward split each batch over GPUs by ``nn.DataParallel``; the rest of it stays."""
    task_forward = task.forward
    split: list[nn.DataParallel[nn.Module]] = []

    def forward(model: nn.Module, batch: Any) -> Any:
        # A trial's model is a copy; where it changes, so does its wrapper.
        if not split or split[0].module is not model:
            split[:] = [_SplitOverGpus(model, list(range(gpus)))]
        return task_forward(split[0], batch)

    # The engine asks the object; a class of its own would be another task.
    task.forward = forward  # type: ignore[method-assign]


# -- a training ---------------------------------------------------------------------------------------

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
    with numerics.settings(PRECISIONS[start.precision], device, leave=_LEFT):
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
        ranks = _facts_of_ranks(session)
    times = session.backend.all_gather_json({"seconds": seconds, "stages": training.seconds})
    return {
        "startup_s": startup_s,
        "seconds": max(one["seconds"] for one in times),
        "samples": steps * start.batch_size * session.world.size,
        "batches": steps * session.world.size,
        "ranks": [{**one["stages"], **facts} for one, facts in zip(times, ranks, strict=True)],
        "description": dict(task.description()),
    }


def _batches(session: Session, task: Task, options: Mapping[str, Any], start: CellStart) -> list[Any]:
    """This rank's batches, whole ones alone, on its device."""
    dataset = drawn(as_dataset(task.dataset()), run_options_of(**options), lambda sentence: None)
    count = min(len(dataset), options.get("limit") or len(dataset))
    whole = count // start.batch_size
    if whole < session.world.size:
        raise UsageError(
            f"{count} samples make {whole} whole batches of {start.batch_size}, and each of "
            f"{session.world.size} processes needs one. Give more samples or a smaller --batch-size."
        )
    uploads = Uploads(accelerator_of(session.backend.device))
    numbers = range(session.world.rank, whole, session.world.size)[:_MOST_BATCHES]
    batches = []
    for batch in numbers:
        first = batch * start.batch_size
        samples = dataset.__getitems__(range(first, first + start.batch_size))
        batches.append(uploads.start(task.collate(samples)))
    return batches


class _Training:
    """A model that is trained on batches, one step at a time."""

    def __init__(self, backend: Backend, task: Task, model: nn.Module, start: CellStart) -> None:
        self._backend = backend
        self._task = task
        self._model = model
        precision = PRECISIONS[start.precision]
        self._forward_context = precision.forward_context(backend.device)
        self._reduces = start.mode in OF_RANKS
        self._optimiser = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE, momentum=_MOMENTUM)
        # float16 has too small a range for gradients; the scaler does nothing for the others.
        self._scaler = torch.amp.GradScaler(backend.device.type, enabled=precision.autocast == "float16")
        # By stage, of all steps since it was set.
        self.seconds = dict.fromkeys(STAGES, 0.0)

    def step(self, batch: Mapping[str, Tensor]) -> None:
        """Train on one batch; each stage is waited for before the next one begins."""
        marks = [perf_counter()]
        with self._forward_context():
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


# -- memory --------------------------------------------------------------------------------------------


def peak_of_process() -> int:
    """The most memory that this process has held at once, in bytes; without its reading processes.

    ``VmHWM`` of proc(5). ``ru_maxrss`` would count what was there before the program was started.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.split()[0]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


def _peak_of_gpus(device: torch.device) -> int | None:
    """The most memory that torch's tensors have held on this process's GPUs, in bytes; None without GPUs."""
    if device.type != "cuda":
        return None
    return sum(torch.cuda.max_memory_allocated(number) for number in range(torch.cuda.device_count()))
