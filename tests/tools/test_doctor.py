"""``dualeval doctor``, started for real."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dualeval.backends.base import Op
from dualeval.backends.selftest import check_operations, measure_all_reduce
from dualeval.backends.single import SingleBackend
from dualeval.world import World
from tests.conftest import BIN, Finished, Launch
from tests.launchers import needs, start

DOCTOR: list[str | Path] = [BIN / "dualeval", "doctor"]
# Rank 1 has other options, does not come, or hangs while it tries the backend.
OTHER_DEVICE = 'if [ "$RANK" = 1 ]; then set -- --device gpu; fi; exec dualeval doctor --limit-s 30 "$@"'
ABSENT = 'if [ "$RANK" = 1 ]; then exit 0; fi; exec dualeval doctor --limit-s 6'
HANGING = """
import importlib, os, threading
from dualeval.cli import main
if os.environ["RANK"] == "1":
    # By its module's name: dualeval.tools.doctor.command itself is the command.
    command = importlib.import_module("dualeval.tools.doctor.command")
    command._try_backend = lambda *_: threading.Event().wait()
main(["doctor", "--limit-s", "12"])
"""


def examined(finished: Finished) -> dict[str, Any]:
    assert finished.returncode == 0, finished.stdout + finished.stderr
    # horovodrun names the rank before each line.
    text = "\n".join(line.removeprefix("[0]<stdout>:") for line in finished.stdout.splitlines())
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.mark.parametrize(
    ("launcher", "launcher_name", "backend"),
    [
        pytest.param(launcher, name, backend, marks=[*needs(launcher, backend), *marks])
        for launcher, name, backend, marks in [
            ("none", "none", "single", []),
            ("torchrun", "torchrun", "torch", []),
            ("horovodrun", "horovodrun", "horovod", []),
            ("mpirun", "openmpi", "mpi", [pytest.mark.long]),
            ("mpirun", "openmpi", "torch", [pytest.mark.long]),
        ]
    ],
)
def test_under_every_launcher(
    launcher: str, launcher_name: str, backend: str, launch: Launch, tmp_path: Path
) -> None:
    size = 1 if launcher == "none" else 2
    command = [*start(launcher, size), *DOCTOR, "--json", "--backend", backend]
    found = examined(launch(command, cwd=tmp_path))
    assert found["problems"] == []
    assert list(found["ranks"]) == [str(rank) for rank in range(size)]
    for facts in found["ranks"].values():
        assert (facts["launcher"], facts["backend"], facts["device"]) == (launcher_name, backend, "cpu")
        assert facts["torch"] == torch.__version__
        assert len(facts["operations"]) == 7
        assert not any(facts["operations"].values())
        assert facts["shares_output"] is True
    assert list(found["speed"]) == ["cpu"]
    assert found["speed"]["cpu"]["latency_us"] > 0
    assert found["speed"]["cpu"]["bandwidth_gb_s"] > 0
    assert list(tmp_path.iterdir()) == [], "the probe is removed, and no folder is made"


def test_a_rank_with_a_problem_keeps_all_from_trying(launch: Launch, tmp_path: Path) -> None:
    finished = launch([*start("torchrun", 2), "bash", "-c", OTHER_DEVICE], cwd=tmp_path)
    assert finished.returncode == 1
    assert "1 problem:\n  - --device 'gpu' is not a device" in finished.stdout
    assert "(rank 1)" in finished.stdout
    assert "operations      not tried on all ranks" in finished.stdout


def test_a_rank_that_does_not_come_is_named(launch: Launch, tmp_path: Path) -> None:
    finished = launch([*start("torchrun", 2), "bash", "-c", ABSENT], cwd=tmp_path)
    assert finished.returncode == 1
    assert "  - rank 1 did not report within 2 s" in finished.stdout
    assert "2 ranks on 1 node, started by torchrun" in finished.stdout


@pytest.mark.long
def test_a_rank_that_hangs_is_given_up(launch: Launch, tmp_path: Path) -> None:
    finished = launch([*start("torchrun", 2), sys.executable, "-c", HANGING], cwd=tmp_path)
    assert finished.returncode == 1
    said = finished.stdout + finished.stderr
    assert "gave up after 12 s, trying the backend torch" in said
    assert list(tmp_path.iterdir()) == [], "the probe is removed"


def test_half_set_variables_are_shown(launch: Launch, tmp_path: Path) -> None:
    finished = launch(DOCTOR, variables={"RANK": "3", "WORLD_SIZE": "8"}, cwd=tmp_path)
    assert finished.returncode == 2
    assert "torchrun    not taken  RANK=3  (rank)" in finished.stdout
    assert "torchrun's variables are half set" in finished.stdout
    finished = launch([*DOCTOR, "--launcher", "none"], variables={"RANK": "3"}, cwd=tmp_path)
    assert finished.returncode == 0, finished.stdout


def test_no_such_launcher(launch: Launch) -> None:
    finished = launch([*DOCTOR, "--launcher", "srum"])
    assert finished.returncode == 2
    assert "Did you mean srun?" in finished.stderr


def test_the_self_test_of_one_process() -> None:
    with SingleBackend(World.alone()) as backend:
        assert not any(check_operations(backend).values())
        assert {name: set(speed) for name, speed in measure_all_reduce(backend).items()} == {
            "cpu": {"latency_us", "bandwidth_gb_s"}
        }


def test_the_self_test_finds_what_is_wrong() -> None:
    class Wrong(SingleBackend):
        def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Tensor:
            return super().all_reduce(tensor, op) + tensor

        def all_gather(self, tensor: Tensor) -> list[Tensor]:
            return super().all_gather(tensor) * 2

    with Wrong(World.alone()) as backend:
        found = check_operations(backend)
    assert found["all_reduce"] is not None
    assert found["all_reduce"].startswith("sum of torch.int64: got [0, 2], expected [0, 1]")
    assert found["all_gather"] == "got [[], []], expected [[]]"
    assert [name for name, problem in found.items() if problem] == ["all_reduce", "all_gather"]
