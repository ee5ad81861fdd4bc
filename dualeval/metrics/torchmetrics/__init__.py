"""Metrics of TorchMetrics as metrics of a run.

Begin with ``metric.py``, which also reads their line of text (``torchmetrics:NAME``).

Callers: ``metrics/by_name.py``, where one is asked for, and ``from_torchmetrics``. Keep: the value is the
library's, on any number of ranks.
"""

from dualeval.metrics.torchmetrics.arguments import Parsed as Parsed
