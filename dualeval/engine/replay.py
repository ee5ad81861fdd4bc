"""A resume proves itself: two finished batches are evaluated anew and compared with their rows on the disk.

The job's fingerprint names what decides its numbers, as far as that can be named. An imported helper, a file
or a variable that the model reads cannot; but they show in the numbers.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from dualeval.columns import Rows, form_of, spread_rows, to_column, values_of
from dualeval.engine.columns import columns_of, update
from dualeval.engine.feed import FailedSample
from dualeval.engine.folder.journal import JournalFile
from dualeval.engine.folder.windows import EVALUATED, evaluated_of
from dualeval.engine.machines import is_same
from dualeval.engine.measured import plain
from dualeval.engine.parts import texts_of
from dualeval.engine.plan import EvalPlan
from dualeval.engine.row_differences import differing_rows
from dualeval.engine.stored_rows import StoredRows
from dualeval.errors import UsageError
from dualeval.metrics import Measured, Metric, RowMetric, keeps_rows
from dualeval.result import sha256_of_json

if TYPE_CHECKING:
    from dualeval.tasks import Dataset, Task

SAME_BITS = "same bits"
WITHIN_TOLERANCE = "within tolerance"
NOTHING_TO_COMPARE = "nothing to compare"
SKIPPED = "skipped"
# Of several batches the last of these counts.
OUTCOMES = (NOTHING_TO_COMPARE, SAME_BITS, WITHIN_TOLERANCE)

# Relative and absolute, for floats that another machine has computed.
_TOLERANCES = {"fp32": 1e-3, "tf32": 1e-2, "amp-fp16": 2e-2, "amp-bf16": 1e-1, "fp16": 2e-2, "bf16": 1e-1}
# Of a batch's rows on another machine this part may be outside: near ties a predicted class may be another.
_OUTSIDE = 0.1
# Letters of a value in a message: a ragged row may be of any length.
_LONGEST_SHOWN = 400


@dataclass(frozen=True, kw_only=True)
class StoredBatch:
    """The rows of one batch as an earlier run has left them."""

    # The batch's indices in the data set.
    samples: range
    # Which of them that run could read, bool of shape (samples,).
    evaluated: npt.NDArray[np.bool_]
    # The rows of those, by column, first dimension the evaluated samples.
    columns: Mapping[str, Rows]
    # What has computed it: one machine, or those that it may have been.
    machines: tuple[Mapping[str, Any], ...]
    # The texts of these rows, by column, where the run had written them.
    texts: Mapping[str, Sequence[str | None]] = field(default_factory=dict)
    # Where the rows lie in a journal.
    file: JournalFile | None = None


def places_drawn(fingerprint: str, count: int) -> list[int]:
    """Which of ``count`` finished batches a job's fingerprint draws: two, where there are two."""
    number = int(fingerprint, 16)
    first = number % count
    return [first] if count == 1 else [first, (first + 1 + number // count % (count - 1)) % count]


def batches_of_journal(
    files: Sequence[JournalFile], plan: EvalPlan, fingerprint: str
) -> Iterator[StoredBatch]:
    """The rows of the finished batches that the fingerprint draws; there is at least one file."""
    where = {chunk: (file, place) for file in files for place, chunk in enumerate(file.chunks)}
    chunks = sorted(where)
    ends = list(accumulate(len(plan.chunk_batches(chunk)) for chunk in chunks))
    for drawn in places_drawn(fingerprint, ends[-1]):
        number = bisect(ends, drawn)
        chunk = chunks[number]
        # From the chunk's end.
        samples = plan.batch_samples(plan.chunk_batches(chunk)[drawn - ends[number]])
        file, place = where[chunk]
        first = sum(file.rows[:place]) + samples.start - plan.chunk_samples(chunk).start
        rows = {name: file.read_rows(name, first, first + len(samples)) for name in file.columns}
        evaluated = evaluated_of(rows)
        del rows[EVALUATED]
        yield StoredBatch(
            samples=samples,
            evaluated=evaluated,
            columns={name: values[evaluated] for name, values in rows.items()},
            machines=(file.machine,),
            file=file,
        )


def batches_of_predictions(
    path: Path, plan: EvalPlan, fingerprint: str, machines: Sequence[Mapping[str, Any]] = ()
) -> Iterator[StoredBatch]:
    """The rows of the batches that the fingerprint draws, or of the next ones with a sample that was read."""
    rows = StoredRows(path)
    if not rows.names:
        return
    without_count = [{name: value for name, value in kind.items() if name != "chunks"} for kind in machines]
    found: set[int] = set()
    for first in places_drawn(fingerprint, plan.num_batches):
        for batch in chain(range(first, plan.num_batches), range(first)):
            samples = plan.batch_samples(batch)
            if batch not in found and (window := rows.batch(samples)).evaluated.any():
                found.add(batch)
                yield StoredBatch(
                    samples=samples,
                    evaluated=window.evaluated,
                    columns=window.columns,
                    machines=tuple(without_count),
                    texts=window.texts,
                )
                break


class Proof:
    """Evaluates a stored batch anew and compares all that was made of it."""

    def __init__(
        self,
        stored: StoredBatch,
        evaluate: Callable[[range], tuple[Mapping[str, Rows], tuple[FailedSample, ...]]],
        *,
        machine: Mapping[str, Any],
        precision: str,
        place: object,
        name: Callable[[int], str],
    ) -> None:
        self._stored = stored
        self._evaluate = evaluate
        self._same_machine = all(is_same(other, machine) for other in stored.machines)
        self._tolerance = _TOLERANCES[precision]
        self._place = place
        self._name = name
        self._again: Mapping[str, Rows] | None = None

    def rows(self) -> tuple[str, str | None]:
        """Compare the columns: to the bit on the machine that has computed them, else to tolerance.

        A column that is another each time on this machine, too, is compared to tolerance.
        """
        now = self._evaluated()
        outcome, unsteady = SAME_BITS, []
        for column, values in self._stored.columns.items():
            found = now.get(column)
            if found is None or _kind(found) != _kind(values):
                self._refuse(column, 0, now)
            elif (row := _first_difference(values, found, None)) is not None:
                if self._same_machine and not self._is_unsteady(column, found):
                    others = [name for name, rows in now.items() if self._is_unsteady(name, rows)]
                    self._refuse(column, row, now, others)
                unsteady += [column] if self._same_machine else []
                row = _first_difference(values, found, self._tolerance)
                if row is not None:
                    self._refuse(column, row, now, unsteady)
                outcome = WITHIN_TOLERANCE
        note = (
            f"the model does not give the same bits twice on this machine (column {', '.join(unsteady)}): "
            "a finished batch that was evaluated again is compared to tolerance there"
        )
        if outcome == WITHIN_TOLERANCE and not unsteady:
            note = (
                "a finished batch that was evaluated again was computed on a machine of other bits, model "
                "or versions: it is compared to tolerance"
            )
        return outcome, note if outcome == WITHIN_TOLERANCE else None

    def _evaluated(self) -> dict[str, Rows]:
        columns, failed = self._evaluate(self._stored.samples)
        for sample in failed:
            if self._stored.evaluated[sample.index - self._stored.samples.start]:
                raise UsageError(
                    f"sample {self._name(sample.index)} cannot be read any more: "
                    f"{sample.error}. It could be read when {self._place} was made. Bring it back, or give "
                    "--fresh to start over without it."
                )
        return {name: values[self._stored.evaluated] for name, values in columns.items()}

    def _is_unsteady(self, column: str, found: Rows) -> bool:
        """Whether a column comes out otherwise in a second evaluation of the same batch."""
        if self._again is None:
            self._again = self._evaluated()
        return _first_difference(found, self._again[column], None) is not None

    def _refuse(
        self, column: str, row: int, now: Mapping[str, Rows], unsteady: Sequence[str] = ()
    ) -> NoReturn:
        index = self._stored.samples[int(np.flatnonzero(self._stored.evaluated)[row])]
        there = _shown(self._stored.columns[column][row])
        found = _shown(now[column][row]) if column in now else "no such column"
        changed = (
            "something that it does not name has changed: an imported helper, a file or variable that the "
            "model reads, or the middle of a picture (--data-fingerprint content reads all of it)."
        )
        random = (
            f"its columns {', '.join(unsteady)} differ from one evaluation to the next, so dropout, "
            "a random number or a time decides them"
        )
        if column in unsteady:
            why = f"This job gives other numbers each time: {random}; so none can be compared."
        elif unsteady:
            why = f"This job is random ({random}), or {changed}"
        else:
            why = f"The job's identity is unchanged, so {changed}"
        raise UsageError(
            f"{self._place} holds other numbers than this job gives now: sample "
            f"{self._name(index)}, column {column!r}: {there} there, {found} now. {why} Give "
            "another --out, or --fresh to start over; --no-replay continues without this comparison."
        )

    def texts(self, task: Task, dataset: Dataset) -> None:
        """Compare the texts that a task makes of the stored rows."""
        if not self._stored.texts:
            return
        rows: dict[str, Rows] = {}
        for name, values in self._stored.columns.items():
            rows[name] = spread_rows(values, self._stored.evaluated)
        made = texts_of(task, dataset, rows, self._stored.samples.start)
        for column, there in self._stored.texts.items():
            now = made.get(column)
            for place in np.flatnonzero(self._stored.evaluated).tolist():
                found = None if now is None else now[place]
                if found != there[place]:
                    index = self._stored.samples[place]
                    raise UsageError(
                        f"{self._place} holds other texts than this job gives now: sample "
                        f"{self._name(index)}, column {column!r}: {there[place]!r} there, "
                        f"{found!r} now. Something that the identity does not name has changed. Give another "
                        "--out, or --fresh to start over; --no-replay continues without this comparison."
                    )

    def metrics(
        self,
        metrics: Sequence[Metric],
        row_metrics: Sequence[RowMetric],
        plan: EvalPlan,
        digests: Mapping[str, str],
    ) -> None:
        """Compare what metrics make of the stored rows with what they made of them then, on one machine."""
        if not self._same_machine:
            return
        if self._stored.file is not None:
            differing = _metrics_of_another_ledger(self._stored.file, metrics, plan)
        else:
            now = metric_digests(metrics, row_metrics, self._stored.columns)
            differing = [name for name, digest in now.items() if digests.get(name, digest) != digest]
        if differing:
            raise UsageError(
                f"metric {differing[0]!r} gives other numbers for the rows in {self._place} than before. "
                "Its options and source file are unchanged, so something that they do not name has "
                "changed: an imported helper, or a file or variable that it reads. Give another --out, or "
                "--fresh to start over; 'dualeval score' computes metrics of a finished run again, from its "
                "rows; --no-replay continues without this comparison."
            )


def metric_digests(
    metrics: Sequence[Metric],
    row_metrics: Sequence[RowMetric],
    columns: Mapping[str, Rows],
) -> dict[str, str]:
    """What each metric makes of a batch's rows, as a hash by its name; without those of columns not kept."""
    found = {}
    tensors = {name: to_column(values) for name, values in columns.items()}
    samples = next((len(values) for values in columns.values()), 0)
    for metric in filter(keeps_rows, metrics):
        slots = torch.zeros(metric.size, dtype=torch.int64)
        update(metric, slots, tensors, [samples])
        found[metric.name] = _digest_of(slots.tolist(), partial(metric.compute, slots))
    for row_metric in row_metrics:
        own = columns_of(row_metric, columns)
        found[row_metric.name] = _digest_of([], partial(row_metric.compute, own))
    return found


def _digest_of(slots: list[int], compute: Callable[[], Measured]) -> str:
    try:
        measured = asdict(plain("", compute()))
    except Exception as error:  # noqa: BLE001 - so few samples may be too few for it; that, too, stays as it is
        measured = {"raises": type(error).__name__}
    measured.pop("warnings", None)
    return sha256_of_json([slots, measured])[:16]


def _metrics_of_another_ledger(file: JournalFile, metrics: Sequence[Metric], plan: EvalPlan) -> list[str]:
    """Names of the metrics whose part of a file's ledger is not that of its rows."""
    rows = sum(file.rows)
    evaluated = evaluated_of({EVALUATED: file.read_rows(EVALUATED, 0, rows)})
    there = torch.zeros(3 * plan.num_chunks + sum(metric.size for metric in metrics), dtype=torch.int64)
    there.index_add_(0, torch.from_numpy(file.slots), torch.from_numpy(file.values))
    batches = _evaluated_by_batch(file, evaluated, plan)
    start = 3 * plan.num_chunks
    differing = []
    for metric in metrics:
        slots = torch.zeros(metric.size, dtype=torch.int64)
        if keeps_rows(metric):
            columns = {name: to_column(file.read_rows(name, 0, rows)[evaluated]) for name in metric.columns}
            update(metric, slots, columns, batches)
            if not torch.equal(slots, there[start : start + metric.size]):
                differing.append(metric.name)
        start += metric.size
    return differing


def _evaluated_by_batch(file: JournalFile, evaluated: npt.NDArray[np.bool_], plan: EvalPlan) -> list[int]:
    """How many samples of each batch of a file's chunks could be read, in the order of its rows."""
    found, start = [], 0
    for batch in (batch for chunk in file.chunks for batch in plan.chunk_batches(chunk)):
        stop = start + len(plan.batch_samples(batch))
        found.append(int(evaluated[start:stop].sum()))
        start = stop
    return found


def _first_difference(there: Rows, now: Rows, tolerance: float | None) -> int | None:
    """The row of the first difference that counts; a tolerance of None wants equal bits."""
    wrong = differing_rows(there, now, tolerance)
    allowed = 0 if tolerance is None else int(_OUTSIDE * len(there))
    return int(wrong[0]) if len(wrong) > allowed else None


def _kind(rows: Rows) -> tuple[Any, ...]:
    values = values_of(rows)
    return form_of(rows), len(rows), values.dtype, values.shape[1:]


def _shown(value: Any) -> str:
    # repr of a float shows every bit; numpy's own adds its type.
    text = repr(value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
