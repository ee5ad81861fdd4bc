"""The same bits over two hosts, with every launcher that starts ranks there, batch jobs included."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

from tests.cluster.hosts import Cluster
from tests.conftest import GRACE, ROOT, Launch
from tests.engine import test_digests
from tests.engine.test_digests import (
    EMBEDDED,
    PART,
    SINGLE,
    Evaluate,
    Evaluation,
    Table,
    Way,
    check,
    once_each,
    row,
    table,
)

pytestmark = pytest.mark.needs("cluster")

# The longest of them takes a tenth of that on two cores.
PATIENCE = 120.0
# Slurm (proctrack/linuxproc) may miss the sleep that a script starts as its job is queued again.
_SCRIPT_SLEEPS_S = 60.0
# A PATH on which no environment is active.
INACTIVE = os.pathsep.join(
    folder for folder in os.environ["PATH"].split(os.pathsep) if not Path(folder, "dualeval").exists()
)

# Asked for by the tests below, as this module's own.
evaluation = test_digests.evaluation


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where so many ranks are put, in the words of each launcher.

    A single rank runs on the host where the command is not typed, but for torchrun's, which knows no hosts.
    """

    nodes: int  # number of hosts
    tasks: str  # options of srun
    hosts: str  # what follows -H
    agents: Sequence[int]  # number of ranks of torchrun's agent on each host


PLACES = {
    1: Places(nodes=1, tasks="-N1 -n1 -w h1", hosts="h1:1", agents=(1,)),
    2: Places(nodes=2, tasks="-N2 --ntasks-per-node 1", hosts="h0:1,h1:1", agents=(1, 1)),
    3: Places(nodes=2, tasks="-N2 -n3", hosts="h0:2,h1:1", agents=(2, 1)),
    4: Places(nodes=2, tasks="-N2 --ntasks-per-node 2", hosts="h0:2,h1:2", agents=(2, 2)),
}


@dataclass(frozen=True, kw_only=True)
class ClusterWay(Way):
    """A way to start ranks on two hosts: what is typed on h0, with the fields of ``PLACES`` filled in."""

    on_each: bool = False  # it is typed on every host that ranks run on, with {node} for the host's number
    sizes: Sequence[int] = (1, 2, 3, 4)  # for how many ranks
    further: Sequence[str] = ()  # what the machine needs beside what launcher and backend do

    def command(self, size: int) -> str:
        agents = PLACES[size].agents
        return self.on_node("I", "/".join(map(str, dict.fromkeys(agents))), size)

    def commands(self, size: int) -> Sequence[str]:
        """What is typed on h0, h1, ...."""
        agents = PLACES[size].agents if self.on_each else PLACES[size].agents[:1]
        return [self.on_node(str(node), str(ranks), size) for node, ranks in enumerate(agents)]

    def on_node(self, node: str, ranks: str, size: int) -> str:
        places = PLACES[size]
        return self.typed.format(
            n=size, node=node, ranks=ranks, nodes=places.nodes, tasks=places.tasks, hosts=places.hosts
        )

    def parameter(self, size: int) -> ParameterSet:
        values, marks, name = super().parameter(size)
        return pytest.param(*values, marks=[*marks, pytest.mark.needs(*self.further)], id=str(name))


AGENT = "--nnodes {nodes} --nproc-per-node {ranks} --rdzv-backend c10d --rdzv-endpoint h0:29500 --rdzv-id 7"
STATIC = "--nnodes {nodes} --nproc-per-node {ranks} --node-rank {node} --master-addr h0 --master-port 29500"


def over(start: str, launcher: str, backend: str, *, asks: bool = False, **more: Any) -> ClusterWay:
    """A way that is typed so; ``asks`` where --backend has to be typed, too."""
    typed = f"{start} dualeval run" + (f" --backend {backend}" if asks else "")
    return ClusterWay(typed=typed, launcher=launcher, backend=backend, **more)


