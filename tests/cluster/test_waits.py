"""What ranks on two hosts say of a wrong start, of ports and names, and while they wait for rank 0's host."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from dualeval.world import network
from dualeval.world.meetings import address
from tests.cluster.conftest import Typed
from tests.cluster.hosts import Cluster
from tests.conftest import ROOT, Launch
from tests.environments import read_variables
from tests.world.test_waiting import WORKER, read_until

pytestmark = pytest.mark.needs("cluster")

STEP = ["srun", "-N2", "--ntasks-per-node", "1"]
TASKS = [*STEP, "--kill-on-bad-exit=1"]
# A rank that fails alone ends the others. Slurm may then lose the last words that it hands on itself, but
# not those that it writes to a rank's file.
ENDING = [*TASKS, "--output=rank-%t.log"]
MESSAGE = "dualeval: error: "
FOLDER = Path(__file__).resolve().parent
NCCL_WORKER = FOLDER / "nccl_worker.py"
HAS_NO_IPV6 = not network._ipv6_addresses(every=True)


@contextmanager
def unknown_on(cluster: Cluster, host: str, name: str) -> Iterator[None]:
    """Have a host not know another one's name, from ``with`` to its end."""
    file = cluster.folder / host / "etc/hosts"
    before = file.read_text()
    # In place: the host sees this very file.
    file.write_text("".join(line for line in before.splitlines(True) if not line.endswith(f" {name}\n")))
    try:
        yield
    finally:
        file.write_text(before)


