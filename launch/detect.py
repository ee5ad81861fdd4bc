"""Find the World of this process in the variables that its launcher set.

Detection is a table of pure probes, each ``Mapping -> World | None``, asked in order: the innermost launcher
first, because it alone knows this process's rank (torchrun inside an allocation starts several ranks for
each task of the outer launcher). All fields of a World come from the one probe that answered.

A launcher's variables that are set in part are an error. One case is not: torchrun's have names that other
tools and shells have too. Where its mark is missing, those that torch.distributed itself reads are enough to
be a rank by (``env``), and fewer are passed over where another launcher's set is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from dualeval.errors import LaunchError, UsageError
from dualeval.launch.gpus import promised_gpus
from dualeval.launch.hostlist import expand_hosts, expand_tasks, node_addresses, order_by_component
from dualeval.launch.reading import (
    LeftOver,
    check_place,
    half_set,
    is_step_of_tasks,
    is_whole,
    launch_error,
    read_address,
    read_place,
    whole_number,
)
from dualeval.launch.unknown import unread_rank
from dualeval.launch.variables import (
    ALL,
    ENV,
    FLUX,
    HOROVODRUN,
    MPICH,
    OPEN_MPI,
    SRUN,
    TORCHRUN,
    Variable,
)
from dualeval.wording import did_you_mean
from dualeval.world import World

Probe = Callable[[Mapping[str, str]], World | None]


# How often the ranks were started again: torchrun's --max-restarts, and a job that was requeued.
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_REQUEUES = "SLURM_RESTART_COUNT"
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
    promised = promised_gpus(environ)
    try:
        if launcher is not None:
            world = replace(_ask_one(environ, launcher), promised_gpus=promised)
            return Detection(world=world, found=found)
        world, left_over = _ask_all(environ)
    except LaunchError as error:
        return Detection(error=error, found=found)
    world = replace(world, promised_gpus=promised)
    if world.launcher == "none" and (problem := left_over or _unplaced(environ)):
        return Detection(error=problem, found=found)
    return Detection(
        world=world,
        found=found,
        notes=tuple(_notes(environ, world, left_over)),
        outer=tuple(_outer(environ, world)),
    )


def _ask_all(environ: Mapping[str, str]) -> tuple[World, LeftOver | None]:
    """The first probe's answer, and what was passed over on the way to it."""
    left_over = None
    for probe in PROBES.values():
        try:
            world = probe(environ)
        except LeftOver as error:
            left_over = left_over or error
            continue
        if world is not None:
            agrees = _refuse_contradiction(environ, world)
            return world, None if agrees else left_over
    raise AssertionError("the last probe answers always")


def _unplaced(environ: Mapping[str, str]) -> LaunchError | None:
    """The error of a process that is one of several, by what is set, though no launcher's set is whole."""
    # A batch script and an salloc shell are number 0 of their job.
    missing = [name for name in SRUN.needed if name not in environ]
    if missing and any(environ.get(name, "0") != "0" for name in (SRUN.rank, SRUN.local_rank)):
        return half_set(SRUN, environ, missing)
    message = unread_rank(environ, ", ".join(name for name in PROBES if name not in (ENV.launcher, "none")))
    return LaunchError(message) if message else None


def _refuse_contradiction(environ: Mapping[str, str], world: World) -> bool:
    """Compare a launcher's word with that of variables that anybody may have set.

    Enough of torchrun's variables for torch.distributed, exported in a shell, would make every task of srun's
    the same rank; set by a script in its task they would be right, and nobody but the user knows which they
    are. Nor does anybody else know whether Flux has started an mpirun, or an mpirun Flux.

    Returns:
        whether such variables are there, and say the same.

    Raises:
        LaunchError: they say another rank or size.
    """
    if TORCHRUN.mark in environ:
        return False
    in_doubt = {
        TORCHRUN if world.launcher == TORCHRUN.launcher else ENV: list(PROBES)[1:-1],
        FLUX: [OPEN_MPI.launcher, MPICH.launcher],
    }
    for source, launchers in in_doubt.items():
        own = _answer(environ, source.launcher)
        others = [_answer(environ, launcher) for launcher in launchers] if own else []
        for other in others:
            if own and other and (other.rank, other.size) != (own.rank, own.size):
                unmarked = "" if source is FLUX else f", without torchrun's own mark {TORCHRUN.mark},"
                names = " ".join(name for name in source.all if name in environ)
                raise launch_error(
                    source,
                    f"{other.launcher} started this process as rank {other.rank} of {other.size}, and the "
                    f"variables of {own.launcher}{unmarked} say rank {own.rank} of {own.size}",
                    environ,
                    f"Type 'unset {names}', or choose with --launcher {other.launcher} or --launcher "
                    f"{own.launcher}",
                )
    return _answer(environ, ENV.launcher) is not None


