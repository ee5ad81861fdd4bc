"""A resume proves itself: one finished batch is evaluated anew and compared with its rows on the disk.

The job's fingerprint names what decides its numbers, as far as that can be named. An imported helper, a file
or a variable that the model reads cannot; but they show in the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dualeval.engine.journal import JournalFile
from dualeval.engine.plan import EvalPlan
from dualeval.engine.predictions import EVALUATED
from dualeval.engine.stored_rows import StoredRows
from dualeval.errors import UsageError

SAME_BITS = "same bits"
WITHIN_TOLERANCE = "within tolerance"
NOTHING_TO_COMPARE = "nothing to compare"
SKIPPED = "skipped"

# Relative and absolute, for floats that another machine has computed.
_TOLERANCES = {"fp32": 1e-3, "tf32": 1e-2, "amp-fp16": 2e-2, "amp-bf16": 1e-1}
# Of a batch's rows on another machine this part may be outside: near ties a predicted class may be another.
_OUTSIDE = 0.1


@dataclass(frozen=True, kw_only=True)
class StoredBatch:
    """The rows of one batch as an earlier run has left them.

    Attributes:
        samples: the batch's indices in the data set.
        evaluated: which of them that run could read, bool of shape (samples,).
        columns: the rows of those, by column, first dimension the evaluated samples.
        machines: what has computed it: one machine, or those that it may have been.
    """

    samples: range
    evaluated: npt.NDArray[np.bool_]
    columns: Mapping[str, npt.NDArray[Any]]
    machines: tuple[Mapping[str, Any], ...]


def drawn(fingerprint: str, count: int) -> int:
    """Which of ``count`` finished batches a job's fingerprint draws."""
    return int(fingerprint, 16) % count


def batch_of_journal(files: tuple[JournalFile, ...], plan: EvalPlan, fingerprint: str) -> StoredBatch:
    """The rows of the finished batch that the fingerprint draws.

    Args:
        files: journal files that count, at least one.
        plan: the job's.
        fingerprint: the job's.
    """
    where = {chunk: (file, place) for file in files for place, chunk in enumerate(file.chunks)}
    chunks = sorted(where)
    chunk = chunks[drawn(fingerprint, len(chunks))]
    batches = plan.chunk_batches(chunk)
    samples = plan.batch_samples(batches[drawn(fingerprint, len(batches))])
    file, place = where[chunk]
    first = sum(file.rows[:place]) + samples.start - plan.chunk_samples(chunk).start
    rows = {name: file.read_rows(name, first, first + len(samples)) for name in file.columns}
    evaluated = rows.pop(EVALUATED).astype(bool)
    return StoredBatch(
        samples=samples,
        evaluated=evaluated,
        columns={name: values[evaluated] for name, values in rows.items()},
        machines=(file.machine,),
    )


def batch_of_predictions(
    path: Path, plan: EvalPlan, fingerprint: str, machines: Sequence[Mapping[str, Any]]
) -> StoredBatch:
    """The rows of the batch that the fingerprint draws, or of the next with a sample that was read.

    Args:
        path: predictions.parquet of a finished run.
        plan: the job's.
        fingerprint: the job's.
        machines: as in the result.
    """
    rows = StoredRows(path)
    if not rows.names:
        return StoredBatch(samples=range(0), evaluated=np.zeros(0, np.bool_), columns={}, machines=())
    first = drawn(fingerprint, plan.num_batches)
    for batch in (*range(first, plan.num_batches), *range(first)):
        samples = plan.batch_samples(batch)
        window = rows.batch(samples)
        if window.evaluated.any():
            break
    without_count = [{name: value for name, value in kind.items() if name != "chunks"} for kind in machines]
    return StoredBatch(
        samples=samples, evaluated=window.evaluated, columns=window.columns, machines=tuple(without_count)
    )


def prove(
    stored: StoredBatch,
    evaluate: Callable[[range], Mapping[str, npt.NDArray[Any]]],
    *,
    machine: Mapping[str, Any],
    precision: str,
    place: object,
    name: Callable[[int], str],
) -> tuple[str, str | None]:
    """Evaluate a batch anew and compare it: to the bit on the machine that has computed it, else to
    tolerance.

    Args:
        stored: what is on the disk.
        evaluate: gives the columns of a batch, one row for each of its samples.
        machine: this machine.
        precision: how it computes; decides the tolerance.
        place: where the rows lie, for the message.
        name: a sample's id by its index.

    Returns:
        ``SAME_BITS``, ``WITHIN_TOLERANCE`` or ``NOTHING_TO_COMPARE``; and a sentence for people, or None.

    Raises:
        UsageError: they differ; names a sample, the column and both values.
    """
    if not stored.evaluated.any() or not stored.columns:
        return NOTHING_TO_COMPARE, None

    def compared() -> dict[str, npt.NDArray[Any]]:
        columns = evaluate(stored.samples)
        return {column: columns[column][stored.evaluated] for column in stored.columns if column in columns}

    now = compared()
    note = None
    same_machine = all(other == machine for other in stored.machines)
    differing = _first_difference(stored.columns, now, None)
    if differing is None:
        return SAME_BITS, None
    if same_machine and _first_difference(now, compared(), None) is not None:
        note = (
            "the model does not give the same bits twice on this machine: the finished batch that was "
            "evaluated anew is compared to tolerance only"
        )
    if note is not None or not same_machine:
        differing = _first_difference(stored.columns, now, _TOLERANCES[precision])
        if differing is None:
            return WITHIN_TOLERANCE, note
    column, row = differing
    index = stored.samples[int(np.flatnonzero(stored.evaluated)[row])]
    there = _shown(stored.columns[column][row])
    found = _shown(now[column][row]) if column in now else "no such column"
    raise UsageError(
        f"{place} holds other numbers than this job gives now: sample {name(index)} (index {index}), column "
        f"{column!r}: {there} there, {found} now. Options, data, weights and source files are those of then, "
        "so something that they do not name has changed: an imported helper, or a file or variable that the "
        "model reads. Give another --out, or --fresh to start over; --no-replay goes on without this "
        "comparison."
    )


def _first_difference(
    there: Mapping[str, npt.NDArray[Any]], now: Mapping[str, npt.NDArray[Any]], tolerance: float | None
) -> tuple[str, int] | None:
    """Column and row of the first difference that counts; a tolerance of None wants equal bits."""
    for column, values in there.items():
        found = now.get(column)
        if found is None or found.dtype != values.dtype or found.shape != values.shape:
            return column, 0
        if tolerance is None:
            equal = _same_bits(values, found)
        elif values.dtype.kind == "f":
            equal = np.isclose(values, found, rtol=tolerance, atol=tolerance, equal_nan=True)
        else:
            equal = values == found
        wrong = np.flatnonzero(~equal.reshape(len(values), -1).all(axis=1))
        if len(wrong) > (0 if tolerance is None else int(_OUTSIDE * len(values))):
            return column, int(wrong[0])
    return None


def _same_bits(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which rows are equal in all their bytes."""
    rows = len(one)
    bits = [np.ascontiguousarray(values).reshape(rows, -1).view(np.uint8) for values in (one, other)]
    equal: npt.NDArray[np.bool_] = (bits[0] == bits[1]).all(axis=1)
    return equal


def _shown(value: Any) -> str:
    # repr of a float shows every bit; numpy's own adds its type.
    return repr(value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value)
