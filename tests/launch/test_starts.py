"""Start commands of launchers, and why one cannot be used: tables of sites."""

from __future__ import annotations

import importlib
import shlex
from dataclasses import replace

import pytest

from dualeval.errors import UsageError
from dualeval.launch.launchers import BACKENDS, LAUNCHERS, launcher_of, launchers_in, may_start_ranks
from dualeval.launch.site import Libraries, Node, Site, default_ranks, spread
from dualeval.launch.ways import WAYS, child_environ, choose_ways, start_words, why_not
from dualeval.tools.starts import plan_starts
from tests.conftest import ROOT
from tests.vehicles.environments import read_variables, world_at

PROGRAMS = {name: name for name in ("torchrun", "horovodrun", "mpirun", "srun", "ssh")}
EVERYTHING = Libraries(horovod=frozenset({"gloo", "mpi"}), mpi="4.1.2 (Open MPI v4.1.4)")
HERE = Site(
    nodes=(Node(host="box", cores=8, gpus=2),),
    programs=PROGRAMS,
    libraries=EVERYTHING,
    mpirun="mpirun (Open MPI) 4.1.4",
)
JOB = replace(
    HERE,
    nodes=(Node(host="n1", cores=4, gpus=2), Node(host="n2", cores=4, gpus=2)),
    job="7",
    srun_mpi=("none", "pmi2", "pmix"),
)
STEP = replace(JOB, in_step=True)
AWAY = replace(JOB, at_a_node=False)
OPEN_MPI_5 = replace(JOB, mpirun="mpirun (Open MPI) 5.0.11")
MPICH = replace(JOB, mpirun="HYDRA build details:", libraries=replace(EVERYTHING, mpi="4.1.2 (MPICH 4.2)"))
SRUN_1 = "srun --nodes=1 --nodelist=n1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=4"
SRUN_2 = "srun --nodes=2 --nodelist=n1,n2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=4"
LAST = "--kill-on-bad-exit=1 --mpi=none"


@pytest.mark.parametrize(
    ("site", "launcher", "ranks", "words"),
    [
        (HERE, "none", 1, ""),
        (HERE, "nproc", 2, ""),
        (HERE, "torchrun", 2, "torchrun --standalone --nproc-per-node=2 --no-python"),
        (HERE, "horovodrun", 2, "horovodrun --gloo -np 2"),
        (HERE, "horovodrun-mpi", 2, "horovodrun --mpi -np 2 --mpi-args=--oversubscribe"),
        (HERE, "mpirun", 2, "mpirun -np 2 --oversubscribe"),
        (replace(HERE, is_root=True), "mpirun", 2, "mpirun -np 2 --allow-run-as-root --oversubscribe"),
        (JOB, "none", 1, f"{SRUN_1} {LAST}"),
        (JOB, "nproc", 1, f"{SRUN_1} {LAST}"),
        (
            *(JOB, "torchrun", 4),
            f"{SRUN_2} {LAST} torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=n1:29503 "
            "--rdzv-id=7-3 --nproc-per-node=2 --no-python",
        ),
        (JOB, "horovodrun", 3, "horovodrun --gloo -np 3 -H n1:2,n2:1"),
        (AWAY, "horovodrun", 4, f"{SRUN_1} {LAST} horovodrun --gloo -np 4 -H n1:2,n2:2"),
        (JOB, "horovodrun-mpi", 2, "horovodrun --mpi -np 2 -H n1:1,n2:1 --mpi-args=--oversubscribe"),
        (JOB, "mpirun", 4, "mpirun -np 4 --oversubscribe -H n1:2,n2:2"),
        (OPEN_MPI_5, "mpirun", 4, "mpirun -np 4 --map-by slot:oversubscribe -H n1:2,n2:2"),
        (MPICH, "mpirun", 4, "mpirun -np 4 -hosts n1:2,n2:2"),
        (JOB, "srun", 2, f"{SRUN_2} {LAST}"),
        (STEP, "srun", 2, f"{SRUN_2} --overlap {LAST}"),
        (JOB, "srun", 3, f"srun --nodes=2 --nodelist=n1,n2 --ntasks=3 --cpus-per-task=2 {LAST}"),
        (
            *(JOB, "srun", 10),
            f"srun --nodes=2 --nodelist=n1,n2 --ntasks=10 --ntasks-per-node=5 --overcommit {LAST}",
        ),
        (JOB, "srun-mpi", 2, f"{SRUN_2} --kill-on-bad-exit=1 --mpi=pmix"),
        (MPICH, "srun-mpi", 2, f"{SRUN_2} --kill-on-bad-exit=1 --mpi=pmi2"),
    ],
)
def test_each_launcher_has_its_start_command(site: Site, launcher: str, ranks: int, words: str) -> None:
    assert shlex.join(start_words(launcher, ranks, site, number=3)) == words


