"""Evaluator: the one loop that evaluates a task, whatever launcher, backend or number of processes."""

from __future__ import annotations

import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dualeval.engine import numerics
from dualeval.engine.agreement import check_same_job, machine_facts, model_fingerprint
from dualeval.engine.compute import Compute, Pending, usable_threads
from dualeval.engine.control import ControlPlane
from dualeval.engine.feed import FailedSample, Feed, Reader
from dualeval.engine.folder import RunFolder
from dualeval.engine.journal import JournalWriter
from dualeval.engine.plan import EvalPlan
from dualeval.engine.recorder import Recorder
from dualeval.errors import UsageError
from dualeval.metrics import Measured
from dualeval.result import Result, sha256_of_json

if TYPE_CHECKING:
    from dualeval.backends.base import Backend
    from dualeval.tasks import Task

# Called with (samples done over all ranks, samples in all); on rank 0 only.
Show = Callable[[int, int], None]


class Evaluator:
    """Evaluates one task on the ranks of one backend.

    Args:
        task: what is evaluated.
        backend: how the ranks reduce and gather.
        control: where the ranks meet; opened on the same backend.
        out: folder for result.json and the rest, the same path on every rank; None makes a new folder
            ``runs/<UTC time>-<fingerprint>``.
        batch_size: samples a batch.
        limit: evaluate only the first samples; None for all.
        precision: a key of ``numerics.PRECISIONS``.
        workers: reading processes of each rank; 0 reads in the rank's own process.
        on_error: what a sample that cannot be read does: "stop" ends the run, "skip" leaves it out.
        fresh: remove an earlier run's files from ``out`` first.
        job: the options as the caller wants them recorded in the result.
        show: progress display, called on rank 0 from a thread of its own.
        started: ``perf_counter()`` at the start of the run, where that was before this call.
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
        fresh: bool = False,
        job: Mapping[str, Any] | None = None,
        show: Show | None = None,
        started: float | None = None,
    ) -> None:
        self._task = task
        self._backend = backend
        self._control = control
        self._out = out
        self._batch_size = batch_size
        self._limit = limit
        self._precision = precision
        self._workers = workers
        self._on_error = on_error
        self._fresh = fresh
        self._job = dict(job or {})
        self._show = show
        self._started = perf_counter() if started is None else started

    def run(self) -> Result:
        """Evaluate; every rank calls this and gets the same metrics.

        Raises:
            UsageError: task, data, weights and options do not fit together.
            ExactlyOnceError: a sample was counted never, or more than once.
            PeerError: another rank failed first.
        """
        if self._backend.world.is_main and self._out is not None and not self._fresh:
            # Again when the folder is made; here, because reading weights and data may take minutes.
            RunFolder.check_unused(self._out.absolute())
        threads = torch.get_num_threads()
        with numerics.settings(self._precision, self._backend.device):
            with numerics.autocast(self._precision, self._backend.device):
                model = self._task.build_model(self._backend.device)
            return _Run(self, model, threads).execute()


class _Run:
    """One execution: what is known once the model is built."""

    def __init__(self, evaluator: Evaluator, model: nn.Module, threads: int) -> None:
        self._options = evaluator
        self._task = evaluator._task
        self._backend = evaluator._backend
        self._control = evaluator._control
        self._world = evaluator._backend.world
        self._model = model
        self._threads = threads
        self._dataset = self._task.dataset()
        self._plan = self._make_plan()
        self._metrics = tuple(self._task.metrics())
        self._times: dict[str, float] = {}

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
        folder = self._make_folder(facts)
        try:
            return self._evaluate_into(folder, facts)
        except BaseException as error:
            folder.note_failure(error)
            raise

    # -- before the loop ---------------------------------------------------------------------------

    def _agree(self) -> dict[str, Any]:
        """Compare jobs and machines over all ranks; returns what the result says about both."""
        job = {
            "task": self._task.name,
            "task_options": self._task.fingerprint(),
            "data": self._dataset.fingerprint(self._plan.num_samples),
            "samples": self._plan.num_samples,
            "weights": model_fingerprint(self._model),
            "metrics": [metric.name for metric in self._metrics],
            "batch_size": self._plan.batch_size,
            "precision": self._options._precision,
            "on_error": self._options._on_error,
        }
        machine = machine_facts(self._backend.device)
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
            "fingerprint": sha256_of_json({"job": job, "machine": machines[0]}),
        }

    def _make_folder(self, facts: Mapping[str, Any]) -> RunFolder:
        """Rank 0 makes the output folder; the others learn its path and see whether they share it."""
        chosen: list[str] | None = None
        if self._world.is_main:
            now = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S")
            out = self._options._out or Path("runs") / f"{now}-{facts['fingerprint'][:8]}"
            token = secrets.token_hex(4)
            RunFolder.create(out.absolute(), token, fresh=self._options._fresh)
            chosen = [str(out.absolute()), token]
        self._control.meet()
        chosen = self._backend.broadcast_json(chosen, src=0)
        assert chosen is not None
        # A path that was given is this rank's to resolve: without a shared folder it names its own disk's.
        path = Path(chosen[0]) if self._options._out is None else self._options._out.absolute()
        return RunFolder(path, chosen[1], rank=self._world.rank)

    # -- the loop ----------------------------------------------------------------------------------

    def _evaluate_into(self, folder: RunFolder, facts: Mapping[str, Any]) -> Result:
        writer = JournalWriter(
            folder.journal, fingerprint=facts["fingerprint"], prefix=f"{folder.token}-{self._world.rank:05d}"
        )
        recorder = Recorder(self._plan, self._metrics, self._task.rows, writer)
        setup_s = perf_counter() - self._options._started
        show = self._options._show if self._world.is_main else None
        self._control.start_reporting(
            None if show is None else lambda done: show(done, self._plan.num_samples)
        )
        start = perf_counter()
        try:
            self._loop(recorder)
            recorder.flush()
        finally:
            self._control.stop_reporting()
        evaluate_s = perf_counter() - start
        self._times.update(evaluate=evaluate_s, metrics=recorder.metrics_s, journal=recorder.journal_s)
        return self._finish(folder, facts, recorder, writer, setup_s=setup_s)

    def _loop(self, recorder: Recorder) -> None:
        """Every batch of this rank: no collective, no wait but for the batch ``compute.ahead`` behind."""
        chunks = self._plan.static_chunks(self._world.rank, self._world.size)
        numbers = [(chunk, batch) for chunk in chunks for batch in self._plan.chunk_batches(chunk)]
        feed = Feed(
            Reader(self._dataset, self._task),
            [self._plan.batch_samples(batch) for _, batch in numbers],
            workers=self._options._workers,
            device=self._backend.device,
        )
        # Not the batch itself: its inputs would stay on the device for as long.
        under_way: deque[tuple[tuple[int, int], Pending | None, tuple[FailedSample, ...]]] = deque()
        compute_s = 0.0
        device = self._backend.device
        threads = usable_threads(self._task, self._model, device, self._threads, len(numbers))
        with Compute(self._task, self._model, device, self._options._precision, threads) as compute:
            for number, batch in zip(numbers, feed, strict=True):
                if batch.failed and self._options._on_error == "stop":
                    raise self._unreadable(batch.failed[0])
                start = perf_counter()
                pending = None if batch.data is None else compute.start(batch.data)
                under_way.append((number, pending, batch.failed))
                compute_s += perf_counter() - start
                if len(under_way) > compute.ahead:
                    compute_s += self._settle(recorder, *under_way.popleft())
                self._control.raise_if_peer_failed()
            while under_way:
                compute_s += self._settle(recorder, *under_way.popleft())
        self._times.update(data=feed.wait_s, transfer=feed.transfer_s, compute=compute_s)

    def _settle(
        self,
        recorder: Recorder,
        number: tuple[int, int],
        pending: Pending | None,
        failed: tuple[FailedSample, ...],
    ) -> float:
        """Wait for a batch and record it; returns the seconds waited."""
        start = perf_counter()
        columns = None if pending is None else pending()
        waited = perf_counter() - start
        recorder.add(*number, columns, failed)
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
        recorder: Recorder,
        writer: JournalWriter,
        *,
        setup_s: float,
    ) -> Result:
        """Reduce, check, compute and, on rank 0, write; no rank returns before the result is on disk."""
        start = perf_counter()
        self._control.meet()
        self._times["meet"] = perf_counter() - start
        start = perf_counter()
        recorder.ledger.values = self._backend.all_reduce(recorder.ledger.values, op="sum")
        self._times["reduce"] = perf_counter() - start
        reports = self._backend.all_gather_json(
            {
                "times": self._times,
                "failed": [[sample.index, sample.error] for sample in recorder.failed],
                "files": len(writer.written),
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
        folder.collect(self._backend, writer.written, reports)
        result = self._result(folder, facts, recorder, reports, setup_s=setup_s)
        if self._world.is_main:
            folder.write(result, self._plan, self._dataset.id, self._task.rows)
        self._control.meet()
        return result

    def _result(
        self,
        folder: RunFolder,
        facts: Mapping[str, Any],
        recorder: Recorder,
        reports: list[dict[str, Any]],
        *,
        setup_s: float,
    ) -> Result:
        # The slowest rank's: the run is not through before.
        evaluate_s = max(report["times"]["evaluate"] for report in reports)
        measured = [metric.compute(slots) for metric, slots in recorder.ledger.parts()]
        evaluated, failed = recorder.ledger.totals()
        failures = sorted(tuple(entry) for report in reports for entry in report["failed"])
        nonfinite = {name: counts for part in measured for name, counts in part.nonfinite.items()}
        machine = facts["machine"]
        return Result(
            metrics={name: value for part in measured for name, value in part.values.items()},
            intervals={name: interval for part in measured for name, interval in part.intervals.items()},
            nonfinite=nonfinite,
            samples={"total": self._plan.num_samples, "evaluated": evaluated, "failed": failed},
            failed=[{"id": self._dataset.id(index), "error": error} for index, error in failures],
            chunks={"total": self._plan.num_chunks, "evaluated_now": self._plan.num_chunks, "resumed": 0},
            job=self._options._job,
            fingerprint=facts["fingerprint"],
            data={"fingerprint": facts["job"]["data"], "samples": len(self._dataset)},
            weights=facts["job"]["weights"],
            versions=machine["versions"],
            world={
                "size": self._world.size,
                "nodes": len(set(facts["hosts"])),
                "launcher": self._world.launcher,
                "backend": self._backend.name,
            },
            device={key: machine[key] for key in ("device", "model", "cpu_capability")},
            homogeneous=facts["homogeneous"],
            timing={
                "total_s": perf_counter() - self._options._started,
                "setup_s": setup_s,
                "evaluate_s": evaluate_s,
                "ranks": [report["times"] for report in reports],
            },
            samples_per_s=evaluated / evaluate_s,
            warnings=list(_warnings(measured, failed, facts["homogeneous"])),
            folder=str(folder.path),
        )


def _warnings(measured: list[Measured], failed: int, homogeneous: bool) -> Iterator[str]:
    if failed:
        yield f"{failed} samples could not be read and are in no metric; result.json lists them"
    for part in measured:
        yield from part.warnings
    if not homogeneous:
        yield "the ranks differ in device model, CPU capability or versions: metrics agree to tolerance only"
