"""What ranks on two hosts say of a wrong start, and while they wait for rank 0's host."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from dualeval.world import network
from tests.cluster.conftest import Typed
from tests.cluster.hosts import Cluster
from tests.conftest import ROOT, Launch
from tests.vehicles.environments import read_variables
from tests.world.test_waiting import WORKER, read_until

pytestmark = pytest.mark.needs("cluster")

STEP = ["srun", "-N2", "--ntasks-per-node", "1"]
TASKS = [*STEP, "--kill-on-bad-exit=1"]
MESSAGE = "dualeval: error: "
HAS_NO_IPV6 = not network._ipv6_addresses(every=True)


@pytest.mark.parametrize("late", [0, pytest.param(1, marks=pytest.mark.long)])
def test_the_other_rank_says_which_one_is_late_and_goes_on(
    late: int, cluster: Cluster, launch: Launch, tmp_path: Path
) -> None:
    expected = [
        r"rank 1 of 2 on h1 has waited \S+ s for rank 0 at h0, ports \d+ to \d+: h0: it answers, but the "
        r"ranks of this run do not meet there yet\. Check that rank 0 has been started",
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
from tests.vehicles.tiny import TinyTask
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


# A rank of Horovod's, which is said to be built with NCCL: all but the GPUs is real.
NCCL = """
import importlib, json, os, torch
from pathlib import Path
from dualeval.launch import detect
from dualeval.world.devices import connect
vars(importlib.import_module("horovod.torch"))["nccl_built"] = lambda: True
world, found = detect(os.environ), [os.environ.get("NCCL_SOCKET_IFNAME")]
with connect("horovod", world, "cpu") as backend:
    found.append(os.environ.get("NCCL_SOCKET_IFNAME"))
    assert backend.all_reduce(torch.tensor(1)) == world.size
found.append(os.environ.get("NCCL_SOCKET_IFNAME"))
Path(f"found.{world.rank}").write_text(json.dumps(found))
"""


@pytest.mark.long
@pytest.mark.needs("horovod")
@pytest.mark.parametrize(
    ("own", "found"), [([], [None, "=eth0", None]), (["NCCL_SOCKET_IFNAME=ib0"], ["ib0"] * 3)]
)
def test_nccl_has_the_hosts_network_or_the_users(
    typed: Typed, tmp_path: Path, own: list[str], found: list[str | None]
) -> None:
    """Before, in and after the backend's life: it is the hosts' own, and a user's stays."""
    typed(*TASKS, "env", *own, f"PYTHONPATH={ROOT}", sys.executable, "-c", NCCL).ok()
    for rank in (0, 1):
        assert json.loads((tmp_path / f"found.{rank}").read_text()) == found


@pytest.fixture
def ipv6_hosts() -> Iterator[Cluster]:
    """Two hosts that have no other addresses than IPv6; Slurm itself would have to be told."""
    with Cluster(ipv6=True) as cluster:
        yield cluster


def step(rank: int) -> dict[str, str]:
    """What Slurm would tell one of two tasks on two nodes."""
    return read_variables(
        f"SLURM_PROCID={rank} SLURM_LOCALID=0 SLURM_NODEID={rank} SLURM_JOB_ID=1 SLURM_STEP_ID=0 "
        "SLURM_STEP_NUM_TASKS=2 'SLURM_STEP_TASKS_PER_NODE=1(x2)' SLURM_STEP_NODELIST=h[0-1]"
    )


@pytest.mark.skipif(HAS_NO_IPV6, reason="this kernel has no IPv6")
def test_doctor_finds_no_problem_on_hosts_with_ipv6_alone(
    ipv6_hosts: Cluster, launch: Launch, tmp_path: Path
) -> None:
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


# -- a wrong start -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "words", "expected"),
    [
        (["--kill-on-bad-exit=1"], ["--limt", "5"], ["--limt", "--limit"]),
        ([], ["--nproc", "2"], ["--nproc 2", "srun had started already", "Leave out --nproc"]),
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
