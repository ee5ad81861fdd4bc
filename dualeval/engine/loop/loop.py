"""The loop: a rank's batches are read, handed out to be computed, and recorded, without a collective."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from dualeval.columns.ragged import Column
from dualeval.engine.checks import first_batch
from dualeval.engine.control.progress import Stage
from dualeval.engine.device.accelerator import accelerator_of, is_out_of_memory
from dualeval.engine.folder.journal import JournalWriter
from dualeval.engine.folder.lease import gone
from dualeval.engine.folder.predictions import load_library
from dualeval.engine.folder.recorder import HandedBatch, Recorder, check_rows
from dualeval.engine.folder.stored_rows import MemoryWriter
from dualeval.engine.job.evaluation import Evaluation, reader_of, unreadable
from dualeval.engine.job.opened import Opened
from dualeval.engine.samples.feed import Feed, lost_worker
from dualeval.engine.samples.subset import postprocessed
from dualeval.engine.values.measured import check_cluster
from dualeval.errors import DualevalError, Stopped, text_of
from dualeval.options.choices import DYNAMIC
from dualeval.process.status_line import LINE
from dualeval.result import JOB, TimedStage


def unwritable(recorder: Recorder, error: OSError) -> Exception:
    """The error to raise when the output folder cannot be written any more."""
    if recorder.folder is None:
        return error
    journal, out = recorder.folder, recorder.folder.parent
    if not (out / JOB).exists():
        return DualevalError(gone(out))
    if isinstance(error, FileNotFoundError) and Path(str(error.filename)).is_relative_to(journal):
        return DualevalError(
            f"the journal {journal} is gone, or a file of it: {error.filename}. Type the same command again: "
            "what is missing is evaluated again."
        )
    return DualevalError(
        f"the output folder {out} cannot be written any more on "
        f"{socket.gethostname()}: {error.strerror or error}. {recorder.chunks_saved} chunks of this rank "
        "are saved. Make room, or bring the folder back, and type the same command again."
    )


def _recorder_of(evaluation: Evaluation, opened: Opened) -> Recorder:
    world, folder = evaluation.run.backend.world, opened.folder
    writer: JournalWriter | MemoryWriter
    if folder is None or not folder.shared:
        writer = MemoryWriter(keeps=bool(evaluation.kept))
    else:
        writer = JournalWriter(
            folder.journal,
            fingerprint=opened.facts.fingerprint,
            machine=opened.facts.machines[world.rank],
            prefix=folder.prefix(world.rank),
        )
    progress = evaluation.run.control.progress
    accelerator = accelerator_of(evaluation.run.device)
    # On a CPU another thread has no core of its own.
    beside = None if accelerator.is_host else accelerator.as_current
    return Recorder(evaluation.plan, evaluation.metrics, evaluation.kept, writer, progress, beside=beside)


class Loop:
    """The batches of one rank: hands them out, and takes their columns.

    The code that computes them iterates over ``read`` inside of ``running``, and calls ``count`` for each
    batch, in order.
    """

    def __init__(self, evaluation: Evaluation, opened: Opened) -> None:
        self._evaluation = evaluation
        # Numbers of the chunks that are still to be evaluated.
        self.remaining = opened.remaining
        self._chunks = opened.chunks
        self._plan = evaluation.plan
        self._task = evaluation.task
        self._run = evaluation.run
        self._control = evaluation.run.control
        self._progress = evaluation.run.control.progress
        self._world = evaluation.run.backend.world
        # Takes the batches.
        self.recorder = _recorder_of(evaluation, opened)
        if opened.folder is not None:
            self._run.watch.recorder = self.recorder
            if self._world.is_main:
                load_library()
        # Seconds before the loop.
        self.setup_s = perf_counter() - self._run.started
        # The columns of the data that each batch gets.
        self._data = evaluation.added
        self._tried = False
        self._feed: Feed | None = None
        # Seconds of the loop: `evaluate`, and its parts `data` and `transfer`; the code that computes adds
        # `look` and `compute`.
        self.times: dict[str, float] = {}
        # Seconds in the task's `postprocess`.
        self.postprocess_s = 0.0
        # The data set's notes on reading.
        self.notes: list[str] = []
        # A warning if samples gave other columns the second time; None if there was no second time.
        self.unlike: list[str] | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """The context in which what remains is evaluated; finished work is saved, however it ends."""
        whole = self._plan.samples_in(self._chunks)
        before = whole - self._plan.samples_in(self.remaining)
        show = self._run.show if self._world.is_main else None
        self._tally = self._control.begin_run(
            None if show is None else lambda done: show(before + done, whole)
        )
        start = perf_counter()
        try:
            yield
        except BaseException as error:
            # The first error is reported, even if saving fails, too.
            with suppress(Exception):
                self.recorder.flush()
            if is_out_of_memory(error):
                raise self._out_of_memory(error) from error
            lost = lost_worker(error)
            if lost is not None:
                # The cause's traceback would only show torch's code.
                raise lost from None
            raise
        else:
            try:
                self.recorder.flush()
            except OSError as error:
                raise unwritable(self.recorder, error) from error
        finally:
            if self._feed is not None:
                self._feed.close()
            self._control.end_run()
            self.times["evaluate"] = perf_counter() - start
        if self._control.stopping is not None:
            raise Stopped(self._control.stopping)

    def read(self, *, until_stopped: bool = True) -> Iterator[tuple[HandedBatch, Any]]:
        """Every batch of this rank with its data on the device, None if none of its samples could be read.

        Without a collective; waits only for data. A stop takes effect at the end of a chunk.
        """
        self._run.watch.has_begun = True
        LINE.show(None)
        waiting: deque[HandedBatch] = deque()  # to the feed, which has not yet returned them
        options = self._run.options
        feed = self._feed = Feed(
            reader_of(self._evaluation),
            self._batches(waiting),
            workers=min(self._run.workers, self._batches_of_rank()),
            device=self._run.device,
            # No other rank can take chunks that reading processes have claimed.
            ahead=1 if options.schedule == DYNAMIC else 2,
            step=lambda stage: self._progress.step(stage, waiting[0].chunk if waiting else None),
        )
        try:
            for data, failed in feed:
                handed = waiting.popleft()
                if failed:
                    if options.on_error == "stop":
                        raise unreadable(self._evaluation.dataset, failed[0])
                    handed = replace(handed, failed=failed)
                self._progress.step(Stage.FORWARD, handed.chunk)
                yield handed, data
                # The current chunk is finished; no other one is begun.
                if self._control.is_stopping() and until_stopped and handed.is_last:
                    return
                if waiting:
                    self._progress.step(Stage.LOAD, waiting[0].chunk)
        finally:
            self.times |= {TimedStage.DATA: feed.wait_s, TimedStage.TRANSFER: feed.transfer_s}
            self.notes = feed.notes

    def _batches_of_rank(self) -> int:
        """Batches of a rank, if all are equally fast."""
        return -(-len(self.remaining) * self._plan.num_batches // (self._plan.num_chunks * self._world.size))

    def _batches(self, waiting: deque[HandedBatch]) -> Iterator[range]:
        """The samples of each batch of this rank, as the feed asks for them."""
        is_dynamic = self._run.options.schedule == DYNAMIC
        mine = self.remaining[self._world.rank :: self._world.size]
        for chunk in self._claimed(self.remaining) if is_dynamic else mine:
            batches = self._plan.chunk_batches(chunk)
            for batch in batches:
                samples = self._plan.batch_samples(batch)
                is_last = batch == batches[-1]
                waiting.append(HandedBatch(chunk=chunk, batch=batch, samples=samples, is_last=is_last))
                if len(waiting) == 1:
                    self._progress.step(Stage.LOAD, chunk)
                yield samples

    def _claimed(self, remaining: Sequence[int]) -> Iterator[int]:
        """Chunks that this rank has claimed from rank 0, until none is left: the current one and the next."""
        # The next chunk is claimed while this one is computed, so that no rank waits for rank 0's answer.
        with ThreadPoolExecutor(1, "dualeval-claims") as pool:
            following = pool.submit(self._control.claim)
            while (number := following.result()) < len(remaining):
                following = pool.submit(self._control.claim)
                yield remaining[number]

    def count(self, handed: HandedBatch, columns: Mapping[str, Column] | None) -> None:
        """Record a batch."""
        self._progress.step(Stage.METRICS, handed.chunk)
        if columns is not None:
            start = perf_counter()
            columns = postprocessed(self._task, self._evaluation.dataset, columns, handed.samples)
            if self._data is not None:
                columns = {**columns, **self._data.of(handed.samples)}
            self.postprocess_s += perf_counter() - start
            if not self._tried:
                self._try(handed, columns)
        try:
            self.recorder.add(handed, columns)
        except OSError as error:
            raise unwritable(self.recorder, error) from error
        self._tally.done += len(handed.samples)

    def _try(self, handed: HandedBatch, columns: Mapping[str, Column]) -> None:
        """Take this rank's first batch through all steps that follow the last batch."""
        evaluated = torch.ones(len(handed.samples), dtype=torch.bool)
        evaluated[[sample.index - handed.samples.start for sample in handed.failed]] = False
        if not evaluated.any():
            return
        of = self._evaluation
        if of.cluster is not None:
            check_cluster(of.cluster, columns)
        made = first_batch.check_columns(
            columns, of.kept, len(handed.samples), [*of.metrics, *of.row_metrics]
        )
        check_rows(columns, handed.batch, handed.samples)
        writes = self._world.is_main and self._run.options.out is not None
        notes = first_batch.try_first_batch(of, made, handed.samples, evaluated, writes=writes)
        self._tried = True
        if len(handed.samples) < of.plan.num_samples:  # what is odd about all samples is said at the end
            self._run.note_all(notes)

    def _out_of_memory(self, error: BaseException) -> DualevalError:
        options = self._run.options
        tries = [] if options.batch_size == 1 else [f"--batch-size {options.batch_size // 2}"]
        tries += [] if self._run.precision.autocast is not None else ["--precision amp-bf16 on a GPU"]
        tries += ["on a CPU fewer threads (OMP_NUM_THREADS) or fewer ranks", "a device with more memory"]
        # Python's MemoryError has no text.
        text = (text_of(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        saved = (
            f" {self.recorder.chunks_saved} finished chunks of this rank are kept for the same command on a "
            "machine with more memory; another batch size is another job, which starts over."
        )
        return DualevalError(
            f"out of memory on {self._run.device} with --batch-size {options.batch_size}: {text}. "
            f"Try {'; '.join(tries)}.{saved if options.out is not None else ''}"
        )
