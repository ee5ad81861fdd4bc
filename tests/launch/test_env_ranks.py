"""Ranks that nobody has told who shares their node: by plain variables, and by Flux's, which are played."""

from __future__ import annotations

import json
import resource
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dualeval.world import place_by_hosts
from dualeval.world.meetings.address import AtMaster
from tests.conftest import ROOT, Finished, Launch
from tests.engine.end.test_endings import await_that
from tests.vehicles.environments import world_at
from tests.vehicles.requirements import MPI_WHEELS

PLACE: list[str | Path] = [sys.executable, ROOT / "tests/vehicles/workers/joining_worker.py", "place"]
# Hydra answers a task in the same protocol of PMI-1 as Flux does.
FLUX: list[str | Path] = [MPI_WHEELS / "mpich/bin/mpirun", "-np", "2", ROOT / "tests/vehicles/play_flux.sh"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def told(ranks: Sequence[tuple[int, int]], master: str = "127.0.0.1") -> list[dict[str, str]]:
    """Plain variables by rank, each of which is told (rank, size)."""
    own = {"MASTER_ADDR": master, "MASTER_PORT": str(free_port())}
    return [{**own, "RANK": str(rank), "WORLD_SIZE": str(size)} for rank, size in ranks]


def start_ranks(
    launch: Launch,
    command: Sequence[str | Path],
    variables: Sequence[dict[str, str]] = (),
    cwd: Path | None = None,
) -> list[Finished]:
    """Run a command as ranks with these variables, two where none are given, to their end."""
    variables = variables or told([(0, 2), (1, 2)])
    with ThreadPoolExecutor(len(variables)) as pool:
        return [*pool.map(lambda own: launch(command, variables=own, timeout=100, cwd=cwd), variables)]


def places(done: Finished) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("hosts", "claimed", "local", "nodes", "sizes"),
    [
        ("a", [0], [0], [0], (1,)),
        ("aa", [0, 0], [0, 1], [0, 0], (2,)),
        ("aabb", [0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 1, 1], (2, 2)),
        # Round robin, and uneven.
        ("abab", [0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1], (2, 2)),
        ("babb", [0, 0, 0, 0], [0, 0, 1, 2], [0, 1, 0, 0], (3, 1)),
        # What the launcher says holds where it numbers the ranks of a host.
        ("aabb", [1, 0, 0, 1], [1, 0, 0, 1], [0, 0, 1, 1], (2, 2)),
        # Two pods of one rank each, on one host and network.
        ("aab", [0, 0, 0], [0, 1, 0], [0, 0, 1], (2, 1)),
        ("aab", [5, 6, 7], [0, 1, 0], [0, 0, 1], (2, 1)),
    ],
)
def test_places_follow_from_hosts(
    hosts: str, claimed: list[int], local: list[int], nodes: list[int], sizes: tuple[int, ...]
) -> None:
    for rank in range(len(hosts)):
        world = world_at(
            "env", rank, len(hosts), claimed[rank], 1, meeting=AtMaster(address=("a", 1)), placed=False
        )
        placed = place_by_hosts(world, hosts, claimed)
        assert (placed.local_rank, placed.node_rank, placed.node_sizes) == (local[rank], nodes[rank], sizes)
        assert placed.local_size == sizes[nodes[rank]]
        assert (placed.rank, placed.size, placed.meeting, placed.placed) == (
            *(rank, len(hosts), world.meeting, True),
        )


@pytest.mark.parametrize(
    "backend", ["torch", pytest.param("horovod", marks=[pytest.mark.needs("horovod"), pytest.mark.long])]
)
def test_plain_variables_make_two_ranks_of_a_node(backend: str, launch: Launch) -> None:
    """MASTER_ADDR may be any name of the host, also where all ranks are on it."""
    done, _ = start_ranks(launch, [*PLACE, backend], told([(0, 2), (1, 2)], socket.gethostname()))
    assert places(done) == [[rank, rank, 2, 0, [2], backend, True] for rank in range(2)]


@pytest.mark.needs("mpi-wheels")
def test_tasks_of_flux_meet_over_its_pmi(launch: Launch) -> None:
    done = launch([*FLUX, *PLACE])
    assert places(done) == [[rank, rank, 2, 0, [2], "torch", True] for rank in range(2)]


