"""How ranks on two hosts find rank 0's, and what they say while they wait for it."""

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
from tests.cluster.hosts import Cluster
from tests.conftest import ROOT, Finished, Launch
from tests.world.test_waiting import WORKER, read_until

pytestmark = pytest.mark.needs("cluster")

TASKS = ["srun", "-N2", "--ntasks-per-node", "1", "--kill-on-bad-exit=1"]
NCCL_WORKER = Path(__file__).resolve().parent / "nccl_worker.py"
HAS_NO_IPV6 = not network._ipv6_addresses(every=True)


def on(cluster: Cluster, host: str, launch: Launch, folder: Path, *command: str | Path) -> Finished:
    return launch(cluster.on(host, command), variables=cluster.variables, cwd=folder, timeout=90)


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
    cluster: Cluster, launch: Launch, tmp_path: Path
) -> None:
    with unknown_on(cluster, "h1", "h0"):
        start = time.monotonic()
        done = on(
            cluster, "h0", launch, tmp_path, *TASKS, "--output=rank-%t.log", "dualeval", "run", "--out", "out"
        )
    assert time.monotonic() - start < address._UNREACHABLE_S / 2
    assert done.returncode != 0
    said = (tmp_path / "rank-1.log").read_text()
    assert "dualeval: error: rank 0's host cannot be reached: h0, ports " in said
    assert "(h0: no such name). Its name has to lead to it from h1, in DNS or in /etc/hosts" in said


@pytest.mark.parametrize("late", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_rank_is_late(late: int, cluster: Cluster, launch: Launch, tmp_path: Path) -> None:
    expected = [
        r"rank 1 of 2 on h1 has waited \S+ s for rank 0 at h0, ports \d+ to \d+: h0: it answers, but no "
        r"meeting of this run is held there yet\. Check that rank 0 has been started",
        r"rank 0 of 2 on h0 has waited \S+ s for all ranks to join the comparison of their hosts and "
        r"GPUs: rank 1 has not come\. Check that every rank has been started",
    ]
    command = cluster.on("h0", [*TASKS, sys.executable, WORKER, "torch", str(late), tmp_path])
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


def test_a_guest_finds_the_network_between_the_hosts(
    cluster: Cluster, launch: Launch, tmp_path: Path
) -> None:
    """Their own names lead to 127.0.1.1, by which gloo would go."""
    done = on(
        cluster, "h0", launch, tmp_path, *TASKS, "env", f"PYTHONPATH={ROOT}", sys.executable, "-c", GUEST
    ).ok()
    assert len(done.stdout.split()) == 4 and len(set(done.stdout.split())) == 1


@pytest.mark.long
@pytest.mark.needs("horovod")
def test_nccl_keeps_its_network(cluster: Cluster, launch: Launch, tmp_path: Path) -> None:
    on(cluster, "h0", launch, tmp_path, *TASKS, sys.executable, NCCL_WORKER, "found").ok()
    for rank in (0, 1):
        found = json.loads((tmp_path / f"found.{rank}").read_text())
        assert found == [None, "=eth0", None]


@pytest.mark.long
@pytest.mark.needs("horovod")
def test_a_users_own_network_of_nccls_stays(cluster: Cluster, launch: Launch, tmp_path: Path) -> None:
    command: list[str | Path] = ["env", "NCCL_SOCKET_IFNAME=ib0", sys.executable, NCCL_WORKER, "own"]
    on(cluster, "h0", launch, tmp_path, *TASKS, *command).ok()
    assert json.loads((tmp_path / "own.0").read_text()) == ["ib0"] * 3


@pytest.fixture
def ipv6_hosts() -> Iterator[Cluster]:
    """Two hosts that have no other addresses than IPv6; Slurm itself would have to be told."""
    with Cluster(ssh=False, slurm=False, ipv6=True) as cluster:
        yield cluster


def step(rank: int) -> dict[str, str]:
    """What Slurm would tell one of two tasks on two nodes."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(rank),
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "h[0-1]",
    }


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