def test_a_name_that_leads_nowhere_is_an_error_at_once(
    typed: Typed, cluster: Cluster, tmp_path: Path
) -> None:
    with unknown_on(cluster, "h1", "h0"):
        start = time.monotonic()
        done = typed(*ENDING, "dualeval", "run", "--out", "out")
    assert time.monotonic() - start < address._UNREACHABLE_S / 2
    assert done.returncode != 0
    said = (tmp_path / "rank-1.log").read_text()
    assert f"{MESSAGE}rank 0's host cannot be reached: h0, ports " in said
    assert "(h0: no such name). Its name has to lead to it from h1, in DNS or in /etc/hosts" in said
    assert MESSAGE not in (tmp_path / "rank-0.log").read_text()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("late", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_rank_is_late(late: int, cluster: Cluster, launch: Launch, tmp_path: Path) -> None:
    expected = [
        r"rank 1 of 2 on h1 has waited \S+ s for rank 0 at h0, ports \d+ to \d+: h0: it answers, but no "
        r"meeting of this run is held there yet\. Check that rank 0 has been started",
        r"rank 0 of 2 on h0 has waited \S+ s for all ranks to join the comparison of their hosts and "
        r"GPUs: rank 1 has not come\. Check that every rank has been started",
    ]
    command = cluster.on("h0", [*TASKS, sys.executable, WORKER, "waits", "torch", str(late), tmp_path])
    for place in ("first", "control", "cores"):
        (tmp_path / place).touch()
    with launch.started(command, variables=cluster.variables, cwd=tmp_path) as process:
        assert process.stderr is not None
        read_until(process.stderr, expected[late])
        (tmp_path / "join").touch()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors


# As with NCCL, which finds the network between the hosts without this variable.
GUEST = """
import os
import torch.distributed as dist
import dualeval
from tests.tiny import TinyTask
os.environ |= {"RANK": os.environ["SLURM_PROCID"], "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "eth0"}
os.environ |= {"MASTER_ADDR": "h0", "MASTER_PORT": "29555"}
dist.init_process_group("gloo")
del os.environ["GLOO_SOCKET_IFNAME"]
for _ in range(2):
    print(dualeval.evaluate(TinyTask(99), batch_size=8, device="cpu").metrics_digest)
assert "GLOO_SOCKET_IFNAME" not in os.environ
dist.destroy_process_group()
"""


def test_a_guest_finds_the_network_between_the_hosts(typed: Typed) -> None:
    """Their own names lead to 127.0.1.1, by which gloo would go."""
    done = typed(*TASKS, "env", f"PYTHONPATH={ROOT}", sys.executable, "-c", GUEST).ok()
    assert len(done.stdout.split()) == 4 and len(set(done.stdout.split())) == 1


@pytest.mark.long
@pytest.mark.needs("horovod")
@pytest.mark.parametrize(
    ("own", "found"), [([], [None, "=eth0", None]), (["NCCL_SOCKET_IFNAME=ib0"], ["ib0"] * 3)]
)
def test_the_network_of_nccl(typed: Typed, tmp_path: Path, own: list[str], found: list[str | None]) -> None:
    """Before, in and after the backend's life: it is the hosts' own, and a user's stays."""
    typed(*TASKS, "env", *own, sys.executable, NCCL_WORKER, "found").ok()
    for rank in (0, 1):
        assert json.loads((tmp_path / f"found.{rank}").read_text()) == found


@pytest.fixture
def ipv6_hosts() -> Iterator[Cluster]:
    """Two hosts that have no other addresses than IPv6; Slurm itself would have to be told."""
    with Cluster(ssh=False, slurm=False, ipv6=True) as cluster:
        yield cluster


def step(rank: int) -> dict[str, str]:
    """What Slurm would tell one of two tasks on two nodes."""
    return read_variables(
        f"SLURM_PROCID={rank} SLURM_LOCALID=0 SLURM_NODEID={rank} SLURM_JOB_ID=1 SLURM_STEP_ID=0 "
        "SLURM_STEP_NUM_TASKS=2 'SLURM_STEP_TASKS_PER_NODE=1(x2)' SLURM_STEP_NODELIST=h[0-1]"
    )


@pytest.mark.skipif(HAS_NO_IPV6, reason="this kernel has no IPv6")
def test_hosts_with_ipv6_alone(ipv6_hosts: Cluster, launch: Launch, tmp_path: Path) -> None:
    with ExitStack() as stack:
        ranks: list[subprocess.Popen[str]] = []
        for rank, host in enumerate(ipv6_hosts.hosts):
            command = ipv6_hosts.on(host, ["dualeval", "doctor", "--json", "--out", tmp_path])
            ranks.append(stack.enter_context(launch.started(command, variables=step(rank), cwd=tmp_path)))
        (found, errors), _ = (process.communicate(timeout=60) for process in ranks)
        assert [process.returncode for process in ranks] == [0, 0], found + errors
    report = json.loads(found)
    assert report["problems"] == []
    assert report["addresses"] == ["h0", ipv6_hosts.address("h0")]
    assert [facts["interface"] for facts in report["ranks"].values()] == ["lo", "eth0"]


# -- a wrong start, and ports that others have -------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "words", "expected"),
    [
        (["--kill-on-bad-exit=1"], ["--limt", "5"], ["--limt", "--limit"]),
        ([], ["--nproc", "2"], ["--nproc 2", "srun had started already", "Leave out --nproc"]),
        pytest.param(
            *([], ["--backend", "mpi"], ["without a way into MPI", "'srun --mpi=pmix'"]),
            marks=[pytest.mark.needs("mpi"), pytest.mark.long],
        ),
        pytest.param(
            *(
                [],
                ["--backend", "single"],
                ["--backend single cannot run with world size 2, started by srun"],
            ),
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_wrong_start_is_said_once(
    typed: Typed, tmp_path: Path, option: list[str], words: list[str], expected: list[str]
) -> None:
    done = typed(*STEP, *option, "--label", "dualeval", "run", *words, "--out", "out")
    assert done.returncode == 2
    assert done.stderr.count(MESSAGE) == 1
    # The label is the rank's number.
    [message] = [line for line in done.stderr.splitlines() if line.startswith(f"0: {MESSAGE}")]
    assert all(part in message for part in expected)
    assert not (tmp_path / "out").exists()


def occupied(number: int, *step: str) -> list[str | Path]:
    """A command for a job whose step finds so many of its ports taken."""
    worker = FOLDER / "occupied_ports_worker.py"
    return [
        "salloc",
        "-N2",
        "--ntasks-per-node=1",
        sys.executable,
        worker,
        str(number),
        *step,
        "--out",
        "out",
    ]


def test_a_port_that_another_has_is_passed_over(typed: Typed, tmp_path: Path) -> None:
    run = ["dualeval", "run", "--limit", "200"]
    done = typed(*occupied(1, *STEP, *run)).ok()
    # The other rank has come to the wrong one first.
    assert int(done.stdout.split()[-1]) >= 1
    result = json.loads((tmp_path / "out/result.json").read_text())
    assert result["samples"] == {"total": 200, "evaluated": 200, "failed": 0}
    assert result["world"] == {"size": 2, "nodes": 2, "launcher": "srun", "backend": "torch"}
    typed(*run, "--out", "alone").ok()
    alone = json.loads((tmp_path / "alone/result.json").read_text())
    assert alone["metrics_digest"] == result["metrics_digest"]


@pytest.mark.long
def test_no_free_port_is_said(typed: Typed, tmp_path: Path) -> None:
    assert typed(*occupied(16, *ENDING, "dualeval", "run")).returncode != 0
    first, second = ((tmp_path / f"rank-{rank}.log").read_text() for rank in (0, 1))
    assert f"{MESSAGE}no port is free for the ranks to meet at: " in first
    assert " on h0 ([Errno 98] Address already in use" in first
    assert MESSAGE not in second
    assert not (tmp_path / "out").exists()
