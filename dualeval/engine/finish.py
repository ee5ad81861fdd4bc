"""From the ranks' counts and reports to the written result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from dualeval.columns.ragged import NumpyRows
from dualeval.engine.checks.replay import Proven, batches_of_predictions, comparable, metric_digests
from dualeval.engine.control.progress import Stage
from dualeval.engine.device.machines import chunks_by_machine
from dualeval.engine.folder.folder import RunFolder
from dualeval.engine.folder.journal import JournalFile
from dualeval.engine.folder.layout import what_they_said
from dualeval.engine.folder.predictions import write_json_file, write_predictions
from dualeval.engine.folder.row_windows import PLAIN, RowsOfChunks, read_columns
from dualeval.engine.folder.stored_rows import MemoryWriter, NewRows, collect_rows
from dualeval.engine.job.evaluation import Evaluation
from dualeval.engine.job.opened import Opened
from dualeval.engine.loop.loop import Loop, unwritable
from dualeval.engine.samples.subset import findings_of, part_of, warnings_of, whole_set_intervals
from dualeval.engine.values.measured import clustered_fields, measure
from dualeval.engine.values.plan import EvalPlan
from dualeval.errors import DualevalError, UsageError
from dualeval.messages import counted, first_of
from dualeval.metrics import mistakes
from dualeval.result import FIRST_SAMPLES, INTERVAL_FORMULAS, PREDICTIONS, Result, TimedStage, checksum_of
from dualeval.tasks import Task

_NAMED_AT_MOST = 5
# Fields of a result that rank 0 computes from all ranks' counts and from the rows.
_NUMBERS = (
    *("metrics", "intervals", "rough", "naive_intervals", "clusters", "nonfinite", "units", "directions"),
    *("scores", "work", "whole_set_intervals", "slices", "reference", "warnings", "machines", "homogeneous"),
)
_SHOWN_DIGITS = 8


def finish(
    evaluation: Evaluation, opened: Opened, loop: Loop, proven: Proven, warnings: Sequence[str]
) -> Result:
    """Reduce, check, compute the metrics and, on rank 0, write; every rank gets the same metrics.

    The warnings are this rank's own; the result has those of all ranks.
    """
    result = _Ended(evaluation, opened, loop).result(proven.replay, warnings)
    # No rank finishes before the result is on the disk, so that a stop until then ends all ranks or none. A
    # stop while rank 0 writes ends the others only if rank 0 takes longer than the watch's grace period.
    evaluation.run.control.meet(stoppable=False)
    let_go(evaluation, opened)
    return result


def finish_share(evaluation: Evaluation, opened: Opened, loop: Loop, warnings: Sequence[str]) -> None:
    """Check that all of a share is on the disk, and say that it is done; every rank calls this."""
    run, folder = evaluation.run, opened.folder
    assert run.share is not None and folder is not None
    run.control.meet()
    reports = run.backend.gather_json({"warnings": list(warnings), "unlike": loop.unlike})
    if reports is not None:
        sentences = (sentence for report in reports for sentence in report["warnings"])
        content = {
            "warnings": [*dict.fromkeys([*opened.previous.notes, *sentences])],
            # Of the ranks that have computed samples twice.
            "unlike": [report["unlike"] for report in reports if report["unlike"] is not None],
        }
        run.note(folder.finish_share(evaluation.plan, run.share, opened.previous, content))
    run.control.meet(stoppable=False)
    let_go(evaluation, opened)


def let_go(evaluation: Evaluation, opened: Opened) -> None:
    """Release the watch and close the folder: nothing is left to save when the process exits."""
    evaluation.run.watch.release(done=True)
    if opened.folder is not None:
        opened.folder.close()


class _Ended:
    """One rank's steps from the end of its loop to the result."""

    def __init__(self, evaluation: Evaluation, opened: Opened, loop: Loop) -> None:
        self._evaluation = evaluation
        self._opened = opened
        self._loop = loop
        self._run = evaluation.run
        self._plan = evaluation.plan
        self._dataset = evaluation.dataset
        self._previous = opened.previous
        self._folder = opened.folder
        self._recorder = loop.recorder
        self._writer = loop.recorder.writer
        self._ledger = loop.recorder.ledger
        self._step = partial(evaluation.run.control.progress.step, Stage.WRITE)
        self._is_main = evaluation.run.backend.world.is_main

    def result(self, replay: str | None, warnings: Sequence[str]) -> Result:
        """Reduce, check, compute and, on rank 0, write; a collective."""
        recorder = self._recorder
        times = {
            **self._loop.times,
            TimedStage.METRICS: self._loop.postprocess_s + recorder.metrics_s,
            TimedStage.JOURNAL: recorder.journal_s,
        }
        self._reduce(times)
        # Only rank 0 has these. Failures in shares count; those of earlier runs are tried again.
        earlier = [failure for file in self._previous.chunks.files for failure in file.failures]
        shares = what_they_said(self._folder.path) if self._folder is not None and self._is_main else []
        reports = self._run.backend.all_gather_json(
            {
                "times": times,
                "first_failed": min(filter(None, [recorder.first_failed, *earlier]), default=None),
                "workers": self._run.workers,
                "cores": self._run.cores,
                "files": len(self._writer.written),
                "in_memory": isinstance(self._writer, MemoryWriter),
                "chunks": recorder.chunks_saved,
                "warnings": [*warnings, *(sentence for share in shares for sentence in share["warnings"])],
                "notes": list(self._loop.notes),
                "unlike": [
                    *([] if self._loop.unlike is None else [self._loop.unlike]),
                    *(unlike for share in shares for unlike in share["unlike"]),
                ],
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
        with self._writable():
            rows = self._collected(reports)
        failures = self._failures(rows) if failed else {}
        made = self._without_numbers(reports, failures, evaluated, replay)
        if not self._is_main:
            return replace(made, **self._run.from_rank_0(None))
        with self._writable():
            made = self._with_numbers(made, reports, rows)
        self._run.from_rank_0({name: getattr(made, name) for name in _NUMBERS})
        if self._folder is None:
            return made
        return self._written(self._folder, made, rows)

    @contextmanager
    def _writable(self) -> Iterator[None]:
        """Say why the folder cannot be read or written any more."""
        try:
            yield
        except OSError as error:
            raise unwritable(self._recorder, error) from error

    def _reduce(self, times: dict[str, float]) -> None:
        if self._is_main:
            # Rank 0 alone adds the earlier ledgers, so that they count once.
            self._previous.chunks.add_to(self._ledger.values)
        start = perf_counter()
        self._run.control.meet()
        times[TimedStage.MEET] = perf_counter() - start
        self._step()
        start = perf_counter()
        self._ledger.values = self._run.backend.all_reduce(self._ledger.values, op="sum")
        times[TimedStage.REDUCE] = perf_counter() - start

    def _collected(self, reports: Sequence[dict[str, Any]]) -> Sequence[RowsOfChunks]:
        """The rows of all chunks, checked, on rank 0; empty on the others. A collective."""
        held = [report["files"] if report["in_memory"] else 0 for report in reports]
        rows: list[RowsOfChunks] = [*collect_rows(self._writer, self._run.backend, max(held), self._step)]
        if self._folder is not None and self._is_main:
            files = [0 if report["in_memory"] else report["files"] for report in reports]
            rows += self._folder.merged_files(self._previous, files, self._step)
        return rows

    def _failures(self, rows: Sequence[RowsOfChunks]) -> dict[int, str]:
        """The failed samples' errors by index, in order; only rank 0 has their texts. A collective."""
        # The indices alone go to all ranks: eight bytes each.
        earlier = [index for file in self._previous.chunks.files for index, _ in file.failures]
        failed = torch.tensor([*self._recorder.failed, *earlier], dtype=torch.int64)
        indices = self._run.backend.all_gather(failed)
        held = self._writer.failures if isinstance(self._writer, MemoryWriter) else []
        known = [file.failures for file in rows if isinstance(file, JournalFile)]
        errors = dict(chain(*(self._run.backend.gather_json(held) or []), *known))
        return {index: errors.get(index, "") for index in torch.cat(indices).sort().values.tolist()}

    def _without_numbers(
        self,
        reports: Sequence[dict[str, Any]],
        failures: Mapping[int, str],
        evaluated: int,
        replay: str | None,
    ) -> Result:
        """The result without rank 0's numbers; the same on every rank, except for seconds before the loop."""
        facts, run, plan, world = self._opened.facts, self._run, self._plan, self._run.backend.world
        task, job, machine = self._evaluation.task, facts.job, self._opened.machine
        # The run takes as long as its slowest rank.
        evaluate_s = max(report["times"]["evaluate"] for report in reports)
        findings = findings_of(task, self._dataset, plan.num_samples)
        part = part_of(self._dataset, plan)
        remaining = self._previous.chunks.remaining
        limit = None
        if any(report["workers"] for report in reports):  # who reads itself does not wait
            from dualeval.engine.values.limits import limit_of

            batches = sum(len(plan.chunk_batches(chunk)) for chunk in remaining)
            limit = limit_of(reports, batches, run.device.type)
        looked = [unlike for report in reports for unlike in report["unlike"]]
        return Result(
            metrics={},
            intervals={},
            interval_formulas=INTERVAL_FORMULAS,
            nonfinite={},
            homogeneous=True,
            part=part,
            samples={"total": plan.num_samples, "evaluated": evaluated, "failed": len(failures)},
            failed=[{"id": self._dataset.id(index), "error": error} for index, error in failures.items()],
            chunks={
                "total": plan.num_chunks,
                "evaluated_now": len(remaining),
                "resumed": plan.num_chunks - len(remaining),
            },
            job={**run.job, **task.options()},
            description=describe(task, part, plan, job, facts.fingerprint),
            labels=dict(task.labels_used()),
            fingerprint=facts.fingerprint,
            samples_digest=facts.samples_digest,
            data={
                "fingerprint": job["data"],
                "contents": job["contents"],
                "samples": part["of"],
                "findings": {kind: ids for kind, ids in findings.items() if ids},
            },
            weights=job["weights"],
            versions=machine["versions"],
            world={
                "size": world.size,
                "nodes": len(set(facts.hosts)),
                "launcher": world.launcher,
                "backend": run.backend.name,
            },
            device={key: machine[key] for key in ("device", "model", "cpu_capability", "bits")},
            deterministic=not any(looked) if looked else None,
            finished_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            replay=replay,
            timing={
                "total_s": perf_counter() - run.started,
                "setup_s": self._loop.setup_s,
                "evaluate_s": evaluate_s,
                "ranks": [report["times"] for report in reports],
                "limited_by": limit,
            },
            samples_per_s=plan.samples_in(remaining) / evaluate_s,
            warnings=[
                *warnings_of(part),
                *self._previous.notes,
                *next(filter(None, looked), []),
                *dict.fromkeys(sentence for report in reports for sentence in report["warnings"]),
            ],
            folder=None if self._folder is None else str(self._folder.path),
        )

    def _with_numbers(
        self, result: Result, reports: Sequence[dict[str, Any]], rows: Sequence[RowsOfChunks]
    ) -> Result:
        """The result with its metrics and all else that rank 0 computes from counts and rows."""
        cluster, row_metrics = self._evaluation.cluster, self._evaluation.row_metrics
        read = partial(self._columns, rows)
        names = sorted({name for metric in row_metrics for name in metric.columns})
        columns = read(names) if names else {}
        measured = measure(self._ledger.slots(), row_metrics, columns)
        fields, of_clusters = clustered_fields(measured, cluster, self._evaluation.kept, read)
        machines = chunks_by_machine(
            [
                *((file.machine, len(file.chunks)) for file in self._previous.chunks.files),
                *zip(self._opened.facts.machines, (report["chunks"] for report in reports), strict=True),
            ]
        )
        result = replace(
            result,
            **fields,
            whole_set_intervals=whole_set_intervals(result.part, result.samples["evaluated"], fields),
            work={name: count for part in measured for name, count in part.work.items()},
            machines=[dict(kind) for kind in machines],
            homogeneous=len(machines) == 1,
        )
        of_metrics = [sentence for part in measured for sentence in part.warnings]
        of_metrics += self._mistakes(rows, result.clusters.get("count", result.samples["evaluated"]))
        result = replace(result, warnings=[*result.warnings, *_warnings(result, [*of_metrics, *of_clusters])])
        new = NewRows(
            path=Path(result.folder or "the run"),
            names=tuple(self._evaluation.kept),
            files=rows,
            plan=self._plan,
            task=self._evaluation.task,
            dataset=self._dataset,
        )
        result = self._with_slices(result, new)
        return self._opened.beside_reference(result, new.windows(), self._dataset, self._step)

    def _mistakes(self, rows: Sequence[RowsOfChunks], samples: int) -> list[str]:
        """Warnings of common mistakes that counts or rows show, given the number of independent samples."""
        if (warnings := mistakes.of_counts(self._ledger.slots(), samples)) is not None:
            return warnings
        known = {name: column for file in rows for name, column in file.columns.items()}
        scalar = [name for name, column in known.items() if column.form == PLAIN and not column.row_shape]
        names = mistakes.pair_among(scalar)
        of = self._evaluation
        reads = {name for each in (of.metrics, of.row_metrics) for metric in each for name in metric.columns}
        return [*mistakes.of_rows(self._columns(rows, names), samples, reads=reads)] if names else []

    def _columns(self, rows: Sequence[RowsOfChunks], names: Sequence[str]) -> dict[str, NumpyRows]:
        """Columns of all evaluated samples, mapped from files if there is a folder."""
        folder = None if self._folder is None else self._folder.path
        return read_columns(rows, self._plan, names, folder, self._step)

    def _with_slices(self, result: Result, rows: NewRows) -> Result:
        """The result with the metrics of each group that was asked for."""
        if not self._evaluation.run.options.by:
            return result
        from dualeval.engine.scoring.slices import slicing_of

        slicing = slicing_of(self._evaluation, self._step)
        assert slicing is not None
        try:
            return slicing.of_rows(result, rows)
        except DualevalError as error:
            # The run is not lost: 'dualeval slice' can compute slices from its rows.
            return replace(result, warnings=[*result.warnings, f"no slices: {error}"])

    def _written(self, folder: RunFolder, result: Result, rows: Sequence[RowsOfChunks]) -> Result:
        """Write predictions.parquet, result.json and, last, status.json; rank 0 calls it.

        After that, the journal is not needed any more.
        """
        folder.check()
        with self._writable():
            result = self._with_files(folder.path, result, rows)
            # Writing may have taken minutes, in which this process may have been stopped.
            folder.check()
            folder.write(result)
            folder.finish(self._previous, [file.path for file in rows if isinstance(file, JournalFile)])
        return result

    def _with_files(self, path: Path, result: Result, rows: Sequence[RowsOfChunks]) -> Result:
        """Write the rows and the other files beside the result, which has their checksums."""
        of, plan, dataset, step = self._evaluation, self._plan, self._dataset, self._step
        of_data = () if of.added is None else of.added.names
        write_predictions(path / PREDICTIONS, rows, plan, of.task, dataset, of.kept, of_data, step)
        for name, column in of.task.exports.items():
            if callable(column):
                column(path / name)
            else:
                write_json_file(path / name, rows, plan, of.task, dataset, of.kept, column, step)
        # Digests of the metrics of the first batch that a later run would compare.
        drawn = batches_of_predictions(path / PREDICTIONS, plan, result.fingerprint)
        stored = next(comparable(drawn), None)
        digests = {} if stored is None else metric_digests(of.metrics, of.row_metrics, stored.columns)
        names = (PREDICTIONS, *of.task.exports)
        return replace(
            result, files={name: checksum_of(path / name, step) for name in names}, metric_digests=digests
        )


def _warnings(result: Result, of_metrics: Sequence[str]) -> Iterator[str]:
    """Warnings about the numbers."""
    failed, machines = result.samples["failed"], len(result.machines)
    if failed:
        if failed == 1:
            yield "1 sample could not be read and is left out of all metrics; result.json lists it"
        else:
            yield (
                f"{failed:,} samples could not be read and are left out of all metrics; result.json lists "
                "them"
            )
    for kind, ids in result.data["findings"].items():
        named = first_of(ids, _NAMED_AT_MOST)
        yield f"{kind.replace('_', ' ')}: {len(ids)} samples ({named}), listed in result.json"
    yield from of_metrics
    if machines > 1:
        yield (
            f"{machines} kinds of machine computed this (machines in result.json: device model, CPU "
            "capability, bits or versions differ): metrics agree to tolerance only, and metrics_digest "
            "cannot be compared with any other"
        )


def describe(
    task: Task, part: Mapping[str, Any], plan: EvalPlan, job: Mapping[str, Any], fingerprint: str
) -> dict[str, str]:
    """Complete a task's description with what the engine knows."""
    of_task = task.description()
    first = {} if "model" in of_task else {"task": task.name}
    # In this order, whatever order the task uses.
    lines = {**first, "model": "", "weights": "", "data": "", **of_task}
    weights, data = job["weights"], f"fingerprint {job['data'][:_SHOWN_DIGITS]}"
    if job["contents"] is not None:
        data += f", contents {job['contents'][:_SHOWN_DIGITS]}"
    mark = f"fingerprint {weights['fingerprint'][:_SHOWN_DIGITS]}" if weights["elements"] else ""
    lines["weights"] = _with(lines["weights"], mark)
    lines["data"] = _with(lines["data"], f"{_samples(part)}, {data}")
    done = ", ".join([f"batch size {plan.batch_size}", *_prepared(job)])
    lines["job"] = f"{done} (fingerprint {fingerprint[:_SHOWN_DIGITS]})"
    return {label: text for label, text in lines.items() if text}


def _prepared(job: Mapping[str, Any]) -> list[str]:
    """How the model was prepared, in the words of the options."""
    kept = ["batch norms in fp32"] if job.get("keep_batchnorm_fp32") else []
    return [job["precision"], *kept, *(job[name] for name in ("layout", "optimize") if name in job)]


def _with(text: str, more: str) -> str:
    return f"{text} ({more})" if text and more else text or more


def _samples(part: Mapping[str, Any]) -> str:
    count, total = f"{part['samples']:,}", counted(part["of"], "sample")
    if part["kind"] == FIRST_SAMPLES:
        return f"the first {count} of {total}"
    return f"{count} of {total}, seed {part['seed']}" if "seed" in part else total
