"""Metrics that are asked for by name, of any task."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import Any

from dualeval.errors import UsageError
from dualeval.metrics.metric import Metric, RowMetric
from dualeval.options.plugins import METRIC_GROUP, entry_points_of, is_metric_of_no_task, plugin_metric
from dualeval.wording import nearest

# The columns of NonfiniteLogits and TieWarning, whose module imports torch.
_NONFINITE, _TIES = ("nan_logits", "inf_logits"), ("ties", "rank")


def chosen_metrics(
    asked: Sequence[str], own: Sequence[Metric | RowMetric], columns: Collection[str] = ()
) -> list[Metric | RowMetric]:
    """The metrics of a task that were asked for; all of them where nobody asked.

    Logits that are not finite are warned of in any case.
    """
    check_metrics(own)
    known = {metric.name: metric for metric in own}
    chosen = [known[text] if text in known else named(text, own, columns) for text in asked] or own
    return with_warning(chosen, {*columns, *(name for metric in own for name in metric.columns)})


def with_warning(metrics: Sequence[Metric | RowMetric], columns: Collection[str]) -> list[Metric | RowMetric]:
    """Metrics, and behind them those that warn of logits: not finite, where no other does, and of ties."""
    if not {*_NONFINITE} <= {*columns}:
        return list(metrics)
    from dualeval.metrics.classification import NonfiniteLogits, NonfiniteWarning, TieWarning

    found = list(metrics)
    if not any(isinstance(metric, NonfiniteLogits) for metric in found):
        found.append(NonfiniteWarning())
    if {*_TIES} <= {*columns} and not any(isinstance(metric, TieWarning) for metric in found):
        found.append(TieWarning())
    return found


def check_metrics(metrics: Sequence[Any]) -> None:
    """Check that what was given as metrics are some."""
    for metric in metrics:
        kind = type(metric)
        if isinstance(metric, type):
            said = (
                f"{metric.__name__}, which is the class of a metric: give an object, {metric.__name__}(...)"
            )
        elif any(base.__module__ == "torchmetrics.metric" for base in kind.__mro__):
            said = (
                f"a {kind.__name__} of TorchMetrics: write dualeval.metrics.from_torchmetrics(metric, "
                "['prediction', 'target']), with the columns that its update reads (docs/torchmetrics.md)"
            )
        elif inspect.isfunction(metric):
            name = metric.__name__ if metric.__name__.isidentifier() else "function"
            said = (
                f"a function, which is not a metric: write dualeval.metrics.Rows({name}, ['prediction', "
                "'target']), with the columns that it takes"
            )
        elif isinstance(metric, str):
            said = f"the text {metric!r}: names are for dualeval.evaluate(model=...) and --metric"
        elif not all(hasattr(metric, name) for name in ("name", "columns", "compute")):
            said = f"a {kind.__name__}, which is not a metric"
        else:
            continue
        raise UsageError(f"metrics has {said}. Metrics are in docs/metrics.md.")


def of_no_task(asked: Sequence[str]) -> list[str]:
    """Those of the metrics that were asked for which no task has: of TorchMetrics, and of packages."""
    return [text for text in asked if is_metric_of_no_task(text)]


def named(text: str, own: Sequence[Metric | RowMetric], columns: Collection[str]) -> Metric | RowMetric:
    """A metric that is none of the task's."""
    if text.startswith("torchmetrics:"):
        from dualeval.metrics.torchmetrics import from_text

        return from_text(text, sorted({*columns, *(name for metric in own for name in metric.columns)}))
    found: Metric | RowMetric | None = plugin_metric(text)
    if found is not None:
        return found
    if text in columns:
        from dualeval.metrics.means import Mean

        return Mean(text)
    known = list(dict.fromkeys([*(metric.name for metric in own), *entry_points_of(METRIC_GROUP), *columns]))
    raise UsageError(f"there is no metric {text!r} here.{nearest(text, known)} Metrics: {', '.join(known)}")
