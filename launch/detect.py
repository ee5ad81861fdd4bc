"""Find the World of this process in the variables that its launcher set.

Detection is a table of pure probes, each ``Mapping -> World | None``, asked in order: the innermost launcher
first, because it alone knows this process's rank (torchrun inside an allocation starts several ranks for
each task of the outer launcher). All fields of a World come from the one probe that answered.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from dualeval.errors import LaunchError, UsageError
from dualeval.world import World

Probe = Callable[[Mapping[str, str]], World | None]


@dataclass(frozen=True, kw_only=True)
class _Variables:
    """The variables by which a launcher tells a process its place.

    Attributes:
        launcher: its name in ``PROBES``.
        rank: variable with this process's number; likewise ``size``, ``local_rank`` and ``local_size``.
        others: further variables that it always sets, and that are needed.
        mark: a variable that it alone sets; None where the names above are its own already.
        start: what to type to start with it.
    """

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    others: tuple[str, ...] = ()
    mark: str | None = None
    start: str

    @property
    def ranks(self) -> tuple[str, ...]:
        return (self.rank, self.size, self.local_rank, self.local_size)

    @property
    def needed(self) -> tuple[str, ...]:
        return (*self.ranks, *self.others)


TORCHRUN = _Variables(
    launcher="torchrun",
    rank="RANK",
    size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_size="LOCAL_WORLD_SIZE",
    others=("GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    mark="TORCHELASTIC_RUN_ID",
    start="torchrun --nproc-per-node N -m dualeval run",
)
# As horovodrun sets them where the ranks meet over gloo. Over MPI it starts mpirun, and the ranks are that's.
HOROVODRUN = _Variables(
    launcher="horovodrun",
    rank="HOROVOD_RANK",
    size="HOROVOD_SIZE",
    local_rank="HOROVOD_LOCAL_RANK",
    local_size="HOROVOD_LOCAL_SIZE",
    others=("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    start="horovodrun -np N dualeval run",
)
OPEN_MPI = _Variables(
    launcher="openmpi",
    rank="OMPI_COMM_WORLD_RANK",
    size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    start="mpirun -np N dualeval run",
)
# MPICH's process manager, Hydra, which Intel MPI has too. PMI_RANK and PMI_SIZE alone are no trace of it:
# Slurm sets them for a step with --mpi=pmi2.
MPICH = _Variables(
    launcher="mpich",
    rank="PMI_RANK",
    size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_size="MPI_LOCALNRANKS",
    start="mpirun -np N dualeval run",
)


def detect(environ: Mapping[str, str], launcher: str | None = None) -> World:
    """Find which launcher started this process, and the process's place in the run.

    Args:
        environ: the environment variables.
        launcher: a name of ``PROBES`` to ask that probe alone; None asks all, innermost first.

    Returns:
        the World; ``World.alone()`` where no launcher left a trace, or with ``launcher="none"``.

    Raises:
        LaunchError: the variables are incomplete or contradict each other, or are not those of ``launcher``.
        UsageError: there is no launcher of that name.
    """
    if launcher is None:
        # The last probe, "none", always answers.
        return next(world for probe in PROBES.values() if (world := probe(environ)) is not None)
    if launcher not in PROBES:
        near = difflib.get_close_matches(launcher, PROBES, cutoff=0.5)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise UsageError(
            f"There is no launcher {launcher!r}.{hint} --launcher takes one of: {', '.join(PROBES)}."
        )
    world = PROBES[launcher](environ)
    if world is None:
        raise LaunchError(
            f"--launcher {launcher} was given, but no variable of {launcher} is set. "
            f"Start with '{_STARTS[launcher]}', or leave --launcher out."
        )
    return world


def _probe_torchrun(environ: Mapping[str, str]) -> World | None:
    """Probe for torchrun: all of its variables, or none of those that place a process.

    MASTER_ADDR and MASTER_PORT alone are no trace of it: job scripts export them for any launcher, and an
    address makes no process a rank.
    """
    trace = (TORCHRUN.mark or "", *TORCHRUN.ranks, "GROUP_RANK")
    world = _place(TORCHRUN, environ, trace)
    if world is None:
        return None
    return replace(
        world,
        node_rank=_whole_number(TORCHRUN, environ, "GROUP_RANK"),
        master=_address(TORCHRUN, environ, "MASTER_ADDR", "MASTER_PORT"),
    )


def _probe_horovodrun(environ: Mapping[str, str]) -> World | None:
    """Probe for horovodrun with gloo.

    Where the ranks meet is the rendezvous of the host where horovodrun was typed, not rank 0's: no master.
    Its HOROVOD_CROSS_RANK numbers the nodes that have this local rank, which is not all of them.
    """
    world = _place(HOROVODRUN, environ, HOROVODRUN.ranks)
    if world is None:
        return None
    if environ.get("HOROVOD_ELASTIC") == "1":
        raise _error(
            HOROVODRUN,
            "horovodrun started this process in its elastic mode, in which ranks come and go",
            environ,
            f"Start a fixed number of them with '{HOROVODRUN.start}'",
        )
    _address(HOROVODRUN, environ, *HOROVODRUN.others)
    return world


def _probe_open_mpi(environ: Mapping[str, str]) -> World | None:
    """Probe for Open MPI's mpirun (its OMPI_COMM_WORLD_NODE_RANK is no number of a node)."""
    return _place(OPEN_MPI, environ, OPEN_MPI.ranks)


