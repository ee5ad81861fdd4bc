"""The backend over Horovod: gloo or MPI between CPUs, NCCL between GPUs where Horovod is built with it."""

from __future__ import annotations

import atexit
import importlib.util
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from dualeval.backends.base import Backend, Op, sleep_until, variables_set
from dualeval.backends.mpi import awaited_by_mpi, start_mpi, stop_mpi
from dualeval.backends.rendezvous import interface_between_nodes, joining, nccl_variables, placed_on_hosts
from dualeval.errors import BackendError, LaunchError, LibraryError
from dualeval.launch.launchers import launcher_of
from dualeval.world import World
from dualeval.world.meetings.served import AtHorovodrun
from dualeval.world.network import LATE_S, LOOPBACK
from dualeval.world.waiting import CONNECTED, STARTED, waiting

# Horovod takes its settings from variables alone. Those that the user has set stay.
_SETTINGS = {
    # It limits the start and every collective. The control plane ends a rank that died or stalls long before.
    "HOROVOD_GLOO_TIMEOUT_SECONDS": f"{LATE_S:.0f}",
    # It warns after a minute that a rank is late. The control plane says so, with that rank's name.
    "HOROVOD_STALL_CHECK_DISABLE": "1",
    # Milliseconds. Once a cycle, from start to end, a thread of Horovod's on every rank asks the others for
    # something to do. In cycles of 1, Horovod's own, that takes a tenth to a fourth of a core.
    "HOROVOD_CYCLE_TIME": "5",
}
_SETTINGS_OVER_MPI = {
    **_SETTINGS,
    # Over MPI the thread that asks first waits by looking without a pause. In cycles of 1 that was measured
    # to take a whole core of a rank that had nothing to do; in cycles of 20 mostly a twentieth, rarely a
    # half, as far apart as the cycles of the ranks happen to begin.
    "HOROVOD_CYCLE_TIME": "20",
}

_SERVER = {
    # Horovod's own queue of 5 makes dozens of ranks that come at once try again, seconds later.
    "request_queue_size": 1024,
    # Its end does not wait, up to 3 s, for a request that a rank which hangs has sent in part.
    "daemon_threads": True,
    "block_on_close": False,
}
_RENDEZVOUS = "dualeval/horovod-rendezvous-port"
_ADVICE = (
    "Horovod is built with that library: pass --backend mpi, or type 'dualeval setup-horovod' with the "
    "launcher's own mpirun first on the PATH."
)