WITHOUT_MPI = Libraries(horovod=frozenset({"gloo"}), no_mpi="mpi4py is not installed")
WITHOUT_HOROVOD = Libraries(no_horovod="Horovod is not installed", mpi="4.1.2 (Open MPI v5)")


@pytest.mark.parametrize(
    ("site", "launcher", "backend", "ranks", "device", "reason"),
    [
        (HERE, "torchrun", "torch", 2, "cuda", None),
        (HERE, "torchrun", "torch", 3, "cuda", "3 ranks on a node with 2 GPUs: each takes one of its own"),
        (HERE, "torchrun", "torch", 64, "cpu", None),
        (replace(HERE, programs={}), "horovodrun", "horovod", 1, "cpu", "there is no horovodrun on the PATH"),
        (HERE, "srun", "torch", 1, "cpu", "this is not a Slurm job: type 'salloc -N2 dualeval conformance'"),
        (
            HERE,
            "srun-mpi",
            "mpi",
            1,
            "cpu",
            "this is not a Slurm job: type 'salloc -N2 dualeval conformance'",
        ),
        (JOB, "nproc", "torch", 2, "cpu", "--nproc starts ranks on one node"),
        (
            *(JOB, "torchrun", "torch", 3, "cpu"),
            "one command starts the same number of ranks on each node, and 3 on 2 is uneven",
        ),
        (replace(HERE, mpirun=""), "horovodrun-mpi", "horovod", 1, "cpu", "there is no mpirun on the PATH"),
        *(
            (replace(HERE, libraries=libraries), launcher, backend, 1, "cpu", reason)
            for libraries, launcher, backend, reason in [
                (WITHOUT_MPI, "horovodrun-mpi", "horovod", "Horovod is built without MPI"),
                (WITHOUT_MPI, "horovodrun", "horovod", None),
                (WITHOUT_MPI, "mpirun", "torch", "mpi4py is not installed"),
                (WITHOUT_HOROVOD, "mpirun", "horovod", "Horovod is not installed"),
                (WITHOUT_HOROVOD, "mpirun", "mpi", None),
                (WITHOUT_HOROVOD, "nproc", "horovod", "Horovod is not installed"),
                (WITHOUT_HOROVOD, "nproc", "torch", None),
            ]
        ),
        (replace(JOB, no_ssh="ssh is closed"), "horovodrun", "horovod", 2, "cpu", "ssh is closed"),
        (replace(JOB, no_ssh="ssh is closed"), "horovodrun", "horovod", 1, "cpu", None),
        (
            *(replace(JOB, srun_mpi=("none", "pmi2")), "srun-mpi", "mpi", 2, "cpu"),
            "mpi4py 4.1.2 (Open MPI v4.1.4) needs srun --mpi=pmix, and this Slurm offers none, pmi2",
        ),
        (replace(JOB, libraries=WITHOUT_MPI), "srun-mpi", "torch", 1, "cpu", "mpi4py is not installed"),
        (JOB, "srun-mpi", "mpi", 4, "cuda", None),
    ],
)
def test_a_start_that_is_not_possible_says_why(
    site: Site, launcher: str, backend: str, ranks: int, device: str, reason: str | None
) -> None:
    assert why_not(launcher, backend, ranks, device, site) == reason


def test_default_ranks_follow_from_the_cores_gpus_and_nodes() -> None:
    one_core = tuple(Node(host=f"n{number}", cores=1) for number in range(3))
    for site, device, ranks in (
        (HERE, "cpu", [1, 2, 4]),
        (HERE, "cuda", [1, 2]),
        (JOB, "cuda", [1, 2, 4]),
        (replace(JOB, nodes=one_core), "cpu", [1, 2, 3]),
        (replace(HERE, nodes=one_core[:1]), "cpu", [1]),
    ):
        assert default_ranks(site, device) == ranks
    spreads = [spread(*counts) for counts in ((1, 4), (3, 2), (4, 2), (7, 3), (2, 1))]
    assert spreads == [[1], [2, 1], [2, 2], [3, 2, 2], [2]]


