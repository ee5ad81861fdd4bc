"""What ranks on two hosts say of a wrong start, of ports that others have and of a host that is not there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import Cluster
from tests.conftest import Finished, Launch

pytestmark = pytest.mark.needs("cluster")

FOLDER = Path(__file__).resolve().parent
TASKS = "srun -N2 --ntasks-per-node 1"
# A rank that fails alone ends the others. Slurm may then lose the last words that it hands on itself, but
# not those that it writes to a rank's file.
ENDING = f"{TASKS} --kill-on-bad-exit=1 --output=rank-%t.log"
MESSAGE = "dualeval: error: "


class Typed:
    """Runs what is typed on h0 in a folder of the test's own, with ``--out out``."""

    def __init__(self, cluster: Cluster, launch: Launch, folder: Path) -> None:
        self.cluster = cluster
        self.launch = launch
        self.folder = folder

    def __call__(self, typed: str) -> Finished:
        command = self.cluster.on("h0", [*typed.split(), "--out", "out"])
        return self.launch(command, variables=self.cluster.variables, cwd=self.folder, timeout=60)

    def result(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self.folder / "out/result.json").read_text())
        return result

    def said(self, rank: int) -> str:
        """What a rank of ``ENDING`` wrote."""
        return (self.folder / f"rank-{rank}.log").read_text()


@pytest.fixture
def typed(cluster: Cluster, launch: Launch, tmp_path: Path) -> Typed:
    return Typed(cluster, launch, tmp_path)


@pytest.mark.parametrize(
    ("option", "words", "expected"),
    [
        ("--kill-on-bad-exit=1", "--limt 5", ["--limt", "--limit"]),
        ("", "--nproc 2", ["--nproc 2", "srun had started already", "Leave out --nproc"]),
        pytest.param(
            *("", "--backend mpi", ["without a way into MPI", "'srun --mpi=pmix'"]),
            marks=[pytest.mark.needs("mpi"), pytest.mark.long],
        ),
        pytest.param(
            *("", "--backend single", ["--backend single cannot run with world size 2, started by srun"]),
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_wrong_start_is_said_once(typed: Typed, option: str, words: str, expected: list[str]) -> None:
    done = typed(f"{TASKS} {option} --label dualeval run {words}")
    assert done.returncode == 2
    assert done.stderr.count(MESSAGE) == 1
    # The label is the rank's number.
    [message] = [line for line in done.stderr.splitlines() if line.startswith(f"0: {MESSAGE}")]
    for part in expected:
        assert part in message
    assert not (typed.folder / "out").exists()


def occupied(number: int, step: str) -> str:
    """A command for a job whose step finds so many of its ports taken."""
    worker = FOLDER / "occupied_ports_worker.py"
    return f"salloc -N2 --ntasks-per-node=1 {sys.executable} {worker} {number} {step}"


def test_a_port_that_another_has_is_passed_over(typed: Typed) -> None:
    done = typed(occupied(1, f"{TASKS} dualeval run --limit 200")).ok()
    # The other rank has come to the wrong one first.
    assert int(done.stdout.split()[-1]) >= 1
    result = typed.result()
    assert result["samples"] == {"total": 200, "evaluated": 200, "failed": 0}
    assert result["world"] == {"size": 2, "nodes": 2, "launcher": "srun", "backend": "torch"}
    assert typed("dualeval run --limit 200 --fresh").returncode == 0
    assert typed.result()["metrics_digest"] == result["metrics_digest"]


@pytest.mark.long
def test_no_free_port_is_said(typed: Typed) -> None:
    done = typed(occupied(16, f"{ENDING} dualeval run"))
    assert done.returncode != 0
    assert f"{MESSAGE}no port is free for the ranks to meet at: " in typed.said(0)
    assert " on h0 ([Errno 98] Address already in use" in typed.said(0)
    assert MESSAGE not in typed.said(1)
    assert not (typed.folder / "out").exists()


def test_a_host_that_cannot_be_reached_is_named(typed: Typed) -> None:
    worker = FOLDER / "lost_host_worker.py"
    done = typed(f"{ENDING} {sys.executable} {worker} run")
    assert done.returncode != 0
    assert f"{MESSAGE}rank 0's host cannot be reached: nowhere, ports " in typed.said(1)
    assert "has to lead to it from h1" in typed.said(1)
    assert MESSAGE not in typed.said(0)
    assert not (typed.folder / "out").exists()
