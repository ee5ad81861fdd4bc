"""The check of a resumed run: two finished batches are evaluated again and compared with their rows on disk.

The job's fingerprint covers what decides its numbers, as far as that can be known. It cannot cover an
imported helper, or a file or variable that the model reads; but a change of these shows in the numbers.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dualeval.columns.ragged import NumpyRows, kind_of, to_column
from dualeval.engine.control.progress import Stage
from dualeval.engine.device.machines import is_same
from dualeval.engine.folder.journal import JournalFile
from dualeval.engine.folder.recorder import Ledger
from dualeval.engine.folder.row_windows import EVALUATED, evaluated_of
from dualeval.engine.folder.stored_rows import StoredRows, Window
from dualeval.engine.job.evaluation import Evaluation
from dualeval.engine.job.opened import Opened
from dualeval.engine.samples.feed import FailedSample
from dualeval.engine.samples.subset import name_of
from dualeval.engine.values.measured import columns_of, plain
from dualeval.engine.values.plan import EvalPlan
from dualeval.errors import UsageError
from dualeval.metrics import Measured, Metric, RowMetric, keeps_rows
from dualeval.process.status_line import doing
from dualeval.result import PREDICTIONS, Result, sha256_of_json

SAME_BITS = "same bits"
WITHIN_TOLERANCE = "within tolerance"
NOTHING_TO_COMPARE = "nothing to compare"
SKIPPED = "skipped"
# If batches differ in outcome, the one that is last here counts.
OUTCOMES = (NOTHING_TO_COMPARE, SAME_BITS, WITHIN_TOLERANCE)

# Part of a batch's rows that may be outside the tolerance on another machine: near ties, the predicted class
# may change.
_OUTSIDE = 0.1
# Letters of a value in a message: a ragged row may be of any length.
_LONGEST_SHOWN = 400

# Returns the kept columns of a batch, and its samples that could not be read.
EvaluatesBatch: TypeAlias = Callable[[range], tuple[Mapping[str, NumpyRows], tuple[FailedSample, ...]]]


@dataclass(frozen=True, kw_only=True)
class Proven:
    """The outcome of a comparison with finished batches."""

    # How equal they are; None if nothing is finished.
    replay: str | None = None
    # The result, if an earlier run has finished here.
    earlier: Result | None = None


@dataclass(frozen=True, kw_only=True)
class StoredBatch(Window):
    """The rows of one batch as an earlier run has left them."""

    # The machine that has computed it, or all machines that may have.
    machines: tuple[Mapping[str, Any], ...]
    # The file of the rows, if they are in a journal.
    file: JournalFile | None = None

    @property
    def samples(self) -> range:
        """The batch's indices in the data set."""
        return range(self.start, self.start + len(self.evaluated))


# -- which batches -------------------------------------------------------------------------------------


def stored_batches(evaluation: Evaluation, opened: Opened) -> list[StoredBatch]:
    """On rank 0, batches that an earlier run has finished, to be evaluated again."""
    run, plan, folder = evaluation.run, evaluation.plan, opened.folder
    is_asked = run.options.replay and run.backend.world.is_main and opened.has_earlier
    if folder is None or not is_asked:
        return []
    run.control.progress.step(Stage.SETUP)
    fingerprint, finished = opened.facts.fingerprint, opened.previous.finished
    if finished is None:
        batches = batches_of_journal(opened.previous.chunks.files, plan, fingerprint)
    else:
        batches = batches_of_predictions(folder.path / PREDICTIONS, plan, fingerprint, finished.machines)
    return [*comparable(batches)]


