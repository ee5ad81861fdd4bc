"""Slurm's srun. A step's variables count: those of the job tell what was asked for, not what was started.

Slurm has short forms for lists of hosts, and of tasks on each node, which are written out here.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dualeval.launch.launchers.base import Environment, Launcher, Way
from dualeval.world import World

if TYPE_CHECKING:
    from dualeval.launch.site import Site

_SIZE, _TASKS = "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"
# From here on Slurm's step numbers mean no tasks: a batch script, an salloc shell on a node.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
# How often a job was requeued.
_REQUEUES = "SLURM_RESTART_COUNT"
# Ports for ranks to meet at: outside of what the kernel gives to clients (32768 and up).
_FIRST_PORT, _PORTS = 16384, 16000
# Options of the job, which srun would take for options of a step; and the binding of the step that this
# process is in.
_OF_THE_JOB = re.compile(
    "S(LURM|RUN)_(NTASKS_PER_NODE|NTASKS_PER_SOCKET|CPUS_PER_TASK|DISTRIBUTION|HOSTFILE"
    "|(CPU|MEM)_BIND.*|OVERCOMMIT|EXCLUSIVE)"
)
# Text outside brackets, then perhaps a bracket: rack[1-2]n[3-4].
_PIECE = re.compile(r"([^\[\],]*)(?:\[([0-9,-]+)\])?")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def is_step_of_tasks(step: str) -> bool:
    """Whether a value of SLURM_STEP_ID is the number of a step that srun started."""
    return step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP


def _read(environment: Environment) -> World | None:
    """A batch script and an salloc shell have a job's variables and SLURM_PROCID=0, but no step's."""
    environ = environment.variables
    step = environ.get("SLURM_STEP_ID", "")
    if (step.isdecimal() and not is_step_of_tasks(step)) or not environment.are_whole():
        return None
    node, job, number = map(environment.number, ("SLURM_NODEID", "SLURM_JOB_ID", "SLURM_STEP_ID"))
    try:
        sizes = expand_tasks(environ[_TASKS])
        hosts = expand_hosts(environ["SLURM_STEP_NODELIST"])
    except ValueError as error:
        raise environment.error(str(error)) from error
    if len(hosts) != len(sizes):
        raise environment.error(f"{len(hosts)} nodes are named, but tasks are given for {len(sizes)}")
    if not node < len(sizes):
        raise environment.error(f"SLURM_NODEID={node} is not below the number of nodes, {len(sizes)}")
    rank, size, local_rank = map(environment.number, ("SLURM_PROCID", _SIZE, "SLURM_LOCALID"))
    if sum(sizes) != size:
        raise environment.error(f"the tasks per node are {sum(sizes)} together, and not {_SIZE}={size}")
    # By the variable on every task, so that none waits for the one that finds it out.
    if environ.get("SLURM_DISTRIBUTION") == "arbitrary" or (rank == 0 and node != 0):
        raise environment.error(
            f"with --distribution=arbitrary task 0 may run anywhere, and the ranks are to meet it on the "
            f"step's first host, {hosts[0]}",
            "Leave out --distribution=arbitrary, and SLURM_HOSTFILE",
        )
    hosts, sizes = _in_order_of_nodes(environment, hosts, sizes, node)
    from dualeval.world.meetings.address import AtAddress

    restarts = environment.number(_REQUEUES, default=0)
    return replace(
        environment.world(rank, size, local_rank, sizes[node]),
        node_rank=node,
        meeting=AtAddress(
            host=hosts[0],
            port=_FIRST_PORT + (131 * job + number) % _PORTS,
            run_id=f"{environ.get('SLURM_CLUSTER_NAME', '')}.{job}.{number}.{restarts}",
            restarts=restarts,
        ),
        node_sizes=sizes,
        mpi=_has_way_into_mpi(environ, f"{job}.{number}"),
    )


def _in_order_of_nodes(
    environment: Environment, hosts: list[str], sizes: tuple[int, ...], node: int
) -> tuple[list[str], tuple[int, ...]]:
    """Put a step's hosts and their numbers of tasks in the order in which Slurm numbers its nodes.

    In a heterogeneous step that is the order of its components, and the lists are in that of the names.
    """
    ordered = _order_by_component(environment.variables, hosts)
    tasks = dict(zip(hosts, sizes, strict=True))
    name = environment.variables.get("SLURMD_NODENAME")
    if name in tasks and ordered[node] != name:
        raise environment.error(
            f"Slurm says that node {node} of this step is {name}, and lists {', '.join(hosts)}: a "
            "heterogeneous step ('srun ... : ...') numbers its nodes in another order, so the node of rank "
            "0 is not known",
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


def one_a_node(site: Site, on_nodes: Sequence[int], number: int) -> list[str]:
    """Give the words before a command that is the rank of its node, or starts the ranks there."""
    return [] if site.job is None else under_srun(site, [1] * len(on_nodes))


def _pmi_of(library: str) -> str:
    """By which PMI an MPI library finds its ranks under srun."""
    return "pmix" if "Open MPI" in library else "pmi2"


def _lacks(site: Site, on_nodes: Sequence[int], backend: str) -> str | None:
    if site.job is None:
        return "this is not a Slurm job: type 'salloc -N2 dualeval conformance'"
    return site.libraries.lack_horovod("gloo") if backend == "horovod" else None


def _lacks_mpi(site: Site, on_nodes: Sequence[int], backend: str) -> str | None:
    if site.job is None or site.libraries.no_mpi is not None:
        return _lacks(site, on_nodes, "torch") or site.libraries.no_mpi
    wanted = _pmi_of(site.libraries.mpi)
    if wanted not in site.srun_mpi:
        offered = ", ".join(site.srun_mpi) or "nothing"
        return f"mpi4py {site.libraries.mpi} needs srun --mpi={wanted}, and this Slurm offers {offered}"
    return site.libraries.lack_horovod("mpi") if backend == "horovod" else None


LAUNCHER = Launcher(
    name="srun",
    page="slurm",
    rank="SLURM_PROCID",
    size=_SIZE,
    local_rank="SLURM_LOCALID",
    local_size=_TASKS,
    trace=(_SIZE, _TASKS, "SLURM_STEP_NODELIST", "SLURM_STEP_ID"),
    others=("SLURM_NODEID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID"),
    start="srun --ntasks-per-node N dualeval run",
    read=_read,
    backends={
        "torch": "",
        "horovod": "over gloo; with [`--mpi`](launchers/slurm.md#mpi) over MPI if built with it",
        "mpi": "with [`--mpi=pmix` or `pmi2`](launchers/slurm.md#mpi)",
    },
    may_start=True,
    not_handed_on=lambda environ: [name for name in environ if _OF_THE_JOB.fullmatch(name)],
    ways=(
        Way(
            name="srun",
            backends=("torch", "horovod"),
            program="srun",
            words=lambda site, on_nodes, number: under_srun(site, on_nodes),
            lacks=_lacks,
        ),
        Way(
            name="srun-mpi",
            backends=("torch", "horovod", "mpi"),
            program="srun",
            words=lambda site, on_nodes, number: under_srun(site, on_nodes, mpi=_pmi_of(site.libraries.mpi)),
            lacks=_lacks_mpi,
        ),
    ),
)


def expand_hosts(text: str) -> list[str]:
    """Write out a list of hosts: ``"n[01-03,7]-ib,login"`` is n01-ib, n02-ib, n03-ib, n7-ib and login.

    Several brackets in a name count like digits, the last one fastest. Numbers keep the width of the range's
    first one.
    """
    return [host for name in _names(text) for host in _expand_name(name)]


def expand_tasks(text: str) -> tuple[int, ...]:
    """Write out the number of tasks on each node: ``"2(x2),1"`` is (2, 2, 1)."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise ValueError(f"{text!r} is not a list of tasks per node, such as '2(x2),1'")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def _order_by_component(environ: Mapping[str, str], hosts: list[str]) -> list[str]:
    """Put the hosts of a step in the order of the components of its heterogeneous job.

    Slurm numbers nodes and tasks component by component, but lists the hosts of all in the order of names.
    """
    components = itertools.takewhile(bool, (_component(environ, number) for number in itertools.count()))
    ordered = [host for component in components for host in expand_hosts(component) if host in hosts]
    return ordered if sorted(ordered) == sorted(hosts) else hosts


