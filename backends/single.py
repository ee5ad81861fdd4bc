"""The backend of a process that is alone: every collective is the identity."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dualeval.backends.base import Backend, Op


class SingleBackend(Backend):
    """A world of one process."""

    name = "single"
    start = "'dualeval run'"

    def carrier(self, device: torch.device) -> torch.device:
        return device

    @contextmanager
    def mesh(self) -> Iterator[DeviceMesh]:
        import torch.distributed as dist
        from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not in __all__
        from torch.distributed.device_mesh import DeviceMesh

        # A group of one, for as long as it is wanted: torch divides no model without a group.
        library = "gloo" if self.device.type == "cpu" else dist.get_default_backend_for_device(self.device)
        dist.init_process_group(library, store=HashStore(), rank=0, world_size=1)
        group = dist.group.WORLD
        assert group is not None
        try:
            yield DeviceMesh.from_group(group, self.device.type)
        finally:
            dist.destroy_process_group()

    def _all_reduce(self, tensor: Tensor, op: Op) -> None:
        """Leave the tensor: the sum, least and greatest of one value is that value."""

    def _broadcast(self, payload: Tensor, src: int) -> None:
        """Leave the payload: the only rank is its own source."""

    def _gather(self, payload: Tensor, dst: int | None) -> list[Tensor]:
        return [payload.clone()]

    def _close(self, failed: bool) -> None:
        """Do nothing: there is no group."""
