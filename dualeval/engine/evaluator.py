"""Evaluator: the one loop that evaluates a task, whatever launcher, backend or number of processes."""

from __future__ import annotations

import json
import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from dualeval.engine import numerics
from dualeval.engine.agreement import check_same_job, machine_facts, model_fingerprint, source_fingerprint
from dualeval.engine.compute import Compute, Pending, is_out_of_memory, usable_threads
from dualeval.engine.control import ControlPlane
from dualeval.engine.feed import FailedSample, Feed, Reader
from dualeval.engine.folder import Found, RunFolder, folder_of_launch
from dualeval.engine.journal import JournalWriter
from dualeval.engine.outcome import make_result
from dualeval.engine.plan import EvalPlan
from dualeval.engine.recorder import Recorder
from dualeval.engine.watch import Watch
from dualeval.errors import DualevalError, PeerError, Stopped, UsageError
from dualeval.metrics import Measured
from dualeval.result import Result, sha256_of_json
from dualeval.tasks import Task

if TYPE_CHECKING:
    from dualeval.backends.base import Backend

# Called with (samples done over all ranks, samples in all); on rank 0 only.
Show = Callable[[int, int], None]


class Evaluator:
    """Evaluates one task on the ranks of one backend.

    Args:
        task: what is evaluated.
        backend: how the ranks reduce and gather.
        control: where the ranks meet; opened on the same backend.
        out: folder for result.json and the rest, the same path on every rank; a run of the same job that
            was begun there is gone on with. None makes a new folder ``runs/<UTC time>-<fingerprint>``.
        batch_size: samples a batch.
        limit: evaluate only the first samples; None for all.
        precision: a key of ``numerics.PRECISIONS``.
        workers: reading processes of each rank; 0 reads in the rank's own process.
        on_error: what a sample that cannot be read does: "stop" ends the run, "skip" leaves it out.
        schedule: how chunks go to ranks: "static", chunk c to rank c mod size, or "dynamic", to the rank that
            has time for it.
        fresh: remove an earlier run's files from ``out`` first.
        lease: keep other runs out of ``out`` for as long as this one lasts. Without it two runs there do the
            same work twice, for one right result.
        watch: saves what is finished, and ends this process, where it cannot end by itself.
        note: called with sentences for people, on rank 0 only.
        job: the options as the caller wants them recorded in the result.
        show: progress display, called on rank 0 from a thread of its own.
        started: ``perf_counter()`` at the start of the run, where that was before this call.

    Raises:
        UsageError: the task is none, or the device has no such precision.
    """

    def __init__(
        self,
        task: Task,
        backend: Backend,
        control: ControlPlane,
        *,
        out: Path | None = None,
        batch_size: int = 64,
        limit: int | None = None,
        precision: str = "fp32",
        workers: int = 0,
        on_error: str = "stop",
        schedule: str = "static",
        fresh: bool = False,
        lease: bool = True,
        watch: Watch | None = None,
        note: Callable[[str], None] = lambda sentence: None,
        job: Mapping[str, Any] | None = None,
        show: Show | None = None,
        started: float | None = None,
    ) -> None:
        if not isinstance(task, Task):
            raise UsageError(
                f"{type(task).__name__} is no task: derive it from dualeval.Task, which has what a task need "
                "not say."
            )
        numerics.check_precision(precision, backend.device)
        self._task = task
        self._backend = backend
        self._control = control
        self._out = out
        self._batch_size = batch_size
        self._limit = limit
        self._precision = precision
        self._workers = workers
        self._on_error = on_error
        self._schedule = schedule
        self._fresh = fresh
        self._lease = lease
        self._watch = watch
        self._note = note
        self._job = dict(job or {})
        self._show = show
        self._started = perf_counter() if started is None else started

    def run(self) -> Result:
        """Evaluate; every rank calls this and gets the same metrics.

        Raises:
            UsageError: task, data, weights and options do not fit together.
            ExactlyOnceError: a sample was counted never, or more than once.
            PeerError: another rank failed first.
            Stopped: a signal has ended the run; what was finished is saved.
        """
        threads = torch.get_num_threads()
        with numerics.settings(self._precision, self._backend.device) as settings:
            with numerics.autocast(self._precision, self._backend.device):
                model = self._task.build_model(self._backend.device)
            return _Run(self, model, threads, settings).execute()


