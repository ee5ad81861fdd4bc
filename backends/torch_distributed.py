"""The backend over torch.distributed: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in __all__

from dualeval.backends.base import Backend, Op
from dualeval.backends.mpi import MpiBackend
from dualeval.errors import BackendError, LaunchError
from dualeval.network import LOOPBACK, offered_addresses, reach
from dualeval.world import World

# Torch wants a limit on every collective. This is its own default, said aloud: a dead or stalled rank is
# noticed, named and ended by the control plane long before.
TIMEOUT = timedelta(minutes=30)

_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class TorchBackend(Backend):
    """The default process group of torch.distributed.

    Joins the group that torchrun's variables describe and leaves it on close. Ranks that mpirun started tell
    each other over MPI where to meet. Where the caller has already initialised torch.distributed, that group
    is used, and stays the caller's to end.

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
        with self._translated("joining the group"):
            store = None if self.world.master else self._meet_over_mpi()
            dist.init_process_group(
                self._library,
                init_method=None if store else "env://",
                store=store,
                rank=self.world.rank,
                world_size=self.world.size,
                timeout=TIMEOUT,
                device_id=self.transport if on_gpu else None,
            )

    def _meet_over_mpi(self) -> TCPStore:
        """Serve the group's store on rank 0, and tell the others through MPI where it is."""
        server = None
        offer = None
        if self.world.is_main:
            server = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
            one_node = self.world.local_size == self.world.size
            offer = [offered_addresses(one_node=one_node), server.port]
        with MpiBackend(self.world, torch.device("cpu")) as mpi:
            addresses, port = mpi.broadcast_json(offer)
        if server is not None:
            return server
        address, tried = reach(addresses, port)
        if address is None:
            raise BackendError(
                f"rank {self.world.rank} cannot reach rank 0 to join torch.distributed; tried "
                f"{'; '.join(tried)}"
            )
        return TCPStore(address, port, is_master=False, timeout=TIMEOUT)

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