class HorovodBackend(Backend):
    """All ranks of Horovod.

    Where the caller has initialised Horovod already, it stays the caller's to shut down. Host tensors travel
    over gloo or MPI; CUDA tensors over NCCL where Horovod is built with it, and else through host memory.

    Horovod has names for collectives, and one name for all of a kind is right here: each one is over on this
    rank before the next begins, and a name that is known already is agreed on faster.
    """

    name = "horovod"
    start = "'dualeval run --nproc N --backend horovod' or 'horovodrun -np N dualeval run'"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._hvd = _load()
        self._library_name, self._library_errors = "Horovod", (RuntimeError, ValueError)
        self._over_mpi = _meets_over_mpi(self._hvd, world)
        if self._hvd.nccl_built():
            self._sends_from = frozenset(["cuda"])
        self._mpi: Any = None
        self._ops = {"sum": self._hvd.Sum, "min": self._hvd.Min, "max": self._hvd.Max}
        self._serving = ExitStack()
        self.owns_group = not self._hvd.is_initialized()
        if self.owns_group:
            try:
                self._start()
            except BaseException:
                self._serving.close()
                raise
        place = (self._hvd.rank(), self._hvd.size())
        if place != (world.rank, world.size):
            raise LaunchError(
                f"{world.launcher} started this process as rank {world.rank} of {world.size}, but Horovod "
                f"says rank {place[0]} of {place[1]}. If mpirun or srun started it, Horovod is built with "
                "another MPI: type 'dualeval setup-horovod' with that MPI's mpirun first on the PATH, or "
                "pass another --backend."
            )

    def _start(self) -> None:
        with (
            self._met() as variables,
            self._translated("joining the group"),
            variables_set(variables),
            waiting(self.world, "all ranks to join Horovod", f"{STARTED} {CONNECTED}"),
        ):
            self._hvd.init()

    @contextmanager
    def _met(self) -> Iterator[Mapping[str, str]]:
        """Meet the other ranks, as far as Horovod does not by itself; yields the variables that it needs."""
        if self._over_mpi:
            # Horovod would initialise MPI itself, but then wait for a late rank without a pause.
            self._mpi = start_mpi(self.world, _ADVICE)
            with awaited_by_mpi(self.world, "Horovod over MPI"):
                sleep_until(self._mpi.COMM_WORLD.Ibarrier().Test)
            yield _SETTINGS_OVER_MPI
        elif not isinstance(self.world.meeting, AtHorovodrun):
            with self._met_without_horovodrun() as variables:
                yield {**_SETTINGS, **variables}
        else:
            yield _SETTINGS

    @contextmanager
    def _met_without_horovodrun(self) -> Iterator[Mapping[str, str]]:
        """Serve on rank 0 what horovodrun would; yields what it would tell this rank."""
        with self.world.meeting.open(self.world, "Horovod's rendezvous") as (store, host, port):
            world = self.world = placed_on_hosts(self.world, store)
            _require_ipv4(host, world.rank)
            if world.is_main:
                everywhere = LOOPBACK if world.is_one_node else "0.0.0.0"
                store.set(_RENDEZVOUS, str(self._serving.enter_context(_rendezvous(everywhere))))
            with joining(world, store, "Horovod's rendezvous"):
                rendezvous_port = int(store.get(_RENDEZVOUS))
            network = "lo" if world.is_one_node else interface_between_nodes(world, store, port)
            if not world.is_one_node and self._hvd.nccl_built():
                # For as long as Horovod runs: NCCL reads it with the first collective of GPU memory.
                self._serving.enter_context(variables_set(nccl_variables(network)))
            # The store is served until the block is left: other ranks may be on their way to it.
            # The host may have been reached before we knew that it is the only one.
            address = LOOPBACK if world.is_one_node else host
            yield gloo_variables(world, address, rendezvous_port, network)

    def _all_reduce(self, tensor: Tensor, op: Op) -> None:
        with self._translated("reducing"):
            self._finish(
                self._hvd.allreduce_async_(tensor, op=self._ops[op], name=f"dualeval.all_reduce.{op}")
            )

    def _broadcast(self, payload: Tensor, src: int) -> None:
        with self._translated("broadcasting"):
            self._finish(self._hvd.broadcast_async_(payload, src, name=f"dualeval.broadcast.{src}"))

    def _gather(self, payload: Tensor, dst: int | None) -> list[Tensor] | None:
        size, rank = self.world.size, self.world.rank
        if dst is None:
            with self._translated("gathering"):
                gathered = self._finish(self._hvd.allgather_async(payload, name="dualeval.all_gather"))
            return list(gathered.view(size, -1))
        # Horovod's allgather would need the room for all on every rank; here all goes to one.
        splits = torch.zeros(size, dtype=torch.int32, device="cpu")
        splits[dst] = payload.numel()
        with self._translated("gathering"):
            gathered, _ = self._finish(
                self._hvd.alltoall_async(payload, splits, name=f"dualeval.gather.{dst}")
            )
        return list(gathered.view(size, -1)) if dst == rank else None

    def _finish(self, handle: int) -> Any:
        """Wait, asleep, for what has been begun; returns its result."""
        sleep_until(lambda: self._hvd.poll(handle))
        return self._hvd.synchronize(handle)

    def _close(self, failed: bool) -> None:
        if not self.owns_group:
            return
        if failed:
            self._serving.close()
            # To shut down is agreed with ranks that may be gone, and Horovod would do it at exit.
            atexit.unregister(self._hvd.mpi_ops._basics.shutdown)
            return
        self.barrier()
        self._hvd.shutdown()
        self._serving.close()
        if self._mpi is not None:
            stop_mpi(self._mpi)


def runs_over_mpi() -> bool:
    """Whether Horovod is installed, and built with MPI."""
    return importlib.util.find_spec("horovod") is not None and bool(_load().mpi_built())


def built_with() -> dict[str, bool]:
    """Whether Horovod is built with gloo, MPI and NCCL; raises LaunchError where it is missing or broken."""
    hvd = _load()
    return {"gloo": hvd.gloo_built(), "MPI": hvd.mpi_built(), "NCCL": bool(hvd.nccl_built())}


def describe() -> str:
    """Horovod's version and what it is built with; raises LaunchError where it is missing or broken."""
    features = ", ".join(name if has else f"no {name}" for name, has in built_with().items())
    return f"{importlib.import_module('horovod').__version__} ({features})"


