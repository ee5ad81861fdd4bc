"""Find the World of this process in the variables that its launcher set.

Detection is a table of pure probes, each ``Mapping -> World | None``, asked in order: the innermost launcher
first, because it alone knows this process's rank (torchrun inside an allocation starts several ranks for
each task of the outer launcher). All fields of a World come from the one probe that answered.

A launcher's variables that are set in part are an error. One case is not: torchrun's have names that other
tools and shells have too, so where its mark is missing and another launcher's set is whole, they are passed
over.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from dualeval.errors import LaunchError, UsageError
from dualeval.launch.hostlist import expand_hosts, expand_tasks, node_addresses
from dualeval.launch.variables import ALL, HOROVODRUN, MPICH, OPEN_MPI, SRUN, TORCHRUN, Variable, Variables
from dualeval.world import World

Probe = Callable[[Mapping[str, str]], World | None]


# Slurm numbers from here on what is no step of tasks: a batch script, an salloc shell on a node.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_GPUS = "SLURM_GPUS_ON_NODE"
# How often the ranks were started again: torchrun's --max-restarts, and a job that was requeued.
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_REQUEUES = "SLURM_RESTART_COUNT"
# By these MPI's own launchers tell a rank its number, beside variables of theirs or, as some do, alone.
_OTHER_RANKS = ("PMI_RANK", "PMIX_RANK", "PALS_RANKID")
# Ports for ranks to meet at: outside of what the kernel gives to clients (32768 and up).
_FIRST_PORT, _PORTS = 16384, 16000


@dataclass(frozen=True, kw_only=True)
class Detection:
    """What the environment says, for ``detect`` and for people.

    Attributes:
        world: this process's place; None where ``error`` is.
        error: why there is none.
        found: by launcher, in the order of ``PROBES``, those of its variables that are set.
        notes: sentences about what does not fit together, and what was made of it.
        outer: sentences about the launchers that started this one, as srun may have started torchrun.
    """

    world: World | None = None
    error: LaunchError | None = None
    found: Mapping[str, tuple[Variable, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    outer: tuple[str, ...] = ()

    @property
    def place(self) -> World:
        """The world; raises the LaunchError where there is none."""
        if self.world is None:
            assert self.error is not None
            raise self.error
        return self.world


class _LeftOver(LaunchError):
    """Variables that are set in part, and may be another's than the launcher whose names they have."""


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
    return examine(environ, launcher).place


def examine(environ: Mapping[str, str], launcher: str | None = None) -> Detection:
    """Find the same as ``detect``, with the reasons; a launcher's variables that are wrong are no exception.

    Args:
        environ: the environment variables.
        launcher: as for ``detect``.

    Raises:
        UsageError: there is no launcher of that name.
    """
    found = {source.launcher: source.found(environ) for source in ALL}
    try:
        if launcher is not None:
            return Detection(world=_ask_one(environ, launcher), found=found)
        world, left_over = _ask_all(environ)
    except LaunchError as error:
        return Detection(error=error, found=found)
    if world.launcher == "none" and (problem := left_over or _unplaced(environ)):
        return Detection(error=problem, found=found)
    return Detection(
        world=world,
        found=found,
        notes=tuple(_notes(environ, world, left_over)),
        outer=tuple(_outer(environ, world)),
    )


def _ask_all(environ: Mapping[str, str]) -> tuple[World, _LeftOver | None]:
    """The first probe's answer, and what was passed over on the way to it."""
    left_over = None
    for probe in PROBES.values():
        try:
            world = probe(environ)
        except _LeftOver as error:
            left_over = error
            continue
        if world is not None:
            _refuse_contradiction(environ, world)
            return world, left_over
    raise AssertionError("the last probe answers always")


def _unplaced(environ: Mapping[str, str]) -> LaunchError | None:
    """The error of a process that is one of several, by what is set, though no launcher's set is whole."""
    # A batch script and an salloc shell are number 0 of their job.
    missing = [name for name in SRUN.needed if name not in environ]
    if missing and any(environ.get(name, "0") != "0" for name in (SRUN.rank, SRUN.local_rank)):
        return _half_set(SRUN, environ, missing)
    others = {name: environ[name] for name in _OTHER_RANKS if name in environ}
    if others and environ.get("PMI_SIZE") != "1":
        found = ", ".join(f"{name}={value}" for name, value in others.items())
        return LaunchError(
            f"a launcher that is none of {', '.join(PROBES)} seems to have started this process as one of "
            f"several (found: {found}). Start with '{OPEN_MPI.start}' or '{SRUN.start}', or pass --launcher "
            f"none to run one process without them."
        )
    return None


