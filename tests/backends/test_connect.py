"""Which backend and device ``connect`` takes, and what it says where they cannot go together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dualeval.backends import choose_backend, connect, horovod
from dualeval.backends.torch import devices_of
from dualeval.errors import LaunchError, UsageError
from dualeval.launch.launchers import BACKENDS, LAUNCHERS
from dualeval.world import World
from tests.conftest import Launch
from tests.environments import read_variables, world_at
from tests.launch.test_env_ranks import free_port
from tests.launchers import start


def test_single_is_the_default_without_a_launcher() -> None:
    for name in (None, "single"):
        with connect(name, World.alone()) as backend:
            assert backend.name == "single"
            assert backend.world == World.alone()
            assert backend.device == torch.device("cpu")


def world_of(launcher: str) -> World:
    size = 1 if launcher == "none" else 2
    return world_at(launcher, 0, size, 0, size, mpi="mpi" in LAUNCHERS[launcher].backends)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_pair_of_launcher_and_backend(
    launcher: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(horovod, "runs_over_mpi", lambda: True)
    if backend in LAUNCHERS[launcher].backends:
        assert choose_backend(backend, world_of(launcher)) == backend
        return
    with pytest.raises(LaunchError, match=f"--backend {backend} cannot run") as caught:
        choose_backend(backend, world_of(launcher))
    assert "Start it with '" in str(caught.value)
    default = choose_backend(None, world_of(launcher))
    assert default in LAUNCHERS[launcher].backends
    assert f"leave --backend out to take {default}." in str(caught.value)


@pytest.mark.parametrize("launcher", ["openmpi", "mpich"])
def test_mpirun_takes_horovod_where_it_is_built_with_mpi(
    launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for built, expected in ((True, "horovod"), (False, "mpi")):
        monkeypatch.setattr(horovod, "runs_over_mpi", lambda built=built: built)
        assert choose_backend(None, world_of(launcher)) == expected


def test_srun_takes_torch_and_needs_a_way_into_mpi() -> None:
    plain = replace(world_of("srun"), mpi=False)
    assert choose_backend(None, plain) == choose_backend(None, world_of("srun")) == "torch"
    assert choose_backend("horovod", plain) == "horovod"
    with pytest.raises(LaunchError, match=r"without a way into MPI\. Type 'srun --mpi=pmix'"):
        choose_backend("mpi", plain)


def test_torch_needs_a_launcher() -> None:
    with pytest.raises(LaunchError, match=r"started by no launcher.*'dualeval run --nproc N'") as caught:
        connect("torch", World.alone())
    assert "leave --backend out to take single" in str(caught.value)


def test_unknown_names() -> None:
    with pytest.raises(UsageError, match=r"no backend 'torhc'\. Did you mean torch\?"):
        connect("torhc", World.alone())
    with pytest.raises(LaunchError, match="no backend for the launcher 'pigeon'"):
        connect(None, World(rank=0, size=1, local_rank=0, local_size=1, node_rank=0, launcher="pigeon"))


def test_single_imports_no_distributed_backend(launch: Launch) -> None:
    """A backend's module is imported when it is chosen."""
    code = (
        "import sys; from dualeval.backends import connect; from dualeval.world import World; "
        "connect(None, World.alone()); sys.exit('dualeval.backends.torch' in sys.modules)"
    )
    launch([sys.executable, "-c", code]).ok()


@pytest.mark.parametrize(
    ("config", "devices"),
    [
        ("cpu:gloo,cuda:nccl", {"cuda"}),
        ("cuda:nccl", {"cuda"}),
        ("cpu:gloo,cuda:gloo", set()),
        ("cpu:gloo", set()),
        ("cpu:mpi,cuda:mpi", set()),
        ("cpu:gloo,xpu:xccl", {"xpu"}),
    ],
)
def test_a_groups_devices(config: str, devices: set[str]) -> None:
    """Only what a library sends from a device's own memory is sent from there."""
    assert devices_of(config) == devices


NCCL = """
import os
from types import SimpleNamespace
import torch, torch.distributed as dist
from dualeval.backends import connect, torch as torch_backend
from dualeval.launch import detect
torch_backend._all_have_nccl = lambda store, world: True
made = []
dist.new_group = lambda **options: made.append(options["backend"]) or dist.group.WORLD
with connect("torch", detect(os.environ)) as backend:
    backend.all_reduce(torch.ones(2))
    print(dist.get_backend_config(), made, backend.carrier(torch.device("cuda", 0)))
    on_a_gpu = SimpleNamespace(device=torch.device("cuda", 0))
    assert backend._group(on_a_gpu) is backend._group(on_a_gpu) is dist.group.WORLD
    backend.device = torch.device("cuda", 0)
    assert backend._group_of_device() is dist.group.WORLD
    print(made)
"""


