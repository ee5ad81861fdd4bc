"""Find the World of this process in the variables that its launcher set.

Detection is a table of pure probes, each ``Mapping -> World | None``, asked in order: the innermost launcher
first, because it alone knows this process's rank (torchrun inside an allocation starts several ranks for each
task of the outer launcher). All fields of a World come from the one probe that answered.

If only part of a launcher's variables is set, that is an error. torchrun is an exception, because other tools
and shells use the same names. Without torchrun's mark, the variables that torch.distributed itself reads are
enough for a rank (``env``), and fewer are ignored if another launcher's variables are complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from dualeval.errors import LaunchError, UsageError
from dualeval.launch.gpus import promised_gpus
from dualeval.launch.launchers import LAUNCHERS, Launcher, launcher_of, launchers_in
from dualeval.launch.launchers.base import MARK_OF_TORCHRUN, Environment, LeftOver, Variable
from dualeval.messages import did_you_mean
from dualeval.world import World

# Variables in which MPI's own launchers give a rank its number; some set only these.
_PMI = ("PMI_RANK", "PMIX_RANK")
_PMI_START = "Start with 'mpirun -np N dualeval run' or 'srun --ntasks-per-node N dualeval run'"
_TORCHRUN = "torchrun --nnodes $SKYPILOT_NUM_NODES --node-rank $SKYPILOT_NODE_RANK --nproc-per-node N"

# Launchers that are not read: the variable with a process's rank; the one with the number of ranks, empty if
# there is none; and what to type instead.
_UNREAD = (
    # MVAPICH2's mpirun_rsh; its mpiexec is Hydra, which is read.
    (
        *("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        "Start with MVAPICH2's other launcher, 'mpiexec -n N dualeval run'",
    ),
    # IBM's Job Step Manager, under LSF.
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "jsrun -n N"),
    # Cray's older and newer launchers.
    ("ALPS_APP_PE", "", "aprun -n N"),
    ("PALS_RANKID", "", "mpiexec -n N"),
    # pbsdsh starts the same command on all slots, as further tasks of a job whose script is task 1.
    (
        *("PBS_TASKNUM", ""),
        "pbsdsh tells no rank: start with 'mpirun -np N dualeval run' in the job's script",
    ),
    # Kubeflow's Trainer sets options of torchrun, and starts the command once in each pod.
    ("PET_NODE_RANK", "PET_NNODES", "Start with 'torchrun -m dualeval run' in each pod"),
    (
        *("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"),
        f'Start with \'{_TORCHRUN} --master-addr $(head -n1 <<< "$SKYPILOT_NODE_IPS") --master-port 29500 '
        "-m dualeval run'",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Detection:
    """The result of reading the environment, for ``detect`` and for messages."""

    # This process's place; None if there is an `error`.
    world: World | None = None
    error: LaunchError | None = None
    # For each launcher, in the order of `LAUNCHERS`, its variables that are set.
    variables: Mapping[str, tuple[Variable, ...]]
    # Sentences about variables that do not fit together, and how they were read.
    notes: tuple[str, ...] = ()
    # Sentences about the launchers that started this one, as srun may have started torchrun.
    outer: tuple[str, ...] = ()

    @property
    def place(self) -> World:
        """The world; raises the LaunchError if there is none."""
        if self.world is None:
            assert self.error is not None
            raise self.error
        return self.world


def detect(environ: Mapping[str, str], launcher: str | None = None) -> World:
    """Find which launcher started this process, and the process's place in the run.

    Args:
        environ: the environment variables.
        launcher: a name of ``LAUNCHERS`` to ask only that probe; None asks all, innermost first.

    Returns:
        the World; ``World.alone()`` if no launcher left a trace, or with ``launcher="none"``.

    Raises:
        LaunchError: the variables are incomplete or contradict each other, or are not those of ``launcher``.
        UsageError: there is no launcher of that name.
    """
    return examine(environ, launcher).place


def examine(environ: Mapping[str, str], launcher: str | None = None) -> Detection:
    """Like ``detect``, with the reasons; a launcher's wrong variables become ``error`` and are not raised."""
    traced = launchers_in(environ)
    variables = {
        name: traced[name].variables_in(environ) if name in traced else ()
        for name in LAUNCHERS
        if name != "none"
    }
    promised = promised_gpus(environ)
    try:
        if launcher is not None:
            world = replace(_ask_one(environ, launcher), promised_gpus=promised)
            return Detection(world=world, variables=variables)
        world, left_over = _ask_all(environ, traced)
    except LaunchError as error:
        return Detection(error=error, variables=variables)
    world = replace(world, promised_gpus=promised)
    if world.launcher == "none" and (problem := left_over or _unplaced(environ)):
        return Detection(error=problem, variables=variables)
    return Detection(
        world=world,
        variables=variables,
        notes=tuple(_notes(environ, world, left_over)),
        outer=tuple(_outer(environ, world, traced)),
    )


