"""Batches that are read by themselves, outside of the loop, as the loop would read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from dualeval.engine.job.evaluation import Evaluation
from dualeval.engine.samples.feed import FailedSample, Feed, Reader
from dualeval.engine.samples.subset import name_of
from dualeval.errors import UsageError
from dualeval.tasks import Dataset
from dualeval.user_code.tracebacks import keep_own_code

_Columns = TypeVar("_Columns")


def read_alone(
    evaluation: Evaluation,
    *several: range,
    step: Callable[[int], object] = lambda place: None,
    notes: list[str] | None = None,
) -> list[tuple[Any, tuple[FailedSample, ...]]]:
    """Read some batches by themselves, as the loop would: their data on the device, and failed samples."""
    # In a worker process if the loop uses any: what a data set opens here may not survive a fork.
    workers = min(evaluation.run.workers, 1)
    feed = Feed(reader_of(evaluation), several, workers=workers, device=evaluation.run.device)
    try:
        reading, batches = iter(feed), []
        for place in range(len(several)):
            step(place)
            batches.append(next(reading))
    finally:
        feed.close()
    if notes is not None:
        notes += feed.notes
    failed = [sample for _, samples in batches for sample in samples]
    if failed and evaluation.run.options.on_error == "stop":
        raise unreadable(evaluation.dataset, failed[0])
    return batches


def compute_alone(
    evaluation: Evaluation, samples: range, compute: Callable[[Any, range], _Columns]
) -> tuple[_Columns | None, tuple[FailedSample, ...]]:
    """Read one batch by itself and have it computed, by the engine or by a caller's own loop.

    Returns the result of ``compute``, None if no sample could be read, and the samples that failed.
    """
    [(data, failed)] = read_alone(evaluation, samples)
    return None if data is None else compute(data, samples), failed


def reader_of(evaluation: Evaluation) -> Reader:
    fill = evaluation.run.options.on_error == "skip"
    cores = evaluation.run.readers_cores
    return Reader(evaluation.dataset, evaluation.task, fill=fill, cores=cores)


def unreadable(dataset: Dataset, sample: FailedSample, *, skips: bool = False) -> UsageError:
    """The error about a sample that cannot be read."""
    text = f"sample {name_of(dataset, sample.index)} cannot be read: {sample.error}. "
    if skips:
        return UsageError(
            f"none of the first samples can be read, so nothing is left out: {text}Fix the data."
        )
    refusal = UsageError(
        f"{text}Repair or remove it, or run with --on-error skip to leave such samples out and list them. "
        "(That is another job: then give another --out, too.)"
    )
    keep_own_code(refusal, sample.own_code)
    return refusal
