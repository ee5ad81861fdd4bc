"""Runs that are killed, stopped, cut off or stand still: named, ended, and gone on with to the same bits."""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
from _pytest.mark.structures import ParameterSet
from PIL import Image

from dualeval.engine.folder.journal import read_journal_file
from dualeval.tasks.image_classification import ImageClassification
from tests.cluster.hosts import Cluster
from tests.conftest import ROOT, Launch
from tests.vehicles.faults import (
    GONE_WITHIN_S,
    HEARTBEAT_S,
    JOB,
    KILL,
    LOADED_S,
    ON_ONE_HOST,
    SAMPLES,
    SMALL_JOB,
    Run,
    ended_run,
    hurt_run,
    is_alive,
    kill,
    look_into,
    play,
)
from tests.vehicles.faulty_models import FAULT, FLUSH_S, began
from tests.vehicles.launchers import start, way
from tests.vehicles.sessions import evaluate

ROUNDS = 3
JOINING = ROOT / "tests/vehicles/workers" / "joining_worker.py"
SEED = "DUALEVAL_TEST_SEED"
NEEDS = {"torch": [], "horovod": ["horovod"], "mpi": ["mpi"]}


@pytest.fixture(scope="module")
def digest() -> str:
    """The digest of the small job."""
    return evaluate(ImageClassification(), batch_size=20, limit=SAMPLES).metrics_digest


# -- kills -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seed() -> str:
    """Of the rounds; set the variable to have the same again."""
    return os.environ.get(SEED) or str(secrets.randbelow(10**6))


@pytest.mark.needs("horovod", "mpi")
@pytest.mark.parametrize(
    "number", [0, *(pytest.param(number, marks=pytest.mark.long) for number in range(1, ROUNDS))]
)
def test_a_run_killed_at_random_goes_on_to_the_digest(
    launch: Launch, tmp_path: Path, digest: str, seed: str, number: int
) -> None:
    played = play(launch, tmp_path, KILL, f"{seed}/{number}", digest)
    said = f"{SEED}={seed}\n{played}"
    assert played.went_well, said
    assert max(played.notice_s, default=0.0) < HEARTBEAT_S + GONE_WITHIN_S + LOADED_S, said


@pytest.mark.parametrize(
    ("point", "backend"),
    [
        ("write", "torch"),
        pytest.param("fsync", "mpi", marks=[pytest.mark.needs("mpi"), pytest.mark.long]),
        pytest.param("rename", "horovod", marks=[pytest.mark.needs("horovod"), pytest.mark.long]),
    ],
)
def test_a_run_killed_within_a_journal_file_loses_only_that_file(
    launch: Launch, tmp_path: Path, out: Path, digest: str, point: str, backend: str
) -> None:
    fault = f"slow:0.02 all 0;{point} 0 2"
    run = ended_run(launch, ["dualeval", "run", *SMALL_JOB, "--out", "out"], 1, tmp_path, fault=fault)
    assert run.launchers[0].returncode == -9, run.said()
    whole = sorted((out / "journal").glob("*.journal"))
    assert len(whole) == 2
    [partial] = [file for file in (out / "journal").iterdir() if file.name.endswith(".partial")]
    finished = sum(len(read_journal_file(file).chunks) for file in whole)
    assert finished > 0
    if point == "write":
        assert partial.stat().st_size > 0
    again = [*ON_ONE_HOST[backend].format(n=2).split(), *SMALL_JOB, "--out", "out"]
    run = ended_run(launch, again, 2, tmp_path)
    assert run.launchers[0].returncode == 0, run.said()
    found = look_into(out, SAMPLES, digest)
    assert (found.lost, found.twice, found.differs, found.wrong) == (0, 0, False, []), run.said()
    # Neither less than was whole, nor anything of what was not.
    assert found.resumed == finished
    assert "left out" not in run.said()
    assert not partial.exists()