@contextmanager
def serve_rendezvous(size: int) -> Iterator[Callable[[int], Mapping[str, str]]]:
    """Serve the place where ranks on this machine find each other over gloo, as horovodrun does."""

    def variables_of(rank: int) -> Mapping[str, str]:
        world = World(
            rank=rank,
            size=size,
            local_rank=rank,
            local_size=size,
            node_rank=0,
            launcher="horovodrun",
            node_sizes=(size,),
        )
        return gloo_variables(world, LOOPBACK, port, "lo")

    with _rendezvous(LOOPBACK) as port:
        yield variables_of


@contextmanager
def _rendezvous(address: str) -> Iterator[int]:
    """Serve Horovod's rendezvous on an address of this host; yields the port."""
    module = _load_module("horovod.runner.http.http_server")
    server_class = type("RendezvousServer", (module.RendezvousHTTPServer,), _SERVER)
    server = server_class((address, 0), module.RendezvousHandler, 0)
    serving = threading.Thread(target=server.serve_forever, name="horovod-rendezvous", daemon=True)
    serving.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


def gloo_variables(world: World, address: str, port: int, interface: str | None) -> dict[str, str]:
    """Find the variables that horovodrun would set for a rank."""
    assert world.node_sizes is not None
    # Horovod's "cross" ranks are those with one local rank, one on each node that has so many.
    cross = [size > world.local_rank for size in world.node_sizes]
    return {
        "HOROVOD_RANK": str(world.rank),
        "HOROVOD_SIZE": str(world.size),
        "HOROVOD_LOCAL_RANK": str(world.local_rank),
        "HOROVOD_LOCAL_SIZE": str(world.local_size),
        "HOROVOD_CROSS_RANK": str(sum(cross[: world.node_rank])),
        "HOROVOD_CROSS_SIZE": str(sum(cross)),
        # With the node's number: containers may have one host name on all nodes.
        "HOROVOD_HOSTNAME": f"{socket.gethostname()}-{world.node_rank}",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        **({"HOROVOD_GLOO_IFACE": interface} if interface else {}),
    }


def _require_ipv4(host: str, rank: int) -> None:
    """Raise where Horovod's gloo would not find the host of its rendezvous, which it looks for over IPv4."""
    try:
        socket.getaddrinfo(host, None, family=socket.AF_INET)
    except socket.gaierror as error:
        raise BackendError(
            f"Horovod meets only over IPv4, and rank {rank} reaches rank 0 at {host}, which has no IPv4 "
            f"address ({error.strerror}). Pass --backend torch, or give that host one that the others reach."
        ) from error


def _load() -> Any:
    return _load_module("horovod.torch")


def _load_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a library that does not fit breaks in any way
        if isinstance(error, ModuleNotFoundError) and error.name == "horovod":
            raise LibraryError(
                "Horovod is not installed. Type 'dualeval setup-horovod', which builds it for this torch in "
                "a few minutes, or pass another --backend."
            ) from error
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise LibraryError(
            f"Horovod is installed but cannot be loaded: {first}. It may be built for another torch than "
            f"{torch.__version__}. Type 'dualeval setup-horovod', which builds it for this one, or pass "
            f"another --backend."
        ) from error


def _meets_over_mpi(hvd: Any, world: World) -> bool:
    """Whether the ranks of this launcher find each other over MPI, else over gloo.

    In a step of Slurm's both may go; HOROVOD_CONTROLLER then says otherwise than MPI.
    """
    if launcher_of(world.launcher).starts_mpi:
        if not hvd.mpi_built():
            raise LibraryError(
                "mpirun started this process, but Horovod is built without MPI. Type 'dualeval setup-horovod "
                "--with-mpi', start with 'horovodrun -np N dualeval run', or pass --backend mpi."
            )
        return True
    wanted = os.environ.get("HOROVOD_CONTROLLER")
    if world.mpi and hvd.mpi_built() and wanted in (None, "mpi"):
        return True
    if world.launcher == "srun" and wanted == "mpi":
        lacks = "srun was not told --mpi=pmix" if hvd.mpi_built() else "Horovod is built without MPI"
        raise LaunchError(
            f"HOROVOD_CONTROLLER=mpi is set, but {lacks}. Type 'unset HOROVOD_CONTROLLER' to meet over gloo."
        )
    if not hvd.gloo_built():
        raise LibraryError(
            f"{world.launcher} started this process to meet over gloo, but Horovod is built without it. Type "
            f"'dualeval setup-horovod'."
        )
    return False
