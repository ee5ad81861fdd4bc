"""From what the ranks have counted and reported to the result that is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import datetime, timezone
from functools import partial
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

from dualeval.columns import Rows
from dualeval.engine.clusters import columns_wanted, find_clusters, with_clusters
from dualeval.engine.columns import columns_of
from dualeval.engine.description import describe
from dualeval.engine.evaluation import Evaluation
from dualeval.engine.folder.collecting import errors_of, gather_failures
from dualeval.engine.folder.folder import RunFolder
from dualeval.engine.folder.journal import JournalFile
from dualeval.engine.folder.opening import PreviousRun
from dualeval.engine.folder.stored_columns import RowsOfChunks
from dualeval.engine.folder.windows import read_columns
from dualeval.engine.in_memory import MemoryWriter
from dualeval.engine.loop import Loop, unwritable
from dualeval.engine.machines import chunks_by_machine
from dualeval.engine.measured import check_keys, fields_of_result, measured_from, plain
from dualeval.engine.opened import Opened
from dualeval.engine.parts import findings_of, part_of, warnings_of, whole_set_intervals
from dualeval.engine.proving import Proven, batches_of_predictions, metric_digests
from dualeval.engine.slices import shared_slices, slicing_of
from dualeval.engine.stored_rows import Window, windows_of_chunks
from dualeval.errors import DualevalError, UsageError
from dualeval.metrics import Measured
from dualeval.metrics.clusters import ClusterIntervals
from dualeval.result import Result

_NAMED_AT_MOST = 5


def finish(
    evaluation: Evaluation, opened: Opened, loop: Loop, proven: Proven, warnings: Sequence[str]
) -> Result:
    """Reduce, check, compute the metrics and, on rank 0, write; every rank gets the same metrics.

    The warnings are this rank's own; the result has those of all ranks.
    """
    result = _Ended(evaluation, opened, loop).result(proven.replay, warnings)
    # No rank is through before the result is on the disk: a stop until then is all ranks' or none's. One
    # while rank 0 writes ends the others only where rank 0 takes longer than the watch's grace.
    evaluation.run.control.meet(stoppable=False)
    let_go(evaluation, opened)
    return result


def let_go(evaluation: Evaluation, opened: Opened) -> None:
    """Nothing is in hand any more that an end would have to save or close."""
    evaluation.run.watch.release(done=True)
    if opened.folder is not None:
        opened.folder.close()


class _Ended:
    """What this rank makes of the evaluation when its loop is through."""

    def __init__(self, evaluation: Evaluation, opened: Opened, loop: Loop) -> None:
        self._evaluation = evaluation
        self._opened = opened
        self._loop = loop
        self._run = evaluation.run
        self._plan = evaluation.plan
        self._task = evaluation.task
        self._dataset = evaluation.dataset
        self._facts = opened.facts
        self._previous = opened.previous
        self._folder = opened.folder
        self._recorder = loop.recorder
        self._writer = loop.recorder.writer
        self._ledger = loop.recorder.ledger
        self._backend = evaluation.run.backend
        self._step = partial(evaluation.run.control.progress.step, "write")
        self._is_main = evaluation.run.backend.world.is_main

    def result(self, replay: str | None, warnings: Sequence[str]) -> Result:
        """Reduce, check, compute and, on rank 0, write; a collective."""
        recorder = self._recorder
        times = {
            **self._loop.times,
            "metrics": self._loop.postprocess_s + recorder.metrics_s,
            "journal": recorder.journal_s,
        }
        self._reduce(times)
        reports = self._backend.all_gather_json(
            {
                "times": times,
                "first_failed": recorder.first_failed,
                "files": len(self._writer.written),
                "chunks": recorder.chunks_saved,
                "warnings": list(warnings),
                "notes": list(self._loop.notes),
                "unlike": self._loop.unlike,
                "shared": self._folder is None or self._folder.shared,
            }
        )
        self._run.note_all(dict.fromkeys(note for report in reports for note in report["notes"]))
        self._ledger.verify_exactly_once()
        evaluated, failed = self._ledger.totals()
        if evaluated == 0:
            index, error = min(report["first_failed"] for report in reports if report["first_failed"])
            raise UsageError(
                f"none of the {failed} samples could be read; the first, {self._dataset.id(index)}: {error}"
            )
        indices = gather_failures(self._backend, recorder.failed) if failed else []
        with self._writable():
            rows = self._collected(reports)
            failures = self._with_errors(indices, rows)
        measured = [plain(metric.name, metric.compute(slots)) for metric, slots in self._ledger.parts()]
        measured += self._measured_by_rows(rows)
        check_keys(measured)
        clusters = self._clusters(rows, measured)
        made = self._made(measured, clusters, reports, failures, evaluated, replay)
        made = self._opened.beside_reference(
            self._evaluation, self._with_slices(made, rows), lambda: self._windows(rows), self._step
        )
        if self._folder is None or not self._is_main:
            return made
        with self._writable():
            return self._written(self._folder, made, rows)

    @contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise unwritable(self._recorder, error) from error

    def _reduce(self, times: dict[str, float]) -> None:
        if self._is_main:
            # Once, and so on one rank alone.
            self._previous.chunks.add_to(self._ledger.values)
        start = perf_counter()
        self._run.control.meet()
        times["meet"] = perf_counter() - start
        self._step()
        start = perf_counter()
        self._ledger.values = self._backend.all_reduce(self._ledger.values, op="sum")
        times["reduce"] = perf_counter() - start

    def _collected(self, reports: Sequence[dict[str, Any]]) -> Sequence[RowsOfChunks]:
        """On rank 0 the rows of all chunks, checked; on the others none. A collective."""
        if isinstance(self._writer, MemoryWriter):
            rounds = max(report["files"] for report in reports)
            return self._writer.collect(self._backend, rounds, self._step)
        assert self._folder is not None
        self._folder.collect(self._backend, self._writer.written, reports, self._step)
        self._step()
        if not self._is_main:
            return []
        fingerprint = self._facts["fingerprint"]
        return self._folder.merged_files(self._previous, reports, fingerprint, self._step)

    def _with_errors(self, failed: Sequence[int], rows: Sequence[RowsOfChunks]) -> list[tuple[int, str]]:
        """Index and error of each failed sample, in order; the errors on rank 0 alone. A collective."""
        if not failed:
            return []
        if isinstance(self._writer, MemoryWriter):
            known = self._backend.gather_json(self._writer.failures) or []
        else:
            known = [file.failures for file in rows if isinstance(file, JournalFile)]
        return errors_of(chain.from_iterable(known), failed)

    def _measured_by_rows(self, rows: Sequence[RowsOfChunks]) -> list[Measured]:
        """What rank 0 makes of all samples' rows, sent to every rank."""
        metrics = self._evaluation.row_metrics
        if not metrics:
            return []
        found: list[dict[str, Any]] | None = None
        if self._is_main:
            names = sorted({name for metric in metrics for name in metric.columns})
            columns = self._columns(rows, names)
            found = [
                asdict(plain(metric.name, metric.compute(columns_of(metric, columns)))) for metric in metrics
            ]
        # JSON keeps every bit of a float.
        return [measured_from(measured) for measured in self._run.from_rank_0(found)]

    def _clusters(
        self, rows: Sequence[RowsOfChunks], measured: Sequence[Measured]
    ) -> ClusterIntervals | None:
        """What rank 0 makes of samples that go together, sent to every rank; None where there are none."""
        name = self._evaluation.cluster
        if name is None:
            return None
        found: dict[str, Any] | None = None
        if self._is_main:
            columns = self._columns(rows, columns_wanted(name, measured, self._evaluation.kept))
            found = asdict(find_clusters(name, measured, columns))
        found = self._run.from_rank_0(found)
        ends = {key: (low, high) for key, (low, high) in found["intervals"].items()}
        return ClusterIntervals(**{**found, "intervals": ends, "warnings": tuple(found["warnings"])})

    def _columns(self, rows: Sequence[RowsOfChunks], names: Sequence[str]) -> dict[str, Rows]:
        """Columns of all evaluated samples, mapped from files where there is a folder; rank 0 calls it."""
        folder = None if self._folder is None else self._folder.path
        with self._writable():
            return read_columns(rows, self._plan, names, folder, self._step)

    def _with_slices(self, result: Result, rows: Sequence[RowsOfChunks]) -> Result:
        """The result with the metrics of each group that was asked for; a collective where any was."""
        slicing = slicing_of(self._evaluation, self._step)
        if slicing is None:
            return result
        found: Result | None = None
        if self._is_main:
            path = Path("the run") if self._folder is None else self._folder.path
            try:
                found = slicing.of_run(result, self._windows(rows), self._evaluation.kept, path)
            except DualevalError as error:
                # The run itself is not lost for it: 'dualeval slice' computes others from its rows.
                found = replace(result, warnings=[*result.warnings, f"no slices: {error}"])
        return shared_slices(self._run, result, found)

    def _windows(self, rows: Sequence[RowsOfChunks]) -> Iterator[Window]:
        return windows_of_chunks(rows, self._plan, self._task, self._dataset, self._evaluation.kept)

    def _made(
        self,
        measured: Sequence[Measured],
        clusters: ClusterIntervals | None,
        reports: Sequence[dict[str, Any]],
        failures: Sequence[tuple[int, str]],
        evaluated: int,
        replay: str | None,
    ) -> Result:
        """The result; the same on every rank, but for seconds before the loop and earlier runs' machines."""
        facts, previous, run = self._facts, self._previous, self._run
        plan, world, machine = self._plan, run.backend.world, facts["machine"]
        # The slowest rank's: the run is not through before.
        evaluate_s = max(report["times"]["evaluate"] for report in reports)
        found = findings_of(self._task, self._dataset, plan.num_samples)
        odd = {kind: ids for kind, ids in found.items() if ids}
        part = part_of(self._dataset, plan)
        fields, said = with_clusters(fields_of_result(measured), self._evaluation.cluster, clusters)
        remaining = previous.chunks.remaining
        looked = [report["unlike"] for report in reports if report["unlike"] is not None]
        machines = chunks_by_machine(
            [
                *((file.machine, len(file.chunks)) for file in previous.chunks.files),
                *zip(facts["machines"], (report["chunks"] for report in reports), strict=True),
            ]
        )
        return Result(
            **fields,
            whole_set_intervals=whole_set_intervals(part, evaluated, fields),
            part=part,
            samples={"total": plan.num_samples, "evaluated": evaluated, "failed": len(failures)},
            failed=[{"id": self._dataset.id(index), "error": error} for index, error in failures],
            chunks={
                "total": plan.num_chunks,
                "evaluated_now": len(remaining),
                "resumed": plan.num_chunks - len(remaining),
            },
            job={**run.job, **self._task.options()},
            description=describe(self._task, part, plan, facts["job"], facts["fingerprint"]),
            labels=dict(self._task.labels_used()),
            fingerprint=facts["fingerprint"],
            samples_digest=facts["samples_digest"],
            data={
                "fingerprint": facts["job"]["data"],
                "contents": facts["job"]["contents"],
                "samples": part["of"],
                "findings": odd,
            },
            weights=facts["job"]["weights"],
            versions=machine["versions"],
            world={
                "size": world.size,
                "nodes": len(set(facts["hosts"])),
                "launcher": world.launcher,
                "backend": run.backend.name,
            },
            device={key: machine[key] for key in ("device", "model", "cpu_capability", "bits")},
            homogeneous=len(machines) == 1,
            machines=[dict(kind) for kind in machines],
            deterministic=not any(looked) if looked else None,
            finished_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            replay=replay,
            timing={
                "total_s": perf_counter() - run.started,
                "setup_s": self._loop.setup_s,
                "evaluate_s": evaluate_s,
                "ranks": [report["times"] for report in reports],
            },
            samples_per_s=plan.samples_in(remaining) / evaluate_s,
            work={name: count for each in measured for name, count in each.work.items()},
            warnings=[
                *warnings_of(part),
                *previous.notes,
                *next(filter(None, looked), []),
                *dict.fromkeys(sentence for report in reports for sentence in report["warnings"]),
                *_warnings(measured, said, len(failures), odd, len(machines)),
            ],
            folder=None if self._folder is None else str(self._folder.path),
        )

    def _written(self, folder: RunFolder, result: Result, rows: Sequence[RowsOfChunks]) -> Result:
        """Write the result and what lies beside it; rank 0 calls it."""
        files = [file for file in rows if isinstance(file, JournalFile)]
        return folder.write(
            _compared_with_replaced(result, self._previous),
            self._plan,
            self._task,
            self._dataset,
            self._evaluation.kept,
            () if self._evaluation.added is None else self._evaluation.added.names,
            self._previous,
            files,
            self._metric_digests,
            step=self._step,
        )

    def _metric_digests(self, path: Path, fingerprint: str) -> dict[str, str]:
        """What the metrics make of the first batch that a later run compares, by their names."""
        stored = next(batches_of_predictions(path, self._plan, fingerprint), None)
        if stored is None:
            return {}
        return metric_digests(self._evaluation.metrics, self._evaluation.row_metrics, stored.columns)


