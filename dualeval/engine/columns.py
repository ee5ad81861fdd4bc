"""Which columns a run keeps, and which of them each metric gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from dualeval.columns import Column
from dualeval.errors import UsageError
from dualeval.metrics import Metric, RowMetric, keeps_rows, per_batch

Values = TypeVar("Values")


class _Declared(dict[str, Values]):
    """The columns of one metric, by name."""

    def __init__(self, metric: str, columns: Mapping[str, Values]) -> None:
        super().__init__(columns)
        self._metric = metric

    def __missing__(self, name: str) -> Values:
        raise UsageError(
            f"metric {self._metric!r} reads column {name!r}, which is not among its columns "
            f"({', '.join(self)}). Add {name!r} to the metric's 'columns'."
        )


def kept_columns(
    rows: Sequence[str],
    metrics: Sequence[Metric],
    row_metrics: Sequence[RowMetric],
) -> tuple[str, ...]:
    """The columns that journal and predictions.parquet hold: the ``rows`` of a task, then what metrics read.

    Without those of metrics that say ``keeps_rows = False``. The same on every rank.
    """
    check_declarations([*metrics, *row_metrics])
    # The rows are all that a row metric has: its columns are kept whatever it says.
    reading: list[Metric | RowMetric] = [*filter(keeps_rows, metrics), *row_metrics]
    read = (name for metric in reading for name in metric.columns)
    return tuple(dict.fromkeys((*rows, *read)))


def check_declarations(metrics: Sequence[Metric | RowMetric]) -> None:
    """Check that metrics say which columns they read."""
    for metric in metrics:
        declared = getattr(metric, "columns", None)
        named = isinstance(declared, (tuple, list)) and all(isinstance(name, str) for name in declared)
        if not named or not declared:
            raise UsageError(
                f"metric {metric.name!r} ({type(metric).__name__}) has columns = {declared!r}, expected a "
                "tuple with the names of the columns that it reads, such as columns = ('loss',)"
            )


def columns_of(metric: Metric | RowMetric, columns: Mapping[str, Values]) -> Mapping[str, Values]:
    """The columns that a metric has declared, of all that there are; any other one is a ``UsageError``."""
    absent = [name for name in metric.columns if name not in columns]
    if absent:
        raise UsageError(
            f"metric {metric.name!r} reads column {absent[0]!r}, which the task does not make. Its columns: "
            f"{', '.join(columns)}."
        )
    return _Declared(metric.name, {name: columns[name] for name in metric.columns})


def update(metric: Metric, slots: Tensor, columns: Mapping[str, Column], batches: Sequence[int]) -> None:
    """Add the samples of consecutive batches to a metric, one batch at a time where it asks for that."""
    own = columns_of(metric, columns)
    if not per_batch(metric):
        metric.update(slots, own)
        return
    start = 0
    for count in batches:
        if count:
            part = {name: values[start : start + count] for name, values in own.items()}
            metric.update(slots, columns_of(metric, part))
        start += count
