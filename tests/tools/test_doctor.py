"""``dualeval doctor``: started for real, and what it says of findings."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dualeval.backends.base import Op
from dualeval.backends.selftest import check_operations
from dualeval.backends.single import SingleBackend
from dualeval.tools.doctor.page import BLOCKING, diagnosis, differences, problems
from dualeval.world import World
from tests.conftest import BIN, Finished, Launch
from tests.vehicles.launchers import needs, start

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
def test_doctor_reports_each_rank_under_every_launcher(
    launcher: str, launcher_name: str, backend: str, launch: Launch, tmp_path: Path
) -> None:
    size = 1 if launcher == "none" else 2
    command = [*start(launcher, size), *DOCTOR, "--json", "--backend", backend]
    found = examined(launch(command, cwd=tmp_path))
    assert found["problems"] == []
    assert list(found["ranks"]) == [str(rank) for rank in range(size)]
    for rank, facts in found["ranks"].items():
        assert (facts["rank"], facts["local_rank"]) == (int(rank), int(rank))
        assert (facts["size"], facts["local_size"]) == (size, size)
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
    assert finished.stdout.count("RANK=3") == 2, "once in the list, once in the problem"
    assert "torchrun's variables are half set" in finished.stdout
    finished = launch([*DOCTOR, "--launcher", "none"], variables={"RANK": "3"}, cwd=tmp_path)
    assert finished.returncode == 0, finished.stdout


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


# -- what is said of findings: pure functions of what ranks tell -----------------------------------------


def facts(rank: int, **others: Any) -> dict[str, Any]:
    """What rank ``rank`` of four on two hosts of 4 cores finds where all is well."""
    host = rank // 2
    return {
        "rank": rank,
        "size": 4,
        "local_rank": rank % 2,
        "local_size": 2,
        "node_rank": host,
        "launcher": "srun",
        "host": f"h{host}",
        "pid": 100 + rank,
        "variables": {
            "torchrun": [],
            "srun": [{"name": "SLURM_PROCID", "value": str(rank), "meaning": "rank"}],
        },
        "notes": [],
        "outer": [],
        "backend": "torch",
        "gpus": [],
        "device": "cpu",
        "device_type": "cpu",
        "no_gpu": "torch 2.13 sees no GPU",
        "cores": [0, 1, 2, 3],
        "cpu_quotas": {},
        "threads": 2,
        "omp_num_threads": None,
        "reached": "h0",
        "interface": "eth0",
        "shares_output": True,
        "operations": {"all_reduce": None, "gather": None},
        "errors": [],
        "dualeval": "0.1.0",
        "python": "3.11",
        "torch": "2.13",
        "cuda": "13.0",
        "nccl": "2.28",
        "horovod": "0.28.1",
        "mpi": "4.1",
        **others,
    }


def report(*changed: dict[str, Any], without: tuple[int, ...] = ()) -> dict[str, Any]:
    """A report of four ranks, some of them changed or missing."""
    ranks = {rank: facts(rank) for rank in range(4) if rank not in without}
    ranks |= {one["rank"]: one for one in changed}
    found = {
        "size": 4,
        "waited_s": 20.0,
        "output": "/data/runs",
        "addresses": ["h0", "10.0.0.1"],
        "speed": {"cpu": {"latency_us": 1234.5, "bandwidth_gb_s": 1.5}},
        "ranks": ranks,
    }
    return {**found, "problems": list(problems(found))}


def test_a_variable_that_a_launcher_takes_is_in_no_other_list() -> None:
    rank, world = ({"name": name, "value": "0", "meaning": ""} for name in ("RANK", "WORLD_SIZE"))
    found = {"torchrun": [rank], "env": [rank, world]}
    changed = [facts(each, launcher="env", variables=found) for each in range(4)]
    lines = [line.split() for line in diagnosis(report(*changed)).splitlines() if "=0" in line]
    assert lines == [["env", "taken", "RANK=0"], ["env", "taken", "WORLD_SIZE=0"]]


def test_a_diagnosis_without_problems_shows_ranks_and_checks() -> None:
    text = diagnosis(report())
    assert report()["problems"] == []
    assert text.startswith("4 ranks on 2 nodes, started by srun\n")
    assert text.endswith("No problem was found.\n")
    for part in (
        "srun        taken      SLURM_PROCID=0  (rank)",
        "3     h1    103  1 of 2  1     torch    0          cpu     2 of 4            h0",
        "control plane   h0, 10.0.0.1, at a port that the kernel picks",
        "output folder   /data/runs, seen by all ranks",
        "operations      all_reduce, gather: right on all ranks",
        "all_reduce      1,234 us for 8 bytes, 1.50 GB/s at 64 MiB (cpu tensors)",
    ):
        assert part in text


QUOTAS = {"cpu_quotas": {"pod": 8.0, "container": 2.5}}
GPU = {"device": "cuda:0 (H)", "device_type": "cuda"}
# What ranks find, and how the problems begin that come of it.
PROBLEMS: list[tuple[list[dict[str, Any]], list[str]]] = [
    ([facts(3, torch="2.12")], ["the ranks differ in torch: 2.13 on ranks 0 to 2; 2.12 on rank 3"]),
    ([facts(3, horovod="no MPI")], ["the ranks differ in Horovod: 0.28.1 on ranks 0 to 2; no MPI on rank 3"]),
    ([facts(3, backend="mpi")], ["the ranks differ in the backend: torch on ranks 0 to 2; mpi on rank 3"]),
    ([facts(3, size=5)], ["the ranks differ in the number of ranks: 4 on ranks 0 to 2; 5 on rank 3"]),
    ([facts(3, errors=["no GPU"])], ["no GPU (rank 3)"]),
    ([facts(rank, errors=["broken"]) for rank in range(4)], ["broken (ranks 0 to 3)"]),
    ([facts(3, notes=["left over"])], ["left over (rank 3)"]),
    ([facts(3, operations={"all_reduce": None, "gather": "got 1"})], ["gather is wrong on rank 3: got 1"]),
    ([facts(3, threads=3)], ["2 ranks on h1 would take 5 threads on 4 cores: set OMP_NUM_THREADS lower"]),
    ([facts(rank, **QUOTAS, threads=1) for rank in (2, 3)], []),
    (
        [facts(rank, **QUOTAS) for rank in (2, 3)],
        ["2 ranks on h1 would take 4 threads with a quota of 2.5 CPUs: set OMP_NUM_THREADS"],
    ),
    # Two containers of a host, each with a quota of its own.
    ([facts(2, cpu_quotas={"one": 2.0}), facts(3, cpu_quotas={"other": 2.0})], []),
    ([facts(2, shares_output=False)], ["rank 2 on h1 does not see rank 0's files in /data/runs"]),
    # That a rank computes on the CPU is a problem where others compute on GPUs, and only there.
    (
        [facts(rank, **GPU) for rank in (0, 1, 3)],
        ["rank 2 on h1 computes on the CPU, others on GPUs: torch 2.13 sees no GPU"],
    ),
]


@pytest.mark.parametrize(("found", "said"), PROBLEMS)
def test_each_problem_is_in_the_diagnosis(found: list[dict[str, Any]], said: list[str]) -> None:
    made = report(*found)
    for problem, words in zip(made["problems"], said, strict=True):
        assert problem.startswith(words)
        assert f"  - {problem}" in diagnosis(made)


@pytest.mark.parametrize(
    ("found", "shown", "times"),
    [
        ([facts(3, **QUOTAS)], "1 of 2  1     torch    0          cpu     2 of 4, quota 2.5", 1),
        ([facts(2, shares_output=False)], "not seen by all ranks", 1),
        ([facts(1, operations={}, shares_output=None)], "not tried on all ranks", 2),
    ],
)
def test_quotas_and_failed_checks_are_shown(found: list[dict[str, Any]], shown: str, times: int) -> None:
    assert diagnosis(report(*found)).count(shown) == times


def test_ranks_that_do_not_come_are_one_problem() -> None:
    found = report(without=(1, 2))
    assert found["problems"] == ["ranks 1, 2 did not report within 20 s"]
    assert "2 problems" not in diagnosis(found)
    # A rank that could not meet rank 0 speaks for itself.
    assert diagnosis(report(without=(0, 1, 2))).count("Variables (rank 3)") == 1


def test_only_some_differences_keep_ranks_from_trying() -> None:
    ranks = {0: facts(0), 1: facts(1, backend="mpi", torch="2.12")}
    assert len(differences(ranks)) == 2
    assert differences(ranks, BLOCKING) == ["the ranks differ in the backend: torch on rank 0; mpi on rank 1"]
