"""Metrics of TorchMetrics as metrics of a run. Begin with ``metric.py``.

Caller: ``metrics/by_name.py``, where one is asked for. Keep: the value is the library's, on any number of
ranks.
"""

from dualeval.metrics.torchmetrics.arguments import Parsed as Parsed