def test_nccl_is_made_with_the_first_tensor_on_a_gpu(launch: Launch) -> None:
    """Played: a run that has GPUs sends none by itself, and had NCCL's part of a group all the same."""
    finished = launch([sys.executable, "-c", NCCL], variables=of_one_rank()).ok()
    assert finished.stdout.splitlines() == ["cpu:gloo [] cuda:0", "['nccl']"]


def test_a_closed_group_has_no_threads_left(launch: Launch) -> None:
    """One that a library has kept meanwhile: with its threads, the interpreter's end may be an abort."""
    code = (
        "import os; from pathlib import Path; from dualeval.backends import connect; "
        "from dualeval.launch import detect\n"
        "with connect('torch', detect(os.environ)): import torch.distributed.nn\n"
        "print([path.read_text() for path in Path('/proc/self/task').glob('*/comm')])"
    )
    finished = launch([sys.executable, "-c", code], variables=of_one_rank()).ok()
    assert "gloo" not in finished.stdout


def of_one_rank() -> dict[str, str]:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return variables | {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def test_a_group_of_another_world(launch: Launch) -> None:
    """A caller's process group that contradicts the launcher's variables is refused."""
    code = (
        "import os, torch.distributed as dist; from dualeval.backends import connect; "
        "from dualeval.errors import LaunchError; from dualeval.launch import detect; "
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "try: connect('torch', detect(os.environ))\n"
        "except LaunchError as error: print(error)\n"
        "dist.destroy_process_group()"
    )
    variables = read_variables(
        "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=1"
    )
    finished = launch([sys.executable, "-c", code], variables=variables).ok()
    assert "already initialised as rank 0 of 1" in finished.stdout
    assert "rank 1 of 2" in finished.stdout


# -- a rank that goes down with an error waits for nobody -----------------------------------------------


WORKER = Path(__file__).with_name("hung_peer_worker.py")


def _await(path: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, f"the ranks ended before {path.name} was there"
        assert time.monotonic() < deadline, f"{path.name} was never there"
        time.sleep(0.01)


@pytest.mark.parametrize("group", ["own", "callers"])
def test_a_failed_rank_does_not_wait_for_one_that_hangs(group: str, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*start("torchrun", 2), sys.executable, str(WORKER), str(tmp_path), group],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        _await(tmp_path / "closed", process)
    finally:
        hanging = tmp_path / "pid-1"
        if hanging.exists():
            os.kill(int(hanging.read_text()), signal.SIGKILL)
        process.terminate()
        process.wait(60)


# -- mpi4py and a Horovod with MPI share one MPI in a process, in any order, and with a caller's own use


PREPARE = """
import os, torch
from dualeval import connect, detect
world = detect(os.environ)
def check(*backends):
    for backend in backends:
        assert backend.all_reduce(torch.tensor([world.rank + 1])).tolist() == [3]
        assert [piece.item() for piece in backend.all_gather(torch.tensor(world.rank))] == [0, 1]
"""
SCRIPTS = {
    "last in, last out": """
mpi = connect("mpi", world, "cpu")
horovod = connect("horovod", world, "cpu")
check(mpi, horovod); mpi.close(); check(horovod); horovod.close()
""",
    "the caller's MPI": """
from mpi4py import MPI
for name in ("mpi", "horovod", "torch", "mpi"):
    with connect(name, world, "cpu") as backend:
        check(backend)
        assert MPI.COMM_WORLD.allreduce(1) == 2
assert MPI.COMM_WORLD.allreduce(1) == 2
assert not MPI.Is_finalized()
""",
    "not again": """
from dualeval import LaunchError
with connect("mpi", world, "cpu") as backend:
    check(backend)
try:
    connect("mpi", world, "cpu")
except LaunchError as error:
    assert "cannot be started again" in str(error)
else:
    raise AssertionError("MPI was started twice")
""",
}


@pytest.mark.needs("horovod", "mpi")
@pytest.mark.parametrize("name", SCRIPTS)
def test_one_mpi_in_a_process(name: str, launch: Launch) -> None:
    launch([*start("mpirun", 2), sys.executable, "-c", PREPARE + SCRIPTS[name]], timeout=60).ok()
