"""The example of the collectives under srun, with and without MPI, and what a PyTorchJob's pods are told."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.backends.test_collectives import EXAMPLE, SAID
from tests.cluster.hosts import Cluster
from tests.conftest import Launch

pytestmark = [pytest.mark.needs("cluster"), pytest.mark.long]


@pytest.mark.parametrize("words", [[], pytest.param(["--mpi=pmix"], marks=pytest.mark.needs("mpi"))])
def test_under_srun(cluster: Cluster, launch: Launch, tmp_path: Path, words: list[str]) -> None:
    command = ["srun", "-N2", "--ntasks-per-node", "1", *words, sys.executable, str(EXAMPLE)]
    done = launch(cluster.on("h0", command), variables=cluster.variables, cwd=tmp_path).ok()
    assert done.stdout.count(SAID[2]) == 1


def test_pods_of_a_pytorch_job(cluster: Cluster, launch: Launch, tmp_path: Path) -> None:
    """Two hosts stand for pods, with the variables that the Training Operator sets (pull request 1840)."""
    out = tmp_path / "out"
    command = ["torchrun", "-m", "dualeval", "run", "--limit", "500", "--out", str(out)]
    with ExitStack() as stack:
        pods = []
        for number, host in enumerate(["h0", "h1"]):
            variables = {
                "MASTER_ADDR": "h0",
                "MASTER_PORT": "23456",
                "WORLD_SIZE": "4",
                "RANK": str(number),
                "PET_MASTER_ADDR": "h0",
                "PET_MASTER_PORT": "23456",
                "PET_NPROC_PER_NODE": "2",
                "PET_NNODES": "2",
                "PET_NODE_RANK": str(number),
                "PYTHONUNBUFFERED": "1",
            }
            told = {**cluster.variables, **variables}
            pods.append(stack.enter_context(launch.started(cluster.on(host, command), variables=told)))
        said = [pod.communicate(timeout=120)[1] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], said
    world = json.loads((out / "result.json").read_text())["world"]
    assert world == {"size": 4, "nodes": 2, "launcher": "torchrun", "backend": "torch"}
