"""Which backend and device ``connect`` takes, and what it says where they cannot go together."""

from __future__ import annotations

import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dualeval.backends import choose_backend, connect, horovod
from dualeval.backends.torch import devices_of
from dualeval.errors import LaunchError, UsageError
from dualeval.launch.launchers import BACKENDS, LAUNCHERS, launcher_of
from dualeval.world import World
from tests.conftest import Launch
from tests.engine.end.test_endings import await_that
from tests.launch.test_env_ranks import free_port
from tests.vehicles.environments import read_variables, world_at
from tests.vehicles.launchers import start


def world_of(launcher: str) -> World:
    size = 1 if launcher == "none" else 2
    return world_at(launcher, 0, size, 0, size, mpi="mpi" in launcher_of(launcher).backends)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_takes_its_backends_and_refuses_others(
    launcher: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(horovod, "runs_over_mpi", lambda: True)
    if backend in launcher_of(launcher).backends:
        assert choose_backend(backend, world_of(launcher)) == backend
        return
    with pytest.raises(LaunchError, match=f"--backend {backend} cannot run") as caught:
        choose_backend(backend, world_of(launcher))
    assert "Start it with '" in str(caught.value)
    default = choose_backend(None, world_of(launcher))
    assert default in launcher_of(launcher).backends
    assert f"leave --backend out to take {default}." in str(caught.value)


def test_the_default_backend_is_what_the_launcher_and_build_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under mpirun Horovod, where it is built with MPI."""
    for built, expected in ((True, "horovod"), (False, "mpi")):
        monkeypatch.setattr(horovod, "runs_over_mpi", lambda built=built: built)
        for launcher in ("openmpi", "mpich"):
            assert choose_backend(None, world_of(launcher)) == expected
    plain = replace(world_of("srun"), mpi=False)
    assert choose_backend(None, plain) == choose_backend(None, world_of("srun")) == "torch"
    assert choose_backend("horovod", plain) == "horovod"


@pytest.mark.parametrize(
    ("backend", "world", "says"),
    [
        ("torch", World.alone(), r"started by no launcher.*'dualeval run --nproc N'.*take single"),
        ("torhc", World.alone(), r"no backend 'torhc'\. Did you mean torch\?"),
        (None, world_at("pigeon", 0, 1, 0, 1, 0), "no backend for the launcher 'pigeon'"),
        ("mpi", world_at("srun", 0, 2, 0, 2, mpi=False), r"without a way into MPI\. Type 'srun --mpi=pmix'"),
    ],
)
def test_what_cannot_be_connected_is_refused(backend: str | None, world: World, says: str) -> None:
    with pytest.raises((LaunchError, UsageError), match=f"(?s){says}"):
        connect(backend, world)


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
def test_a_groups_devices_are_those_of_which_its_library_sends(config: str, devices: set[str]) -> None:
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
def test_groups_of_torch_are_made_closed_and_checked(
    launch: Launch, tmp_path: Path, script: str, rank: int, size: int, printed: str
) -> None:
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
heavy = [name for name in sys.modules if name.startswith(('torch.distributed.fsdp', 'horovod', 'mpi4py'))]
assert not heavy, heavy
"""


def test_what_is_not_asked_for_is_not_imported(launch: Launch) -> None:
    """By detection, by a run of one process, and where no model is divided: in a start of its own."""
    launch([sys.executable, "-c", IMPORTED]).ok()


# -- a rank that goes down with an error waits for nobody -----------------------------------------------


# Rank 1 stops, as Ctrl-Z or a dead disk would stop it. Rank 0 closes as one that has failed, and says so.
HUNG_PEER = """
import os, signal, sys
from pathlib import Path
import torch, torch.distributed as dist
from dualeval.launch import detect
from dualeval.world.devices import connect
folder, group = Path(sys.argv[1]), sys.argv[2]
world = detect(os.environ)
if group == "callers":
    dist.init_process_group("gloo")
backend = connect(None, world, "cpu")
backend.all_reduce(torch.ones(3))
(folder / f"pid-{world.rank}").write_text(str(os.getpid()))
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
backend.close(failed=True)
(folder / "closed").write_text("")
os._exit(0)  # torchrun waits for rank 1, which the test ends
"""


@pytest.mark.parametrize("group", ["own", "callers"])
def test_a_failed_rank_does_not_wait_for_one_that_hangs(group: str, launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(HUNG_PEER)
    worker: list[str | Path] = [sys.executable, tmp_path / "worker.py", tmp_path, group]
    command = [*start("torchrun", 2), *worker]
    with launch.started(command, variables={"OMP_NUM_THREADS": "1"}) as process:
        await_that((tmp_path / "closed").exists, process)
        os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
        process.terminate()
        process.communicate(timeout=60)


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
def test_horovod_and_mpi4py_share_one_mpi(name: str, launch: Launch) -> None:
    launch([*start("mpirun", 2), sys.executable, "-c", PREPARE + SCRIPTS[name]], timeout=60).ok()