def test_what_a_job_was_asked_for_with_is_not_handed_on() -> None:
    """srun would take a job's --ntasks-per-node for that of a step without one."""
    environ = read_variables(
        "PATH=/usr/bin SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n[1-2] SLURM_TASKS_PER_NODE=2(x2) "
        "SLURM_NTASKS_PER_NODE=1 SLURM_CPU_BIND_LIST=0x1 SRUN_CPUS_PER_TASK=4 SLURM_CPUS_PER_TASK=4"
    )
    kept = child_environ(environ, "/env/bin")
    assert kept == read_variables(
        "PATH=/env/bin:/usr/bin SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n[1-2] SLURM_TASKS_PER_NODE=2(x2)"
    )


def test_what_makes_this_process_a_rank_is_not_handed_on() -> None:
    """A pod of one replica, a task of Flux's: ranks of another launcher would find two who disagree."""
    pod = read_variables("RANK=0 WORLD_SIZE=1 MASTER_ADDR=a MASTER_PORT=1 PET_NPROC_PER_NODE=auto")
    task = {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1", "FLUX_TASK_LOCAL_ID": "0", "FLUX_JOB_ID": "f1"}
    pmi = {"PMI_FD": "9", "PMI_RANK": "0", "PMI_SIZE": "1"}
    assert child_environ({**pod, **task, **pmi}, "/env/bin") == {"PATH": "/env/bin:/usr/bin:/bin"}
    assert child_environ(pmi, "/env/bin") == {**pmi, "PATH": "/env/bin:/usr/bin:/bin"}


def test_only_a_process_alone_may_start_ranks() -> None:
    def may(launcher: str, size: int) -> bool:
        return may_start_ranks(world_at(launcher, 0, size, 0, size, 0))

    assert all(may(launcher, 1) for launcher in ("none", "srun", "flux", "env"))
    assert not any(may(*place) for place in (("env", 2), ("srun", 2), ("openmpi", 1), ("torchrun", 1)))


def test_launchers_are_chosen_by_their_names() -> None:
    assert choose_ways(["srun", "nproc", "srun"]) == ["nproc", "srun"]
    with pytest.raises(UsageError, match=r"--launchers 'srum': expected some of none, nproc, torchrun"):
        choose_ways(["srum"])


def test_starts_begin_with_the_reference_and_know_what_cannot_start() -> None:
    """The reference is first, and what cannot be started has no self-test."""
    starts = plan_starts(HERE, ["cuda", "cpu"], ["none", "torchrun", "srun"], [1, 2, 4])
    shown = [
        (start.device, start.launcher, start.ranks, start.is_self_test, start.reason is None)
        for start in starts
        if start.backend != "horovod"
    ]
    for device, most in (("cuda", 2), ("cpu", 4)):
        assert [row[1:] for row in shown if row[0] == device] == [
            ("none", 1, False, True),
            *(("torchrun", ranks, False, ranks <= most) for ranks in (1, 2, 4)),
            ("torchrun", most, True, True),
            *(("srun", ranks, False, False) for ranks in (1, 2, 4)),
        ]
    assert [start.is_reference for start in starts].count(True) == 2


def test_every_backend_is_tried_once() -> None:
    starts = plan_starts(JOB, ["cpu"], list(WAYS), None)
    tests = [(start.launcher, start.backend, start.ranks) for start in starts if start.is_self_test]
    assert len(tests) == len(set(tests)) == 11
    assert {ranks for _, _, ranks in tests} == {8}


# -- docs/launchers.md says of each launcher what its file in launch/launchers says ---------------------


PAGE = ROOT / "docs/launchers.md"


def test_the_tables_are_those_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    tables = importlib.import_module("launcher_tables")
    assert tables.with_tables(PAGE.read_text("utf-8")) == PAGE.read_text("utf-8"), "type: make tables"


def test_each_launcher_has_a_file_and_its_page_is_there() -> None:
    files = {path.stem for path in (ROOT / "launch/launchers").glob("*.py")} - {"__init__", "base"}
    assert files == {*LAUNCHERS}
    assert {*BACKENDS} == {name for launcher in LAUNCHERS for name in launcher_of(launcher).backends}
    for name in LAUNCHERS:
        launcher = launcher_of(name)
        assert launcher.name == name
        # Else its file would not be imported where it is this one that is set.
        assert all(name in launchers_in({variable: ""}) for variable in (*launcher.all, *launcher.trace))
        assert not launcher.page or (ROOT / "docs/launchers" / f"{launcher.page}.md").exists()
