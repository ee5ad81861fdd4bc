"""Metrics of TorchMetrics as metrics of a run. Begin with ``metric.py``."""

from dualeval.metrics.torchmetrics.arguments import Parsed as Parsed