# One command for all agents, and so as many ranks on each host.
SRUN_TORCHRUN = over(
    f"srun -N{{nodes}} --ntasks-per-node 1 torchrun {AGENT} -m", "torchrun", "torch", sizes=(1, 2, 4)
)
HOROVODRUN = over("horovodrun -np {n} -H {hosts}", "mpirun", "horovod", sizes=(2,))
SRUN = over("srun {tasks}", "srun", "torch")
SRUN_PMIX_MPI = over("srun {tasks} --mpi=pmix", "srun", "mpi", asks=True)
EVERY_WAY = [
    over(f"torchrun {AGENT} -m", "torchrun", "torch", on_each=True),
    over(f"torchrun {STATIC} -m", "torchrun", "torch", on_each=True),
    SRUN_TORCHRUN,
    # Where all ranks are on one other host, horovodrun may take the loopback interface for the right one.
    over(
        "horovodrun --gloo --network-interfaces eth0 -np {n} -H {hosts}", "horovodrun", "horovod", sizes=(1,)
    ),
    over("horovodrun --gloo -np {n} -H {hosts}", "horovodrun", "horovod", sizes=(2, 3, 4)),
    over("horovodrun --mpi -np {n} -H {hosts}", "mpirun", "horovod"),
    over("mpirun -np {n} -H {hosts}", "mpirun", "horovod"),
    over("mpirun -np {n} -H {hosts}", "mpirun", "torch", asks=True),
    over("mpirun -np {n} -H {hosts}", "mpirun", "mpi", asks=True),
    SRUN,
    over("srun {tasks}", "srun", "horovod", asks=True),
    over("srun {tasks} --mpi=pmix", "srun", "torch", further=("mpi",)),
    over("srun {tasks} --mpi=pmix", "srun", "horovod", asks=True, further=("mpi",)),
    SRUN_PMIX_MPI,
]


@pytest.fixture(scope="module")
def evaluate(cluster: Cluster, launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Evaluate:
    """Evaluate once in each way, size and job, each in a new folder; gives result.json."""

    def run(way: Way, size: int, evaluation: Evaluation, home: Path) -> str:
        typed = way.commands(size) if isinstance(way, ClusterWay) else [way.command(size)]
        with ExitStack() as stack:
            processes = []
            for host, words in zip(cluster.hosts, typed, strict=False):
                command = cluster.on(host, [*words.split(), *evaluation.arguments, "--out", home / "out"])
                variables = {**cluster.variables, "PYTHONPATH": ""}
                folder = evaluation.folder or home
                processes.append(
                    stack.enter_context(launch.started(command, variables=variables, cwd=folder))
                )
            said = [text for process in processes for text in process.communicate(timeout=PATIENCE)]
        assert [process.returncode for process in processes] == [0] * len(typed), "\n".join(said)
        return "".join(said)

    return once_each(run, tmp_path_factory)


@pytest.mark.parametrize(
    ("way", "size"),
    [
        way.parameter(size)
        for way, size in [(SRUN_TORCHRUN, 4), (HOROVODRUN, 2), (SRUN, 4), (SRUN_PMIX_MPI, 2)]
    ],
)
def test_every_launcher_has_the_digest_over_two_hosts(evaluate: Evaluate, way: ClusterWay, size: int) -> None:
    check(evaluate, way, size, PART, nodes=PLACES[size].nodes)


cluster_table = table(
    "cluster",
    "Digests under every launcher and backend over two hosts",
    ["job", "command", "launcher", "backend", "hosts", "ranks", "metrics_digest"],
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "size"), [SINGLE.parameter(1), *(way.parameter(size) for way in EVERY_WAY for size in way.sizes)]
)
def test_every_launcher_at_every_size_has_the_digest(
    evaluate: Evaluate, way: Way, size: int, evaluation: Evaluation, cluster_table: Table
) -> None:
    result = check(evaluate, way, size, evaluation, nodes=PLACES[size].nodes)
    cluster_table.append(row(evaluation, way, size, result, "launcher", "backend", "nodes", "size"))


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What a job of Slurm's left behind, and what was said when it was handed over."""

    number: int
    state: str
    exit_code: str
    log: str
    said: str


