"""The engine's own way through the loop: the task's forward and observe, several batches at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from torch import nn

from dualeval.columns.ragged import NumpyRows, to_rows
from dualeval.engine.checks.repeatability import (
    ALONE,
    LATER,
    Lasting,
    Widest,
    as_before,
    differing,
    is_short,
    look,
)
from dualeval.engine.control.progress import Stage
from dualeval.engine.device.divided import is_sharded
from dualeval.engine.device.numerics import NumericSettings
from dualeval.engine.device.transfer import Pending
from dualeval.engine.folder.recorder import HandedBatch
from dualeval.engine.job.evaluation import Evaluation, compute_alone, plan_of, unreadable
from dualeval.engine.job.run_state import Run
from dualeval.engine.loop.loop import Loop
from dualeval.engine.model.compute import Compute, copy_sharing_tensors
from dualeval.engine.model.layouts import OF_TRIAL, layout_by_trial, layout_of
from dualeval.engine.model.preparation import prepare, why_preparation_failed
from dualeval.engine.samples.feed import FailedSample
from dualeval.engine.samples.subset import postprocessed
from dualeval.options.choices import COMPILE
from dualeval.result import TimedStage
from dualeval.tasks import Dataset, Task

_Result = TypeVar("_Result")

# Samples that are computed to learn the columns, and batches that are searched for readable ones.
_FEW = 2
_LOOKED_AT = 64
# Options that a result shows even if the caller gives no job.
_SHOWN = ("batch_size", "precision", "keep_batchnorm_fp32", "optimize")


def evaluate_all(evaluation: Evaluation, loop: Loop, settings: NumericSettings) -> list[str]:
    """Compute every batch of the loop, without a collective; waits only for the oldest batch under way.

    Returns warnings about the first samples, and about settings that the computation has changed.
    """
    with loop.running():
        start = perf_counter()
        looked = look(evaluation, loop.remaining, partial(compute_of, evaluation))
        loop.times[TimedStage.LOOK] = perf_counter() - start
        evaluation.run.note_all([*looked.notes, *looked.warnings, *(looked.unlike or [])])
        lasting, widest = Lasting(evaluation.model), Widest()
        with compute_of(evaluation, looked.threads) as compute:
            under_way = UnderWay(evaluation, loop, compute, widest)
            for handed, data in loop.read():
                under_way.start(handed, compute.start, data)
                under_way.count(all_but=compute.ahead)
            under_way.count()
    loop.times[TimedStage.COMPUTE] = under_way.compute_s
    # If the numbers differ each time anyway, none are compared.
    decides = None if looked.unlike else partial(_decides, evaluation, loop, lasting)
    switched = lasting.warnings(*compute.models, decides=decides)
    loop.unlike = [*(looked.unlike or []), *switched] if switched else looked.unlike
    loop.notes = [*looked.of_reading, *loop.notes]
    warnings = [*looked.warnings]
    if loop.unlike == [] and not warnings:
        warnings, loop.unlike = _of_widest(evaluation, widest, loop.times["evaluate"] * looked.threads)
    return [*warnings, *settings.check_after_loop(compute.changed_settings)]


def _of_widest(evaluation: Evaluation, widest: Widest, seconds: float) -> tuple[list[str], list[str]]:
    """Compute samples of the widest batch alone, if that is quick; returns warnings, and what is unlike."""
    batches = max(widest.batches, 1)
    if is_short(seconds * ALONE / batches, ALONE, batches * evaluation.plan.batch_size):
        with suppress(Exception):  # some models want batches of one size
            warnings, is_other = widest.warnings(evaluation, partial(compute_of, evaluation))
            return ([], [LATER]) if is_other else (warnings, [])
    return [], []


class UnderWay:
    """The batches that are being computed, in the order in which they were handed out."""

    def __init__(
        self, evaluation: Evaluation, loop: Loop, compute: Compute, widest: Widest | None = None
    ) -> None:
        self._loop = loop
        self._progress = evaluation.run.control.progress
        self._waits = compute.ahead > 0
        # While a GPU computes, this thread sleeps; on a CPU the watch sees the threads compute.
        self._stage = Stage.FORWARD if evaluation.run.device.type == "cpu" else Stage.DEVICE
        self._batches: deque[tuple[HandedBatch, Pending | None]] = deque()
        self._widest = widest
        # Seconds spent on starting batches and waiting for them.
        self.compute_s = 0.0

    def start(self, handed: HandedBatch | None, begin: Callable[[Any], Pending | None], data: Any) -> None:
        """Start a batch; ``data`` is None if none of its samples could be read."""
        start = perf_counter()
        if handed is not None and data is not None and self._widest is not None:
            self._widest.see(handed.samples, data)
        pending = None if data is None else begin(data)
        if handed is not None:
            self._batches.append((handed, pending))
        self.compute_s += perf_counter() - start

    def count(self, *, all_but: int = 0) -> None:
        """Wait for the oldest batches and count them, until ``all_but`` are left."""
        while len(self._batches) > all_but:
            start = perf_counter()
            handed, pending = self._batches.popleft()
            if self._waits:
                self._progress.step(self._stage, handed.chunk)
            columns = None if pending is None else pending()
            self.compute_s += perf_counter() - start
            if self._widest is not None and handed.samples is self._widest.samples and not handed.failed:
                self._widest.columns = columns
            self._loop.count(handed, columns)


def evaluate_alone(
    evaluation: Evaluation, samples: range
) -> tuple[dict[str, NumpyRows], tuple[FailedSample, ...]]:
    """Read and compute one batch by itself, as the loop would."""
    columns, failed = compute_alone(evaluation, samples, partial(_columns_of, evaluation))
    if columns is None:
        raise unreadable(evaluation.dataset, failed[0])
    columns = evaluation.with_data(columns, samples)
    return {name: to_rows(columns[name]) for name in evaluation.kept}, failed


def _again(
    evaluation: Evaluation, samples: range, begin: Callable[[], object] = lambda: None
) -> Mapping[str, Any]:
    """The columns of one batch that is read and computed by itself; restores model and task."""
    with as_before(evaluation.model, evaluation.task):
        begin()
        return compute_alone(evaluation, samples, partial(_columns_of, evaluation))[0] or {}


def _decides(evaluation: Evaluation, loop: Loop, lasting: Lasting, model: nn.Module) -> bool:
    """Whether this rank's first or last batch has another result with the model as the loop left it."""
    world, plan = evaluation.run.backend.world, evaluation.plan
    mine = loop.remaining[world.rank :: world.size] or loop.remaining  # in a dynamic schedule any
    evaluation.run.control.progress.step(Stage.FORWARD)
    for batch in {plan.chunk_batches(mine[0])[0], plan.chunk_batches(mine[-1])[-1]}:
        samples = plan.batch_samples(batch)
        try:
            before = _again(evaluation, samples, lasting.state.put_back)
            now = _again(replace(evaluation, model=model), samples)
        except Exception:  # noqa: BLE001 - in the loop it could be computed; the run is not lost for it
            return True
        if differing(before, now):
            return True
    return False


