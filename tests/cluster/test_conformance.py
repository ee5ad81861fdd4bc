"""``dualeval conformance`` inside an allocation of Slurm's, over two hosts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cluster.hosts import Cluster
from tests.conftest import Launch
from tests.tools.test_conformance import outcomes, shared

pytestmark = [pytest.mark.needs("cluster"), pytest.mark.long]


@pytest.mark.timeout(900)
@pytest.mark.needs("horovod", "mpi")
def test_all_launchers_of_an_allocation(cluster: Cluster, launch: Launch, tmp_path: Path) -> None:
    words = ["--ranks", "2", "--limit", "500", "--out", str(tmp_path / "report")]
    command = ["salloc", "-N2", "dualeval", "conformance", *words]
    done = launch(cluster.on("h0", command), variables=cluster.variables, cwd=tmp_path, timeout=800)
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
        ("torchrun", "torch"),
        ("horovodrun", "horovod"),
        ("horovodrun-mpi", "horovod"),
        *(("mpirun", backend) for backend in ("torch", "horovod", "mpi")),
        *(("srun", backend) for backend in ("torch", "horovod")),
        *(("srun-mpi", backend) for backend in ("torch", "horovod", "mpi")),
    }


@pytest.mark.timeout(300)
def test_the_shell_of_a_step(cluster: Cluster, launch: Launch, tmp_path: Path) -> None:
    """Its own step holds the job's cores, and those of the launchers overlap with it."""
    words = ["--launchers", "srun", "--ranks", "1", "--limit", "64"]
    command = ["srun", "-N1", "-n1", "dualeval", "conformance", *words, "--out", str(tmp_path / "report")]
    done = launch(cluster.on("h0", command), variables=cluster.variables, cwd=tmp_path, timeout=200)
    content = shared(tmp_path / "report")
    assert ("srun", "torch", 1, "ok") in outcomes(content), done.stdout + done.stderr
