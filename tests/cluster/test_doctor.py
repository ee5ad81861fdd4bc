"""``dualeval doctor`` over two hosts: where ranks differ, and what they do not share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import Cluster
from tests.conftest import Finished, Launch

pytestmark = pytest.mark.needs("cluster")

SRUN = ["srun", "-N2", "--ntasks-per-node", "1"]
# The rank on h1 is told to use another backend than rank 0.
DIFFERING = 'if [ "$SLURM_PROCID" = 1 ]; then set -- --backend horovod; fi; exec dualeval doctor "$@"'


def on_h0(cluster: Cluster, launch: Launch, folder: Path, *command: str | Path) -> Finished:
    return launch(cluster.on("h0", command), variables=cluster.variables, cwd=folder, timeout=90)


@pytest.mark.long
def test_two_hosts(cluster: Cluster, launch: Launch, tmp_path: Path) -> None:
    """/dev/shm is each host's own, and nobody is told an address that another host cannot use."""
    finished = on_h0(
        cluster, launch, tmp_path, *SRUN, "dualeval", "doctor", "--json", "--out", "/dev/shm/out"
    )
    assert finished.returncode == 1, finished.stderr
    found: dict[str, Any] = json.loads(finished.stdout)
    assert [(facts["host"], facts["shares_output"]) for facts in found["ranks"].values()] == [
        ("h0", True),
        ("h1", False),
    ]
    [problem] = found["problems"]
    assert problem.startswith("rank 1 on h1 does not see rank 0's files in /dev/shm/out")
    assert found["addresses"] == ["h0", cluster.address("h0")]
    assert found["ranks"]["1"]["reached"] == "h0"
    assert [facts["interface"] for facts in found["ranks"].values()] == ["lo", "eth0"]
    assert found["speed"]["cpu"]["bandwidth_gb_s"] > 0


@pytest.mark.needs("horovod")
def test_ranks_that_differ(cluster: Cluster, launch: Launch, tmp_path: Path) -> None:
    finished = on_h0(cluster, launch, tmp_path, *SRUN, "bash", "-c", DIFFERING)
    assert finished.returncode == 1, finished.stderr
    problem = "the ranks differ in the backend: torch on rank 0; horovod on rank 1"
    assert f"1 problem:\n  - {problem}\n" in finished.stdout
    assert "operations      not tried on all ranks" in finished.stdout