class _Run:
    """One execution: what is known once the model is built."""

    def __init__(
        self, evaluator: Evaluator, model: nn.Module, threads: int, settings: numerics.NumericSettings
    ) -> None:
        self._options = evaluator
        self._task = evaluator._task
        self._backend = evaluator._backend
        self._control = evaluator._control
        self._world = evaluator._backend.world
        self._model = model
        self._threads = threads
        self._settings = settings
        # What this rank says of its numeric settings; in the result.
        self._said_of_settings = [*settings.notes, *settings.check_after_build()]
        if self._world.is_main:
            for sentence in self._said_of_settings:
                evaluator._note(sentence)
        self._dataset = self._task.dataset()
        self._plan = self._make_plan()
        self._metrics = tuple(self._task.metrics())
        self._row_metrics = tuple(self._task.row_metrics())
        self._times: dict[str, float] = {}
        self._postprocess_s = 0.0
        self._progress = evaluator._control.progress

    def _make_plan(self) -> EvalPlan:
        count = len(self._dataset)
        if count == 0:
            raise UsageError("the data set is empty: nothing to evaluate")
        limit = self._options._limit
        return EvalPlan(
            num_samples=count if limit is None else min(limit, count),
            batch_size=self._options._batch_size,
        )

    def execute(self) -> Result:
        """Agree, evaluate, reduce, write."""
        facts = self._agree()
        folder, found = self._open_folder(facts)
        try:
            if found.finished is not None:
                return self._finished(folder, found.finished)
            return self._evaluate_into(folder, facts, found)
        except BaseException as error:
            if isinstance(error, Stopped) and self._options._watch is not None:
                # It writes that down itself, when all ranks have saved what they had.
                raise
            # Where rank 0 is what failed, another rank has to write it.
            if self._world.is_main or (folder.shared and isinstance(error, PeerError) and error.rank == 0):
                folder.note_end(error)
            self._close(folder, done=False)
            raise

    def _close(self, folder: RunFolder, *, done: bool = True) -> None:
        if self._options._watch is not None:
            self._options._watch.release(done=done)
        self._control.attend(None)
        folder.close()

    # -- before the loop ---------------------------------------------------------------------------

    def _agree(self) -> dict[str, Any]:
        """Compare jobs and machines over all ranks; returns what the result says about both."""
        job = {
            "task": self._task.name,
            "source": source_fingerprint([self._task, self._dataset, *self._model.modules()]),
            "task_options": self._task.fingerprint(),
            "data": self._dataset.fingerprint(self._plan.num_samples),
            "samples": self._plan.num_samples,
            "weights": model_fingerprint(self._model),
            "metrics": [
                *(metric.name for metric in self._metrics),
                *(metric.name for metric in self._row_metrics),
            ],
            "batch_size": self._plan.batch_size,
            "precision": self._options._precision,
            "on_error": self._options._on_error,
        }
        machine = machine_facts(self._backend.device, self._task.libraries, self._options._precision)
        self._control.meet()
        everyone = self._backend.all_gather_json(
            {"job": job, "machine": machine, "host": socket.gethostname()}
        )
        check_same_job([rank["job"] for rank in everyone], [rank["host"] for rank in everyone])
        machines = [rank["machine"] for rank in everyone]
        return {
            "job": job,
            "machine": machines[0],
            "hosts": [rank["host"] for rank in everyone],
            "homogeneous": all(other == machines[0] for other in machines),
            "files": sorted(self._task.json_files),
            "fingerprint": sha256_of_json({"job": job, "machine": machines[0]}),
        }

    def _open_folder(self, facts: Mapping[str, Any]) -> tuple[RunFolder, Found]:
        """Rank 0 makes the output folder, or goes on in it; the others learn what it has found there."""
        words: dict[str, Any] | None = None
        if self._world.is_main:
            folder, found = RunFolder.open(
                self._path(facts).absolute(),
                secrets.token_hex(4),
                self._plan,
                facts,
                self._world,
                fresh=self._options._fresh,
                lease=self._options._lease,
                step=lambda: self._progress.step("setup"),
            )
            # From here on: while rank 0 is at work, its lease shows it.
            self._control.attend(folder.renew_lease)
            words = {
                "path": str(folder.path),
                "token": folder.token,
                # None for all of them, which need no list.
                "remaining": None if not found.earlier.files else found.earlier.remaining,
                "finished": None if found.finished is None else json.loads(found.finished.to_json()),
            }
        self._control.meet()
        words = self._backend.broadcast_json(words, src=0)
        assert words is not None
        if not self._world.is_main:
            # A path that was given is this rank's to resolve: without a shared folder it names another disk.
            out = self._options._out
            path = Path(words["path"]) if out is None else out.absolute()
            folder = RunFolder(path, words["token"], rank=self._world.rank)
            found = Found.told(words["remaining"], words["finished"], self._plan)
        self._control.meet()
        apart = self._backend.gather_json(folder.shared)
        if self._world.is_main:
            self._say_what_was_found(
                folder, found, [rank for rank, shared in enumerate(apart or []) if not shared]
            )
        return folder, found

    def _path(self, facts: Mapping[str, Any]) -> Path:
        if self._options._out is not None:
            return self._options._out
        earlier = folder_of_launch(Path("runs"), facts["fingerprint"], self._world)
        if earlier is not None:
            return earlier
        now = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S")
        new = [
            f"{now}{again}-{facts['fingerprint'][:8]}" for again in ("", *(f".{n}" for n in range(2, 100)))
        ]
        return next(path for name in new if not (path := Path("runs") / name).exists())

    def _say_what_was_found(self, folder: RunFolder, found: Found, apart: list[int]) -> None:
        note = self._options._note
        for sentence in found.notes:
            note(sentence)
        if found.finished is not None:
            return
        done = self._plan.num_chunks - len(found.earlier.remaining)
        if done:
            note(f"goes on in {folder.path}: {done} of {self._plan.num_chunks} chunks are finished already")
        if apart:
            ranks = ", ".join(map(str, apart[:8])) + (", ..." if len(apart) > 8 else "")
            note(
                f"rank {ranks} of {self._world.size} cannot see {folder.path} on {socket.gethostname()}: "
                "what they finish is sent when all is done, and is lost where the run is ended before"
            )

    def _finished(self, folder: RunFolder, result: Result) -> Result:
        if self._world.is_main:
            self._options._note(f"this job was finished before, in {folder.path}: nothing is evaluated")
        self._control.meet()
        self._close(folder)
        return result

    # -- the loop ----------------------------------------------------------------------------------

    def _evaluate_into(self, folder: RunFolder, facts: Mapping[str, Any], found: Found) -> Result:
        writer = JournalWriter(
            folder.journal, fingerprint=facts["fingerprint"], prefix=folder.prefix(self._world.rank)
        )
        recorder = Recorder(self._plan, self._metrics, self._task.rows, writer, self._progress)
        if self._options._watch is not None:
            self._options._watch.keep(recorder, folder)
        setup_s = perf_counter() - self._options._started
        start = perf_counter()
        self._loop_and_save(recorder, found)
        evaluate_s = perf_counter() - start
        metrics_s = self._postprocess_s + recorder.metrics_s
        self._times.update(evaluate=evaluate_s, metrics=metrics_s, journal=recorder.journal_s)
        result = self._finish(folder, facts, found, recorder, writer, setup_s=setup_s)
        # No rank is through before the result is on the disk: a stop until then is all ranks' or none's.
        self._control.meet()
        self._close(folder)
        return result

    def _loop_and_save(self, recorder: Recorder, found: Found) -> None:
        """Evaluate what remains; whatever ends the loop, what was finished is saved."""
        show = self._options._show if self._world.is_main else None
        chunks = [chunk for file in found.earlier.files for chunk in file.chunks]
        before = sum(len(self._plan.chunk_samples(chunk)) for chunk in chunks)
        self._control.begin_run(
            None if show is None else lambda done: show(before + done, self._plan.num_samples)
        )
        try:
            self._loop(recorder, found.earlier.remaining)
        except BaseException as error:
            # The first error is the one to report, whatever this one comes to.
            with suppress(Exception):
                recorder.flush()
            if is_out_of_memory(error):
                self._out_of_memory(recorder, error)
            raise
        else:
            self._save(recorder)
        finally:
            self._control.end_run()
        if self._control.stopping is not None:
            raise Stopped(self._control.stopping)

    def _save(self, recorder: Recorder) -> None:
        try:
            recorder.flush()
        except OSError as error:
            self._unwritable(recorder, error)

    def _unwritable(self, recorder: Recorder, error: OSError) -> NoReturn:
        raise DualevalError(
            f"the output folder {recorder.folder.parent} cannot be written any more on "
            f"{socket.gethostname()}: {error.strerror or error}. {recorder.chunks_saved} chunks of this rank "
            "are saved. Make room, or bring the folder back, and type the same command again."
        ) from error

    def _out_of_memory(self, recorder: Recorder, error: BaseException) -> NoReturn:
        job = self._options
        smaller = max(1, self._plan.batch_size // 2)
        precision = "" if job._precision.startswith("amp") else ", or --precision amp-bf16 on a GPU"
        device = self._backend.device
        raise DualevalError(
            f"out of memory on {device} with --batch-size {self._plan.batch_size}: "
            f"{str(error).splitlines()[0]} Try --batch-size {smaller}{precision}; on a CPU fewer threads "
            f"(OMP_NUM_THREADS) or fewer ranks. {recorder.chunks_saved} finished chunks of this rank stay "
            "for the same command where there is more memory; another batch size is another job, and begins "
            "anew (--fresh)."
        ) from error

    def _loop(self, recorder: Recorder, remaining: Sequence[int]) -> None:
        """Every batch of this rank: no collective, no wait but for the batch ``compute.ahead`` behind."""
        dynamic = self._options._schedule == "dynamic"
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
            Reader(self._dataset, self._task, fill=self._options._on_error == "skip"),
            batches(),
            workers=min(self._options._workers, share),
            device=self._backend.device,
            ahead=1 if dynamic else 2,
            step=lambda stage: self._progress.step(stage, handed[0][0] if handed else None),
        )
        compute_s = 0.0
        device = self._backend.device
        threads = usable_threads(self._task, self._model, device, self._threads, share)
        with Compute(self._task, self._model, device, self._options._precision, threads) as compute:
            for batch in feed:
                # Not the batch itself is kept: its inputs would stay on the device for as long.
                chunk, number = handed.popleft()
                if batch.failed and self._options._on_error == "stop":
                    raise self._unreadable(batch.failed[0])
                self._progress.step("forward", chunk)
                start = perf_counter()
                pending = None if batch.data is None else compute.start(batch.data)
                under_way.append(((chunk, number), pending, batch.failed))
                compute_s += perf_counter() - start
                if len(under_way) > compute.ahead:
                    compute_s += self._settle(recorder, *under_way.popleft())
                self._control.raise_if_peer_failed()
                # The chunk in hand is finished; no other is begun.
                if self._control.stopping and number == self._plan.chunk_batches(chunk)[-1]:
                    break
                self._progress.step("load", handed[0][0] if handed else None)
            while under_way:
                compute_s += self._settle(recorder, *under_way.popleft())
        self._said_of_settings += self._settings.check_after_loop(compute.changed_settings)
        self._times.update(data=feed.wait_s, transfer=feed.transfer_s, compute=compute_s)

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
        recorder: Recorder,
        number: tuple[int, int],
        pending: Pending | None,
        failed: tuple[FailedSample, ...],
    ) -> float:
        """Wait for a batch and record it; returns the seconds waited."""
        start = perf_counter()
        self._progress.step("forward", number[0])
        columns = None if pending is None else pending()
        waited = perf_counter() - start
        self._progress.step("metrics", number[0])
        if columns is not None:
            start = perf_counter()
            columns = self._task.postprocess(columns, self._plan.batch_samples(number[1]))
            self._postprocess_s += perf_counter() - start
        try:
            recorder.add(*number, columns, failed)
        except OSError as error:
            self._unwritable(recorder, error)
        self._control.add_done(len(self._plan.batch_samples(number[1])))
        return waited

    def _unreadable(self, sample: FailedSample) -> UsageError:
        return UsageError(
            f"sample {self._dataset.id(sample.index)} (index {sample.index}) cannot be read: {sample.error}. "
            "Mend or remove it, or run with --on-error skip to leave such samples out and list them."
        )

    # -- after the loop ----------------------------------------------------------------------------

    def _finish(
        self,
        folder: RunFolder,
        facts: Mapping[str, Any],
        found: Found,
        recorder: Recorder,
        writer: JournalWriter,
        *,
        setup_s: float,
    ) -> Result:
        """Reduce, check, compute and, on rank 0, write."""
        if self._world.is_main:
            # Once, and so on one rank alone.
            found.earlier.add_to(recorder.ledger.values)
        start = perf_counter()
        self._control.meet()
        self._times["meet"] = perf_counter() - start
        self._progress.step("reduce")
        start = perf_counter()
        recorder.ledger.values = self._backend.all_reduce(recorder.ledger.values, op="sum")
        self._times["reduce"] = perf_counter() - start
        reports = self._backend.all_gather_json(
            {
                "times": self._times,
                "failed": [[sample.index, sample.error] for sample in recorder.failed],
                "files": len(writer.written),
                "settings": self._said_of_settings,
                "shared": folder.shared,
            }
        )
        recorder.ledger.verify_exactly_once()
        evaluated, failed = recorder.ledger.totals()
        if evaluated == 0:
            index, error = min(tuple(entry) for report in reports for entry in report["failed"])
            raise UsageError(
                f"none of the {failed} samples could be read; the first, {self._dataset.id(index)}: {error}"
            )
        try:
            folder.collect(self._backend, writer.written, reports, lambda: self._progress.step("reduce"))
        except OSError as error:
            self._unwritable(recorder, error)
        self._progress.step("write")
        measured = [metric.compute(slots) for metric, slots in recorder.ledger.parts()]
        measured += self._measured_by_rows(folder, found, reports)
        result = make_result(
            self._task,
            self._plan,
            measured,
            facts,
            found,
            reports,
            totals=(evaluated, failed),
            world={
                "size": self._world.size,
                "nodes": len(set(facts["hosts"])),
                "launcher": self._world.launcher,
                "backend": self._backend.name,
            },
            job=self._options._job,
            folder=folder.path,
            setup_s=setup_s,
            total_s=perf_counter() - self._options._started,
        )
        if self._world.is_main:
            try:
                folder.write(
                    result, self._plan, self._task, found, reports, step=lambda: self._progress.step("write")
                )
            except OSError as error:
                self._unwritable(recorder, error)
        return result

    def _measured_by_rows(
        self, folder: RunFolder, found: Found, reports: list[dict[str, Any]]
    ) -> list[Measured]:
        """What rank 0 makes of all samples' rows, told to every rank."""
        if not self._row_metrics:
            return []
        words: list[dict[str, Any]] | None = None
        if self._world.is_main:
            names = sorted({name for metric in self._row_metrics for name in metric.columns})
            columns = folder.read_columns(
                names, self._plan, found, reports, lambda: self._progress.step("write")
            )
            words = [
                asdict(metric.compute({name: columns[name] for name in metric.columns}))
                for metric in self._row_metrics
            ]
        self._control.meet()
        words = self._backend.broadcast_json(words, src=0)
        assert words is not None
        # JSON keeps every bit of a float.
        return [Measured(**told) for told in words]