class Batch:
    """Hands jobs to Slurm in a folder that holds the checkout's ``slurm``, and waits for their end."""

    def __init__(self, cluster: Cluster, launch: Launch, folder: Path) -> None:
        self.cluster = cluster
        self.launch = launch
        self.folder = folder
        (folder / "slurm").symlink_to(ROOT / "slurm")

    def __call__(self, typed: str, variables: Mapping[str, str] | None = None) -> Ended:
        with self.begun(typed, variables) as (number, said):
            state = self.cluster.wait_for_job(number, PATIENCE)
        log = (self.folder / f"dualeval-{number}.log").read_text()
        exit_code = self.facts(number)["ExitCode"]
        return Ended(number=number, state=state, exit_code=exit_code, log=log, said=said)

    @contextmanager
    def begun(self, typed: str, variables: Mapping[str, str] | None = None) -> Iterator[tuple[int, str]]:
        """Hand over a job; gives its number, and what was said. It has to end within the block."""
        environ = {**self.cluster.variables, "PYTHONPATH": "", **(variables or {})}
        command = self.cluster.on("h0", shlex.split(typed))
        # The job has the mark of its launch.
        with self.launch.started(
            command, variables=environ, cwd=self.folder, grace=_SCRIPT_SLEEPS_S + GRACE
        ) as process:
            said, errors = process.communicate(timeout=PATIENCE)
            assert (process.returncode, errors) == (0, ""), said + errors
            number = int(said.replace("Submitted batch job", "job").split()[1])
            try:
                yield number, said
            except BaseException:
                # The next test is to find an empty queue, and what is requeued has an end.
                self.order(f"scancel {number}")
                raise

    def order(self, typed: str) -> str:
        """Have Slurm do something, from h0; returns what it printed."""
        done = self.launch(self.cluster.on("h0", typed.split()), variables=self.cluster.variables).ok()
        return done.stdout

    def facts(self, number: int | str) -> dict[str, str]:
        """What Slurm tells of a job."""
        shown = self.order(f"scontrol show job --oneliner {number}")
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def result(self, out: str) -> dict[str, Any]:
        [found] = self.folder.glob(f"{out}/result.json")
        result: dict[str, Any] = json.loads(found.read_text())
        return result


@pytest.fixture
def batch(cluster: Cluster, launch: Launch, tmp_path: Path) -> Batch:
    """Hand over a job as a person types it: ``batch("sbatch slurm/eval.sbatch")``."""
    return Batch(cluster, launch, tmp_path)


@pytest.mark.parametrize(
    ("typed", "backend", "nodes", "out"),
    [
        pytest.param("sbatch slurm/eval.sbatch", "torch", 1, "runs/job-*", marks=pytest.mark.long),
        pytest.param(
            *("sbatch --nodes 2 slurm/eval_horovod.sbatch --out out", "horovod", 2, "out"),
            marks=pytest.mark.needs("horovod"),
        ),
        pytest.param("dualeval submit --nodes 2 -- --out out", "torch", 2, "out", marks=pytest.mark.long),
    ],
)
def test_a_batch_job_has_the_digest(
    evaluate: Evaluate, batch: Batch, typed: str, backend: str, nodes: int, out: str
) -> None:
    variables = {}
    if nodes == 1:
        # The environment is then that of the folder.
        (batch.folder / ".venv").symlink_to(sys.prefix)
        variables["PATH"] = INACTIVE
    ended = batch(typed, variables)
    assert (ended.state, ended.exit_code) == ("COMPLETED", "0:0"), ended.log
    if typed.startswith("dualeval"):
        log = batch.folder.resolve() / f"dualeval-{ended.number}.log"
        assert ended.said == f"job {ended.number}\nlog {log}\n"
    result = batch.result(out)
    assert result["samples"] == {"total": 10_000, "evaluated": 10_000, "failed": 0}
    assert result["world"] == {"size": nodes, "nodes": nodes, "launcher": "srun", "backend": backend}
    assert result["metrics_digest"] == evaluate(SINGLE, 1, EMBEDDED)["metrics_digest"]
    assert ended.log.count(result["metrics_digest"]) == 1


def test_a_batch_job_without_an_environment_says_what_to_do(batch: Batch) -> None:
    ended = batch("sbatch slurm/eval.sbatch --out out", variables={"PATH": INACTIVE})
    assert (ended.state, ended.exit_code) == ("FAILED", "2:0")
    folder = batch.folder.resolve()
    assert ended.log.startswith(f"There is no dualeval on the PATH of h0, and none in {folder}/.venv/bin.")
    assert "Activate its environment before you type sbatch" in ended.log
    assert not (folder / "out").exists()