def first_columns(task: Task, dataset: Dataset, model: nn.Module, run: Run) -> Mapping[str, Any]:
    """The columns that ``postprocess`` returns, computed from the first readable samples."""
    evaluation = Evaluation(task=task, dataset=dataset, model=model, plan=plan_of(dataset, run), run=run)
    # A task with a ``see`` keeps what its first observe has found.
    keeps = type(task).see is not Task.see
    with as_before(model, None if keeps else task):
        return of_first(evaluation, partial(_columns_of, evaluation))


def settle_layout(task: Task, dataset: Dataset, model: nn.Module, run: Run) -> None:
    """Decide the layout for "auto"; a model with the user's own code is tried on the first samples.

    Every rank tries the same samples and so decides alike, which ``agree`` checks. A model that all ranks
    compute together is not tried: if its first forward fails channels-last, the error says what to type.
    """
    # Unreadable samples are skipped here: the loop reports them.
    trial = run.trying(on_error="skip", **OF_TRIAL)

    def compute_in(layout: str) -> None:
        tried = prepare(copy_sharing_tensors(model), replace(trial.options, layout=layout))
        run.control.progress.step(Stage.FORWARD)
        first_columns(task, dataset, tried, trial)
        run.control.progress.step(Stage.SETUP)

    if run.options.shard is not None or is_sharded(model):
        layout = layout_of(model, run.options.layout)
    else:
        layout, note = layout_by_trial(model, run.options.layout, compute_in)
        run.note_all([] if note is None else [note])
    shown = {name: getattr(run.options, name) for name in _SHOWN}
    run.decide({**shown, **run.job, "layout": layout}, layout=layout)


def of_first(evaluation: Evaluation, compute: Callable[[Any, range], _Result]) -> _Result:
    """The result of ``compute`` for the first samples that can be read."""
    plan, options = evaluation.plan, evaluation.run.options
    failed: tuple[FailedSample, ...] = ()
    for batch in range(min(plan.num_batches, _LOOKED_AT)):
        samples = plan.batch_samples(batch)
        # Compiling for a shape takes seconds: a compiled model is tried only with the loop's shape.
        few = [] if options.optimize == COMPILE else [samples[:_FEW]]
        for some in (*few, samples):
            result, failed = compute_alone(evaluation, some, compute)
            if result is not None:
                return result
    raise unreadable(evaluation.dataset, failed[0], skips=options.on_error == "skip")


def _columns_of(evaluation: Evaluation, data: Any, samples: range) -> Mapping[str, Any]:
    """The columns that ``postprocess`` returns for one batch that is computed by itself."""
    with compute_of(evaluation, 1) as compute:
        return postprocessed(evaluation.task, evaluation.dataset, compute.start(data)(), samples)


def compute_of(
    evaluation: Evaluation,
    threads: int,
    around_forward: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Compute:
    """The ``Compute`` of an evaluation's batches."""
    options = evaluation.run.options
    # After inference mode, a sharded model computes in no other mode; but its owner may still need it.
    keeps_mode = evaluation.run.guest or is_sharded(evaluation.model)
    return Compute(
        evaluation.task,
        evaluation.model,
        evaluation.run.device,
        evaluation.run.precision,
        threads,
        inference=not keeps_mode,
        explain=partial(why_preparation_failed, options=options),
        around_forward=evaluation.run.around_forward or around_forward,
    )