def _refuse_contradiction(environ: Mapping[str, str], world: World) -> None:
    """Raise where all of torchrun's variables are set, but not by torchrun, and another launcher says else.

    Exported in a shell they would make every task of srun's the same rank; set by a script in its task they
    would be right, and nobody but the user knows which they are.
    """
    if world.launcher != TORCHRUN.launcher or TORCHRUN.mark in environ:
        return
    for launcher in list(PROBES)[1:-1]:
        try:
            other = PROBES[launcher](environ)
        except LaunchError:
            continue
        if other is not None and (other.rank, other.size) != (world.rank, world.size):
            raise _error(
                TORCHRUN,
                f"{launcher} started this process as rank {other.rank} of {other.size}, and torchrun's "
                f"variables, which torchrun has not set ({TORCHRUN.mark} is missing), say rank {world.rank} "
                f"of {world.size}",
                environ,
                f"Type 'unset {' '.join(TORCHRUN.needed)}', or choose with --launcher {launcher} or "
                f"--launcher torchrun",
            )


def _ask_one(environ: Mapping[str, str], launcher: str) -> World:
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


def _notes(environ: Mapping[str, str], world: World, left_over: LaunchError | None) -> Iterator[str]:
    if left_over is not None:
        names = [name for name in TORCHRUN.needed if name in environ]
        yield (
            f"{', '.join(f'{name}={environ[name]}' for name in names)} {'is' if len(names) == 1 else 'are'} "
            f"left over or another tool's and passed over: {world.launcher} started this process. "
            f"Type 'unset {' '.join(names)}' to be rid of them."
        )
    tasks = environ.get("SLURM_NTASKS", environ.get("SLURM_NNODES", "1"))
    if world.launcher == "none" and "SLURM_JOB_ID" in environ and tasks != "1":
        yield (
            f"This shell belongs to Slurm's job {environ['SLURM_JOB_ID']} ({tasks} tasks on "
            f"{environ.get('SLURM_JOB_NODELIST', 'its nodes')}), but to no step of it, so one process runs "
            f"here alone. Type 'srun dualeval run' to start the tasks."
        )


def _outer(environ: Mapping[str, str], world: World) -> Iterator[str]:
    order = list(PROBES)
    for launcher in order[order.index(world.launcher) + 1 : -1]:
        try:
            place = PROBES[launcher](environ)
        except LaunchError as error:
            yield f"Passed over, because {world.launcher} started this process: {error}"
            continue
        if place is not None:
            yield (
                f"{launcher} started {world.launcher}, as rank {place.rank} of {place.size}; "
                f"{world.launcher}'s numbers count."
            )


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
        restarts=_whole_number(TORCHRUN, environ, _RESTARTS) if environ.get(_RESTARTS) else 0,
        launch_id=environ.get(TORCHRUN.mark or ""),
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
    return replace(world, words=_address(HOROVODRUN, environ, *HOROVODRUN.others))


def _probe_open_mpi(environ: Mapping[str, str]) -> World | None:
    """Probe for Open MPI's mpirun (its OMPI_COMM_WORLD_NODE_RANK is no number of a node)."""
    world = _place(OPEN_MPI, environ, OPEN_MPI.ranks)
    return world and replace(world, mpi=True)


def _probe_mpich(environ: Mapping[str, str]) -> World | None:
    """Probe for MPICH's mpirun."""
    world = _place(MPICH, environ, (MPICH.local_rank, MPICH.local_size))
    return world and replace(world, mpi=True)


def _probe_srun(environ: Mapping[str, str]) -> World | None:
    """Probe for a step of Slurm's.

    A batch script and an salloc shell have a job's variables and SLURM_PROCID=0, but no step's.
    """
    step = environ.get("SLURM_STEP_ID", "")
    if step.isdecimal() and int(step) >= _FIRST_SPECIAL_STEP:
        return None
    if not _is_whole(SRUN, environ, (SRUN.size, SRUN.local_size, "SLURM_STEP_NODELIST", "SLURM_STEP_ID")):
        return None
    node, job, number = (
        _whole_number(SRUN, environ, name) for name in ("SLURM_NODEID", "SLURM_JOB_ID", "SLURM_STEP_ID")
    )
    try:
        sizes = expand_tasks(environ[SRUN.local_size])
        hosts = expand_hosts(environ["SLURM_STEP_NODELIST"])
    except ValueError as error:
        raise _error(SRUN, str(error), environ) from error
    if len(hosts) != len(sizes):
        raise _error(SRUN, f"{len(hosts)} nodes are named, but tasks are given for {len(sizes)}", environ)
    if not node < len(sizes):
        raise _error(SRUN, f"SLURM_NODEID={node} is not below the number of nodes, {len(sizes)}", environ)
    size = _whole_number(SRUN, environ, SRUN.size)
    if sum(sizes) != size:
        raise _error(SRUN, f"the tasks a node are {sum(sizes)} together, and not {SRUN.size}={size}", environ)
    rank = _whole_number(SRUN, environ, SRUN.rank)
    # By the variable on every task, so that none waits for the one that finds it out.
    if environ.get("SLURM_DISTRIBUTION") == "arbitrary" or (rank == 0 and node != 0):
        raise _error(
            SRUN,
            f"with --distribution=arbitrary task 0 may run anywhere, and the ranks are to meet it on the "
            f"step's first host, {hosts[0]}",
            environ,
            "Leave out --distribution=arbitrary, and SLURM_HOSTFILE",
        )
    restarts = _whole_number(SRUN, environ, _REQUEUES) if environ.get(_REQUEUES) else 0
    return replace(
        _checked(SRUN, environ, rank, size, _whole_number(SRUN, environ, SRUN.local_rank), sizes[node]),
        node_rank=node,
        master=(hosts[0], _FIRST_PORT + (131 * job + number) % _PORTS),
        master_addresses=node_addresses(environ, hosts[0]),
        run_id=f"{environ.get('SLURM_CLUSTER_NAME', '')}.{job}.{number}.{restarts}",
        node_sizes=sizes,
        mpi=_has_way_into_mpi(environ, f"{job}.{number}"),
        node_gpus=_whole_number(SRUN, environ, _GPUS) if environ.get(_GPUS) else None,
        restarts=restarts,
    )


