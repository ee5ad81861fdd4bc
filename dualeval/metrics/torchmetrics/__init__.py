"""Metrics of TorchMetrics, by routes that give the same bits at every number of processes; see
docs/torchmetrics.md.

The route follows from a metric's states: sums of integers go into the ledger as they are, sums of floats
exactly, and everything else is computed from all rows, in the order of the data set.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from dualeval.errors import UsageError
from dualeval.metrics.metric import Metric, RowMetric
from dualeval.metrics.torchmetrics.arguments import Arguments, Columns, Parsed
from dualeval.metrics.torchmetrics.library import read, torchmetrics, usual_columns, why_refused
from dualeval.metrics.torchmetrics.routes import FromRows, InLedger
from dualeval.metrics.torchmetrics.states import is_metric, isolated, networks_in, states_of

__all__ = ["Parsed", "from_text", "from_torchmetrics"]


def from_torchmetrics(
    metric: Any, columns: Columns, *, name: str | None = None, by_rows: bool = False, keeps_rows: bool = True
) -> Metric | RowMetric:
    """Make a metric of TorchMetrics one that dualeval can compute, with the same bits at every number of
    processes.

    Args:
        metric: an object such as ``MulticlassAUROC(num_classes=10)``, or the same as text, which is parsed
            and never evaluated. It is copied; what it has seen is left out.
        columns: for each argument of the metric's ``update``, in its order or by its name, what it is made
            of: a column's name for the column of all samples; ``[...]`` of one entry for a list with one
            entry a sample; ``{"key": ...}`` for a dict; ``Parsed(column)`` for the JSON in a column of text.
        name: of the metric and its value; without one the name of its class. Where it is given the keys of a
            metric that computes a dict begin with it.
        by_rows: compute it from all rows, whatever its states are.
        keeps_rows: whether a run keeps the columns, so that the metric can be computed again without a
            forward. Say no for what is large, such as pictures. A metric from the rows keeps them in any
            case.

    Returns:
        A metric with a ledger, or one of all rows.

    Raises:
        UsageError: it is no metric of TorchMetrics, it cannot be computed in parts, or the columns do not fit
            its ``update``.
    """
    version = str(torchmetrics().__version__)
    if isinstance(metric, str):
        metric, of_text, own = read(metric)
        if of_text is not None:
            raise UsageError("the columns stand in the text of the metric and beside it: give them once")
        name = name or own
    _check(metric)
    own_name = name is not None
    name = name or type(metric).__name__.lstrip("_")
    pristine = isolated(metric)
    arguments = Arguments(columns, pristine.update, name)
    states = None if by_rows else states_of(pristine)
    common: dict[str, Any] = {"name": name, "own_name": own_name, "version": version}
    if states is None:
        return FromRows(pristine, arguments, **common)
    return InLedger(pristine, arguments, states, keeps_rows=keeps_rows, **common)


def from_text(text: str, available: Collection[str] | None = None) -> Metric | RowMetric:
    """Make the metric that a text spells, as ``--metric`` takes it: 'torchmetrics:Class(...)@preds=column as
    name'.
    """
    metric, columns, name = read(text)
    _check(metric)
    if columns is None:
        columns = usual_columns(metric, available, text)
        if available is not None and "rank" in available:  # else 'prediction' may hold scores
            columns = _classes_or_scores(metric, columns, available, text)
    made: Any = from_torchmetrics(metric, columns, name=name)
    made.spelled = text
    return made  # type: ignore[no-any-return]


def _check(metric: Any) -> None:
    if isinstance(metric, type):
        raise UsageError(
            f"{metric.__name__} is the class of a metric: give an object of it, {metric.__name__}(...)"
        )
    why = why_refused(metric) if isinstance(metric, torch.nn.Module) else None
    if why:
        raise UsageError(why)
    if not is_metric(metric):
        raise UsageError(
            f"{type(metric).__name__} is not a metric of TorchMetrics: expected an object such as "
            "torchmetrics.classification.MulticlassAUROC(num_classes=10), or the same as text"
        )
    if networks := networks_in(metric):
        raise UsageError(
            f"{type(metric).__name__} evaluates a network of its own ({networks[0]}) within update. Evaluate "
            "that network as a model, let 'observe' return its outputs as columns, and compute the rest from "
            "these"
        )


def _classes_or_scores(metric: Any, columns: Any, available: Collection[str], text: str) -> Any:
    """The columns with what the metric takes for ``preds``: predicted classes, else probabilities."""
    if columns.get("preds") not in ("prediction", "predictions") or not set(columns.values()) <= _OF_CLASSES:
        return columns
    classes, count = torch.tensor([0, 1]), getattr(metric, "num_classes", None) or 2
    tried = {"predicted classes": (columns["preds"], classes)}
    # Not logits: TorchMetrics takes those of a batch for probabilities where all lie between 0 and 1.
    if "probabilities" in available:
        tried["probabilities of each class"] = "probabilities", torch.full((2, count), 1 / count)
    for name, values in tried.values():
        try:
            isolated(metric).update(**{**dict.fromkeys(columns, classes), "preds": values})
        except (ValueError, RuntimeError, TypeError, IndexError) as error:
            why = str(error).strip()
        else:
            return {**columns, "preds": name}
    raise UsageError(
        f"{text}: the metric does not take {' or '.join(tried)} ({why}). Take one of several classes, whose "
        "name begins with Multiclass; or let observe of a task of your own return a column of scores, and "
        f"name it: {text.partition('@')[0]}@preds=COLUMN,target={columns.get('target', 'COLUMN')}"
    )


_OF_CLASSES = {"prediction", "predictions", "target", "targets", "label", "labels"}
