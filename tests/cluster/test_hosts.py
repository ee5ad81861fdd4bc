"""The cluster of the tests: what its hosts have of their own, what works between them, and that it ends."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from tests.cluster.hosts import Cluster
from tests.conftest import GRACE, Launch

pytestmark = pytest.mark.needs("cluster")

# A session whose one test holds the cluster until a signal makes it fail.
SESSION = """
import signal
from tests.cluster.conftest import cluster

def fail(*_):
    raise RuntimeError("broken")

def test_broken(cluster):
    signal.signal(signal.SIGUSR1, fail)
    print("up", flush=True)
    signal.pause()
"""
RANKS = "from mpi4py.MPI import COMM_WORLD as world\nprint(world.allgather(world.rank), flush=True)\n"


def on(cluster: Cluster, host: str, *command: str | Path, launch: Launch, cwd: Path | None = None) -> str:
    """Run a command on a host; returns what it printed."""
    done = launch(cluster.on(host, command), variables=cluster.variables, cwd=cwd, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def of_folder(folder: Path) -> list[psutil.Process]:
    """List the processes that name a folder on their command line, as the daemons of a cluster there do."""
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if str(folder) in " ".join(process.info["cmdline"] or [])]


def test_a_host_has_a_name_and_an_address(cluster: Cluster, launch: Launch) -> None:
    assert cluster.hosts == ["h0", "h1"]
    for host in cluster.hosts:
        assert on(cluster, host, "hostname", launch=launch).strip() == host
        assert on(cluster, host, "cat", "/etc/hostname", launch=launch).strip() == host
        assert f" {cluster.address(host)}/24 " in on(cluster, host, "ip", "address", launch=launch)
        for name in cluster.hosts:
            found = on(cluster, host, "getent", "ahostsv4", name, launch=launch).split()[0]
            assert found == ("127.0.1.1" if name == host else cluster.address(name))


def test_a_host_keeps_the_folder_and_its_own_memory(cluster: Cluster, launch: Launch, tmp_path: Path) -> None:
    assert on(cluster, "h0", "pwd", "-P", launch=launch, cwd=tmp_path).strip() == str(tmp_path.resolve())
    memory = Path("/dev/shm")
    name = f"dualeval-test-{os.getpid()}"
    assert on(cluster, "h0", "touch", name, launch=launch, cwd=memory) == ""
    everywhere = (memory / name).exists()
    (memory / name).unlink(missing_ok=True)
    assert not everywhere
    assert on(cluster, "h0", "ls", "/dev/shm", launch=launch) == f"{name}\n"
    assert on(cluster, "h1", "ls", "/dev/shm", launch=launch) == ""


def test_hosts_reach_each_other_over_ssh(cluster: Cluster, launch: Launch) -> None:
    for here in cluster.hosts:
        for there in cluster.hosts:
            said = on(cluster, here, "ssh", there, "hostname; command -v python", launch=launch)
            assert said.split() == [there, sys.executable]


def test_srun_starts_a_task_on_each_host(cluster: Cluster, launch: Launch) -> None:
    for host in cluster.hosts:
        said = on(cluster, host, "srun", "-N2", "--ntasks-per-node=1", "hostname", launch=launch)
        assert sorted(said.split()) == cluster.hosts


@pytest.mark.needs("mpi")
@pytest.mark.parametrize("start", ["srun --mpi=pmix -N2 --ntasks-per-node=1", "mpirun -np 2 -H h0:1,h1:1"])
def test_mpi_between_the_hosts(start: str, cluster: Cluster, launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    command = [*start.split(), sys.executable, "ranks.py"]
    assert on(cluster, "h0", *command, launch=launch, cwd=tmp_path) == "[0, 1]\n" * 2


@pytest.mark.parametrize(("script", "state"), [("srun hostname", "COMPLETED"), ("exit 3", "FAILED")])
def test_sbatch(script: str, state: str, cluster: Cluster, launch: Launch, tmp_path: Path) -> None:
    command = cluster.on("h0", ["sbatch", "--parsable", "-N2", "--ntasks-per-node=1", "--wrap", script])
    # The job has sbatch's environment, with the mark of its launch, and so must be waited for within it.
    with launch.started(command, variables=cluster.variables, cwd=tmp_path) as process:
        job_id, errors = process.communicate(timeout=30)
        assert process.returncode == 0, errors
        assert cluster.wait_for_job(int(job_id), 30) == state
    said = (tmp_path / f"slurm-{int(job_id)}.out").read_text()
    assert sorted(said.split()) == (cluster.hosts if state == "COMPLETED" else [])


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGKILL])
def test_nothing_outlives_a_session(number: signal.Signals, launch: Launch, tmp_path: Path) -> None:
    session = tmp_path / "test_broken.py"
    session.write_text(SESSION)
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", str(session)]
    with launch.started(command, variables={"TMPDIR": str(tmp_path)}) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said == "up\n", said + process.communicate()[0]
        (folder,) = tmp_path.glob("dualeval-cluster-*")
        processes = psutil.Process(process.pid).children(recursive=True)
        names = {process.name() for process in processes}
        assert names >= {"bash", "sshd", "munged", "slurmctld", "slurmd"}
        process.send_signal(number)
        process.communicate(timeout=GRACE)
    assert process.returncode == (1 if number is signal.SIGUSR1 else -signal.SIGKILL)
    deadline = time.monotonic() + (0 if number is signal.SIGUSR1 else GRACE)
    while left := [process for process in processes if alive(process)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
    assert folder.exists() == (number is signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def alive(process: psutil.Process) -> bool:
    """Whether a process runs; one that only waits for its parent to ask for its end does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_nothing_is_left_of_half_a_start(launch: Launch, tmp_path: Path) -> None:
    stub = tmp_path / "bin/slurmctld"
    stub.parent.mkdir()
    stub.write_text("#!/bin/sh\necho no room for a controller\nexit 1\n")
    stub.chmod(0o755)
    folder = tmp_path / "temporary"
    folder.mkdir()
    path = f"{stub.parent}{os.pathsep}{os.environ['PATH']}"
    script = "from tests.cluster.hosts import Cluster\nwith Cluster(): pass\n"
    done = launch([sys.executable, "-c", script], variables={"TMPDIR": str(folder), "PATH": path})
    assert done.returncode == 1
    assert "RuntimeError: h0 failed" in done.stderr
    assert "--- slurmctld.log\nno room for a controller" in done.stderr
    assert "--- sshd-h1.log\nServer listening" in done.stderr
    assert of_folder(folder) == []
    assert list(folder.iterdir()) == []
