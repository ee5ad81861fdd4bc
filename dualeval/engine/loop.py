"""The loop: a rank's batches are read, computed and recorded, without a collective."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from dualeval.engine import numerics, trial
from dualeval.engine.accelerator import is_out_of_memory
from dualeval.engine.compute import Compute, usable_threads
from dualeval.engine.control.plane import ControlPlane
from dualeval.engine.feed import FailedSample, Feed, Reader
from dualeval.engine.folder.opening import Found
from dualeval.engine.plan import EvalPlan
from dualeval.engine.recorder import Recorder, check_rows
from dualeval.engine.transfer import Pending
from dualeval.errors import DualevalError, Stopped, UsageError
from dualeval.metrics import Metric, RowMetric
from dualeval.tasks import Dataset, Task

if TYPE_CHECKING:
    from dualeval.backends.base import Backend

# Called with (samples done over all ranks, samples in all); on rank 0 only.
Show = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is evaluated, and with what: known once the model is built, and the same for each batch.

    Attributes:
        task: what is evaluated.
        dataset: the task's.
        model: the task's, on the device.
        plan: the division of the data set.
        metrics: the task's, of the ledger.
        row_metrics: the task's, of all rows together.
        kept: the columns that the journal keeps.
        backend: names ranks and device.
        control: where the ranks meet.
        settings: the numeric settings in force.
        precision: a key of ``numerics.PRECISIONS``.
        on_error: "stop" or "skip".
        schedule: "static" or "dynamic".
        workers: reading processes of each rank.
        threads: what this rank may compute in.
        note: called with sentences for people.
    """

    task: Task
    dataset: Dataset
    model: nn.Module
    plan: EvalPlan
    metrics: Sequence[Metric]
    row_metrics: Sequence[RowMetric]
    kept: Sequence[str]
    backend: Backend
    control: ControlPlane
    settings: numerics.NumericSettings
    precision: str
    on_error: str
    schedule: str
    workers: int
    threads: int
    note: Callable[[str], None]


def ahead_of(schedule: str) -> int:
    """How many batches a reading process may read ahead: what it has claimed, no other rank can take."""
    return 1 if schedule == "dynamic" else 2


def evaluate_alone(
    evaluation: Evaluation, samples: range
) -> tuple[dict[str, npt.NDArray[Any]], tuple[FailedSample, ...]]:
    """Read and compute one batch by itself, as the loop would.

    Returns:
        Its kept columns by name, first dimension the samples; and the samples that could not be read.

    Raises:
        UsageError: none of it can be read, or one cannot, where that ends a run.
    """
    # In a reading process where the loop reads in some: what a data set opens may not outlive a fork.
    feed = Feed(
        reader_of(evaluation),
        [samples],
        workers=min(evaluation.workers, 1),
        device=evaluation.backend.device,
    )
    [batch] = feed
    if batch.data is None or (batch.failed and evaluation.on_error == "stop"):
        raise unreadable(evaluation.dataset, batch.failed[0])
    with Compute(
        evaluation.task, evaluation.model, evaluation.backend.device, evaluation.precision, 1
    ) as compute:
        columns = evaluation.task.postprocess(compute.start(batch.data)(), samples)
    return {name: columns[name].numpy() for name in evaluation.kept}, batch.failed


def reader_of(evaluation: Evaluation) -> Reader:
    """What reads the batches of an evaluation."""
    return Reader(
        evaluation.dataset,
        evaluation.task,
        fill=evaluation.on_error == "skip",
        model=evaluation.model,
    )


def unreadable(dataset: Dataset, sample: FailedSample) -> UsageError:
    """What is said of a sample that cannot be read."""
    return UsageError(
        f"sample {dataset.id(sample.index)} (index {sample.index}) cannot be read: {sample.error}. "
        "Mend or remove it, or run with --on-error skip to leave such samples out and list them."
    )


def unwritable(recorder: Recorder, error: OSError) -> DualevalError:
    """What is said where the output folder cannot be written any more."""
    return DualevalError(
        f"the output folder {recorder.folder.parent} cannot be written any more on "
        f"{socket.gethostname()}: {error.strerror or error}. {recorder.chunks_saved} chunks of this rank "
        "are saved. Make room, or bring the folder back, and type the same command again."
    )


