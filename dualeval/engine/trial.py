"""Everything that happens after the last batch, tried on the first one: an hour later would be too late.

The first batch that a rank has computed goes through scratch ledgers, ``compute``, JSON and a Parquet file
in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualeval.engine.columns import columns_of
from dualeval.engine.predictions import EVALUATED, json_entries, parquet_bytes
from dualeval.errors import DualevalError, UsageError
from dualeval.metrics import Measured, Metric, RowMetric

if TYPE_CHECKING:
    from dualeval.tasks import Task

# The columns that predictions.parquet and the journal have by themselves.
_RESERVED = ("id", "index", EVALUATED)
_LARGEST_RANK = 2
# What numpy and Parquet both have.
_WRITABLE = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64),
)


def check_names(metrics: Sequence[Metric | RowMetric], kept: Sequence[str]) -> None:
    """Check the names of metrics and kept columns, before anything is computed.

    Raises:
        UsageError: two metrics share a name, or a column has a name that is taken.
    """
    names = [metric.name for metric in metrics]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two metrics are called {name!r}. Give each a name of its own.")
    for name in kept:
        if name in _RESERVED:
            raise UsageError(
                f"the column {name!r} is a name that is taken. predictions.parquet has "
                f"{', '.join(_RESERVED[:2])} by itself, the journal {EVALUATED}: give the column another "
                "name."
            )


def try_first_batch(
    task: Task,
    metrics: Sequence[Metric],
    row_metrics: Sequence[RowMetric],
    kept: Sequence[str],
    columns: Mapping[str, Tensor],
    samples: range,
    evaluated: Tensor,
    *,
    writes: bool,
) -> list[str]:
    """Take one batch through all that comes after the last one, in memory; nothing is kept of it.

    Args:
        task: what is evaluated.
        metrics: of the ledger.
        row_metrics: of all rows together.
        kept: the columns that the journal keeps.
        columns: of the batch, on the CPU, as ``postprocess`` gave them, checked by ``check_columns``.
        samples: the batch's indices in the data set.
        evaluated: which of them could be read, bool of shape (samples,).
        writes: this rank writes the files.

    Returns:
        Sentences for people: what did not work on so few samples, and may on all.

    Raises:
        UsageError: a column or a metric is not as it must be; names it.
    """
    present = {name: column[evaluated] for name, column in columns.items()}
    measured = [_try_metric(metric, present) for metric in metrics]
    rows = {name: present[name].numpy() for name in kept}
    notes = []
    for metric in row_metrics:
        found, note = _try_row_metric(metric, rows)
        measured += [found] if found is not None else []
        notes += [note] if note is not None else []
    check_keys(measured)
    if writes:
        _try_files(task, kept, columns, samples, evaluated)
    return notes


def check_columns(
    columns: Mapping[str, Tensor],
    kept: Sequence[str],
    samples: int,
    metrics: Sequence[Metric | RowMetric] = (),
) -> None:
    """Check that a batch's columns can be counted and written.

    Args:
        columns: as ``postprocess`` gave them.
        kept: the columns that the journal keeps.
        samples: how many the batch has.
        metrics: those that read columns.

    Raises:
        UsageError: one is missing, or is of a kind that cannot; names it.
    """
    for name, column in columns.items():
        if not isinstance(column, Tensor):
            raise UsageError(
                f"the column {name!r} is a {type(column).__name__}, expected a torch.Tensor with one row a "
                "sample"
            )
        if column.ndim == 0:
            raise UsageError(
                f"the column {name!r} is one number for a batch of {samples} samples, expected one row a "
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
        column = columns[name]
        if column.ndim > _LARGEST_RANK:
            raise UsageError(
                f"the column {name!r} has shape {tuple(column.shape)}, expected (samples,) or (samples, "
                "values): flatten the rest"
            )
        if column.dtype not in _WRITABLE:
            raise UsageError(
                f"the column {name!r} is of {column.dtype}, which cannot be written: expected bool, "
                "integers, float16, float32 or float64. Cast it, as with .float()."
            )


def _try_metric(metric: Metric, columns: Mapping[str, Tensor]) -> Measured:
    slots = torch.zeros(metric.size, dtype=torch.int64)
    own = columns_of(metric, columns)
    try:
        metric.update(slots, own)
        measured = metric.compute(slots)
    except DualevalError:
        raise
    except Exception as error:  # raised on with the metric's name; what it is, its own frames show
        raise RuntimeError(
            f"metric {metric.name!r} fails on the first batch: {type(error).__name__}: {error}"
        ) from error
    return plain(metric.name, measured)


def _try_row_metric(
    metric: RowMetric, rows: Mapping[str, npt.NDArray[Any]]
) -> tuple[Measured | None, str | None]:
    """What a row metric says of one batch; or a note, where so few samples are too few for it."""
    own = columns_of(metric, rows)
    try:
        measured = metric.compute(own)
    except DualevalError:
        raise
    except Exception as error:  # noqa: BLE001 - some need all classes, or many samples; the note says what it was
        return None, (
            f"metric {metric.name!r} fails on the first batch alone ({type(error).__name__}: {error}); it is "
            "computed on all rows at the end"
        )
    return plain(metric.name, measured), None


def check_keys(measured: Iterable[Measured]) -> None:
    """Check that no two metrics give a value of the same name.

    Raises:
        UsageError: two do; names the key.
    """
    seen: set[str] = set()
    for part in measured:
        for key in part.values:
            if key in seen:
                raise UsageError(
                    f"two metrics give a value called {key!r}, and only one could be in the result. Rename "
                    "one."
                )
            seen.add(key)


def plain(metric: str, measured: Measured) -> Measured:
    """What a metric has measured as plain JSON values; numpy's numbers become Python's.

    Args:
        metric: its name.
        measured: as ``compute`` gave it.

    Raises:
        UsageError: a value is NaN or infinite, or no plain value; names metric and key.
    """
    if not isinstance(measured, Measured):
        raise UsageError(
            f"metric {metric!r} returned a {type(measured).__name__}, expected dualeval.Measured(values=...)"
        )
    found = replace(
        measured,
        values={key: _plain(metric, key, value) for key, value in measured.values.items()},
        intervals={
            key: tuple(_plain(metric, f"the interval of {key}", ends))
            for key, ends in measured.intervals.items()
        },
        nonfinite=_plain(metric, "nonfinite", measured.nonfinite),
        work=_plain(metric, "work", measured.work),
    )
    json.dumps(asdict(found), allow_nan=False)
    return found


def _plain(metric: str, where: str, value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(
            f"metric {metric!r} gave {value} for {where}: give None where there is no finite value, and "
            "count such samples in Measured.nonfinite"
        )
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise UsageError(f"metric {metric!r}: {where} has the key {key!r}, expected a text")
        return {key: _plain(metric, f"{where}.{key}", entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(metric, f"{where}[{place}]", entry) for place, entry in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UsageError(
        f"metric {metric!r} gave a {type(value).__name__} for {where}, expected a number, a text, a list or "
        "dict of them, or "
        f"None{'; a tensor of one number becomes one by .item()' if isinstance(value, Tensor) else ''}"
    )


def _try_files(
    task: Task, kept: Sequence[str], columns: Mapping[str, Tensor], samples: range, evaluated: Tensor
) -> None:
    """Write the batch's part of predictions.parquet and of the task's own files, in memory."""
    rows: dict[str, npt.NDArray[Any]] = {name: columns[name].numpy() for name in kept}
    rows[EVALUATED] = evaluated.numpy().astype(np.uint8)
    for name in task.texts(rows, samples.start):
        if name in (*_RESERVED, *kept):
            raise UsageError(f"the task's texts have a column {name!r}, and so do its rows. Rename one.")
    parquet_bytes(task, kept, rows, samples.start)
    for file, column in task.json_files.items():
        try:
            for _ in json_entries(task, rows, samples.start, column):
                pass
        except KeyError as error:
            raise UsageError(
                f"{file} is to hold the column {column!r}, which is neither in the task's rows nor in its "
                "texts"
            ) from error
        except ValueError as error:
            raise UsageError(f"{file}: the column {column!r} cannot be written as JSON: {error}") from error
    task.findings(len(samples))
