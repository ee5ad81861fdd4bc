"""Fixtures of several files of tests of models."""

from __future__ import annotations

import pytest
from torch import Tensor

from dualeval.vision_library import torchvision
from tests.models.test_weights import small
from tests.tasks.conftest import tiny
from tests.vehicles.published_weights import cache, publish

__all__ = ["cache", "publish", "tiny"]  # fixtures

# Imported here, not in the first test that needs it: the import sets an environment variable.
torchvision()


@pytest.fixture
def state() -> dict[str, Tensor]:
    """The state_dict of a small model."""
    return small().state_dict()
