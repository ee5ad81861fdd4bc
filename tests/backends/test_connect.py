"""Which backend and device ``connect`` takes, and what it says where they cannot go together."""

from __future__ import annotations

import os
import re
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


# Scripts in a process group of one or two ranks, and what each prints.
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
CLOSED = """
import os
from pathlib import Path
from dualeval.backends import connect
from dualeval.launch import detect
with connect('torch', detect(os.environ)):
    import torch.distributed.nn
print(['gloo' in path.read_text() for path in Path('/proc/self/task').glob('*/comm')].count(True))
"""
ANOTHER_WORLD = """
import os, torch.distributed as dist
from dualeval.backends import connect
from dualeval.errors import LaunchError
from dualeval.launch import detect
dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
try:
    connect('torch', detect(os.environ))
except LaunchError as error:
    print(error)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("script", "rank", "size", "printed"),
    [
        # Played: a run that has GPUs sends none by itself, and had NCCL's part of a group all the same.
        pytest.param(
            NCCL, 0, 1, r"cpu:gloo \[\] cuda:0\n\['nccl'\]\n", id="nccl comes with a tensor on a GPU"
        ),
        # One that a library has kept meanwhile: with its threads, the interpreter's end may be an abort.
        pytest.param(CLOSED, 0, 1, "0\n", id="a closed group has no threads left"),
        pytest.param(
            *(ANOTHER_WORLD, 1, 2, "(?s).*already initialised as rank 0 of 1.*rank 1 of 2.*"),
            id="a caller's group contradicts the launcher's variables",
        ),
    ],
)
def test_groups(launch: Launch, tmp_path: Path, script: str, rank: int, size: int, printed: str) -> None:
    (tmp_path / "script.py").write_text(script)
    numbers = f"RANK={rank} WORLD_SIZE={size} LOCAL_RANK={rank} LOCAL_WORLD_SIZE={size} GROUP_RANK=0"
    variables = read_variables(f"{numbers} MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()}")
    finished = launch([sys.executable, tmp_path / "script.py"], variables=variables).ok()
    assert re.fullmatch(printed, finished.stdout)


IMPORTED = """
import sys
import dualeval.launch
assert 'torch' not in sys.modules
import dualeval, torch
from dualeval.backends import connect
from dualeval.world import World
connect(None, World.alone())
assert 'dualeval.backends.torch' not in sys.modules
dualeval.evaluate(model=torch.nn.Linear(2, 2).eval(), data=[(torch.zeros(2), 1)], batch_size=1)
heavy = [name for name in sys.modules if name.startswith('torch.distributed.fsdp')]
assert not heavy, heavy
"""


def test_what_is_not_asked_for_is_not_imported(launch: Launch) -> None:
    """By detection, by a run of one process, and where no model is divided: in a start of its own."""
    launch([sys.executable, "-c", IMPORTED]).ok()


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
import dualeval
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
try:
    connect("mpi", world, "cpu")
except dualeval.LaunchError as error:
    assert "cannot be started again" in str(error)
else:
    raise AssertionError("MPI was started twice")
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
}


@pytest.mark.needs("horovod", "mpi")
@pytest.mark.parametrize("name", SCRIPTS)
def test_one_mpi_in_a_process(name: str, launch: Launch) -> None:
    launch([*start("mpirun", 2), sys.executable, "-c", PREPARE + SCRIPTS[name]], timeout=60).ok()
