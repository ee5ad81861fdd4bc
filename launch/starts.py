"""What is typed before a command to start ranks of it: each launcher's words, as a pure function.

``LAUNCHERS`` has one entry a launcher. ``start_words`` gives its words for so many ranks on the nodes of a
``Site``, and ``why_not`` says why they cannot be started there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dualeval.errors import UsageError
from dualeval.launch.variables import ENV, FLUX, TORCHRUN
from dualeval.wording import counted
from dualeval.world import World

# What a job was asked for with, which srun would take for what this step is asked for with; and the binding
# of a step that this process is in itself.
_OF_THE_JOB = re.compile(
    "S(LURM|RUN)_(NTASKS_PER_NODE|NTASKS_PER_SOCKET|CPUS_PER_TASK|DISTRIBUTION|HOSTFILE"
    "|(CPU|MEM)_BIND.*|OVERCOMMIT|EXCLUSIVE)"
)
# What makes this process a rank, and what torchrun takes for its options; Flux's PMI is for its own task.
_OF_A_RANK = frozenset({*TORCHRUN.all, *ENV.all, *FLUX.needed})
_OF_TORCHRUN = "PET_"
_PMI_OF_FLUX = frozenset({"PMI_FD", "PMI_RANK", "PMI_SIZE"})
# Where torchrun's agents on several nodes meet; each start takes the next port.
_FIRST_AGENT_PORT, _AGENT_PORTS = 29500, 100


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node on which ranks can be started.

    Attributes:
        host: the name by which launchers reach it.
        cores: how many cores ranks may use there.
        gpus: how many GPUs.
    """

    host: str
    cores: int
    gpus: int = 0


