"""Metrics whose whole state is integers in one ledger, so that merging them is addition and never rounds.

A metric is ``size`` slots of the run's int64 ledger, ``update`` (samples into slots) and ``compute`` (slots
to values). It knows no communicator: ranks, chunks and restarts are merged by adding ledgers, by the engine.

It imports columns. Begin with ``metric.py``.
Callers: tasks declare them, the engine counts and computes them, comparison reads their scores. Keep: slots
are integers, and merging adds them; the names of values are public; this room's text is in identities.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dualeval.metrics.metric import DIRECTIONS as DIRECTIONS
from dualeval.metrics.metric import Measured, Metric, RowMetric, Value
from dualeval.metrics.metric import is_of_rows as is_of_rows
from dualeval.metrics.metric import keeps_rows as keeps_rows
from dualeval.metrics.metric import per_batch as per_batch
from dualeval.metrics.metric import split_by_kind as split_by_kind
from dualeval.metrics.scores import Score

if TYPE_CHECKING:
    from dualeval.metrics.classification import TopK as TopK
    from dualeval.metrics.confusion import Confusion as Confusion
    from dualeval.metrics.confusion import IoU as IoU
    from dualeval.metrics.confusion import PrecisionRecall as PrecisionRecall
    from dualeval.metrics.detection.average_precision import AveragePrecision as AveragePrecision
    from dualeval.metrics.means import Count as Count
    from dualeval.metrics.means import Mean as Mean
    from dualeval.metrics.means import Ratio as Ratio
    from dualeval.metrics.rows import Rows as Rows
    from dualeval.metrics.torchmetrics.metric import from_torchmetrics as from_torchmetrics

# Where the metrics are, which are imported at their first use.
_HOME = {
    "AveragePrecision": "dualeval.metrics.detection.average_precision",
    "Confusion": "dualeval.metrics.confusion",
    "Count": "dualeval.metrics.means",
    "IoU": "dualeval.metrics.confusion",
    "Mean": "dualeval.metrics.means",
    "PrecisionRecall": "dualeval.metrics.confusion",
    "Ratio": "dualeval.metrics.means",
    "Rows": "dualeval.metrics.rows",
    "TopK": "dualeval.metrics.classification",
    "from_torchmetrics": "dualeval.metrics.torchmetrics.metric",
}

__all__ = [
    "AveragePrecision",
    "Confusion",
    "Count",
    "IoU",
    "Mean",
    "Measured",
    "Metric",
    "PrecisionRecall",
    "Ratio",
    "RowMetric",
    "Rows",
    "Score",
    "TopK",
    "Value",
    "from_torchmetrics",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