def _ask_all(environ: Mapping[str, str], traced: Mapping[str, Launcher]) -> tuple[World, LeftOver | None]:
    """The first probe's answer, and the first left-over variables that were skipped before it."""
    left_over = None
    for launcher in traced.values():
        try:
            world = launcher.probe(environ)
        except LeftOver as error:
            left_over = left_over or error
            continue
        if world is not None:
            agrees = _refuse_contradiction(environ, world, traced)
            return world, None if agrees else left_over
    raise AssertionError("the last probe answers always")


def _unplaced(environ: Mapping[str, str]) -> LaunchError | None:
    """The error if variables show one process of several, but no launcher's are complete; else None."""
    # A batch script and an salloc shell are number 0 of their job.
    if any(environ.get(name, "0") != "0" for name in ("SLURM_PROCID", "SLURM_LOCALID")):
        of_srun = Environment(launcher_of("srun"), environ)
        if missing := of_srun.missing():
            return of_srun.half_set(missing)
    message = _unread_rank(environ, ", ".join(name for name in LAUNCHERS if name not in ("env", "none")))
    return LaunchError(message) if message else None


def _refuse_contradiction(environ: Mapping[str, str], world: World, traced: Mapping[str, Launcher]) -> bool:
    """Compare a launcher's variables with those that anybody may have set; returns whether these agree.

    If a shell exports enough of torchrun's variables for torch.distributed, every task of srun's would be the
    same rank. A script may also have set them on purpose. We cannot tell the two cases apart, nor whether
    Flux started mpirun or mpirun started Flux: the user has to say.
    """
    if MARK_OF_TORCHRUN in environ:
        return False
    plain = "torchrun" if world.launcher == "torchrun" else "env"
    in_doubt = [(plain, list(LAUNCHERS)[1:-1]), *((each, one.contradicts) for each, one in traced.items())]
    for name, launchers in in_doubt:
        answer = _answer(environ, traced.get(name))
        others = [_answer(environ, traced.get(each)) for each in launchers] if answer else []
        for other in others:
            if answer and other and (other.rank, other.size) != (answer.rank, answer.size):
                unmarked = f", without torchrun's own mark {MARK_OF_TORCHRUN}," if name == plain else ""
                source = traced[name]
                names = " ".join(name for name in source.all if name in environ)
                raise Environment(source, environ).error(
                    f"{other.launcher} started this process as rank {other.rank} of {other.size}, and the "
                    f"variables of {answer.launcher}{unmarked} say rank {answer.rank} of {answer.size}",
                    f"Type 'unset {names}', or choose with --launcher {other.launcher} or --launcher "
                    f"{answer.launcher}",
                )
    return _answer(environ, traced.get("env")) is not None