@pytest.mark.long
def test_torchrun_starts_ranks_on_two_hosts_again(
    cluster: Cluster, launch: Launch, tmp_path: Path, digest: str
) -> None:
    """One agent's rank is killed; the other agent, which counts no restart of its own, joins again."""
    agent = "torchrun --nnodes 2 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d"
    typed = f"{agent} --rdzv-endpoint h0:29511 --rdzv-id 11 -m dualeval run".split()
    commands = [cluster.on(host, [*typed, *SMALL_JOB, "--out", "out", "--fresh"]) for host in ("h0", "h1")]

    def find() -> list[psutil.Process]:
        return [*cluster.processes("h0"), *cluster.processes("h1")]

    with hurt_run(launch, commands, 2, tmp_path, fault="slow:0.02 all 0", find=find) as run:
        journal = tmp_path / "out/journal"
        run.wait(lambda: len(run.ranks) == 2 and list(journal.glob("*.journal")), "the first journal file")
        kill(run.ranks[1])
        run.wait(run.has_ended, "the end of both agents")
    assert [launcher.returncode for launcher in run.launchers] == [0, 0], run.said()
    found = look_into(tmp_path / "out", SAMPLES, digest)
    assert (found.lost, found.twice, found.differs, found.wrong) == (0, 0, False, []), run.said()
    assert found.resumed > 0


# -- standstills -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Standstill:
    """A way in which one rank is no longer there, or does not go on."""

    fault: str | None  # in the words of ``tests.vehicles.faulty_models``; None where a reading hangs
    rank: int  # whose it is
    says: str  # what the others say of it, a regular expression
    stack: str | None = None  # what its own stacks contain; None where it cannot write them
    size: int = 3  # the number of ranks
    stopped: bool = False  # whether it stays, stopped, until somebody kills it
    workers: int = 0  # reading processes, where a reading hangs
    hosts: int = 1  # on how many it is tried


NO_PROGRESS = r"no progress for \d+ s, chunk \d+, stage forward"
# The last stage that it has told of, up to half a second before; its first chunk may not be among them.
NO_SIGN = r"no progress for \d+ s, (?:chunk \d+, )?stage \w+, and the process does not respond"
UNREACHABLE = r"can no longer be reached: it ended, or its host or network did"
STANDSTILLS = {
    "a reading": Standstill(
        fault=None, rank=1, says=r"no progress for \d+ s, chunk 3, stage load", stack="image_files.py", size=2
    ),
    "a reading process": Standstill(
        fault=None,
        rank=1,
        says=r"no progress for \d+ s, chunk 3, stage load",
        stack="feed.py",
        size=2,
        workers=1,
    ),
    "a forward": Standstill(fault="stall 1 5", rank=1, says=NO_PROGRESS, stack="faulty_models.py", size=2),
    "the lock": Standstill(fault="lock 1 5", rank=1, says=NO_SIGN, stack="faulty_models.py"),
    "stopped": Standstill(fault="stop 1 5", rank=1, says=NO_SIGN, stopped=True),
    "rank 0 stopped": Standstill(
        fault="stop 0 5", rank=0, says=rf"(no answer for \d+ s|{NO_SIGN})", stopped=True
    ),
    "rank 0 killed": Standstill(fault="kill 0 5", rank=0, says=UNREACHABLE, hosts=2),
    "killed": Standstill(fault="kill 2 5", rank=2, says=NO_SIGN, hosts=2),
    "killed beside rank 0": Standstill(
        fault="kill 1 5", rank=1, says="exited without a message: it was killed or crashed", hosts=2
    ),
}
SIZE = 3
# On two hosts: plain srun, which leaves the others be when a rank fails. Its ranks 0 and 1 are on h0.
ON_TWO_HOSTS = {
    "torch": "srun -N2 -n3 --output=rank-%t.log dualeval run",
    "horovod": "srun -N2 -n3 --output=rank-%t.log dualeval run --backend horovod",
    "mpi": "srun -N2 -n3 --output=rank-%t.log --mpi=pmix dualeval run --backend mpi",
}
QUICK = {("the lock", "torch"), ("rank 0 killed", "torch")}