def _has_way_into_mpi(environ: Mapping[str, str], step: str) -> bool:
    """Whether this very step was started with PMIx or PMI-2: its shell may have been, with another step's."""
    if "PMIX_RANK" in environ:
        return f".{environ.get('PMIX_NAMESPACE', step)}".endswith(f".{step}")
    return "PMI_RANK" in environ and environ.get("PMI_JOBID", step) in (step, step.partition(".")[0])


def _probe_none(environ: Mapping[str, str]) -> World:
    """Probe for no launcher: answers always, whatever is set."""
    return World.alone()


def _place(source: Variables, environ: Mapping[str, str], trace: tuple[str, ...]) -> World | None:
    """Read the four numbers that every launcher gives; None where it left no trace."""
    if not _is_whole(source, environ, trace):
        return None
    rank, size, local_rank, local_size = (_whole_number(source, environ, name) for name in source.ranks)
    return _checked(source, environ, rank, size, local_rank, local_size)


def _is_whole(source: Variables, environ: Mapping[str, str], trace: tuple[str, ...]) -> bool:
    """Whether a launcher's variables are all set; False where it left no trace.

    A rank or a size without the rest is an error and never rank 0: several processes that each took
    themselves for the only one would all write the same result.
    """
    if not any(name in environ for name in trace):
        return False
    missing = [name for name in source.needed if name not in environ]
    if missing:
        raise _half_set(source, environ, missing)
    return True


def _checked(
    source: Variables, environ: Mapping[str, str], rank: int, size: int, local_rank: int, local_size: int
) -> World:
    """Make a World of numbers that fit together."""
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


def _whole_number(source: Variables, environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not (text.isascii() and text.isdecimal()):
        raise _error(source, f"{name}={text!r} is not a whole number", environ)
    return int(text)


def _address(source: Variables, environ: Mapping[str, str], host: str, port: str) -> tuple[str, int]:
    if not environ[host]:
        raise _error(source, f"{host} is empty", environ)
    number = _whole_number(source, environ, port)
    if not 0 < number < 65536:
        raise _error(source, f"{port}={number} is no port (1 to 65535)", environ)
    return environ[host], number


def _half_set(source: Variables, environ: Mapping[str, str], missing: list[str]) -> LaunchError:
    start = f"Start with '{source.start}'"
    own = source.mark is None or source.mark in environ
    if own:
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
    return _error(source, problem, environ, f"{cause}. {remedy}", LaunchError if own else _LeftOver)


def _error(
    source: Variables,
    problem: str,
    environ: Mapping[str, str],
    advice: str | None = None,
    kind: type[LaunchError] = LaunchError,
) -> LaunchError:
    """Make the error that shows what was found of a launcher's variables and what to type."""
    found = ", ".join(f"{name}={environ[name]}" for name in source.all if name in environ)
    start = f"Start with '{source.start}'"
    return kind(
        f"{problem} (found: {found}). {advice or start}, "
        f"or pass --launcher none to run one process without them."
    )


# Innermost launcher first: torchrun may run inside a task of any other, and horovodrun inside an allocation
# that sets MPI's variables. In a job of Slurm's, mpirun starts its own ranks through a step of one process a
# node. "none" stays last: it always answers.
PROBES: dict[str, Probe] = {
    TORCHRUN.launcher: _probe_torchrun,
    HOROVODRUN.launcher: _probe_horovodrun,
    OPEN_MPI.launcher: _probe_open_mpi,
    MPICH.launcher: _probe_mpich,
    SRUN.launcher: _probe_srun,
    "none": _probe_none,
}
_STARTS = {source.launcher: source.start for source in ALL}
