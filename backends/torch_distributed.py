"""The backend over torch.distributed: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from dualeval.backends.base import Backend, Op, variables_set
from dualeval.backends.rendezvous import (
    PATIENCE,
    interface_between_nodes,
    own_place,
    placed_on_hosts,
    shared_store,
)
from dualeval.errors import BackendError, LaunchError
from dualeval.world import World, place_by_hosts

_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class TorchBackend(Backend):
    """The default process group of torch.distributed.

    Joins the group that torchrun's variables describe, or those of another tool that have the same names, and
    leaves it on close. Ranks that mpirun started tell each other over MPI where to meet, Flux's over PMI, and
    those of a step of Slurm's at a port that follows from the step's number. Where the caller has already
    initialised torch.distributed, that group is used, and stays the caller's to end.

    Raises:
        LaunchError: the caller's group has another rank or size than ``world``, or there is neither an
            address to meet at nor an MPI to learn one.
        BackendError: the group could not be joined.
    """

    name = "torch"

    def __init__(self, world: World, device: torch.device, transport: torch.device | None = None) -> None:
        super().__init__(world, device, transport)
        self._joined = not dist.is_initialized()
        if self._joined:
            self._join()
        else:
            self._adopt()

    def _join(self) -> None:
        on_gpu = self.transport.type == "cuda"
        self._library = "nccl" if on_gpu else "gloo"
        with (
            self._translated("joining the group"),
            shared_store(self.world, "torch.distributed") as (store, _, port),
        ):
            self.world = placed_on_hosts(self.world, store)
            # NCCL finds a network by itself that all nodes share; gloo has to be told.
            told = on_gpu or self.world.is_one_node
            network = None if told else interface_between_nodes(self.world, store, port)
            with variables_set({"GLOO_SOCKET_IFNAME": network} if network else {}):
                dist.init_process_group(
                    self._library,
                    store=store,
                    rank=self.world.rank,
                    world_size=self.world.size,
                    timeout=PATIENCE,
                    device_id=self.transport if on_gpu else None,
                )

    def _adopt(self) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        if (rank, size) != (self.world.rank, self.world.size):
            raise LaunchError(
                f"torch.distributed is already initialised as rank {rank} of {size}, but the launcher's "
                f"variables say rank {self.world.rank} of {self.world.size}. Initialise it from the same "
                f"variables, or leave that to dualeval."
            )
        self._library = dist.get_backend()
        # Any group but one of NCCL alone takes host memory.
        on_gpu = self._library == "nccl"
        self.transport = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        if not self.world.placed:
            hosts, local_ranks = zip(*self.all_gather_json(own_place(self.world)), strict=True)
            self.world = place_by_hosts(self.world, hosts, local_ranks)

    def _all_reduce(self, tensor: Tensor, op: Op) -> None:
        with self._translated("reducing"):
            dist.all_reduce(tensor, _OPS[op])

    def _broadcast(self, payload: Tensor, src: int) -> None:
        with self._translated("broadcasting"):
            dist.broadcast(payload, src)

    def _gather(self, payload: Tensor, dst: int | None) -> list[Tensor] | None:
        if dst is not None and dst != self.world.rank:
            with self._translated("gathering"):
                dist.gather(payload, None, dst)
            return None
        parts = [torch.empty_like(payload) for _ in range(self.world.size)]
        with self._translated("gathering"):
            if dst is None:
                dist.all_gather(parts, payload)
            else:
                dist.gather(payload, parts, dst)
        return parts

    def _barrier(self) -> None:
        with self._translated("waiting at a barrier"):
            if self.transport.type == "cuda":
                dist.barrier(device_ids=[self.transport.index])
            else:
                dist.barrier()

    def _close(self, failed: bool) -> None:
        if not self._joined:
            return
        try:
            # A gloo rank that leaves while another is still in its last collective breaks it, and a group
            # that is never destroyed now and then aborts the interpreter at exit (SIGABRT).
            if not failed:
                self._barrier()
        finally:
            dist.destroy_process_group()

    @contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        """Turn torch's errors into a BackendError that says who was doing what."""
        try:
            yield
        except RuntimeError as error:
            raise BackendError(
                f"torch.distributed ({self._library}) broke on rank {self.world.rank} of {self.world.size} "
                f"while {doing}: {str(error).strip() or type(error).__name__}. Where another rank failed "
                f"first, its message has the cause."
            ) from error