def _answer(environ: Mapping[str, str], launcher: str) -> World | None:
    """What a launcher's variables say; None where they are not whole."""
    try:
        return PROBES[launcher](environ)
    except LaunchError:
        return None


def _ask_one(environ: Mapping[str, str], launcher: str) -> World:
    if launcher not in PROBES:
        hint = did_you_mean(launcher, PROBES, most=3, cutoff=0.5)
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
            f"left over or another tool's and ignored: {world.launcher} started this process. "
            f"Type 'unset {' '.join(names)}' to remove them."
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
    # Plain variables are torchrun's own, too.
    for launcher in order[order.index(world.launcher) + 1 : order.index(ENV.launcher)]:
        try:
            place = PROBES[launcher](environ)
        except LaunchError as error:
            yield f"Ignored, because {world.launcher} started this process: {error}"
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
    world = read_place(TORCHRUN, environ, trace)
    if world is None:
        return None
    return replace(
        world,
        node_rank=whole_number(TORCHRUN, environ, "GROUP_RANK"),
        master=read_address(TORCHRUN, environ, "MASTER_ADDR", "MASTER_PORT"),
        restarts=whole_number(TORCHRUN, environ, _RESTARTS) if environ.get(_RESTARTS) else 0,
        launch_id=environ.get(TORCHRUN.mark or ""),
    )


def _probe_horovodrun(environ: Mapping[str, str]) -> World | None:
    """Probe for horovodrun with gloo.

    Where the ranks meet is the rendezvous of the host where horovodrun was typed, not rank 0's: no master.
    Its HOROVOD_CROSS_RANK numbers the nodes that have this local rank, which is not all of them.
    """
    world = read_place(HOROVODRUN, environ, HOROVODRUN.ranks)
    if world is None:
        return None
    if environ.get("HOROVOD_ELASTIC") == "1":
        raise launch_error(
            HOROVODRUN,
            "horovodrun started this process in its elastic mode, in which ranks come and go",
            environ,
            f"Start a fixed number of them with '{HOROVODRUN.start}'",
        )
    return replace(world, rendezvous=read_address(HOROVODRUN, environ, *HOROVODRUN.others))


def _probe_open_mpi(environ: Mapping[str, str]) -> World | None:
    """Probe for Open MPI's mpirun (its OMPI_COMM_WORLD_NODE_RANK is no number of a node)."""
    world = read_place(OPEN_MPI, environ, OPEN_MPI.ranks)
    return world and replace(world, mpi=True)


def _probe_mpich(environ: Mapping[str, str]) -> World | None:
    """Probe for MPICH's mpirun."""
    world = read_place(MPICH, environ, (MPICH.local_rank, MPICH.local_size))
    return world and replace(world, mpi=True)