def _answer(environ: Mapping[str, str], launcher: Launcher | None) -> World | None:
    """The World by a launcher's variables; None if they are incomplete."""
    try:
        return None if launcher is None else launcher.probe(environ)
    except LaunchError:
        return None


def _ask_one(environ: Mapping[str, str], launcher: str) -> World:
    if launcher not in LAUNCHERS:
        hint = did_you_mean(launcher, LAUNCHERS, most=3, cutoff=0.5)
        raise UsageError(
            f"There is no launcher {launcher!r}.{hint} --launcher takes one of: {', '.join(LAUNCHERS)}."
        )
    world = launcher_of(launcher).probe(environ)
    if world is None:
        raise LaunchError(
            f"--launcher {launcher} was given, but no variable of {launcher} is set. "
            f"Start with '{launcher_of(launcher).start}', or leave --launcher out."
        )
    return world


def _notes(environ: Mapping[str, str], world: World, left_over: LaunchError | None) -> Iterator[str]:
    if left_over is not None:
        names = [name for name in launcher_of("torchrun").needed if name in environ]
        yield (
            f"{', '.join(f'{name}={environ[name]}' for name in names)} {'is' if len(names) == 1 else 'are'} "
            f"left over or another tool's and ignored: {world.launcher} started this process. "
            f"Type 'unset {' '.join(names)}' to remove them."
        )
    tasks = environ.get("SLURM_NTASKS", environ.get("SLURM_NNODES", "1"))
    if world.launcher == "none" and "SLURM_JOB_ID" in environ and tasks != "1":
        yield (
            f"This shell belongs to Slurm's job {environ['SLURM_JOB_ID']} ({tasks} tasks on "
            f"{environ.get('SLURM_JOB_NODELIST', 'its nodes')}), but to no step of it, so only one process "
            "runs. Type 'srun dualeval run' to start the tasks."
        )


def _outer(environ: Mapping[str, str], world: World, traced: Mapping[str, Launcher]) -> Iterator[str]:
    # Not env: its variables are also torchrun's.
    outer = LAUNCHERS[LAUNCHERS.index(world.launcher) + 1 : LAUNCHERS.index("env")]
    for name, launcher in traced.items():
        if name not in outer:
            continue
        try:
            place = launcher.probe(environ)
        except LaunchError as error:
            yield f"Ignored, because {world.launcher} started this process: {error}"
            continue
        if place is not None:
            yield (
                f"{name} started {world.launcher}, as rank {place.rank} of {place.size}; "
                f"{world.launcher}'s numbers count."
            )


def _unread_rank(environ: Mapping[str, str], known: str) -> str | None:
    """The error if the process is one of several that an unsupported launcher has started."""
    for rank, size, start in _UNREAD:
        is_alone = "1" in (environ.get(size), environ.get("PMI_SIZE"))
        if not environ.get(rank) or is_alone or (rank, environ[rank]) == ("PBS_TASKNUM", "1"):
            continue
        if start.endswith(" -n N"):
            # Set variables that dualeval reads, from the launcher's own.
            told = f"RANK=${rank} WORLD_SIZE={f'${size}' if size else 'N'}"
            start = (
                "Type 'export MASTER_ADDR=FIRST_HOST MASTER_PORT=29500', where FIRST_HOST is the host of "
                f"rank 0, and \"{start} bash -c '{told} exec dualeval run'\""
            )
        return _message(environ, (rank, size), known, start)
    if any(name in environ for name in _PMI) and environ.get("PMI_SIZE") != "1":
        return _message(environ, (), known, _PMI_START)
    return None


def _message(environ: Mapping[str, str], names: tuple[str, ...], known: str, start: str) -> str:
    names = (*names, *_PMI, "PMI_SIZE")
    variables = ", ".join(f"{name}={environ[name]}" for name in names if name in environ)
    return (
        f"a launcher other than {known} seems to have started this process as one of several "
        f"(found: {variables}). {start}, or pass --launcher none to run one process without them."
    )
