"""Which backend and device ``connect`` takes, and what it says where they cannot go together."""

from __future__ import annotations

import sys

import pytest
import torch

from dualeval.backends import choose_device, connect
from dualeval.errors import LaunchError, UsageError
from dualeval.world import World
from tests.conftest import Launch

TORCHRUN = World(rank=1, size=2, local_rank=1, local_size=2, node_rank=0, launcher="torchrun")
TORCHRUN_ALONE = World(rank=0, size=1, local_rank=0, local_size=1, node_rank=0, launcher="torchrun")


def test_single_is_the_default_without_a_launcher() -> None:
    for name in (None, "single"):
        with connect(name, World.alone(), "cpu") as backend:
            assert backend.name == "single"
            assert backend.world == World.alone()
            assert backend.device == torch.device("cpu")


def test_single_under_torchrun_takes_a_world_of_one() -> None:
    assert connect("single", TORCHRUN_ALONE, "cpu").name == "single"
    with pytest.raises(LaunchError, match="--backend single cannot run a world of 2 started by torchrun"):
        connect("single", TORCHRUN, "cpu")


def test_torch_needs_a_launcher() -> None:
    with pytest.raises(LaunchError, match=r"started by no launcher.*'dualeval run --nproc N'") as caught:
        connect("torch", World.alone(), "cpu")
    assert "leave --backend out to take single" in str(caught.value)


def test_unknown_names() -> None:
    with pytest.raises(UsageError, match=r"no backend 'torhc'\. Did you mean torch\?"):
        connect("torhc", World.alone())
    with pytest.raises(LaunchError, match="no backend for the launcher 'pigeon'"):
        connect(None, World(rank=0, size=1, local_rank=0, local_size=1, node_rank=0, launcher="pigeon"))


@pytest.mark.parametrize("wanted", ["gpu", "", "cuda:", "cuda:-1", "cpu:0", "cuda:0 ", "mps"])
def test_no_device(wanted: str) -> None:
    with pytest.raises(UsageError, match="is no device: it takes cpu, cuda"):
        choose_device(wanted, TORCHRUN)


def test_devices_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = {wanted: choose_device(wanted, TORCHRUN) for wanted in (None, "cpu", "cuda", "cuda:0", "cuda:1")}
    own = torch.device("cuda", 1)
    assert found == {
        None: own,
        "cpu": torch.device("cpu"),
        "cuda": own,
        "cuda:0": torch.device("cuda", 0),
        "cuda:1": own,
    }
    with pytest.raises(UsageError, match="--device cuda:2 needs GPU 2, but this node shows 2 \\(0 to 1\\)"):
        choose_device("cuda:2", TORCHRUN)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match="rank with local number 1 needs GPU 1, but this node shows 1"):
        choose_device(None, TORCHRUN)


def test_devices_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(None, TORCHRUN) == torch.device("cpu")
    for wanted in ("cuda", "cuda:0"):
        with pytest.raises(UsageError, match=f"--device {wanted}: torch .* Type --device cpu"):
            choose_device(wanted, TORCHRUN)


def test_single_imports_no_distributed_backend(launch: Launch) -> None:
    """A backend's module is imported when it is chosen."""
    code = (
        "import sys; from dualeval.backends import connect; from dualeval.world import World; "
        "connect(None, World.alone(), 'cpu'); sys.exit('dualeval.backends.torch_distributed' in sys.modules)"
    )
    finished = launch([sys.executable, "-c", code])
    assert finished.returncode == 0, finished.stderr


def test_a_group_of_another_world(launch: Launch) -> None:
    """A caller's process group that contradicts the launcher's variables is refused."""
    code = (
        "import os, torch.distributed as dist; from dualeval.backends import connect; "
        "from dualeval.errors import LaunchError; from dualeval.launch import detect; "
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "try: connect('torch', detect(os.environ), 'cpu')\n"
        "except LaunchError as error: print(error)\n"
        "dist.destroy_process_group()"
    )
    variables = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    finished = launch([sys.executable, "-c", code], variables=variables)
    assert finished.returncode == 0, finished.stderr
    assert "already initialised as rank 0 of 1" in finished.stdout
    assert "rank 1 of 2" in finished.stdout