def _probe_flux(environ: Mapping[str, str]) -> World | None:
    """Probe for a task of Flux's.

    Flux gives the tasks no address to meet at. Its PMI, which it serves to each task at a file descriptor,
    passes one on; without PMI the user has to.
    """
    if not is_whole(FLUX, environ, (FLUX.rank, FLUX.size)):
        return None
    rank, size, local_rank = (
        whole_number(FLUX, environ, name) for name in (FLUX.rank, FLUX.size, FLUX.local_rank)
    )
    world = replace(check_place(FLUX, environ, rank, size, local_rank, size), local_size=1)
    if size == 1:
        return replace(world, node_rank=0, node_sizes=(1,))
    world = replace(world, placed=False)
    pmi = {FLUX.rank: "PMI_RANK", FLUX.size: "PMI_SIZE"}
    if "PMI_FD" in environ and all(environ.get(own) == environ[name] for name, own in pmi.items()):
        return replace(world, pmi_fd=whole_number(FLUX, environ, "PMI_FD"))
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        master = read_address(FLUX, environ, "MASTER_ADDR", "MASTER_PORT")
        return replace(world, master=master, run_id=f"flux.{environ['FLUX_JOB_ID']}")
    raise launch_error(
        FLUX,
        "Flux gave this process no PMI (PMI_FD is missing), by which the ranks would meet",
        environ,
        "Leave out '-o pmi=none', or add '--env=MASTER_ADDR=FIRST_HOST --env=MASTER_PORT=29500' to 'flux "
        "run', FIRST_HOST being the host of task 0",
    )


def _probe_env(environ: Mapping[str, str]) -> World | None:
    """Probe for the variables that torch.distributed itself reads, whoever has set them."""
    if not is_whole(ENV, environ, (ENV.rank, ENV.size, ENV.local_rank, ENV.local_size)):
        return None
    rank, size = (whole_number(ENV, environ, name) for name in (ENV.rank, ENV.size))
    _refuse_missing_ranks(environ)
    master = read_address(ENV, environ, "MASTER_ADDR", "MASTER_PORT")
    world = replace(check_place(ENV, environ, rank, size, 0, 1), master=master)
    local_rank, local_size = (
        whole_number(ENV, environ, name) if name in environ else default
        for name, default in ((ENV.local_rank, 0), (ENV.local_size, size))
    )
    check_place(ENV, environ, rank, size, local_rank, local_size)
    if size == 1:
        return replace(world, node_rank=0, node_sizes=(1,))
    return replace(world, local_rank=local_rank, placed=False)


def _refuse_missing_ranks(environ: Mapping[str, str]) -> None:
    """Raise in a pod of a PyTorchJob which is to start several ranks, by torchrun, and starts one."""
    count = environ.get("PET_NPROC_PER_NODE", "1")
    if count.isdecimal() and int(count) > 1 and "LOCAL_RANK" not in environ:
        raise launch_error(
            ENV,
            f"this pod is to start {count} ranks (PET_NPROC_PER_NODE), and WORLD_SIZE counts all of them",
            environ,
            "Start with 'torchrun -m dualeval run', which reads the PET_ variables, or leave out "
            "nprocPerNode",
        )


def _probe_srun(environ: Mapping[str, str]) -> World | None:
    """Probe for a step of Slurm's.

    A batch script and an salloc shell have a job's variables and SLURM_PROCID=0, but no step's.
    """
    step = environ.get("SLURM_STEP_ID", "")
    if step.isdecimal() and not is_step_of_tasks(step):
        return None
    if not is_whole(SRUN, environ, (SRUN.size, SRUN.local_size, "SLURM_STEP_NODELIST", "SLURM_STEP_ID")):
        return None
    node, job, number = (
        whole_number(SRUN, environ, name) for name in ("SLURM_NODEID", "SLURM_JOB_ID", "SLURM_STEP_ID")
    )
    try:
        sizes = expand_tasks(environ[SRUN.local_size])
        hosts = expand_hosts(environ["SLURM_STEP_NODELIST"])
    except ValueError as error:
        raise launch_error(SRUN, str(error), environ) from error
    if len(hosts) != len(sizes):
        raise launch_error(
            SRUN, f"{len(hosts)} nodes are named, but tasks are given for {len(sizes)}", environ
        )
    if not node < len(sizes):
        raise launch_error(
            SRUN, f"SLURM_NODEID={node} is not below the number of nodes, {len(sizes)}", environ
        )
    size = whole_number(SRUN, environ, SRUN.size)
    if sum(sizes) != size:
        raise launch_error(
            SRUN, f"the tasks a node are {sum(sizes)} together, and not {SRUN.size}={size}", environ
        )
    rank = whole_number(SRUN, environ, SRUN.rank)
    # By the variable on every task, so that none waits for the one that finds it out.
    if environ.get("SLURM_DISTRIBUTION") == "arbitrary" or (rank == 0 and node != 0):
        raise launch_error(
            SRUN,
            f"with --distribution=arbitrary task 0 may run anywhere, and the ranks are to meet it on the "
            f"step's first host, {hosts[0]}",
            environ,
            "Leave out --distribution=arbitrary, and SLURM_HOSTFILE",
        )
    hosts, sizes = _in_order_of_nodes(environ, hosts, sizes, node)
    restarts = whole_number(SRUN, environ, _REQUEUES) if environ.get(_REQUEUES) else 0
    return replace(
        check_place(SRUN, environ, rank, size, whole_number(SRUN, environ, SRUN.local_rank), sizes[node]),
        node_rank=node,
        master=(hosts[0], _FIRST_PORT + (131 * job + number) % _PORTS),
        master_addresses=node_addresses(environ, hosts[0]),
        run_id=f"{environ.get('SLURM_CLUSTER_NAME', '')}.{job}.{number}.{restarts}",
        node_sizes=sizes,
        mpi=_has_way_into_mpi(environ, f"{job}.{number}"),
        restarts=restarts,
    )