def each(kinds: Sequence[str], quick: set[tuple[str, str]]) -> list[ParameterSet]:
    """Every kind with every backend; long, but for a few."""
    return [
        pytest.param(
            kind,
            backend,
            id=f"{kind}, {backend}",
            marks=[
                pytest.mark.needs(*NEEDS[backend]),
                *([] if (kind, backend) in quick else [pytest.mark.long]),
            ],
        )
        for kind in kinds
        for backend in ON_ONE_HOST
    ]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of pictures, one of which is a pipe that nobody writes to: opening it takes for ever."""
    folder = tmp_path_factory.mktemp("images")
    for target, name in enumerate("abc"):
        (folder / name).mkdir()
        for number in range(8):
            Image.new("RGB", (20, 20), (80 * target, 50, number)).save(folder / name / f"{number}.png")
    (folder / "a/6.png").unlink()
    os.mkfifo(folder / "a/6.png")
    return folder


def job_of(kind: Standstill, images: Path) -> list[str]:
    """The words after 'dualeval run'."""
    common = ["--heartbeat-timeout", f"{HEARTBEAT_S:g}", "--out", "out"]
    if kind.fault is not None:
        return [*JOB, *common]
    # The pipe is in chunk 3, rank 1's of two.
    words = "--model tests.vehicles.faulty_models:means --weights random:0 --batch-size 2"
    sizes = "--resize 20 --crop 20 --mean 0 --std 1"
    return [
        *(*words.split(), *sizes.split(), "--no-progress", "--data", str(images)),
        *("--workers", str(kind.workers), *common),
    ]


def lines_of(said: str, rank: int) -> list[str]:
    """What a rank says of the failure."""
    own = "dualeval: error: " if rank == 0 else f"dualeval: rank {rank} ends: "
    return [line.partition(own)[2] for line in said.splitlines() if own in line]


def assert_said(run: Run, rank: int, named: Sequence[int], says: str) -> None:
    """Check that a rank has named another one, with host and process, and why, once."""
    said = run.said()
    names = "|".join(map(str, named))
    wanted = re.compile(rf"rank ({names}) on \S+ \(pid \d+\):? {says}")
    found = [line for line in lines_of(said, rank) if wanted.match(line)]
    assert len(found) == 1, f"rank {rank} should say, once: {wanted.pattern}\n{said}"


def gone_in_time(run: Run, ranks: Sequence[int], since: float) -> None:
    """Wait until ranks are gone; fails where they take too long."""
    within_s = HEARTBEAT_S + GONE_WITHIN_S + LOADED_S - (time.monotonic() - since)
    run.wait(lambda: not any(is_alive(run.ranks[rank]) for rank in ranks), f"the end of {ranks}", within_s)
    print(f"gone {time.monotonic() - since:.1f} s after the beginning")


@pytest.mark.needs("cluster")
@pytest.mark.parametrize(
    ("name", "backend"), each([name for name, kind in STANDSTILLS.items() if kind.hosts == 2], QUICK)
)
def test_a_rank_that_is_killed_is_named(
    cluster: Cluster, launch: Launch, tmp_path: Path, images: Path, name: str, backend: str
) -> None:
    kind = STANDSTILLS[name]
    command = cluster.on("h0", [*ON_TWO_HOSTS[backend].split(), *job_of(kind, images)])
    check_standstill(launch, command, tmp_path, kind, cluster)


@pytest.mark.parametrize(
    ("name", "backend"), each([name for name, kind in STANDSTILLS.items() if kind.hosts == 1], QUICK)
)
def test_a_rank_that_stands_still_is_named(
    launch: Launch, tmp_path: Path, images: Path, name: str, backend: str
) -> None:
    kind = STANDSTILLS[name]
    command = [*ON_ONE_HOST[backend].format(n=kind.size).split(), *job_of(kind, images)]
    check_standstill(launch, command, tmp_path, kind)


def check_standstill(
    launch: Launch, command: list[str], folder: Path, kind: Standstill, cluster: Cluster | None = None
) -> None:
    """Have a rank stand still, and look at what the others do."""
    word = None if kind.fault is None else began(kind.fault.split()[0])
    with hurt_run(
        launch,
        [command],
        kind.size,
        folder,
        fault=f"slow all 0;{kind.fault}" if kind.fault else "",
        variables={} if cluster is None else cluster.variables,
        find=None if cluster is None else lambda: processes_of(cluster),
    ) as run:
        run.wait(
            lambda: len(run.ranks) == kind.size and (word is None or word in run.said()), "the standstill", 60
        )
        since = time.monotonic()
        others = [rank for rank in range(kind.size) if rank != kind.rank]
        gone_in_time(run, others if kind.stopped else range(kind.size), since)
        # Its launcher may wait for it, torch's agent for 30 s.
        kill(run.ranks[kind.rank])
        run.wait(run.has_ended, "the end of the launcher", 20)
    assert run.launchers[0].returncode != 0, run.said()
    for rank in others:
        assert_said(run, rank, [kind.rank], kind.says)
    status = json.loads((folder / "out/status.json").read_text())
    assert status["state"] == "failed" and re.search(kind.says, status["reason"]), status
    if kind.stack is not None:
        assert kind.stack in (folder / f"out/stacks/rank-{kind.rank:05d}.txt").read_text()


# -- a batch that takes longer than the timeout ------------------------------------------------------------

COMPUTING = r"dualeval: note: rank {rank} on \S+ \(pid \d+\): computing for \d+ s, chunk \d+, stage forward; "
COMPUTING += r"the limit is 1,800 s \(--forward-timeout\)"


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2])
def test_a_batch_that_computes_for_long_is_named_and_awaited(
    launch: Launch, tmp_path: Path, digest: str, size: int
) -> None:
    """Alone its own watch says it, else rank 0, once."""
    rank = size - 1
    words = [] if size == 1 else ["--nproc", str(size)]
    job = [*SMALL_JOB, "--heartbeat-timeout", f"{HEARTBEAT_S:g}", "--out", "out"]
    run = ended_run(launch, ["dualeval", "run", *words, *job], size, tmp_path, fault=f"compute {rank} 5")
    assert run.launchers[0].returncode == 0, run.said()
    found = look_into(tmp_path / "out", SAMPLES, digest)
    assert (found.lost, found.twice, found.differs, found.wrong) == (0, 0, False, []), run.said()
    assert len(re.findall(COMPUTING.format(rank=rank), run.said())) == 1, run.said()


@pytest.mark.long
def test_a_batch_that_computes_for_too_long_is_given_up(launch: Launch, tmp_path: Path) -> None:
    limits = ["--heartbeat-timeout", f"{HEARTBEAT_S:g}", "--forward-timeout", f"{HEARTBEAT_S + 1:g}"]
    command = ["dualeval", "run", "--nproc", "2", *SMALL_JOB, *limits, "--out", "out"]
    run = ended_run(launch, command, 2, tmp_path, fault="compute 1 5")
    assert run.launchers[0].returncode == 1, run.said()
    for rank in (0, 1):
        assert_said(
            run, rank, [1], r"computing for \d+ s, chunk \d+, stage forward, longer than --forward-timeout 4$"
        )


# -- a collective to which not all come --------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "backend"), [way("torchrun", "torch"), way("horovodrun", "horovod"), way("mpirun", "mpi")]
)
def test_a_collective_that_hangs_in_setup_is_named(
    launch: Launch, tmp_path: Path, launcher: str, backend: str
) -> None:
    """Waiting loops of Horovod and MPI take time of the processor: that is no progress."""
    with hurt_run(
        launch, [[*start(launcher, 2), sys.executable, str(JOINING), "stuck", backend]], 2, tmp_path
    ) as run:
        run.wait(run.has_ended, "the end of the launcher")
    assert run.launchers[0].returncode != 0, run.said()
    said = re.findall(
        r"rank (\d) heard: rank 1 on \S+ \(pid \d+\): no progress for \d+ s, stage collective", run.said()
    )
    assert sorted(said) == ["0", "1"], run.said()


# -- a cable that is cut -----------------------------------------------------------------------------------

AGENT = f"{sys.executable} -m torch.distributed.run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint h0:29511"
AGENT += " --rdzv-id 7 --nproc-per-node {n} --no-python dualeval run"
PASSED_ON = f"-x {FAULT} -x {FLUSH_S} -x OMP_NUM_THREADS"
# Through a shell on the rank's own host: what mpirun passes on gets lost along with the cable.
OWN_LOG = 'exec dualeval "$@" > rank-$OMPI_COMM_WORLD_RANK.log 2>&1'


def cable_commands(cluster: Cluster, backend: str, job: Sequence[str]) -> list[list[str]]:
    """What is typed on the hosts: torchrun on each, srun, and mpirun over ssh."""
    if backend == "torch":
        return [
            cluster.on(host, [*AGENT.format(n=ranks).split(), *job])
            for host, ranks in zip(cluster.hosts, (2, 1), strict=True)
        ]
    if backend == "horovod":
        return [cluster.on("h0", [*ON_TWO_HOSTS["horovod"].split(), *job])]
    words = f"mpirun -np 3 -H h0:2,h1:1 {PASSED_ON} sh -c".split()
    return [cluster.on("h0", [*words, OWN_LOG, "dualeval", "run", "--backend", "mpi", *job])]


@pytest.mark.needs("cluster")
@pytest.mark.parametrize(("name", "backend"), each(["cable"], {("cable", "mpi")}))
def test_a_host_that_is_cut_off_is_named(
    cluster: Cluster, launch: Launch, tmp_path: Path, name: str, backend: str
) -> None:
    job = [*JOB, "--heartbeat-timeout", f"{HEARTBEAT_S:g}", "--out", "out"]
    with hurt_run(
        launch,
        cable_commands(cluster, backend, job),
        SIZE,
        tmp_path,
        fault="slow:0.1 all 0",
        variables=cluster.variables,
        find=lambda: processes_of(cluster),
    ) as run:
        # The first journal file of every rank says that they are all at work.
        writers = tmp_path / "out/journal"
        run.wait(
            lambda: len({file.name.split("-")[1] for file in writers.glob("*.journal")}) == SIZE,
            "a journal file of each rank",
            60,
        )
        assert len(run.ranks) == SIZE
        far = [rank for rank, process in run.ranks.items() if is_on(cluster, "h1", process)]
        with cluster.without_cable("h1"):
            gone_in_time(run, range(SIZE), time.monotonic())
        end_launchers(cluster, run)
    assert [launcher.returncode for launcher in run.launchers if launcher.returncode == 0] == []
    # torchrun numbers hosts as they come.
    apart = far if 0 not in far else [rank for rank in range(SIZE) if rank not in far]
    for rank in range(SIZE):
        if rank in apart:
            assert_said(run, rank, [0], r"no (answer|progress) for \d+ s")
        else:
            assert_said(run, rank, apart, NO_SIGN.replace("forward", r"\w+"))


def processes_of(cluster: Cluster) -> list[psutil.Process]:
    return [process for host in cluster.hosts for process in cluster.processes(host)]


def is_on(cluster: Cluster, host: str, process: psutil.Process) -> bool:
    return process in cluster.processes(host)


def end_launchers(cluster: Cluster, run: Run) -> None:
    """Give launchers that were cut off from each other a moment, then end them."""
    deadline = time.monotonic() + 1.0
    while not run.has_ended():
        if time.monotonic() > deadline:
            for process in processes_of(cluster):
                if process.info["name"] not in ("slurmstepd",):
                    kill(process)
        assert time.monotonic() < deadline + 20.0, run.said()
        time.sleep(0.05)
