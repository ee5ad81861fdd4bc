"""The cluster of the tests: what its hosts have of their own, what works between them, and that it ends."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
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
# Says something to a host without a pause until a file is there; the other writes down what it hears.
TALK = """
import pathlib, socket, sys, time
with socket.create_connection((sys.argv[1], 29400)) as connection:
    while not pathlib.Path("enough").exists():
        connection.sendall(b".")
        time.sleep(0.02)
"""
LISTEN = """
import socket
with socket.create_server(("", 29400)) as server, open("heard", "wb", buffering=0) as heard:
    print("up", flush=True)
    connection, _ = server.accept()
    with connection:
        while words := connection.recv(100):
            heard.write(words)
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
    said = on(cluster, "h0", *command, launch=launch, cwd=tmp_path)
    # mpirun puts together what the ranks say as it comes, at times two words before two ends of line.
    assert said.count("[0, 1]") == 2 and not said.replace("[0, 1]", "").strip()


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


def until(found: Callable[[], bool]) -> None:
    """Wait for something that comes soon."""
    deadline = time.monotonic() + 60
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def names(cluster: Cluster, host: str, *, daemons: bool = False) -> list[str]:
    """The names of a host's processes, but for what Slurm has yet to clear away after an earlier test."""
    found = [str(process.info["name"]) for process in cluster.processes(host, daemons=daemons)]
    return [name for name in found if name != "slurmstepd"]


def test_processes_are_those_of_the_host(cluster: Cluster, launch: Launch) -> None:
    assert set(names(cluster, "h0", daemons=True)) >= {"sshd", "munged", "slurmctld", "slurmd"}
    assert set(names(cluster, "h1", daemons=True)) == {"sshd", "munged", "slurmd"}
    with launch.started(cluster.on("h1", ["sleep", "60"])) as process:
        until(lambda: names(cluster, "h1") == ["sleep"])
        assert names(cluster, "h0") == []
        for found in cluster.processes("h1"):
            found.kill()
        process.communicate(timeout=GRACE)
    assert process.returncode != 0
    until(lambda: names(cluster, "h1") == [])


@pytest.mark.parametrize("fault", [Cluster.without_cable, Cluster.stopped])
@pytest.mark.parametrize("silent", [pytest.param("h0", marks=pytest.mark.long), "h1"])
def test_a_host_falls_silent_and_is_back(
    fault: Callable[[Cluster, str], AbstractContextManager[None]],
    silent: str,
    cluster: Cluster,
    launch: Launch,
    tmp_path: Path,
) -> None:
    heard = tmp_path / "heard"
    listen = cluster.on("h0", [sys.executable, "-c", LISTEN])
    talk = cluster.on("h1", [sys.executable, "-c", TALK, cluster.address("h0")])
    with launch.started(listen, cwd=tmp_path) as listener:
        assert listener.stdout is not None and listener.stdout.readline() == "up\n"
        with launch.started(talk, cwd=tmp_path) as talker:
            until(lambda: heard.stat().st_size > 5)
            with fault(cluster, silent):
                # What was on its way.
                time.sleep(0.1)
                before = heard.stat().st_size
                time.sleep(0.5)
                assert heard.stat().st_size == before
                assert talker.poll() is None and listener.poll() is None
            until(lambda: heard.stat().st_size > before + 5)
            (tmp_path / "enough").touch()
            assert talker.communicate(timeout=GRACE) == ("", "")
        assert listener.communicate(timeout=GRACE) == ("", "")
    assert talker.returncode == listener.returncode == 0


def test_a_stopped_host_has_no_process_that_runs(cluster: Cluster, launch: Launch) -> None:
    def states() -> set[str]:
        return {process.info["status"] for process in cluster.processes("h1", daemons=True)}

    # Its processes come and go all the time.
    with launch.started(cluster.on("h1", ["sh", "-c", "while :; do sleep 0.001; done"])) as process:
        until(lambda: "sh" in names(cluster, "h1"))
        for _ in range(3):
            with cluster.stopped("h1"):
                assert states() == {psutil.STATUS_STOPPED}
                # nsenter, which waits for it, stops as well.
                assert psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
            assert psutil.STATUS_STOPPED not in states()
            assert psutil.Process(process.pid).status() != psutil.STATUS_STOPPED
        for found in cluster.processes("h1"):
            if found.info["name"] == "sh":
                found.kill()
        process.communicate(timeout=GRACE)


def test_faults_end_with_a_test_that_fails(cluster: Cluster, launch: Launch) -> None:
    for fault in (cluster.without_cable, cluster.stopped):
        with pytest.raises(ZeroDivisionError), fault("h1"):
            _ = 1 / 0
    assert on(cluster, "h0", "ssh", "h1", "hostname", launch=launch) == "h1\n"
    said = on(cluster, "h0", "srun", "-N2", "--ntasks-per-node=1", "hostname", launch=launch)
    assert sorted(said.split()) == cluster.hosts


@pytest.fixture
def own_cluster() -> Iterator[Cluster]:
    """A cluster that a test may damage."""
    with Cluster() as cluster:
        yield cluster


def test_a_job_of_a_lost_node_is_requeued(own_cluster: Cluster, launch: Launch, tmp_path: Path) -> None:
    cluster = own_cluster

    def ask(*command: str) -> str:
        return on(cluster, "h0", *command, launch=launch).strip()

    # What has left its step is lost as well; a step that is ended in another way would wait for it.
    leave = '[ "$SLURM_PROCID${SLURM_RESTART_COUNT-}" != 1 ] || setsid sleep 60 &'
    task = f"sh -c '{leave} exec sleep 60'"
    command = ["sbatch", "--parsable", "--requeue", "-N2", "--ntasks-per-node=1", "--wrap", f"srun {task}"]
    with launch.started(cluster.on("h0", command), variables=cluster.variables, cwd=tmp_path) as process:
        job_id, errors = process.communicate(timeout=30)
        assert process.returncode == 0, errors
        until(lambda: names(cluster, "h1") == ["sleep", "sleep"])
        cluster.lose("h1")
        assert set(names(cluster, "h1", daemons=True)) == {"sshd", "munged"}
        assert ask("sinfo", "--noheader", "--nodes=h1", "--format=%T") == "down"
        cluster.bring_back("h1")
        assert ask("sinfo", "--noheader", "--nodes=h1", "--format=%T") == "idle"
        cluster.wait_for_restart(int(job_id), 1)
        for restarts in (2, 3):
            until(lambda: names(cluster, "h1") == ["sleep"])
            ask("scontrol", "requeue", job_id.strip())
            cluster.wait_for_restart(int(job_id), restarts)
        until(lambda: names(cluster, "h1") == ["sleep"])
        assert " Restarts=3 " in ask("scontrol", "show", "job", "--oneliner", job_id.strip())
        ask("scancel", job_id.strip())
        assert cluster.wait_for_job(int(job_id), 30) == "CANCELLED"


@pytest.mark.parametrize("number", [pytest.param(signal.SIGUSR1, marks=pytest.mark.long), signal.SIGKILL])
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
