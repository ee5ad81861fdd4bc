"""Metrics that are asked for by name, of any task."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from dualeval.errors import UsageError
from dualeval.messages import nearest
from dualeval.metrics.metric import Metric, RowMetric, by_names
from dualeval.options.plugins import METRIC_GROUP, entry_points_of, is_metric_of_no_task, plugin_metric

if TYPE_CHECKING:
    from dualeval.metrics.rows import Rows

# The columns of NonfiniteLogits and TieWarning, whose module imports torch.
_NONFINITE, _TIES = ("nan_logits", "inf_logits"), ("ties", "rank")


def chosen_metrics(
    asked: Sequence[str], default: Sequence[Metric | RowMetric], columns: Collection[str] = ()
) -> list[Metric | RowMetric]:
    """The metrics of a task that were asked for; all of them where nobody asked.

    Logits that are not finite are warned of in any case.
    """
    default = as_metrics(default)
    every = [*columns, *(name for metric in default for name in metric.columns)]
    chosen = by_names(asked, default, lambda text: named(text, default, columns), by_value=False) or default
    return with_warning(chosen, every)


def with_warning(metrics: Sequence[Metric | RowMetric], columns: Collection[str]) -> list[Metric | RowMetric]:
    """Metrics, and behind them those that warn of logits: not finite, where no other does, and of ties."""
    if not {*_NONFINITE} <= {*columns}:
        return list(metrics)
    from dualeval.metrics.classification import NonfiniteLogits, NonfiniteWarning, TieWarning

    chosen = list(metrics)
    if not any(isinstance(metric, NonfiniteLogits) for metric in chosen):
        chosen.append(NonfiniteWarning())
    if {*_TIES} <= {*columns} and not any(isinstance(metric, TieWarning) for metric in chosen):
        chosen.append(TieWarning())
    return chosen


def as_metrics(metrics: Sequence[Any], *, with_names: bool = False) -> list[Any]:
    """What was given as metrics, functions of columns as metrics; a UsageError where something is none."""
    return [
        metric
        if isinstance(metric, str) and with_names
        else _of_columns(metric)
        if inspect.isfunction(metric)
        else _checked(metric)
        for metric in metrics
    ]


def _of_columns(function: Callable[..., Any]) -> Rows:
    """A function as a metric: its parameters without a default are the names of the columns."""
    from dualeval.metrics.rows import Rows

    of_name = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    takes = inspect.signature(function).parameters.values()
    columns = [each.name for each in takes if each.kind in of_name and each.default is each.empty]
    unnamed = any(each.kind is each.KEYWORD_ONLY and each.default is each.empty for each in takes)
    if unnamed or not columns or not function.__name__.isidentifier():
        raise UsageError(
            f"metrics has the function {function.__name__}: as a metric a function has a name, and its "
            "parameters without a default are the names of columns, as in def error(prediction, target). Or "
            "write dualeval.metrics.Rows(function, ['prediction', 'target'], name=...)"
        )
    return Rows(function, columns)


def _checked(metric: Any) -> Any:
    kind = type(metric)
    if isinstance(metric, type):
        fault = f"{metric.__name__}, which is the class of a metric: give an object, {metric.__name__}(...)"
    elif any(base.__module__ == "torchmetrics.metric" for base in kind.__mro__):
        fault = (
            f"a {kind.__name__} of TorchMetrics: write dualeval.metrics.from_torchmetrics(metric, "
            "['prediction', 'target']), with the columns that its update reads (docs/torchmetrics.md)"
        )
    elif isinstance(metric, str):
        fault = (
            f"the text {metric!r}: names are for dualeval.evaluate(model=...), and of a finished run for the "
            f"command line, dualeval score RUN --metric {metric}"
        )
    elif not all(hasattr(metric, name) for name in ("name", "columns", "compute")):
        fault = f"a {kind.__name__}, which is not a metric"
    else:
        return metric
    raise UsageError(f"metrics has {fault}. Metrics are in docs/metrics.md.")


def of_no_task(asked: Sequence[str]) -> list[str]:
    """Those of the metrics that were asked for which no task has: of TorchMetrics, and of packages."""
    return [text for text in asked if is_metric_of_no_task(text)]


def named(text: str, default: Sequence[Metric | RowMetric], columns: Collection[str]) -> Metric | RowMetric:
    """A metric that is none of the task's."""
    if text.startswith("torchmetrics:"):
        from dualeval.metrics.torchmetrics.metric import from_text

        return from_text(text, sorted({*columns, *(name for each in default for name in each.columns)}))
    metric: Metric | RowMetric | None = plugin_metric(text)
    if metric is not None:
        return metric
    if text in columns:
        from dualeval.metrics.means import Mean

        return Mean(text)
    known = list(dict.fromkeys([*(each.name for each in default), *entry_points_of(METRIC_GROUP), *columns]))
    raise UsageError(f"there is no metric {text!r} here.{nearest(text, known)} Metrics: {', '.join(known)}")