def _probe_mpich(environ: Mapping[str, str]) -> World | None:
    """Probe for MPICH's mpirun."""
    return _place(MPICH, environ, (MPICH.local_rank, MPICH.local_size))


def _probe_none(environ: Mapping[str, str]) -> World:
    """Probe for no launcher: answers always, whatever is set."""
    return World.alone()


def _place(source: _Variables, environ: Mapping[str, str], trace: tuple[str, ...]) -> World | None:
    """Read the four numbers that every launcher gives; None where it left no trace.

    A rank or a size without the rest is an error and never rank 0: several processes that each took
    themselves for the only one would all write the same result.
    """
    if not any(name in environ for name in trace):
        return None
    missing = [name for name in source.needed if name not in environ]
    if missing:
        raise _half_set(source, environ, missing)
    rank, size, local_rank, local_size = (_whole_number(source, environ, name) for name in source.ranks)
    if not rank < size:
        raise _error(source, f"{source.rank}={rank} is not below {source.size}={size}", environ)
    if not local_rank < local_size:
        raise _error(
            source, f"{source.local_rank}={local_rank} is not below {source.local_size}={local_size}", environ
        )
    if not local_size <= size:
        raise _error(source, f"{source.local_size}={local_size} is above {source.size}={size}", environ)
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=None,
        launcher=source.launcher,
    )


def _whole_number(source: _Variables, environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not (text.isascii() and text.isdecimal()):
        raise _error(source, f"{name}={text!r} is not a whole number", environ)
    return int(text)


def _address(source: _Variables, environ: Mapping[str, str], host: str, port: str) -> tuple[str, int]:
    if not environ[host]:
        raise _error(source, f"{host} is empty", environ)
    number = _whole_number(source, environ, port)
    if not 0 < number < 65536:
        raise _error(source, f"{port}={number} is no port (1 to 65535)", environ)
    return environ[host], number


def _half_set(source: _Variables, environ: Mapping[str, str], missing: list[str]) -> LaunchError:
    start = f"Start with '{source.start}'"
    if source.mark is None or source.mark in environ:
        cause = (
            f"{source.launcher} started this process, but something between removed a part of its variables"
        )
        remedy = start
    else:
        stale = " ".join(name for name in source.needed if name in environ)
        cause = f"{source.mark} is not set either, so these are left over or another tool's"
        remedy = f"{start}, or type 'unset {stale}'"
    verb = "is" if len(missing) == 1 else "are"
    problem = f"{source.launcher}'s variables are half set: {', '.join(missing)} {verb} missing"
    return _error(source, problem, environ, f"{cause}. {remedy}")


def _error(
    source: _Variables, problem: str, environ: Mapping[str, str], advice: str | None = None
) -> LaunchError:
    """Make the error that shows what was found of a launcher's variables and what to type."""
    names = (*source.needed, *((source.mark,) if source.mark else ()))
    found = ", ".join(f"{name}={environ[name]}" for name in names if name in environ)
    start = f"Start with '{source.start}'"
    return LaunchError(
        f"{problem} (found: {found}). {advice or start}, "
        f"or pass --launcher none to run one process without them."
    )


# Innermost launcher first: torchrun may run inside a task of any other, and horovodrun inside an allocation
# that sets MPI's variables. "none" stays last: it always answers.
PROBES: dict[str, Probe] = {
    TORCHRUN.launcher: _probe_torchrun,
    HOROVODRUN.launcher: _probe_horovodrun,
    OPEN_MPI.launcher: _probe_open_mpi,
    MPICH.launcher: _probe_mpich,
    "none": _probe_none,
}
_STARTS = {source.launcher: source.start for source in (TORCHRUN, HOROVODRUN, OPEN_MPI, MPICH)}
