"""Commands over two hosts: those of the README, doctor, conformance, sharded models."""

from __future__ import annotations

import json
import re
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Typed
from tests.cluster.hosts import Cluster
from tests.cluster.test_launchers import Batch
from tests.conftest import ROOT, Launch
from tests.docs.test_readme import commands, needs_slurm
from tests.engine.sharding import test_sharded_runs
from tests.engine.sharding.test_sharded_runs import SHARD, Job, Run, check
from tests.tools.test_conformance import outcomes, shared

pytestmark = pytest.mark.needs("cluster")

SRUN = ["srun", "-N2", "--ntasks-per-node", "1"]

# Asked for by the tests below, as this module's own.
pictures = test_sharded_runs.pictures
asked = test_sharded_runs.asked
job = test_sharded_runs.job
whole = test_sharded_runs.whole


@pytest.mark.parametrize("command", [text for text in commands() if needs_slurm(text)])
def test_every_way_to_start_runs(
    typed: Typed, cluster: Cluster, launch: Launch, tmp_path: Path, command: str
) -> None:
    # One rank for every four: this is about the words, and each rank costs a second of a core.
    words = ["1" if word == "4" else word for word in shlex.split(command)]
    if command.startswith("srun"):
        said = typed(*words).ok().stdout
    else:
        ended = Batch(cluster, launch, tmp_path)(shlex.join(words))
        assert ended.state == "COMPLETED"
        said = ended.log
    assert re.search(r"([0-9,]+) of \1 evaluated|first 5,000 of 10,000", said)


@pytest.mark.long
def test_doctor_names_a_folder_that_two_hosts_do_not_share(typed: Typed, cluster: Cluster) -> None:
    """/dev/shm is each host's own, and nobody is told an address that another host cannot use."""
    finished = typed(*SRUN, "dualeval", "doctor", "--json", "--out", "/dev/shm/out")
    assert finished.returncode == 1, finished.stderr
    found: dict[str, Any] = json.loads(finished.stdout)
    assert [(facts["host"], facts["shares_output"]) for facts in found["ranks"].values()] == [
        *(("h0", True), ("h1", False))
    ]
    [problem] = found["problems"]
    assert problem.startswith("rank 1 on h1 does not see rank 0's files in /dev/shm/out")
    assert found["addresses"] == ["h0", cluster.address("h0")]
    assert found["ranks"]["1"]["reached"] == "h0"
    assert [facts["interface"] for facts in found["ranks"].values()] == ["lo", "eth0"]
    assert found["speed"]["cpu"]["bandwidth_gb_s"] > 0


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.needs("horovod", "mpi")
def test_conformance_passes_with_all_launchers_of_an_allocation(
    typed: Typed, cluster: Cluster, tmp_path: Path
) -> None:
    words = ["--ranks", "2", "--limit", "500", "--out", tmp_path / "report"]
    done = typed("salloc", "-N2", "dualeval", "conformance", *words, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    content = shared(tmp_path / "report")
    text = (tmp_path / "report/conformance.md").read_text()
    assert not re.search(r"\bh[01]\b", text)
    assert cluster.address("h0") not in text
    assert content["site"]["scheduler"].startswith("slurm")
    over_two = {
        (launcher, backend)
        for launcher, backend, ranks, said in outcomes(content)
        if ranks == 2 and said == "ok"
    }
    assert over_two == {
        *(("torchrun", "torch"), ("horovodrun", "horovod"), ("horovodrun-mpi", "horovod")),
        *(("mpirun", backend) for backend in ("torch", "horovod", "mpi")),
        *(("srun", backend) for backend in ("torch", "horovod")),
        *(("srun-mpi", backend) for backend in ("torch", "horovod", "mpi")),
    }


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.needs("horovod")
def test_make_gpu_measures_the_nodes_of_an_allocation(typed: Typed, cluster: Cluster, tmp_path: Path) -> None:
    words = ["--device", "cpu", "--images", "64", "--rounds", "2", "--step", "ranks-speed,ranks-srun"]
    words += ["--parts", str(tmp_path / "parts"), "--results", str(tmp_path)]
    done = typed("salloc", "-N2", sys.executable, ROOT / "benchmarks/gpu.py", *words, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    [page] = tmp_path.glob("gpu-on-cpu-*.md")
    text = page.read_text("utf-8")
    for backend in ("torch", "horovod"):
        assert f"| srun | {backend} | 2 | 2 | " in text
    assert "**Agrees.**" in text
    assert not re.search(r"\bh[01]\b", text) and cluster.address("h0") not in text


@pytest.mark.long
@pytest.mark.timeout(300)
def test_conformance_passes_from_the_shell_of_a_step(typed: Typed, tmp_path: Path) -> None:
    """Its own step holds the job's cores, and those of the launchers overlap with it."""
    words = ["--launchers", "srun", "--ranks", "1", "--limit", "64", "--out", tmp_path / "report"]
    done = typed("srun", "-N1", "-n1", "dualeval", "conformance", *words, timeout=200)
    content = shared(tmp_path / "report")
    assert ("srun", "torch", 1, "ok") in outcomes(content), done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "tasks"), [(2, "-N2 --ntasks-per-node 1"), (3, "-N2 -n3"), (1, "-N1 -n1 -w h1")]
)
def test_a_sharded_model_has_the_digest_of_the_whole_one(
    typed: Typed, whole: Run, job: Job, size: int, tasks: str, tmp_path: Path
) -> None:
    words = ["srun", *tasks.split(), "dualeval", "run", *job.arguments, *SHARD, "--no-progress"]
    done = typed(*words, "--out", tmp_path / "out", timeout=120, PYTHONPATH="", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out/result.json").read_text())
    check(found, whole(job), size, job.samples)
    world = {"size": size, "nodes": min(size, 2), "launcher": "srun", "backend": "torch"}
    assert found["world"] == world


@pytest.mark.long
def test_pods_of_a_pytorch_job_evaluate_together(cluster: Cluster, launch: Launch, out: Path) -> None:
    """Two hosts stand for pods, with the variables that the Training Operator sets (pull request 1840)."""
    command = ["torchrun", "-m", "dualeval", "run", "--limit", "500", "--out", str(out)]
    told = {"MASTER_ADDR": "h0", "MASTER_PORT": "23456", "WORLD_SIZE": "4", "PYTHONUNBUFFERED": "1"}
    told |= {
        "PET_MASTER_ADDR": "h0",
        "PET_MASTER_PORT": "23456",
        "PET_NPROC_PER_NODE": "2",
        "PET_NNODES": "2",
    }
    with ExitStack() as stack:
        pods = []
        for number, host in enumerate(["h0", "h1"]):
            variables = {**cluster.variables, **told, "RANK": str(number), "PET_NODE_RANK": str(number)}
            pods.append(stack.enter_context(launch.started(cluster.on(host, command), variables=variables)))
        said = [pod.communicate(timeout=120)[1] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], said
    world = json.loads((out / "result.json").read_text())["world"]
    assert world == {"size": 4, "nodes": 2, "launcher": "torchrun", "backend": "torch"}