@dataclass(frozen=True, kw_only=True)
class Libraries:
    """What the environment has beside torch.

    Attributes:
        horovod: of "gloo", "mpi" and "nccl", with what Horovod is built.
        no_horovod: why Horovod cannot be used; None where it can.
        mpi: mpi4py's version and the MPI library that it loads, such as "4.1.2 (Open MPI v4.1.4)".
        no_mpi: why mpi4py cannot be used; None where it can.
    """

    horovod: frozenset[str] = frozenset()
    no_horovod: str | None = None
    mpi: str = ""
    no_mpi: str | None = None


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where ranks can be started, and with what.

    Attributes:
        nodes: this machine alone, or those of the Slurm job.
        programs: path of each launcher that was found, by name.
        libraries: of the environment.
        job: number of the Slurm job whose nodes they are; None for this machine alone.
        in_step: this process is a step of that job itself, whose cores it holds.
        at_a_node: this process runs on one of the nodes.
        srun_mpi: what ``srun --mpi=list`` shows.
        mpirun: first line of ``mpirun --version``.
        no_ssh: why the nodes are not reached through ssh; None where they are, or there is one node.
        is_root: this user is root, for whom Open MPI starts nothing unless told so.
    """

    nodes: tuple[Node, ...]
    programs: Mapping[str, str] = field(default_factory=dict)
    libraries: Libraries = field(default_factory=Libraries)
    job: str | None = None
    in_step: bool = False
    at_a_node: bool = True
    srun_mpi: tuple[str, ...] = ()
    mpirun: str = ""
    no_ssh: str | None = None
    is_root: bool = False


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """One way to start ranks.

    Attributes:
        name: what ``--launchers`` of ``dualeval conformance`` takes.
        backends: which backends its ranks can use.
        program: what has to be on the PATH; None where the command starts its own ranks.
        words: the words before the command, for a site, the ranks on each node, and a number of this start.
        after: the words after the command, for so many ranks.
        lacks: why it cannot start ranks of a backend, for a site and the ranks on each node; None: it can.
        has_doctor: whether ``dualeval doctor`` can be its command.
    """

    name: str
    backends: tuple[str, ...]
    program: str | None
    words: Callable[[Site, Sequence[int], int], list[str]]
    lacks: Callable[[Site, Sequence[int], str], str | None]
    after: Callable[[int], list[str]] = lambda ranks: []
    has_doctor: bool = True


def spread(ranks: int, nodes: int) -> list[int]:
    """Say how many ranks each node gets, evenly, the first ones one more: 3 ranks on 2 nodes are [2, 1]."""
    used = min(ranks, nodes)
    each, more = divmod(ranks, used)
    return [each + (node < more) for node in range(used)]


def start_words(launcher: str, ranks: int, site: Site, number: int = 0) -> list[str]:
    """Give the words before a command that start so many ranks of it.

    Args:
        launcher: a name of ``LAUNCHERS``.
        ranks: how many.
        site: where.
        number: of this start, where several follow each other: what has to differ between them does.
    """
    return LAUNCHERS[launcher].words(site, spread(ranks, len(site.nodes)), number)


def why_not(launcher: str, backend: str, ranks: int, device: str, site: Site) -> str | None:
    """Say why a launcher cannot start so many ranks of a backend on a site; None where it can."""
    entry = LAUNCHERS[launcher]
    if entry.program is not None and entry.program not in site.programs:
        return f"there is no {entry.program} on the PATH"
    on_nodes = spread(ranks, len(site.nodes))
    if problem := entry.lacks(site, on_nodes, backend):
        return problem
    for node, count in zip(site.nodes, on_nodes, strict=False):
        if device != "cpu" and count > node.gpus:
            gpus = counted(node.gpus, "GPU")
            return f"{counted(count, 'rank')} on a node with {gpus}: each takes one of its own"
    return None


def choose_launchers(names: Sequence[str]) -> list[str]:
    """Check names of launchers, and give them in the order of the table, each once.

    Raises:
        UsageError: there is no launcher of that name.
    """
    for name in names:
        if name not in LAUNCHERS:
            raise UsageError(f"--launchers {name!r}: expected some of {', '.join(LAUNCHERS)}.")
    return [name for name in LAUNCHERS if name in names]


def default_ranks(site: Site, device: str) -> list[int]:
    """Choose numbers of ranks: one, two, one a node, and one a GPU (on CPUs: up to four a node)."""
    each = min(node.gpus if device != "cpu" else min(node.cores, 4) for node in site.nodes)
    most = each * len(site.nodes)
    return sorted({number for number in (1, 2, len(site.nodes), most) if number <= max(most, 1)})


def may_start_ranks(world: World) -> bool:
    """Whether a process may start ranks of its own: no launcher made it one of several.

    A shell that srun has opened on a node is a step of one task, and a pod may be a job of one.
    """
    return world.launcher == "none" or (world.launcher in ("srun", "flux", "env") and world.size == 1)


def child_environ(environ: Mapping[str, str], folder: str) -> dict[str, str]:
    """Make the variables for launchers: without what would say in their steps how ranks are placed.

    Nor does it hand on what makes this process itself a rank: ranks would find two launchers who disagree.

    Args:
        environ: those of this process.
        folder: what is first on the PATH.
    """
    own = _OF_A_RANK | (_PMI_OF_FLUX if FLUX.rank in environ else frozenset())
    kept = {
        name: value
        for name, value in environ.items()
        if name not in own and not name.startswith(_OF_TORCHRUN) and not _OF_THE_JOB.fullmatch(name)
    }
    return {**kept, "PATH": f"{folder}:{environ.get('PATH', '/usr/bin:/bin')}"}


def under_srun(site: Site, on_nodes: Sequence[int], *, mpi: str = "none") -> list[str]:
    """Give the words of an srun that starts so many tasks on each of the first nodes of its job."""
    tasks, most = sum(on_nodes), max(on_nodes)
    nodes = site.nodes[: len(on_nodes)]
    cores = min(node.cores for node in nodes)
    even = len(set(on_nodes)) == 1
    return [
        site.programs.get("srun", "srun"),
        f"--nodes={len(nodes)}",
        f"--nodelist={','.join(node.host for node in nodes)}",
        f"--ntasks={tasks}",
        *([f"--ntasks-per-node={most}"] if even else []),
        # Said, for the job's own number may be for other tasks; more tasks than cores only when told so.
        *([f"--cpus-per-task={cores // most}"] if most <= cores else ["--overcommit"]),
        *(["--overlap"] if site.in_step else []),
        "--kill-on-bad-exit=1",
        f"--mpi={mpi}",
    ]


def pmi_of(library: str) -> str:
    """Say by which PMI an MPI library finds its ranks under srun."""
    return "pmix" if "Open MPI" in library else "pmi2"


def _start_one_a_node(site: Site, on_nodes: Sequence[int], number: int) -> list[str]:
    """Words for what is itself, or starts by itself, the ranks of its node."""
    return [] if site.job is None else under_srun(site, [1] * len(on_nodes))


def _start_torchrun(site: Site, on_nodes: Sequence[int], number: int) -> list[str]:
    # --standalone: a port that the kernel picks, where torchrun's own may be another run's.
    meeting = ["--standalone"]
    if len(on_nodes) > 1:
        port = _FIRST_AGENT_PORT + number % _AGENT_PORTS
        meeting = [
            f"--nnodes={len(on_nodes)}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={site.nodes[0].host}:{port}",
            f"--rdzv-id={site.job}-{number}",
        ]
    each = f"--nproc-per-node={max(on_nodes)}"
    torchrun = site.programs.get("torchrun", "torchrun")
    return [*_start_one_a_node(site, on_nodes, number), torchrun, *meeting, each, "--no-python"]


def _hosts(site: Site, on_nodes: Sequence[int]) -> str:
    return ",".join(f"{node.host}:{count}" for node, count in zip(site.nodes, on_nodes, strict=False))


def _start_horovodrun_gloo(site: Site, on_nodes: Sequence[int], number: int) -> list[str]:
    horovodrun = site.programs.get("horovodrun", "horovodrun")
    words = [horovodrun, "--gloo", "-np", str(sum(on_nodes))]
    if site.job is None:
        return words
    # horovodrun may take another network where all ranks are away from it.
    through = [] if site.at_a_node else under_srun(site, [1])
    return [*through, *words, "-H", _hosts(site, on_nodes)]


def _is_open_mpi(site: Site) -> bool:
    return "Open MPI" in site.mpirun


def _is_version_4(site: Site) -> bool:
    return _is_open_mpi(site) and ") 4." in site.mpirun


def _start_horovodrun_mpi(site: Site, on_nodes: Sequence[int], number: int) -> list[str]:
    horovodrun = site.programs.get("horovodrun", "horovodrun")
    words = [horovodrun, "--mpi", "-np", str(sum(on_nodes))]
    if site.job is not None:
        words += ["-H", _hosts(site, on_nodes)]
    if _is_version_4(site):
        # It counts cores, and a job's tasks, as places; two ranks may share a core.
        words.append("--mpi-args=--oversubscribe")
    return words


def _start_mpirun(site: Site, on_nodes: Sequence[int], number: int) -> list[str]:
    words = [site.programs.get("mpirun", "mpirun"), "-np", str(sum(on_nodes))]
    if _is_open_mpi(site):
        words += ["--allow-run-as-root"] if site.is_root else []
        # In 5.0 --oversubscribe puts all ranks on the first host.
        words += ["--oversubscribe"] if _is_version_4(site) else ["--map-by", "slot:oversubscribe"]
    if site.job is not None:
        words += ["-H" if _is_open_mpi(site) else "-hosts", _hosts(site, on_nodes)]
    return words


def _start_srun(site: Site, on_nodes: Sequence[int], number: int) -> list[str]:
    return under_srun(site, on_nodes)


def _start_srun_mpi(site: Site, on_nodes: Sequence[int], number: int) -> list[str]:
    return under_srun(site, on_nodes, mpi=pmi_of(site.libraries.mpi))


def _lacks_horovod(site: Site, *controllers: str) -> str | None:
    """Why Horovod cannot be used over one of these controllers."""
    if site.libraries.no_horovod is not None:
        return site.libraries.no_horovod
    if not site.libraries.horovod.intersection(controllers):
        return (
            f"Horovod is built without {' and '.join('MPI' if one == 'mpi' else one for one in controllers)}"
        )
    return None


def _lacks_ssh(site: Site, on_nodes: Sequence[int]) -> str | None:
    return site.no_ssh if len(on_nodes) > 1 else None


def _lacks_nproc(site: Site, on_nodes: Sequence[int], backend: str) -> str | None:
    if len(on_nodes) > 1:
        return "--nproc starts ranks on one node"
    return _lacks_horovod(site, "gloo") if backend == "horovod" else None


def _lacks_torchrun(site: Site, on_nodes: Sequence[int], backend: str) -> str | None:
    if len(set(on_nodes)) > 1:
        return (
            f"one command starts as many ranks on each node, and {sum(on_nodes)} on {len(on_nodes)} is uneven"
        )
    return None


def _lacks_horovodrun_gloo(site: Site, on_nodes: Sequence[int], backend: str) -> str | None:
    return _lacks_horovod(site, "gloo") or _lacks_ssh(site, on_nodes)


def _lacks_horovodrun_mpi(site: Site, on_nodes: Sequence[int], backend: str) -> str | None:
    if not site.mpirun:
        return "there is no mpirun on the PATH"
    return _lacks_horovod(site, "mpi") or site.libraries.no_mpi


def _lacks_mpirun(site: Site, on_nodes: Sequence[int], backend: str) -> str | None:
    if site.libraries.no_mpi is not None:
        return site.libraries.no_mpi
    return _lacks_horovod(site, "mpi") if backend == "horovod" else None


def _lacks_srun(site: Site, on_nodes: Sequence[int], backend: str) -> str | None:
    if site.job is None:
        return "this is no Slurm job: type 'salloc -N2 dualeval conformance'"
    return _lacks_horovod(site, "gloo") if backend == "horovod" else None


def _lacks_srun_mpi(site: Site, on_nodes: Sequence[int], backend: str) -> str | None:
    if site.job is None or site.libraries.no_mpi is not None:
        return _lacks_srun(site, on_nodes, "torch") or site.libraries.no_mpi
    wanted = pmi_of(site.libraries.mpi)
    if wanted not in site.srun_mpi:
        offered = ", ".join(site.srun_mpi) or "nothing"
        return f"mpi4py {site.libraries.mpi} needs srun --mpi={wanted}, and this Slurm offers {offered}"
    return _lacks_horovod(site, "mpi") if backend == "horovod" else None


LAUNCHERS: Mapping[str, Launcher] = {
    launcher.name: launcher
    for launcher in (
        Launcher(
            name="none",
            backends=("single",),
            program=None,
            words=_start_one_a_node,
            after=lambda ranks: ["--launcher", "none"],
            lacks=lambda site, on_nodes, backend: "one process" if sum(on_nodes) > 1 else None,
        ),
        Launcher(
            name="nproc",
            backends=("torch", "horovod"),
            program=None,
            words=_start_one_a_node,
            after=lambda ranks: ["--nproc", str(ranks)],
            lacks=_lacks_nproc,
            has_doctor=False,
        ),
        Launcher(
            name="torchrun",
            backends=("torch",),
            program="torchrun",
            words=_start_torchrun,
            lacks=_lacks_torchrun,
        ),
        Launcher(
            name="horovodrun",
            backends=("horovod",),
            program="horovodrun",
            words=_start_horovodrun_gloo,
            lacks=_lacks_horovodrun_gloo,
        ),
        Launcher(
            name="horovodrun-mpi",
            backends=("horovod",),
            program="horovodrun",
            words=_start_horovodrun_mpi,
            lacks=_lacks_horovodrun_mpi,
        ),
        Launcher(
            name="mpirun",
            backends=("torch", "horovod", "mpi"),
            program="mpirun",
            words=_start_mpirun,
            lacks=_lacks_mpirun,
        ),
        Launcher(
            name="srun",
            backends=("torch", "horovod"),
            program="srun",
            words=_start_srun,
            lacks=_lacks_srun,
        ),
        Launcher(
            name="srun-mpi",
            backends=("torch", "horovod", "mpi"),
            program="srun",
            words=_start_srun_mpi,
            lacks=_lacks_srun_mpi,
        ),
    )
}