def places_drawn(fingerprint: str, count: int) -> list[int]:
    """Pick up to two of ``count`` finished batches, by the job's fingerprint."""
    number = int(fingerprint, 16)
    first = number % count
    return [first] if count == 1 else [first, (first + 1 + number // count % (count - 1)) % count]


def batches_of_journal(
    files: Sequence[JournalFile], plan: EvalPlan, fingerprint: str
) -> Iterator[StoredBatch]:
    """The rows of the finished batches that the fingerprint picks; there is at least one file."""
    where = {chunk: (file, place) for file in files for place, chunk in enumerate(file.chunks)}
    chunks = sorted(where)
    ends = list(accumulate(len(plan.chunk_batches(chunk)) for chunk in chunks))
    for drawn in places_drawn(fingerprint, ends[-1]):
        number = bisect(ends, drawn)
        chunk = chunks[number]
        # Indexed from the chunk's end.
        samples = plan.batch_samples(plan.chunk_batches(chunk)[drawn - ends[number]])
        file, place = where[chunk]
        first = sum(file.rows[:place]) + samples.start - plan.chunk_samples(chunk).start
        rows = {name: file.read_rows(name, first, first + len(samples)) for name in file.columns}
        evaluated = evaluated_of(rows)
        columns = {name: values[evaluated] for name, values in rows.items() if name != EVALUATED}
        yield StoredBatch(
            start=samples.start, evaluated=evaluated, columns=columns, machines=(file.machine,), file=file
        )


def batches_of_predictions(
    path: Path, plan: EvalPlan, fingerprint: str, machines: Sequence[Mapping[str, Any]] = ()
) -> Iterator[StoredBatch]:
    """The rows of the batches that the fingerprint picks."""
    rows = StoredRows(path)
    without_count = [{name: value for name, value in kind.items() if name != "chunks"} for kind in machines]
    for number in places_drawn(fingerprint, plan.num_batches) if rows.names else ():
        yield StoredBatch(**vars(rows.batch(plan.batch_samples(number))), machines=tuple(without_count))


def comparable(batches: Iterable[StoredBatch]) -> Iterator[StoredBatch]:
    """The batches with rows to compare; a result has the metrics' digests of the first of them."""
    return (batch for batch in batches if batch.columns and batch.evaluated.any())


# -- the comparison ------------------------------------------------------------------------------------


def prove(
    evaluation: Evaluation, opened: Opened, stored: Sequence[StoredBatch], evaluate: EvaluatesBatch
) -> Proven:
    """Compare finished batches with this job's results now; a collective if anything is finished."""
    run, finished = evaluation.run, opened.previous.finished
    if not opened.has_earlier:
        return Proven()
    if not run.options.replay:
        outcome = SKIPPED
        run.note_all(["what is finished is not compared with what this job gives now"])
    else:
        rank_0s = _compare(evaluation, opened, stored, evaluate) if run.backend.world.is_main else None
        outcome = str(run.from_rank_0(rank_0s))
    if finished is None:
        return Proven(replay=outcome)
    assert opened.folder is not None
    run.note_all([f"this job was finished before, in {opened.folder.path}: its result is shown again"])
    # The folder may have been moved since.
    result = replace(finished, earlier=True, replay=outcome, folder=str(opened.folder.path))
    return Proven(replay=outcome, earlier=_with_what_is_asked(evaluation, opened, result))


@doing("comparing two finished batches")
def _compare(
    evaluation: Evaluation, opened: Opened, stored: Sequence[StoredBatch], evaluate: EvaluatesBatch
) -> str:
    assert opened.folder is not None
    finished = opened.previous.finished
    digests = {} if finished is None else finished.metric_digests
    compared: dict[str, str | None] = {NOTHING_TO_COMPARE: None}
    for batch in stored:
        proof = Proof(
            stored=batch,
            evaluate=evaluate,
            machine=opened.facts.machine,
            tolerance=evaluation.run.precision.tolerance,
            place=opened.folder.path,
            start_over=opened.facts.start_over,
            name=partial(name_of, evaluation.dataset),
        )
        outcome, compared[outcome] = proof.rows()
        # The digests are those of the first batch; a journal file is compared as a whole.
        if batch is stored[0] or batch.file is not stored[0].file:
            proof.metrics(evaluation.metrics, evaluation.row_metrics, evaluation.plan, digests)
    worst = max(compared, key=OUTCOMES.index)
    if (note := compared[worst]) is not None:
        evaluation.run.note(note)
    return worst


def _with_what_is_asked(evaluation: Evaluation, opened: Opened, result: Result) -> Result:
    """A finished run's result with the reference and the groups that are asked for now. A collective.

    Its result.json stays as it was written.
    """
    from dualeval.engine.scoring.slices import slicing_of

    run = evaluation.run
    step = partial(run.control.progress.step, Stage.SETUP)
    slicing = slicing_of(evaluation, step)
    fields: dict[str, Any] | None = None
    if run.backend.world.is_main:
        assert opened.folder is not None
        rows = StoredRows(opened.folder.path / PREDICTIONS)
        completed = opened.beside_reference(result, rows.windows(), evaluation.dataset, step)
        completed = completed if slicing is None else slicing.of_rows(completed, rows)
        fields = {name: getattr(completed, name) for name in ("reference", "slices", "warnings")}
    return replace(result, **run.from_rank_0(fields))


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Evaluates a stored batch again and compares its columns and metrics."""

    stored: StoredBatch
    evaluate: EvaluatesBatch
    # The machine that computes now.
    machine: Mapping[str, Any]
    # The precision's, for floats that another machine has computed.
    tolerance: float
    # For messages: the folder of the stored batch, how to start over, and a sample's name.
    place: object
    start_over: str
    name: Callable[[int], str]

    def rows(self) -> tuple[str, str | None]:
        """Compare the columns: to the bit on the machine that has computed them, else to tolerance.

        A column that differs from one evaluation to the next on this machine is also compared to tolerance.
        """
        outcome, unsteady = SAME_BITS, list[str]()
        for column, values in self.stored.columns.items():
            now = self._now.get(column)
            if now is None or len(now) != len(values) or kind_of(now) != kind_of(values):
                self._refuse(column, 0, values, now)
            row = _first_difference(values, now)
            if row is None:
                continue
            if self._same_machine:
                unsteady = self._unsteady
                if column not in unsteady:
                    self._refuse(column, row, values, now)
            row = _first_difference(values, now, self.tolerance)
            if row is not None:
                self._refuse(column, row, values, now, unsteady)
            outcome = WITHIN_TOLERANCE
        if outcome == SAME_BITS:
            return outcome, None
        if unsteady:
            why = (
                f"the model does not give the same bits twice on this machine (column {', '.join(unsteady)})"
            )
        else:
            why = "a finished batch was computed on a machine with other bits, model or versions"
        return outcome, f"{why}: batches evaluated again are compared to tolerance"

    @cached_property
    def _same_machine(self) -> bool:
        return all(is_same(other, self.machine) for other in self.stored.machines)

    @cached_property
    def _now(self) -> dict[str, NumpyRows]:
        return self._evaluated()

    @cached_property
    def _unsteady(self) -> list[str]:
        """The columns that differ in a second evaluation of the same batch."""
        again = self._evaluated()
        return [name for name, rows in self._now.items() if _first_difference(rows, again[name]) is not None]

    def _evaluated(self) -> dict[str, NumpyRows]:
        columns, failed = self.evaluate(self.stored.samples)
        for sample in failed:
            if self.stored.evaluated[sample.index - self.stored.samples.start]:
                raise UsageError(
                    f"sample {self.name(sample.index)} cannot be read any more: {sample.error}. It could be "
                    f"read when {self.place} was made. Restore it, or start over without it. "
                    f"{self.start_over}."
                )
        return {name: values[self.stored.evaluated] for name, values in columns.items()}

    def _refuse(
        self, column: str, row: int, there: NumpyRows, now: NumpyRows | None, unsteady: Sequence[str] = ()
    ) -> NoReturn:
        index = self.stored.samples[int(np.flatnonzero(self.stored.evaluated)[row])]
        here = "no such column" if now is None else _repr_of(now[row])
        why = (
            "The job's identity is unchanged, so something outside of it has changed: an imported helper, a "
            "file or variable that the model reads, or the middle of a picture (--data-fingerprint content "
            "reads all of it)."
        )
        if column in unsteady:
            why = (
                "This job gives different numbers each time: dropout, a random number or a time changes its "
                f"columns {', '.join(unsteady)}; so they cannot be compared."
            )
        raise UsageError(
            f"{self.place} holds other numbers than this job gives now: sample {self.name(index)}, column "
            f"{column!r}: {_repr_of(there[row])} there, {here} now. {why} {self.start_over}; --no-replay "
            "continues without this comparison."
        )

    def metrics(
        self,
        metrics: Sequence[Metric],
        row_metrics: Sequence[RowMetric],
        plan: EvalPlan,
        digests: Mapping[str, str],
    ) -> None:
        """Compare the metrics' results for the stored rows, now and then, if the machine is the same."""
        if not self._same_machine:
            return
        if self.stored.file is not None:
            differing = _metrics_of_another_ledger(self.stored.file, metrics, plan)
        else:
            now = metric_digests(metrics, row_metrics, self.stored.columns)
            differing = [name for name, digest in now.items() if digests.get(name, digest) != digest]
        if differing:
            raise UsageError(
                f"metric {differing[0]!r} gives other numbers for the rows in {self.place} than before. Its "
                "options and source file are unchanged, so something outside of them has changed: an "
                f"imported helper, or a file or variable that it reads. {self.start_over}; 'dualeval score' "
                "computes metrics of a finished run again, from its rows; --no-replay continues without "
                "this comparison."
            )


def metric_digests(
    metrics: Sequence[Metric], row_metrics: Sequence[RowMetric], columns: Mapping[str, NumpyRows]
) -> dict[str, str]:
    """A hash of each metric's result for a batch's rows, by its name; without metrics of columns not kept."""
    samples = next((len(values) for values in columns.values()), 0)
    digests = {
        metric.name: _digest_of(slots.tolist(), partial(metric.compute, slots))
        for metric, slots in counted(metrics, columns, [samples])
    }
    for row_metric in row_metrics:
        read = columns_of(row_metric, columns)
        digests[row_metric.name] = _digest_of([], partial(row_metric.compute, read))
    return digests


def _digest_of(slots: list[int], compute: Callable[[], Measured]) -> str:
    try:
        measured = asdict(plain("", compute()))
    except Exception as error:  # noqa: BLE001 - so few samples may be too few for it; that, too, stays as it is
        measured = {"raises": type(error).__name__}
    measured.pop("warnings", None)
    return sha256_of_json([slots, measured])[:16]


def _metrics_of_another_ledger(file: JournalFile, metrics: Sequence[Metric], plan: EvalPlan) -> list[str]:
    """Names of the metrics whose part of a file's ledger does not match the file's rows."""
    rows = {name: file.read_rows(name, 0, sum(file.rows)) for name in file.columns}
    evaluated = evaluated_of(rows)
    sizes = [len(plan.batch_samples(batch)) for chunk in file.chunks for batch in plan.chunk_batches(chunk)]
    # How many samples of each batch could be read.
    batches = np.add.reduceat(evaluated, np.cumsum([0, *sizes[:-1]]), dtype=np.int64).tolist()
    columns = {name: values[evaluated] for name, values in rows.items()}
    now = {metric.name: slots for metric, slots in counted(metrics, columns, batches)}
    there = Ledger(plan, metrics)
    there.values.index_add_(0, torch.from_numpy(file.slots), torch.from_numpy(file.values))
    return [
        metric.name for metric, slots in there.slots() if not torch.equal(slots, now.get(metric.name, slots))
    ]


def counted(
    metrics: Sequence[Metric], columns: Mapping[str, NumpyRows], batches: Sequence[int]
) -> list[tuple[Metric, Tensor]]:
    """The ledger's slots of each metric whose columns are kept, for the rows of some batches."""
    ledger = Ledger(EvalPlan(num_samples=1, batch_size=1), [*filter(keeps_rows, metrics)])
    ledger.update({name: to_column(values) for name, values in columns.items()}, batches)
    return ledger.slots()


def _first_difference(there: NumpyRows, now: NumpyRows, tolerance: float | None = None) -> int | None:
    """The row of the first difference beyond the tolerance; without a tolerance, of any bit."""
    from dualeval.engine.values.row_comparison import differing_rows

    wrong = differing_rows(there, now, tolerance)
    allowed = 0 if tolerance is None else int(_OUTSIDE * len(there))
    return int(wrong[0]) if len(wrong) > allowed else None


def _repr_of(value: Any) -> str:
    # repr of a Python float shows every bit; numpy's repr adds its type.
    text = repr(value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