@pytest.mark.long
@pytest.mark.needs("mpi-wheels")
def test_a_pmi_that_something_has_closed_is_named(launch: Launch) -> None:
    """Python closes all descriptors of a child but three."""
    wrapper = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
    done = launch([*FLUX, sys.executable, "-c", wrapper, "dualeval", "run", "--limit", "3"])
    assert done.returncode != 0
    assert (
        "is not a connection to the launcher in this process: something in between has closed "
        "it" in done.stderr
    )


def test_an_evaluation_has_the_same_bits(launch: Launch, tmp_path: Path) -> None:
    launch(["dualeval", "run", "--limit", "997", "--out", "alone"], cwd=tmp_path).ok()
    done = start_ranks(launch, ["dualeval", "run", "--limit", "997", "--out", "out"], cwd=tmp_path)
    assert [rank.returncode for rank in done] == [0, 0], done
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("alone", "out")]
    assert results[0]["metrics_digest"] == results[1]["metrics_digest"]
    assert results[1]["world"] == {"size": 2, "nodes": 1, "launcher": "env", "backend": "torch"}


FILES = """
import os, resource
from dualeval import backends, detect
with backends.connect(None, detect(os.environ)):
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def test_every_rank_may_open_as_many_files_as_it_needs(launch: Launch) -> None:
    """They were raised on rank 0 alone, and by the control plane, when all had met already."""
    limited = ["bash", "-c", 'ulimit -Sn 200; exec "$@"', "-", sys.executable, "-c", FILES]
    done = start_ranks(launch, limited)
    assert [rank.returncode for rank in done] == [0, 0], done
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert [int(rank.stdout) for rank in done] == [hard, hard]


LONELY = """
from dualeval.world import waiting
from dualeval.cli import main
waiting.FIRST_WORD_S = 0.3
main(["run", "--limit", "3"])
"""


def test_rank_0_names_those_that_have_not_come(launch: Launch, tmp_path: Path) -> None:
    """It serves the store itself, and torch would have it wait there for all, without a word on whom."""
    port = str(free_port())
    variables = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with launch.started([sys.executable, "-c", LONELY], variables=variables, cwd=tmp_path) as process:
        assert process.stderr is not None
        expected = f"for all ranks to come to rank 0's store at 127.0.0.1:{port}: ranks 1 to 3 have not come."
        assert expected in process.stderr.readline()
        process.terminate()
        process.communicate(timeout=60)


def test_a_port_that_is_taken_is_named(launch: Launch, tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = launch(["dualeval", "run", "--limit", "3"], variables=variables, cwd=tmp_path)
    assert done.returncode == 1
    assert (
        f"port {port} of {socket.gethostname()}, where rank 0 is to serve by MASTER_PORT, is" in done.stderr
    )


def test_ranks_told_different_numbers_of_ranks_are_refused(launch: Launch, tmp_path: Path) -> None:
    said = "rank 1 was told that there are 3 ranks, and rank 0 that there are 2. Set WORLD_SIZE"
    ended = start_ranks(launch, ["dualeval", "run", "--limit", "64"], told([(0, 2), (1, 3)]), tmp_path)
    assert any(said in rank.stderr and rank.returncode == 2 for rank in ended), ended


def test_of_two_processes_of_one_rank_the_later_goes_on(launch: Launch, tmp_path: Path) -> None:
    """The one that came last goes on: a rank may have been started again before all had come."""
    command = ["dualeval", "run", "--limit", "64"]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(launch.started(command, variables=own, cwd=tmp_path))
            for own in told([(1, 3), (1, 3), (0, 3)])
        ]
        *rank_1, rank_0 = processes
        await_that(lambda: any(process.poll() is not None for process in rank_1), rank_0)
        codes = [process.poll() for process in processes]
        for process in processes:
            process.terminate()
        errors = [process.communicate(timeout=60)[1] for process in processes]
    assert codes.count(2) == 1
    assert "as rank 1. Give each rank a RANK of its own" in errors[codes.index(2)]
