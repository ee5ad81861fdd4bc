"""Evaluator: the one loop that evaluates a task, whatever launcher, backend or number of processes."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dualeval.choices import ON_ERROR, PRECISIONS, SCHEDULES, check_choice, check_count
from dualeval.engine import numerics, replay, trial
from dualeval.engine.agreement import check_same_job, machine_facts
from dualeval.engine.columns import columns_of, kept_columns
from dualeval.engine.control.plane import ControlPlane
from dualeval.engine.evaluation_mode import set_evaluation_mode
from dualeval.engine.folder.folder import RunFolder
from dualeval.engine.folder.journal import JournalFile, JournalWriter
from dualeval.engine.folder.opening import Found, folder_of_launch
from dualeval.engine.folder.predictions import load_library, read_columns
from dualeval.engine.identity import contents_fingerprint, job_identity
from dualeval.engine.loop import Evaluation, Loop, Show, ahead_of, evaluate_alone, unwritable
from dualeval.engine.machines import check_kinds_of_ranks, chunks_by_machine
from dualeval.engine.measured import check_keys, plain
from dualeval.engine.outcome import compared_with_replaced, make_result
from dualeval.engine.plan import EvalPlan
from dualeval.engine.recorder import Recorder
from dualeval.engine.shared_memory import Reading, choose_workers, measure_reading
from dualeval.engine.watch import Watch
from dualeval.errors import PeerError, UsageError
from dualeval.metrics import Measured
from dualeval.result import PREDICTIONS, Result, sha256_of_json
from dualeval.tasks import Task

if TYPE_CHECKING:
    from dualeval.backends.base import Backend


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
        fewer_workers: take fewer, with a note, where the shared memory has no room for the batches of all.
            Without it that is an error.
        on_error: what a sample that cannot be read does: "stop" ends the run, "skip" leaves it out.
        schedule: how chunks go to ranks: "static", chunk c to rank c mod size, or "dynamic", to the rank that
            has time for it.
        fresh: remove an earlier run's files from ``out`` first.
        replay: before going on from what is finished in ``out``, or giving back a finished result, evaluate
            one finished batch anew and compare it with its rows.
        mix_machines: let ranks of different device types or versions compute one result, and go on from what
            another kind of machine has computed.
        lease: keep other runs out of ``out`` for as long as this one lasts. Without it two runs there do the
            same work twice, for one right result.
        watch: saves what is finished, and ends this process, where it cannot end by itself.
        note: called with sentences for people, on rank 0 only.
        job: the options as the caller wants them recorded in the result; ``task.options()`` is added.
        show: progress display, called on rank 0 from a thread of its own.
        started: ``perf_counter()`` at the start of the run, where that was before this call.

    Raises:
        UsageError: the task is none, or an option has a value that it, or the device, cannot have.
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
        fewer_workers: bool = False,
        on_error: str = "stop",
        schedule: str = "static",
        fresh: bool = False,
        replay: bool = True,
        mix_machines: bool = False,
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
        for option, value, least in (
            ("batch_size", batch_size, 1),
            ("limit", limit, 1),
            ("workers", workers, 0),
        ):
            check_count(option, value, least)
        check_choice("precision", precision, PRECISIONS)
        check_choice("on_error", on_error, ON_ERROR)
        check_choice("schedule", schedule, SCHEDULES)
        numerics.check_precision(precision, backend.device)
        self._task = task
        self._backend = backend
        self._control = control
        self._out = None if out is None else Path(out)
        self._batch_size = batch_size
        self._limit = limit
        self._precision = precision
        self._workers = workers
        self._fewer_workers = fewer_workers
        self._on_error = on_error
        self._schedule = schedule
        self._fresh = fresh
        self._replay = replay
        self._mix_machines = mix_machines
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
            said = set_evaluation_mode(model)
            if self._backend.world.is_main:
                for sentence in self._task.notes():
                    self._note(sentence)
            return _Run(self, model, threads, settings, said).execute()


class _Run:
    """One execution: what is known once the model is built."""

    def __init__(
        self,
        evaluator: Evaluator,
        model: nn.Module,
        threads: int,
        settings: numerics.NumericSettings,
        said: list[str],
    ) -> None:
        self._options = evaluator
        self._task = evaluator._task
        self._backend = evaluator._backend
        self._control = evaluator._control
        self._world = evaluator._backend.world
        self._model = model
        self._dataset = self._task.dataset()
        self._plan = self._make_plan()
        self._metrics = tuple(self._task.metrics())
        self._row_metrics = tuple(self._task.row_metrics())
        self._kept = kept_columns(self._task, self._metrics, self._row_metrics)
        trial.check_names([*self._metrics, *self._row_metrics], self._kept)
        self._times: dict[str, float] = {}
        self._progress = evaluator._control.progress
        # After all that a task's own code may have set. What this rank says of it is in the result.
        self._said_of_settings = [*said, *settings.notes, *settings.check_after_build()]
        if self._world.is_main:
            for sentence in self._said_of_settings:
                evaluator._note(sentence)
        self._evaluation = Evaluation(
            task=self._task,
            dataset=self._dataset,
            model=model,
            plan=self._plan,
            metrics=self._metrics,
            row_metrics=self._row_metrics,
            kept=self._kept,
            backend=self._backend,
            control=self._control,
            settings=settings,
            precision=evaluator._precision,
            on_error=evaluator._on_error,
            schedule=evaluator._schedule,
            workers=evaluator._workers,
            threads=threads,
            note=evaluator._note,
        )

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
        if self._options._watch is not None:
            self._options._watch.keep(folder)
        try:
            proof = self._prove(folder, facts, found)
            if found.finished is not None:
                return self._finished(folder, replace(found.finished, earlier=True, replay=proof))
            return self._evaluate_into(folder, facts, found, proof)
        except BaseException as error:
            if self._options._watch is not None:
                # Whose session writes that down, when all ranks have saved what they had.
                raise
            # Where rank 0 is what failed, another rank has to write it.
            if self._world.is_main or (folder.shared and isinstance(error, PeerError) and error.rank == 0):
                folder.note_end(error)
            self._close(folder, done=False)
            raise

    def _close(self, folder: RunFolder, *, done: bool = True) -> None:
        if self._options._watch is not None:
            self._options._watch.release(done=done)
        folder.close()

    # -- before the loop ---------------------------------------------------------------------------

    def _agree(self) -> dict[str, Any]:
        """Compare jobs and machines over all ranks; returns what the result says about both."""
        # Of the model as it was built: what is folded or compiled later is another one to look at, and the
        # same to compute with.
        job = {
            **job_identity(
                self._task,
                self._dataset,
                self._model,
                self._metrics,
                self._row_metrics,
                self._plan.num_samples,
            ),
            "columns": list(self._kept),
            "batch_size": self._plan.batch_size,
            "precision": self._options._precision,
            "on_error": self._options._on_error,
        }
        machine = {
            **machine_facts(self._backend.device, self._task.libraries, self._options._precision),
            # Beside the versions: what was computed with another torch may be gone on with, where it is
            # asked for.
            "libraries": job.pop("libraries"),
        }
        reading = self._measure_reading()
        self._control.meet()
        everyone = self._backend.all_gather_json(
            {
                "job": job,
                "machine": machine,
                "host": socket.gethostname(),
                "reading": asdict(reading),
            }
        )
        hosts = [rank["host"] for rank in everyone]
        check_same_job([rank["job"] for rank in everyone], hosts)
        self._fit_workers([Reading(**rank["reading"]) for rank in everyone])
        # After what costs less to compare, and so of the same samples on every rank.
        job["contents"] = contents_fingerprint(
            self._dataset, self._plan.num_samples, self._backend, self._control
        )
        machines = [rank["machine"] for rank in everyone]
        check_kinds_of_ranks(machines, hosts, mix=self._options._mix_machines)
        return {
            "job": job,
            "machine": machines[0],
            "machines": machines,
            "hosts": hosts,
            "files": sorted(self._task.json_files),
            "task_class": f"{type(self._task).__module__}.{type(self._task).__qualname__}",
            "metrics": [
                *(metric.name for metric in self._metrics),
                *(metric.name for metric in self._row_metrics),
            ],
            "fingerprint": sha256_of_json(job),
        }

    def _measure_reading(self) -> Reading:
        """What the reading processes of this rank will need of the shared memory."""
        on_cpu = self._backend.device.type == "cpu"
        batches = -(-self._plan.num_batches // self._world.size)
        return measure_reading(
            self._dataset,
            self._task,
            self._model,
            self._plan.batch_size,
            workers=min(self._options._workers, batches),
            ahead=ahead_of(self._options._schedule),
            # One that comes out of the loader, and those that are computed; for a GPU they are copied first.
            held=1 + (self._evaluation.threads if on_cpu else 1),
            batches=batches,
        )

    def _fit_workers(self, everyone: Sequence[Reading]) -> None:
        """Take no more reading processes than the shared memory has room for."""
        workers, notes = choose_workers(everyone, chosen=not self._options._fewer_workers)
        if notes:
            self._evaluation = replace(self._evaluation, workers=workers[self._world.rank])
        if self._world.is_main:
            for sentence in notes:
                self._options._note(sentence)

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
                mix_machines=self._options._mix_machines,
                step=lambda: self._progress.step("setup"),
            )
            # From here on: while rank 0 is at work, its lease shows it.
            folder.keep_lease(lambda reason: self._control.give_up(reason, rank=self._world.rank))
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

    def _prove(self, folder: RunFolder, facts: Mapping[str, Any], found: Found) -> str | None:
        """Rank 0 evaluates one finished batch anew; returns how that went, None where nothing is finished."""
        if found.finished is None and len(found.earlier.remaining) == self._plan.num_chunks:
            return None
        if not self._options._replay:
            if self._world.is_main:
                self._options._note("what is finished is not compared with what this job gives now")
            return replay.SKIPPED
        outcome: str | None = None
        if self._world.is_main:
            self._progress.step("setup")
            if found.finished is None:
                stored = replay.batch_of_journal(found.earlier.files, self._plan, facts["fingerprint"])
            else:
                stored = replay.batch_of_predictions(
                    folder.path / PREDICTIONS, self._plan, facts["fingerprint"], found.finished.machines
                )
            proof = replay.Proof(
                stored,
                lambda samples: evaluate_alone(self._evaluation, samples),
                machine=facts["machine"],
                precision=self._options._precision,
                place=folder.path,
                name=self._dataset.id,
            )
            outcome, note = proof.rows()
            proof.texts(self._task)
            digests = {} if found.finished is None else found.finished.metric_digests
            proof.metrics(self._metrics, self._row_metrics, self._plan, digests)
            if note is not None:
                self._options._note(note)
        self._control.meet()
        return str(self._backend.broadcast_json(outcome, src=0))

    def _finished(self, folder: RunFolder, result: Result) -> Result:
        if self._world.is_main:
            self._options._note(f"this job was finished before, in {folder.path}: its result is shown again")
        self._control.meet()
        self._close(folder)
        return result

    def _evaluate_into(
        self, folder: RunFolder, facts: Mapping[str, Any], found: Found, proof: str | None
    ) -> Result:
        writer = JournalWriter(
            folder.journal,
            fingerprint=facts["fingerprint"],
            machine=facts["machines"][self._world.rank],
            prefix=folder.prefix(self._world.rank),
        )
        recorder = Recorder(self._plan, self._metrics, self._kept, writer, self._progress)
        if self._options._watch is not None:
            self._options._watch.recorder = recorder
        if self._world.is_main:
            load_library()
        setup_s = perf_counter() - self._options._started
        start = perf_counter()
        loop = Loop(self._evaluation, recorder)
        loop.run(found, self._options._show if self._world.is_main else None)
        evaluate_s = perf_counter() - start
        metrics_s = loop.postprocess_s + recorder.metrics_s
        self._times.update(loop.times, evaluate=evaluate_s, metrics=metrics_s, journal=recorder.journal_s)
        self._said_of_settings += loop.said_of_settings
        result = self._finish(folder, facts, found, recorder, writer, proof, setup_s=setup_s)
        # No rank is through before the result is on the disk: a stop until then is all ranks' or none's.
        self._control.meet()
        self._close(folder)
        return result

    # -- after the loop ----------------------------------------------------------------------------

    def _finish(
        self,
        folder: RunFolder,
        facts: Mapping[str, Any],
        found: Found,
        recorder: Recorder,
        writer: JournalWriter,
        proof: str | None,
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
        self._progress.step("write")
        start = perf_counter()
        recorder.ledger.values = self._backend.all_reduce(recorder.ledger.values, op="sum")
        self._times["reduce"] = perf_counter() - start
        reports = self._backend.all_gather_json(
            {
                "times": self._times,
                "failed": [[sample.index, sample.error] for sample in recorder.failed],
                "files": len(writer.written),
                "chunks": recorder.chunks_saved,
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
            folder.collect(self._backend, writer.written, reports, lambda: self._progress.step("write"))
        except OSError as error:
            raise unwritable(recorder, error) from error
        self._progress.step("write")
        measured = [plain(metric.name, metric.compute(slots)) for metric, slots in recorder.ledger.parts()]
        files = self._merged_files(folder, found, reports, facts["fingerprint"], recorder)
        measured += self._measured_by_rows(files)
        check_keys(measured)
        result = make_result(
            self._task,
            self._plan,
            measured,
            facts,
            found,
            reports,
            machines=chunks_by_machine(
                [
                    *((file.machine, len(file.chunks)) for file in found.earlier.files),
                    *zip(facts["machines"], (report["chunks"] for report in reports), strict=True),
                ]
            ),
            replay=proof,
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
            result = compared_with_replaced(result, found)
            try:
                result = folder.write(
                    result,
                    self._plan,
                    self._task,
                    self._kept,
                    found,
                    files,
                    self._metric_digests,
                    step=lambda: self._progress.step("write"),
                )
            except OSError as error:
                raise unwritable(recorder, error) from error
        return result

    def _metric_digests(self, path: Path, fingerprint: str) -> dict[str, str]:
        """What the metrics make of the batch that a later run compares, by their names."""
        stored = replay.batch_of_predictions(path, self._plan, fingerprint)
        if not stored.evaluated.any():
            return {}
        return replay.metric_digests(self._metrics, self._row_metrics, stored.columns)

    def _merged_files(
        self,
        folder: RunFolder,
        found: Found,
        reports: list[dict[str, Any]],
        fingerprint: str,
        recorder: Recorder,
    ) -> list[JournalFile]:
        """On rank 0 all files of the journal, each checked; on the others none."""
        if not self._world.is_main:
            return []
        try:
            return folder.merged_files(found, reports, fingerprint, step=lambda: self._progress.step("write"))
        except OSError as error:
            raise unwritable(recorder, error) from error

    def _measured_by_rows(self, files: list[JournalFile]) -> list[Measured]:
        """What rank 0 makes of all samples' rows, told to every rank."""
        if not self._row_metrics:
            return []
        words: list[dict[str, Any]] | None = None
        if self._world.is_main:
            names = sorted({name for metric in self._row_metrics for name in metric.columns})
            columns = read_columns(files, self._plan, names, lambda: self._progress.step("write"))
            words = [
                asdict(plain(metric.name, metric.compute(columns_of(metric, columns))))
                for metric in self._row_metrics
            ]
        self._control.meet()
        words = self._backend.broadcast_json(words, src=0)
        assert words is not None
        # JSON keeps every bit of a float.
        return [Measured(**told) for told in words]
