"""Everything that happens after the last batch, tried on the first one: an hour later would be too late.

The first batch that a rank has computed goes through scratch ledgers, ``compute``, JSON and a Parquet file
in memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from dualeval.columns.ragged import Column, NumpyRows, Ragged, all_copied, parts_of, to_rows
from dualeval.engine.folder.predictions import json_entries, write_to_memory
from dualeval.engine.folder.row_windows import EVALUATED, read_only
from dualeval.engine.identity.hasher import same_bits
from dualeval.engine.identity.source import is_own
from dualeval.engine.job.evaluation import RESERVED, Evaluation
from dualeval.engine.model.kept import OF_METRIC, Kept, version_of
from dualeval.engine.samples.subset import texts_of
from dualeval.engine.values.measured import check_keys, check_scores, columns_of, plain
from dualeval.errors import DualevalError, RefusedSamples, UsageError, text_of, with_type
from dualeval.metrics import Measured, Metric, RowMetric

_LARGEST_RANK = 2
# Types that both numpy and Parquet have.
_WRITABLE = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64),
)


def try_first_batch(
    evaluation: Evaluation, columns: Mapping[str, Column], samples: range, evaluated: Tensor, *, writes: bool
) -> list[str]:
    """Take one batch through all steps that follow the last batch, in memory; nothing is kept."""
    present = {name: column[evaluated] for name, column in columns.items()}
    rows = {name: present[name] for name in evaluation.kept}
    # One copy for all metrics: none may write into its columns.
    copies, one_row = all_copied(present), {name: column[[0]] for name, column in present.items()}
    tried = [_try_metric(metric, present, copies, one_row) for metric in evaluation.metrics]
    tried += [_try_row_metric(metric, rows) for metric in evaluation.row_metrics]
    measurements = [measured for measured, _ in tried if measured is not None]
    check_keys(measurements)
    check_scores(measurements, present)
    if writes:
        _try_files(evaluation, columns, samples, evaluated)
    return [note for _, notes in tried for note in notes]


def check_columns(
    columns: Mapping[str, Column],
    kept: Sequence[str],
    samples: int,
    metrics: Sequence[Metric | RowMetric] = (),
) -> dict[str, Column]:
    """The columns of a batch, checked: they can be counted and written."""
    if not isinstance(columns, Mapping):
        raise UsageError(
            f"observe and postprocess gave a {type(columns).__name__}, expected a dict of columns by name"
        )
    columns = dict(columns)
    for name, column in columns.items():
        if not isinstance(column, (Tensor, Ragged)):
            raise UsageError(
                f"the column {name!r} is a {type(column).__name__}, expected a torch.Tensor with one row per "
                "sample; or, for rows that differ in length, a dualeval.Ragged, a list of tensors or of str"
            )
        if isinstance(column, Tensor) and column.ndim == 0:
            raise UsageError(
                f"the column {name!r} is one number for a batch of {samples} samples, expected one row per "
                "sample"
            )
    for metric in metrics:
        columns_of(metric, columns)
    for name in kept:
        if name not in columns:
            raise UsageError(
                f"the column {name!r} is in the task's rows, but observe and postprocess gave only: "
                f"{', '.join(columns) or 'none'}"
            )
        _check_values(name, columns[name])
    return columns


def _check_values(name: str, column: Column) -> None:
    """Check that a column can be written."""
    is_ragged = isinstance(column, Ragged)
    values, rows = (column.values, "total") if isinstance(column, Ragged) else (column, "samples")
    if values.layout is not torch.strided or 0 in values.shape[1:]:
        raise UsageError(
            f"the column {name!r} has layout {values.layout} and shape {tuple(values.shape)}, expected a "
            f"dense tensor with at least one value {'an entry of a row' if is_ragged else 'a sample'}"
        )
    if values.ndim > _LARGEST_RANK:
        raise UsageError(
            f"the column {name!r} has shape {tuple(values.shape)}, expected ({rows},) or ({rows}, values): "
            "flatten the rest"
        )
    if values.dtype not in _WRITABLE:
        raise UsageError(
            f"the column {name!r} is {values.dtype}, which cannot be written: expected bool, integers, "
            "float16, float32 or float64. Cast it, as with .float()."
        )


def _try_metric(
    metric: Metric, columns: Mapping[str, Column], copies: Mapping[str, Column], one_row: Mapping[str, Column]
) -> tuple[Measured | None, list[str]]:
    """A metric's measurement of one batch, and notes on failures with so few samples."""
    own = is_own(type(metric))
    kept = Kept(metric, OF_METRIC if own else ())
    try:
        other = copy.deepcopy(metric)
    except Exception:  # noqa: BLE001 - whatever stands in the way: what it holds more deeply is not put back
        other = metric
    slots, of_few, again = torch.zeros((3, metric.size), dtype=torch.int64)
    changed = _update(metric, slots, copies, own)
    once = slots.clone()
    tried = _try_compute(metric.name, partial(metric.compute, slots.clone()))
    kept.put_back()  # from here on, state is built from one row: no number may depend on that
    changed += _update(other, of_few, one_row, own)
    compared, _ = _try_compute(metric.name, partial(other.compute, slots.clone()), tried[0])
    changed += _update(other, again, copies, own)
    is_equal = torch.equal(once, again) and _same_values(tried[0], compared)
    # A table, for instance, that the first update builds is no state unless a number depends on it.
    last = _update(other, again, copies, own)
    _check_pure(metric, columns, copies)
    for place in last if is_equal else [*last, *changed]:
        if is_equal and " of the module " in place:
            continue  # a global that has changed may be, for instance, a log's counter
        raise UsageError(
            f"metric {metric.name!r} keeps {place} from one batch to the next, and each rank would see "
            "only its own samples. State belongs in the ledger, which is added up over all ranks: give the "
            "metric a larger 'size', and have update add to its slots"
        )
    if slots.shape != (metric.size,):
        raise UsageError(
            f"metric {metric.name!r} has changed the shape of its ledger from ({metric.size},) to "
            f"{tuple(slots.shape)}: update adds to it in place"
        )
    if not is_equal:
        raise UsageError(_UNLIKE.format(metric.name))
    if once.any() and torch.equal(once, again):
        raise UsageError(
            f"metric {metric.name!r} does not add to its ledger: the same samples, counted twice, do not "
            "change it. The ledgers of all batches and ranks are added up: write ledger[0] += count, not "
            "ledger[0] = count. A maximum is not a sum; dualeval.metrics.Rows computes it"
        )
    return tried