def _compared_with_replaced(result: Result, previous: PreviousRun) -> Result:
    """Warn where all was evaluated again, on a machine of the same bits, and came to other metrics."""
    if previous.replaced is None or not result.homogeneous:
        return result
    digest, bits = previous.replaced
    if result.device.get("bits") != bits or result.metrics_digest == digest:
        return result
    warning = (
        f"the result that was there before its files were damaged had metrics_digest {digest}, and this one "
        f"has {result.metrics_digest}: something that the job's identity does not name has changed since"
    )
    return replace(result, warnings=[*result.warnings, warning])


def _warnings(
    measured: Sequence[Measured],
    said: Sequence[str],
    failed: int,
    odd: Mapping[str, Sequence[str]],
    machines: int,
) -> Iterator[str]:
    if failed:
        if failed == 1:
            yield "1 sample could not be read and is in no metric; result.json lists it"
        else:
            yield f"{failed:,} samples could not be read and are in no metric; result.json lists them"
    for kind, ids in odd.items():
        more = ", ..." if len(ids) > _NAMED_AT_MOST else ""
        named = ", ".join(ids[:_NAMED_AT_MOST])
        yield f"{kind.replace('_', ' ')}: {len(ids)} samples ({named}{more}), listed in result.json"
    for part in measured:
        yield from part.warnings
    yield from said
    if machines > 1:
        yield (
            f"{machines} kinds of machine have computed this (machines in result.json: device model, CPU "
            "capability, bits or versions differ): metrics agree to tolerance only, and metrics_digest "
            "cannot be compared with any other"
        )