class Loop:
    """The batches of one rank.

    Args:
        evaluation: what is evaluated.
        recorder: takes the finished batches.

    Attributes:
        times: seconds by part of the loop: ``data``, ``transfer``, ``compute``.
        postprocess_s: seconds in the task's ``postprocess``.
        said_of_settings: sentences on numeric settings that a forward has changed.
    """

    def __init__(self, evaluation: Evaluation, recorder: Recorder) -> None:
        self._evaluation = evaluation
        self._plan = evaluation.plan
        self._task = evaluation.task
        self._control = evaluation.control
        self._progress = evaluation.control.progress
        self._world = evaluation.backend.world
        self._recorder = recorder
        self._tried = False
        self.times: dict[str, float] = {}
        self.postprocess_s = 0.0
        self.said_of_settings: list[str] = []

    def run(self, found: Found, show: Show | None = None) -> None:
        """Evaluate what remains; whatever ends the loop, what was finished is saved.

        Args:
            found: what earlier runs have finished.
            show: progress display.

        Raises:
            UsageError: a sample cannot be read, or a column or metric is not as it must be.
            DualevalError: the output folder cannot be written, or there is no memory for a batch.
            PeerError: another rank failed first.
            Stopped: a signal has ended the run.
        """
        chunks = [chunk for file in found.earlier.files for chunk in file.chunks]
        before = sum(len(self._plan.chunk_samples(chunk)) for chunk in chunks)
        self._control.begin_run(
            None if show is None else lambda done: show(before + done, self._plan.num_samples)
        )
        try:
            self._loop(found.earlier.remaining)
        except BaseException as error:
            # The first error is the one to report, whatever this one comes to.
            with suppress(Exception):
                self._recorder.flush()
            if is_out_of_memory(error):
                raise self._out_of_memory(error) from error
            raise
        else:
            self._save()
        finally:
            self._control.end_run()
        if self._control.stopping is not None:
            raise Stopped(self._control.stopping)

    def _save(self) -> None:
        try:
            self._recorder.flush()
        except OSError as error:
            raise unwritable(self._recorder, error) from error

    def _loop(self, remaining: Sequence[int]) -> None:
        """Every batch of this rank: no collective, no wait but for the batch ``compute.ahead`` behind."""
        dynamic = self._evaluation.schedule == "dynamic"
        size = self._world.size
        mine: Iterable[int] = self._claimed(remaining) if dynamic else remaining[self._world.rank :: size]
        under_way: deque[tuple[tuple[int, int], Pending | None, tuple[FailedSample, ...]]] = deque()
        # What has been handed to the feed, until it comes out.
        handed: deque[tuple[int, int]] = deque()

        def batches() -> Iterator[range]:
            for chunk in mine:
                for batch in self._plan.chunk_batches(chunk):
                    handed.append((chunk, batch))
                    if len(handed) == 1:
                        self._progress.step("load", chunk)
                    yield self._plan.batch_samples(batch)

        # A rank's share, if all are equally fast.
        share = -(-len(remaining) * self._plan.num_batches // (self._plan.num_chunks * size))
        feed = Feed(
            reader_of(self._evaluation),
            batches(),
            workers=min(self._evaluation.workers, share),
            device=self._evaluation.backend.device,
            ahead=ahead_of(self._evaluation.schedule),
            step=lambda stage: self._progress.step(stage, handed[0][0] if handed else None),
        )
        compute_s = 0.0
        model, device = self._evaluation.model, self._evaluation.backend.device
        threads = usable_threads(self._task, model, device, self._evaluation.threads, share)
        with Compute(
            self._task, model, device, self._evaluation.precision, threads, self._evaluation.settings
        ) as compute:
            for batch in feed:
                # Not the batch itself is kept: its inputs would stay on the device for as long.
                chunk, number = handed.popleft()
                if batch.failed and self._evaluation.on_error == "stop":
                    raise unreadable(self._evaluation.dataset, batch.failed[0])
                self._progress.step("forward", chunk)
                start = perf_counter()
                pending = None if batch.data is None else compute.start(batch.data)
                under_way.append(((chunk, number), pending, batch.failed))
                compute_s += perf_counter() - start
                if len(under_way) > compute.ahead:
                    compute_s += self._settle(*under_way.popleft())
                self._control.raise_if_peer_failed()
                # The chunk in hand is finished; no other is begun.
                if self._control.stopping and number == self._plan.chunk_batches(chunk)[-1]:
                    break
                self._progress.step("load", handed[0][0] if handed else None)
            while under_way:
                compute_s += self._settle(*under_way.popleft())
        self.said_of_settings += self._evaluation.settings.check_after_loop(
            compute.changed_settings, compute.changed_inside
        )
        self.times.update(data=feed.wait_s, transfer=feed.transfer_s, compute=compute_s)

    def _claimed(self, remaining: Sequence[int]) -> Iterator[int]:
        """Chunks that no other rank takes, as long as there are any: the one in hand, and the next."""
        # The next is asked for while this one is computed, so that nobody waits for rank 0's answer.
        with ThreadPoolExecutor(1, "dualeval-claims") as pool:
            following = pool.submit(self._control.claim)
            while (number := following.result()) < len(remaining):
                following = pool.submit(self._control.claim)
                yield remaining[number]

    def _settle(
        self,
        number: tuple[int, int],
        pending: Pending | None,
        failed: tuple[FailedSample, ...],
    ) -> float:
        """Wait for a batch and record it; returns the seconds waited."""
        start = perf_counter()
        # A GPU computes while this thread sleeps; on a CPU the pool's threads are seen to compute.
        on_host = self._evaluation.backend.device.type == "cpu"
        self._progress.step("forward" if on_host else "device", number[0])
        columns = None if pending is None else pending()
        waited = perf_counter() - start
        self._progress.step("metrics", number[0])
        if columns is not None:
            start = perf_counter()
            columns = self._task.postprocess(columns, self._plan.batch_samples(number[1]))
            self.postprocess_s += perf_counter() - start
            if not self._tried:
                self._try(number[1], columns, failed)
        try:
            self._recorder.add(*number, columns, failed)
        except OSError as error:
            raise unwritable(self._recorder, error) from error
        self._control.add_done(len(self._plan.batch_samples(number[1])))
        return waited

    def _try(self, batch: int, columns: Mapping[str, Tensor], failed: tuple[FailedSample, ...]) -> None:
        """Take this rank's first batch through all that comes after the last one."""
        samples = self._plan.batch_samples(batch)
        evaluated = torch.ones(len(samples), dtype=torch.bool)
        evaluated[[sample.index - samples.start for sample in failed]] = False
        if not evaluated.any():
            return
        metrics, row_metrics = self._evaluation.metrics, self._evaluation.row_metrics
        trial.check_columns(columns, self._evaluation.kept, len(samples), [*metrics, *row_metrics])
        check_rows(columns, batch, samples)
        notes = trial.try_first_batch(
            self._task,
            metrics,
            row_metrics,
            self._evaluation.kept,
            columns,
            samples,
            evaluated,
            writes=self._world.is_main,
        )
        self._tried = True
        if self._world.is_main:
            for sentence in notes:
                self._evaluation.note(sentence)

    def _out_of_memory(self, error: BaseException) -> DualevalError:
        smaller = max(1, self._plan.batch_size // 2)
        precision = (
            "" if self._evaluation.precision.startswith("amp") else ", or --precision amp-bf16 on a GPU"
        )
        device = self._evaluation.backend.device
        # Python's own has no text.
        said = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        return DualevalError(
            f"out of memory on {device} with --batch-size {self._plan.batch_size}: {said}. "
            f"Try --batch-size {smaller}{precision}; on a CPU fewer threads "
            f"(OMP_NUM_THREADS) or fewer ranks. {self._recorder.chunks_saved} finished chunks of this rank "
            "stay for the same command where there is more memory; another batch size is another job, and "
            "begins anew (--fresh)."
        )