def _component(environ: Mapping[str, str], number: int) -> str:
    # Both names up to Slurm 22.05, where srun alone sets the older; the newer one since.
    names = (f"SLURM_JOB_NODELIST_{kind}_GROUP_{number}" for kind in ("HET", "PACK"))
    return next((environ[name] for name in names if name in environ), "")


def _names(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    names = re.findall(r"(?:[^\[\],]|\[[^\[\]]*\])+", text)
    if not names or ",".join(names) != text:
        raise ValueError(f"{text!r} is not a list of hosts, such as 'n[01-03,7],login'")
    return names


def _expand_name(name: str) -> list[str]:
    choices: list[list[str]] = []
    end = 0
    while end < len(name):
        match = _PIECE.match(name, end)
        if match is None or match.end() == end:
            raise ValueError(f"{name!r} is not a name of hosts, such as 'n[01-03,7]'")
        choices.append([match[1]])
        if match[2] is not None:
            choices.append([number for part in match[2].split(",") for number in _expand_range(part, name)])
        end = match.end()
    return ["".join(pieces) for pieces in itertools.product(*choices)]


def _expand_range(text: str, name: str) -> list[str]:
    match = _RANGE.fullmatch(text)
    first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
    if int(first) > int(last):
        raise ValueError(f"{text!r} in {name!r} is not a range of numbers, such as 01-03")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
