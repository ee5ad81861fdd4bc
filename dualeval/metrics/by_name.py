"""Metrics that are asked for by name, of any task."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from dualeval.errors import UsageError
from dualeval.metrics import Metric, RowMetric
from dualeval.plugins import METRIC_GROUP, entry_points_of, plugin_metric


def chosen_metrics(asked: Sequence[str], own: Sequence[Metric | RowMetric]) -> list[Metric | RowMetric]:
    """The metrics of a task that were asked for; all of them where nobody asked.

    Args:
        asked: names of the task's own metrics, or what ``named`` takes.
        own: the task's.

    Raises:
        UsageError: there is none of that name.
    """
    known = {metric.name: metric for metric in own}
    if not asked:
        return list(own)
    return [known[text] if text in known else named(text, own) for text in asked]


def named(text: str, own: Sequence[Metric | RowMetric]) -> Metric | RowMetric:
    """A metric that is none of the task's: that of an installed package, by its entry point's name.

    Args:
        text: as asked for.
        own: the task's, for messages.

    Raises:
        UsageError: there is none of that name.
    """
    found: Metric | RowMetric | None = plugin_metric(text)
    if found is not None:
        return found
    known = [*(metric.name for metric in own), *entry_points_of(METRIC_GROUP)]
    near = difflib.get_close_matches(text, known)
    hint = f" Nearest: {', '.join(near)}." if near else ""
    raise UsageError(f"there is no metric {text!r} here.{hint} Metrics: {', '.join(known)}")
