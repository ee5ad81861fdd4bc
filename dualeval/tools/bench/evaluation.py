"""One start of a cell that evaluates: passes of dualeval's own loop over the data, timed by each rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic
from types import MethodType
from typing import Any

import torch
from torch import nn

from dualeval.engine.session import Session
from dualeval.tasks import Task
from dualeval.tools.bench.peaks import peak_of_gpus, peak_of_process
from dualeval.tools.bench.plan import DATAPARALLEL, CellStart

# A data set that is through in a moment is not repeated for ever: each pass is set up anew.
_MOST_PASSES = 20
# Seconds of a rank's part of a pass, as in ``Result.timing``.
_TIMES = ("evaluate", "data", "transfer", "compute", "metrics", "meet", "reduce")


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
        for own, one in zip(ranks, times, strict=True):
            for name in _TIMES:
                own[name] += one.get(name, 0.0)
    return {
        "startup_s": startup_s,
        "passes": passes,
        "seconds": sum(passes),
        "samples": samples,
        "batches": batches,
        "ranks": [{**own, **one} for own, one in zip(ranks, facts_of_ranks(session), strict=True)],
        "metrics_digest": result.metrics_digest,
        "description": result.description,
    }


def facts_of_ranks(session: Session) -> list[dict[str, Any]]:
    """What each rank computed with, and the most memory that it has held; a collective."""
    return session.backend.all_gather_json(
        {
            "cores": session.cores,
            "threads": torch.get_num_threads(),
            "peak_bytes": peak_of_process(),
            "peak_gpu_bytes": peak_of_gpus(session.backend.device),
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
    own = task.forward
    split: list[nn.DataParallel[nn.Module]] = []

    def forward(model: nn.Module, batch: Any) -> Any:
        # A trial's model is a copy; where it changes, so does its wrapper.
        if not split or split[0].module is not model:
            split[:] = [_SplitOverGpus(model, list(range(gpus)))]
        return own(split[0], batch)

    # The engine asks the object; a class of its own would be another task.
    task.forward = forward  # type: ignore[method-assign]
