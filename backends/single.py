"""The backend of a process that is alone: every collective is the identity."""

from __future__ import annotations

import torch
from torch import Tensor

from dualeval.backends.base import Backend, Op


class SingleBackend(Backend):
    """A world of one process."""

    name = "single"

    def carrier(self, device: torch.device) -> torch.device:
        return device

    def _all_reduce(self, tensor: Tensor, op: Op) -> None:
        """Leave the tensor: the sum, least and greatest of one value is that value."""

    def _broadcast(self, payload: Tensor, src: int) -> None:
        """Leave the payload: the only rank is its own source."""

    def _gather(self, payload: Tensor, dst: int | None) -> list[Tensor]:
        return [payload.clone()]

    def _close(self, failed: bool) -> None:
        """Do nothing: there is no group."""
