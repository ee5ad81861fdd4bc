"""Sharded models over two hosts, under srun: the digest of the whole model in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.hosts import Cluster
from tests.conftest import Launch
from tests.engine import test_sharded_runs
from tests.engine.test_sharded_runs import SHARD, Job, Run, check

pytestmark = [pytest.mark.needs("cluster"), pytest.mark.long]

# Asked for by the tests below, as this module's own.
pictures = test_sharded_runs.pictures
asked = test_sharded_runs.asked
job = test_sharded_runs.job
whole = test_sharded_runs.whole


@pytest.mark.parametrize(
    ("size", "tasks"), [(2, "-N2 --ntasks-per-node 1"), (3, "-N2 -n3"), (1, "-N1 -n1 -w h1")]
)
def test_srun(
    cluster: Cluster, launch: Launch, whole: Run, job: Job, size: int, tasks: str, tmp_path: Path
) -> None:
    words = ["srun", *tasks.split(), "dualeval", "run", *job.arguments, *SHARD, "--no-progress"]
    variables = {**cluster.variables, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    command = cluster.on("h0", [*words, "--out", tmp_path / "out"])
    done = launch(command, variables=variables, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out/result.json").read_text())
    check(found, whole(job), size, job.samples)
    world = {"size": size, "nodes": min(size, 2), "launcher": "srun", "backend": "torch"}
    assert found["world"] == world