def _in_order_of_nodes(
    environ: Mapping[str, str], hosts: list[str], sizes: tuple[int, ...], node: int
) -> tuple[list[str], tuple[int, ...]]:
    """Put a step's hosts and their numbers of tasks in the order in which Slurm numbers its nodes.

    In a heterogeneous step that is the order of its components, and the lists are in that of the names.

    Raises:
        LaunchError: this process's own host is not where it should be then.
    """
    ordered = order_by_component(environ, hosts)
    tasks = dict(zip(hosts, sizes, strict=True))
    own = environ.get("SLURMD_NODENAME")
    if own in tasks and ordered[node] != own:
        raise launch_error(
            SRUN,
            f"Slurm says that node {node} of this step is {own}, and lists {', '.join(hosts)}: a "
            f"heterogeneous step ('srun ... : ...') numbers its nodes in another order, and nobody here "
            f"knows on which of them rank 0 is",
            environ,
            "Start all ranks with one srun without ':', or ask for a heterogeneous job ('sbatch ... : ...') "
            "and type 'srun --het-group=0,1 dualeval run'",
        )
    if len(tasks) < len(hosts):
        return hosts, sizes
    return ordered, tuple(tasks[host] for host in ordered)


def _has_way_into_mpi(environ: Mapping[str, str], step: str) -> bool:
    """Whether this very step was started with PMIx or PMI-2: its shell may have been, with another step's."""
    if "PMIX_RANK" in environ:
        return f".{environ.get('PMIX_NAMESPACE', step)}".endswith(f".{step}")
    return "PMI_RANK" in environ and environ.get("PMI_JOBID", step) in (step, step.partition(".")[0])


def _probe_none(environ: Mapping[str, str]) -> World:
    """Probe for no launcher: answers always, whatever is set."""
    return World.alone()


# Innermost launcher first: torchrun may run inside a task of any other, and horovodrun inside an allocation
# that sets MPI's variables. Flux may itself run in a step of Slurm's, and may set a part of Open MPI's. In a
# job of Slurm's, mpirun starts its own ranks through a step of one process a node. "env" is whoever sets such
# names, so launchers that have names of their own are asked before. "none" stays last: it always answers.
PROBES: dict[str, Probe] = {
    TORCHRUN.launcher: _probe_torchrun,
    HOROVODRUN.launcher: _probe_horovodrun,
    FLUX.launcher: _probe_flux,
    OPEN_MPI.launcher: _probe_open_mpi,
    MPICH.launcher: _probe_mpich,
    SRUN.launcher: _probe_srun,
    ENV.launcher: _probe_env,
    "none": _probe_none,
}
_STARTS = {source.launcher: source.start for source in ALL}