def _update(metric: Metric, ledger: Tensor, columns: Mapping[str, Column], own: bool) -> list[str]:
    """Count a batch; returns what this has changed in a user's own metric and in values that it names."""
    kept = Kept(metric, OF_METRIC) if own else None
    try:
        metric.update(ledger, columns_of(metric, columns))
    except DualevalError:
        raise
    except Exception as error:  # raised again with the metric's name; its frames show the rest
        raise RuntimeError(f"metric {metric.name!r} fails on the first batch: {with_type(error)}") from error
    return [] if kept is None else kept.changes()


_UNLIKE = (
    "metric {!r} gives different values for the same samples: have it seed its random "
    "numbers, as with numpy.random.default_rng(0), and keep nothing"
)


def _same_values(one: Measured | None, other: Measured | None) -> bool:
    """Whether two computations gave the same values; one that failed on so few samples is ignored."""
    return one is None or other is None or one.values == other.values


def _check_pure(metric: Metric, columns: Mapping[str, Column], copies: Mapping[str, Column]) -> None:
    """Check that ``update`` has not written into its columns."""
    for name in metric.columns:
        column = copies[name]
        # The version also shows writes that changed no value.
        if any(map(version_of, parts_of(column))) or not same_bits(column, columns[name]):
            raise UsageError(
                f"metric {metric.name!r} writes into its column {name!r}, which other metrics read and the "
                "rows keep. Have it make a new tensor, as with column.abs() in place of column.abs_()"
            )


def _try_row_metric(metric: RowMetric, columns: Mapping[str, Column]) -> tuple[Measured | None, list[str]]:
    """A row metric's measurement of one batch; its columns are read-only, as after the last batch."""
    rows = {name: read_only(to_rows(column)) for name, column in columns.items()}
    tried = _try_compute(metric.name, partial(metric.compute, columns_of(metric, rows)))
    if tried[0] is None:
        if "read-only" in tried[1][0]:  # as numpy says it
            raise UsageError(
                f"metric {metric.name!r} writes into its columns, which are read-only: {tried[1][0]}. Have "
                "it copy what it changes, as with numpy.array(column)"
            )
        return tried
    again, _ = _try_compute(metric.name, partial(metric.compute, columns_of(metric, rows)), tried[0])
    if not _same_values(tried[0], again):
        raise UsageError(_UNLIKE.format(metric.name))
    return tried


def _try_compute(
    name: str, compute: Callable[[], Measured], before: Measured | None = None
) -> tuple[Measured | None, list[str]]:
    """A measurement as plain values, and notes on it; that of before if it gives the same values."""
    try:
        measured = compute()
        if before is not None and measured.values == before.values:
            return before, []
    except DualevalError as error:
        if not isinstance(error, RefusedSamples):
            raise
        return None, [f"on the first batch alone, {text_of(error)} It is computed on all samples at the end"]
    except Exception as error:  # noqa: BLE001 - some need all classes, or many samples; the note says what it was
        return None, [
            f"metric {name!r} fails on the first batch alone ({with_type(error)}); it is "
            "computed on all samples at the end"
        ]
    checked = plain(name, measured)
    new = checked.warnings[len(measured.warnings) :]
    return checked, [f"on the first batch alone, {sentence}" for sentence in new]


def _try_files(
    evaluation: Evaluation, columns: Mapping[str, Column], samples: range, evaluated: Tensor
) -> None:
    """Write the batch's part of predictions.parquet and of the task's own files, in memory."""
    task, dataset, kept = evaluation.task, evaluation.dataset, evaluation.kept
    rows: dict[str, NumpyRows] = {name: to_rows(columns[name]) for name in kept}
    rows[EVALUATED] = evaluated.numpy().astype(np.uint8)
    for name in texts_of(task, dataset, rows, samples.start):
        if name in (*RESERVED, *kept):
            raise UsageError(f"the task's texts have a column {name!r}, and so do its rows. Rename one.")
    write_to_memory(task, dataset, kept, rows, samples.start)
    for file, column in task.exports.items():
        if callable(column):
            continue
        try:
            for _ in json_entries(task, dataset, rows, samples.start, column):
                pass
        except KeyError as error:
            raise UsageError(
                f"{file} is to hold the column {column!r}, which is neither in the task's rows nor in its "
                "texts"
            ) from error
        except ValueError as error:
            raise UsageError(f"{file}: the column {column!r} cannot be written as JSON: {error}") from error
    task.findings(len(samples))
