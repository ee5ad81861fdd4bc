"""For tests of metrics of TorchMetrics: one thread, and nothing said."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from dualeval.metrics.torchmetrics.metric import torchmetrics


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads that wait for each other take minutes on a machine that is in use."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def quiet() -> Iterator[None]:
    """TorchMetrics says at the construction of some metrics that they hold all predictions."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Metric .* will save all")
        yield


@pytest.fixture(scope="module")
def package() -> ModuleType:
    return torchmetrics()
