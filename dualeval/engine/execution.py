"""Execution: one evaluation, from the first meeting of its ranks to its result."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import nn

from dualeval.columns import Rows
from dualeval.engine import replay, trial
from dualeval.engine.agreement import check_same_job, differences, machine_facts
from dualeval.engine.columns import kept_columns
from dualeval.engine.context import RunContext
from dualeval.engine.feed import FailedSample
from dualeval.engine.folder.folder import RunFolder
from dualeval.engine.folder.journal import FinishedChunks, JournalWriter
from dualeval.engine.folder.opening import PreviousRun, folder_of_launch
from dualeval.engine.folder.predictions import load_library
from dualeval.engine.folder.process import launch_of
from dualeval.engine.identity import ModelIdentity, both_readings, contents_fingerprint, job_identity
from dualeval.engine.in_memory import MemoryWriter
from dualeval.engine.loop import Evaluation, Loop, ahead_of
from dualeval.engine.machines import check_kinds_of_ranks
from dualeval.engine.outcome import Outcome
from dualeval.engine.parts import identity_of, name_of
from dualeval.engine.plan import EvalPlan
from dualeval.engine.preparation import identity_of as identity_of_preparation
from dualeval.engine.recorder import Recorder
from dualeval.engine.reference import Reference, windows_of_file
from dualeval.engine.samples_digest import check_ids, hashes_of_ids, joined
from dualeval.engine.shared_memory import Reading, choose_workers, measure_reading
from dualeval.engine.stored_rows import StoredRows
from dualeval.errors import UsageError
from dualeval.metrics import split_by_kind
from dualeval.metrics.by_name import chosen_metrics
from dualeval.metrics.classification import NonfiniteWarning
from dualeval.result import PREDICTIONS, Result, sha256_of_json
from dualeval.tasks import Dataset, Task

_NO_METRICS = (
    "there are no metrics, so the result has no numbers. Let metrics() or metrics= give some, as "
    "[dualeval.metrics.Mean('loss')] of a column 'loss'"
)


class Execution:
    """One evaluation on this rank: ``begin``, ``prove``, ``loop``, ``finish``; ``fail`` where it breaks."""

    # What earlier runs have left; from `begin` on.
    previous: PreviousRun
    # Hands out the batches; from `start_loop` on.
    loop: Loop

    def __init__(
        self,
        task: Task,
        dataset: Dataset,
        model: nn.Module,
        context: RunContext,
        rows: Sequence[str],
        *,
        threads: int,
        identity: ModelIdentity | None = None,
        attributes: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {}),
    ) -> None:
        self._task = task
        self._identity = identity
        self._attributes = attributes
        self._context = context
        self._options = context.options
        self._backend = context.backend
        self._control = context.control
        self._world = context.backend.world
        self._progress = context.control.progress
        self._folder: RunFolder | None = None
        self._reference: Reference | None = None
        self._proof: str | None = None
        self._plan = plan_of(dataset, context)
        task.check_batches(self._plan.batch_size, self._plan.num_samples)
        chosen = chosen_metrics(self._options.metric, task.metrics(), (*rows, *task.on_request))
        # Of what only warns there is no number.
        measures = any(metric.name != NonfiniteWarning.name for metric in chosen)
        # Sentences about this rank's settings, for the result.
        self.settings_notes = [] if measures else [_NO_METRICS]
        metrics, row_metrics = split_by_kind(chosen)
        cluster = self._options.cluster or task.cluster
        self._columns = kept_columns(rows, metrics, row_metrics, cluster)
        trial.check_names(chosen, self._columns)
        if task.on_request:
            task.requested = {name for metric in chosen for name in metric.columns}
        self._spelled = {metric.name: getattr(metric, "spelled", metric.name) for metric in chosen}
        # What nobody reads again is not kept where nothing is written.
        of_rows = tuple(dict.fromkeys(name for metric in row_metrics for name in metric.columns))
        # All that is the same for each batch; complete after `begin`.
        self.evaluation = Evaluation(
            task=task,
            dataset=dataset,
            model=model,
            plan=self._plan,
            metrics=metrics,
            row_metrics=row_metrics,
            kept=self._columns if self._keeps_all(cluster) else of_rows,
            cluster=cluster,
            context=context,
            device=context.backend.device,
            workers=self._options.workers or 0,
            threads=threads,
        )

    def _keeps_all(self, cluster: str | None) -> bool:
        return self._options.out is not None or cluster is not None or self._options.reference is not None

    # -- before the loop ---------------------------------------------------------------------------

    def begin(self) -> None:
        """Agree with all ranks on the job, and open the run to compare with and the output folder."""
        self._facts = self._agree()
        self._open_reference()
        if self._options.out is not None:
            self._open_folder()
            assert self._folder is not None
            self._context.watch.keep(self._folder)
            return
        chunks = tuple(range(self._plan.num_chunks))
        nothing = FinishedChunks(files=(), remaining=chunks, left_out=())
        self.previous = PreviousRun(chunks=nothing)

    def _agree(self) -> dict[str, Any]:
        """Compare jobs and machines over all ranks; returns what the result says about both."""
        evaluation = self.evaluation
        # It holds the model's tensors as they were built: not for longer than they are wanted.
        identity, self._identity = self._identity, None
        identity = identity or ModelIdentity.of(evaluation.model, world=self._world)
        first, alone = both_readings(
            self._world,
            lambda: job_identity(
                self._task,
                evaluation.dataset,
                identity,
                evaluation.metrics,
                evaluation.row_metrics,
                self._plan.num_samples,
                self._attributes[0],
            ),
        )
        alone = {**alone, **identity.alone, "task_attributes": self._attributes[1] or None}
        job = {
            **first,
            **identity_of(evaluation.dataset),
            "columns": list(self._columns),
            "batch_size": self._plan.batch_size,
            **identity_of_preparation(self._options),
            "on_error": self._options.on_error,
            # Its intervals are other ones.
            **({} if evaluation.cluster is None else {"cluster": evaluation.cluster}),
        }
        machine = {
            **machine_facts(self._backend.device, self._task.libraries, self._options.precision),
            # Beside the versions: what was computed with another torch may be gone on with, where it is
            # asked for.
            "libraries": job.pop("libraries"),
        }
        reading = self._measure_reading()
        step = partial(self._progress.step, "setup")
        ids, hashes = hashes_of_ids(evaluation.dataset, self._plan.num_samples, self._world, step)
        self._control.meet()
        everyone = self._backend.all_gather_json(
            {
                "job": job,
                "alone": {name: value for name, _, value in differences(first, alone)},
                "machine": machine,
                "host": socket.gethostname(),
                "launch": launch_of(self._world),
                "reading": asdict(reading),
                "ids": ids,
            }
        )
        hosts = [rank["host"] for rank in everyone]
        check_same_job([rank["job"] for rank in everyone], hosts, [rank["alone"] for rank in everyone])
        check_ids(evaluation.dataset, self._plan.num_samples, hashes, self._backend)
        # What holds a rank's number is another value on each.
        job = everyone[0]["job"]
        self._fit_workers([Reading(**rank["reading"]) for rank in everyone])
        # After what costs less to compare, and so of the same samples on every rank.
        job["contents"] = contents_fingerprint(
            evaluation.dataset, self._plan.num_samples, self._backend, self._control
        )
        machines = [rank["machine"] for rank in everyone]
        check_kinds_of_ranks(machines, hosts, mix=self._options.mix_machines)
        return {
            "job": job,
            "machine": machines[0],
            "machines": machines,
            "hosts": hosts,
            "launches": sorted({rank["launch"] for rank in everyone} - {None}),
            "files": sorted(self._task.exports),
            "task_class": f"{type(self._task).__module__}.{type(self._task).__qualname__}",
            # What only warns is nothing to compute again.
            "metrics": [self._spelled[name] for name in job["metrics"] if name != NonfiniteWarning.name],
            "fingerprint": sha256_of_json(job),
            "samples_digest": joined(self._plan.num_samples, [rank["ids"] for rank in everyone]),
        }

    def _open_reference(self) -> None:
        """On rank 0, open the run that this one is compared with. A collective where there is one."""
        if self._options.reference is None:
            return
        if self._world.is_main:
            step = partial(self._progress.step, "setup")
            self._reference = Reference.open(self._options.reference)
            self._reference.check(
                self.evaluation.dataset, self._plan.num_samples, self._columns, self._facts_of_data(), step
            )
        # Nothing is evaluated, and no folder made, where it cannot be compared with.
        self._control.meet()

    def _facts_of_data(self) -> dict[str, Any]:
        """What ``Reference`` asks of this run, as it will be in the result."""
        job = self._facts["job"]
        return {
            "data": {"fingerprint": job["data"], "contents": job["contents"]},
            "weights": job["weights"],
            "job": {**self._context.job, **self._task.options()},
        }

    def _measure_reading(self) -> Reading:
        """What the reading processes of this rank will need of the shared memory."""
        evaluation = self.evaluation
        batches = -(-self._plan.num_batches // self._world.size)
        return measure_reading(
            evaluation.dataset,
            self._task,
            evaluation.model,
            self._plan.batch_size,
            workers=min(evaluation.workers, batches),
            ahead=ahead_of(self._options.schedule),
            # One that comes out of the loader, and those that are computed; for a GPU they are copied first.
            held=1 + (evaluation.threads if evaluation.device.type == "cpu" else 1),
            batches=batches,
        )

    def _fit_workers(self, everyone: Sequence[Reading]) -> None:
        """Take no more reading processes than the shared memory has room for."""
        workers, notes = choose_workers(everyone, chosen=not self._options.fewer_workers)
        if notes:
            self.evaluation = replace(self.evaluation, workers=workers[self._world.rank])
        self._context.note_all(notes)

    def _open_folder(self) -> None:
        """Rank 0 makes the output folder, or goes on in it; the others learn what was there."""
        message: dict[str, Any] | None = None
        if self._world.is_main:
            folder, previous = RunFolder.open(
                self._path().absolute(),
                secrets.token_hex(4),
                self._plan,
                self._facts,
                fresh=self._options.fresh,
                lease=self._options.lease,
                mix_machines=self._options.mix_machines,
                step=lambda: self._progress.step("setup"),
            )
            self._folder = folder
            folder.keep_lease(lambda reason: self._control.give_up(reason, rank=self._control.name.rank))
            message = folder.to_message(previous, self._plan)
        message = self._context.from_rank_0(message)
        if not self._world.is_main:
            folder, previous = RunFolder.from_message(
                message, self._plan, rank=self._world.rank, path=self._options.path
            )
        self._folder, self.previous = folder, previous
        self._control.meet()
        apart = self._backend.gather_json(folder.shared)
        if self._world.is_main:
            self._note_previous_run(folder, [rank for rank, shared in enumerate(apart or []) if not shared])

    def _path(self) -> Path:
        if self._options.path is not None:
            return self._options.path
        fingerprint = self._facts["fingerprint"]
        earlier = folder_of_launch(Path("runs"), fingerprint, self._facts["launches"])
        if earlier is not None:
            return earlier
        now = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S")
        new = [f"{now}{again}-{fingerprint[:8]}" for again in ("", *(f".{n}" for n in range(2, 100)))]
        return next(path for name in new if not (path := Path("runs") / name).exists())

    def _note_previous_run(self, folder: RunFolder, apart: list[int]) -> None:
        note, previous = self._context.note, self.previous
        for sentence in previous.notes:
            note(sentence)
        if previous.finished is not None:
            return
        done = self._plan.num_chunks - len(previous.chunks.remaining)
        if done:
            note(f"resumes in {folder.path}: {done} of {self._plan.num_chunks} chunks are finished already")
        if apart:
            ranks = ", ".join(map(str, apart[:8])) + (", ..." if len(apart) > 8 else "")
            note(
                f"rank {ranks} of {self._world.size} cannot see {folder.path} on {socket.gethostname()}: "
                "their rows are sent at the end of the run, and are lost if it ends early"
            )

    def stored_batches(self) -> list[replay.StoredBatch]:
        """On rank 0, batches that an earlier run has finished, to be evaluated anew."""
        is_asked = self._folder is not None and self._options.replay and self._has_earlier()
        if not is_asked or not self._world.is_main:
            return []
        assert self._folder is not None
        self._progress.step("setup")
        fingerprint, finished = self._facts["fingerprint"], self.previous.finished
        if finished is None:
            found = replay.batches_of_journal(self.previous.chunks.files, self._plan, fingerprint)
        else:
            path = self._folder.path / PREDICTIONS
            found = replay.batches_of_predictions(path, self._plan, fingerprint, finished.machines)
        return [batch for batch in found if batch.columns and batch.evaluated.any()]

    def prove(
        self,
        stored: Sequence[replay.StoredBatch],
        evaluate: Callable[[range], tuple[Mapping[str, Rows], tuple[FailedSample, ...]]],
    ) -> Result | None:
        """Compare finished batches with what this job gives now; a collective where anything is finished.

        Returns the result, where an earlier run has come to its end here; None where there is work to do.
        """
        if not self._has_earlier():
            return None
        if not self._options.replay:
            self._proof = replay.SKIPPED
            self._context.note_all(["what is finished is not compared with what this job gives now"])
        else:
            self._proof = self._compare(stored, evaluate) if self._world.is_main else None
            self._proof = str(self._context.from_rank_0(self._proof))
        if self.previous.finished is None:
            return None
        assert self._folder is not None
        self._context.note_all(
            [f"this job was finished before, in {self._folder.path}: its result is shown again"]
        )
        compared = self._compare_finished()
        self._control.meet()
        self._close()
        # It may have been moved since.
        folder = str(self._folder.path)
        result = replace(self.previous.finished, earlier=True, replay=self._proof, folder=folder)
        return result if compared is None else replace(result, reference=compared)

    def _compare_finished(self) -> dict[str, Any] | None:
        """What a finished run's rows say beside those of another run; None where there is none. A collective.

        Its result.json stays as it was written.
        """
        if self._options.reference is None:
            return None
        compared: dict[str, Any] | None = None
        if self._reference is not None:
            assert self._folder is not None
            compared = self._reference.compare(
                windows_of_file(StoredRows(self._folder.path / PREDICTIONS), self._plan.num_samples),
                self.evaluation.dataset,
                self._facts_of_data(),
                partial(self._progress.step, "setup"),
            )
        found: dict[str, Any] = self._context.from_rank_0(compared)
        return found

    def _has_earlier(self) -> bool:
        return (
            self.previous.finished is not None or len(self.previous.chunks.remaining) < self._plan.num_chunks
        )

    def _compare(
        self,
        stored: Sequence[replay.StoredBatch],
        evaluate: Callable[[range], tuple[Mapping[str, Rows], tuple[FailedSample, ...]]],
    ) -> str:
        assert self._folder is not None
        finished = self.previous.finished
        digests = {} if finished is None else finished.metric_digests
        compared: dict[str, str | None] = {replay.NOTHING_TO_COMPARE: None}
        for batch in stored:
            proof = replay.Proof(
                batch,
                evaluate,
                machine=self._facts["machine"],
                precision=self._options.precision,
                place=self._folder.path,
                name=partial(name_of, self.evaluation.dataset),
            )
            outcome, compared[outcome] = proof.rows()
            proof.texts(self._task, self.evaluation.dataset)
            # The digests are those of the first batch; a journal file is compared as a whole.
            if batch is stored[0] or batch.file is not stored[0].file:
                proof.metrics(self.evaluation.metrics, self.evaluation.row_metrics, self._plan, digests)
        worst = max(compared, key=replay.OUTCOMES.index)
        if (note := compared[worst]) is not None:
            self._context.note(note)
        return worst

    # -- the loop and after it ---------------------------------------------------------------------

    def start_loop(self) -> None:
        """Make the loop, and what takes its batches; what was done until now counts as setup."""
        if self._folder is None:
            self._writer: JournalWriter | MemoryWriter = MemoryWriter(keeps=bool(self.evaluation.kept))
        else:
            self._writer = JournalWriter(
                self._folder.journal,
                fingerprint=self._facts["fingerprint"],
                machine=self._facts["machines"][self._world.rank],
                prefix=self._folder.prefix(self._world.rank),
            )
        evaluation = self.evaluation
        self._recorder = Recorder(
            self._plan, evaluation.metrics, evaluation.kept, self._writer, self._progress
        )
        if self._folder is not None:
            self._context.watch.recorder = self._recorder
            if self._world.is_main:
                load_library()
        self.loop = Loop(evaluation, self._recorder)
        self._setup_s = perf_counter() - self._context.started

    def finish(self) -> Result:
        """Reduce, check, compute the metrics and, on rank 0, write; every rank gets the same metrics."""
        recorder = self._recorder
        times = {
            **self.loop.times,
            "metrics": self.loop.postprocess_s + recorder.metrics_s,
            "journal": recorder.journal_s,
        }
        outcome = Outcome(
            self.evaluation,
            self._facts,
            self.previous,
            self._folder,
            self._writer,
            recorder,
            reference=None if self._reference is None else (self._reference, self._facts_of_data()),
        )
        result = outcome.result(
            times,
            self.settings_notes,
            self.loop.notes,
            unlike=self.loop.unlike,
            replay=self._proof,
            setup_s=self._setup_s,
        )
        # No rank is through before the result is on the disk: a stop until then is all ranks' or none's. One
        # while rank 0 writes ends the others only where rank 0 takes longer than the watch's grace.
        self._control.meet(stoppable=False)
        self._close()
        return result

    def _close(self) -> None:
        self._context.watch.release(done=True)
        if self._folder is not None:
            self._folder.close()


def plan_of(dataset: Dataset, context: RunContext) -> EvalPlan:
    """The division of a data set."""
    count, limit = len(dataset), context.options.limit
    if count == 0:
        raise UsageError("the data set is empty: nothing to evaluate")
    return EvalPlan(
        num_samples=count if limit is None else min(limit, count), batch_size=context.options.batch_size
    )
