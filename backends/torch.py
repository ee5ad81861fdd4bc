"""The backend over torch.distributed: gloo between host memories, NCCL between GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, but not in __all__
from torch.distributed.device_mesh import DeviceMesh

from dualeval.backends.base import Backend, Op, variables_set
from dualeval.backends.rendezvous import (
    interface_beside,
    interface_between_nodes,
    joining,
    nccl_variables,
    own_place,
    placed_on_hosts,
)
from dualeval.errors import LaunchError, UsageError
from dualeval.world import World, place_by_hosts
from dualeval.world.meetings import PATIENCE
from dualeval.world.waiting import waiting

_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
# Libraries that send from host memory; what a group has beside them sends from a device's.
_HOST_LIBRARIES = ("gloo", "mpi", "ucc", "fake")
# Each backend beside a script's group looks for its network by itself; all ranks open them in one order.
_GUESTS = count()
_ALL_EVALUATE = (
    "Every rank of the script's group must make the same call: dualeval.evaluate, EarlyStopping.update or "
    "Session.open."
)


class TorchBackend(Backend):
    """The default process group of torch.distributed.

    Joins the group that torchrun's variables describe, or those of another tool that have the same names, and
    leaves it on close. Ranks that mpirun started tell each other over MPI where to meet, Flux's over PMI, and
    those of a step of Slurm's at a port that follows from the step's number. Host tensors travel over gloo.
    Where all ranks have a GPU and NCCL, CUDA tensors travel over a group of NCCL's, which is made with the
    first of them: a caller's, or a sharded model's. An evaluation sends none.

    Where the caller has already initialised torch.distributed, host tensors travel over a gloo group of the
    backend's own on the same ranks, and devices' tensors over the caller's, which stays the caller's to end.
    """

    name = "torch"
    start = "'dualeval run --nproc N' or 'torchrun --nproc-per-node N -m dualeval run'"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._library_name = "torch.distributed"
        self.owns_group = not dist.is_initialized()
        # None is the default group.
        self._host_group: Any = None
        # In a group of this backend's own, that of NCCL once it is needed.
        self._nccl_group: Any = None
        self._settings = ExitStack()
        if self.owns_group:
            self._join()
        else:
            self._adopt()

    def _join(self) -> None:
        with (
            self._translated("joining the group"),
            self.world.meeting.open(self.world, "torch.distributed") as (store, _, port),
        ):
            with joining(self.world, store, "the comparison of their hosts and GPUs"):
                self.world = placed_on_hosts(self.world, store)
                with_nccl = _all_have_nccl(store, self.world)
            network = None if self.world.is_one_node else interface_between_nodes(self.world, store, port)
            if with_nccl and network is not None:
                # For as long as the group is there: NCCL reads it when it is set up.
                self._settings.enter_context(variables_set(nccl_variables(network)))
            # Imported later, it keeps the group for the default of an argument, and a group that is never
            # destroyed now and then aborts the interpreter at exit (SIGABRT).
            import torch.distributed.nn  # noqa: F401

            with (
                variables_set({"GLOO_SOCKET_IFNAME": network} if network else {}),
                joining(self.world, store, "torch.distributed's group (gloo)"),
            ):
                dist.init_process_group(
                    "cpu:gloo",
                    store=store,
                    rank=self.world.rank,
                    world_size=self.world.size,
                    timeout=PATIENCE,
                )
        if with_nccl:
            self._sends_from = frozenset(["cuda"])

    def _adopt(self) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        if (rank, size) != (self.world.rank, self.world.size):
            raise LaunchError(
                f"torch.distributed is already initialised as rank {rank} of {size}, but the launcher's "
                f"variables say rank {self.world.rank} of {self.world.size}. Initialise it from the same "
                f"variables, or leave that to dualeval."
            )
        self._sends_from = devices_of(dist.get_backend_config())
        with (
            self._translated("making a gloo group of its own"),
            waiting(self.world, "the other ranks to evaluate, too", _ALL_EVALUATE),
        ):
            # The caller's may have NCCL alone; and its collectives may be under way in another thread.
            self._host_group = self._group_of_its_own()
        if not self.world.placed:
            hosts, local_ranks = zip(*self.all_gather_json(own_place(self.world)), strict=True)
            self.world = place_by_hosts(self.world, hosts, local_ranks)

    def _group_of_its_own(self) -> Any:
        store = dist.distributed_c10d._get_default_store()
        with ExitStack() as stack:
            # NCCL finds its network by itself, gloo does not; and the script may have gloo's name no more.
            if self.world.size > 1 and not (self.world.placed and self.world.is_one_node):
                of_its_own = PrefixStore(f"dualeval/guest/{next(_GUESTS)}", store)
                network = stack.enter_context(interface_beside(self.world, of_its_own))
                stack.enter_context(variables_set({"GLOO_SOCKET_IFNAME": network} if network else {}))
            return dist.new_group(backend="gloo", timeout=PATIENCE)

    @contextmanager
    def mesh(self) -> Iterator[DeviceMesh]:
        from torch.distributed.device_mesh import DeviceMesh

        group, is_new = self._group_of_device(), False
        if group is None:
            with self._translated("making a group for the model's parts"):
                group, is_new = dist.new_group(backend="nccl", timeout=PATIENCE), True
        try:
            yield DeviceMesh.from_group(group, self.device.type)
        finally:
            if is_new:
                dist.destroy_process_group(group)

    def _group_of_device(self) -> Any:
        """The group between the memories where the models are; None where there is none yet."""
        kind = self.device.type
        if kind == "cpu":
            return dist.group.WORLD if self._host_group is None else self._host_group
        if kind in self._sends_from:
            return self._nccl() if self.owns_group else dist.group.WORLD
        if self._shares_device:
            raise UsageError(
                f"shard: several ranks share {self.device}, and NCCL gives each rank a GPU of its own. Start "
                "as many ranks as there are GPUs, or leave shard out."
            )
        if kind != "cuda" or not dist.is_nccl_available():
            raise UsageError(
                f"shard: this torch has no library that gathers a model's parts on {kind} (for a GPU, NCCL). "
                "Install a torch that has, give --device cpu, or leave shard out."
            )
        return None

    def _group(self, tensor: Tensor) -> Any:
        if tensor.device.type == "cpu":
            return self._host_group
        return self._nccl() if self.owns_group else None

    def _nccl(self) -> Any:
        """The group of NCCL's, which is made when it is first needed. A collective then."""
        if self._nccl_group is None:
            with self._translated("making a group of NCCL's"):
                self._nccl_group = dist.new_group(backend="nccl", timeout=PATIENCE)
        return self._nccl_group

    def _all_reduce(self, tensor: Tensor, op: Op) -> None:
        with self._translated("reducing"):
            dist.all_reduce(tensor, _OPS[op], group=self._group(tensor))

    def _broadcast(self, payload: Tensor, src: int) -> None:
        with self._translated("broadcasting"):
            dist.broadcast(payload, src, group=self._group(payload))

    def _gather(self, payload: Tensor, dst: int | None) -> list[Tensor] | None:
        group = self._group(payload)
        if dst is not None and dst != self.world.rank:
            with self._translated("gathering"):
                dist.gather(payload, None, dst, group=group)
            return None
        pieces = [torch.empty_like(payload) for _ in range(self.world.size)]
        with self._translated("gathering"):
            if dst is None:
                dist.all_gather(pieces, payload, group=group)
            else:
                dist.gather(payload, pieces, dst, group=group)
        return pieces

    def _close(self, failed: bool) -> None:
        # A gloo rank that leaves while another is still in its last collective breaks it.
        with self._settings:
            try:
                if not failed:
                    self.barrier()
            finally:
                if failed and self._nccl_group is not None:
                    # NCCL's own end waits for collectives of ranks that may be gone.
                    dist.distributed_c10d._abort_process_group()
                else:
                    dist.destroy_process_group(self._host_group)
                # Its threads end with it; collected later, in a forked process, it would wait for them there.
                self._host_group = self._nccl_group = None


def devices_of(config: str) -> frozenset[str]:
    """The types of devices from whose memory a process group sends."""
    pairs = (entry.split(":") for entry in config.split(","))
    return frozenset(
        device for device, library in pairs if library not in _HOST_LIBRARIES and device != "cpu"
    )


def _all_have_nccl(store: Store, world: World) -> bool:
    """Whether every rank has a GPU and NCCL: all have to open the same kind of group. A collective."""
    # NCCL's part of a group cannot be made on a node without a GPU.
    has_nccl = dist.is_nccl_available() and torch.cuda.is_available()
    store.add("dualeval/with-nccl", int(has_nccl))
    if store.add("dualeval/asked-for-nccl", 1) == world.size:
        store.set("dualeval/nccl", str(store.add("dualeval/with-nccl", 0) == world.size))
    return store.get("dualeval/nccl") == b"True"
