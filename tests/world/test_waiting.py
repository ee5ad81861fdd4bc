"""Waits say what they wait for: when, who says it, and under every launcher where a rank is late."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import re
import select
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from dualeval.world import World
from dualeval.world import waiting as module
from dualeval.world.waiting import name_ranks, not_come, waiting
from tests.conftest import ROOT, Launch
from tests.vehicles.environments import world_at
from tests.vehicles.launchers import start, way

WORKER = ROOT / "tests/vehicles/workers" / "joining_worker.py"
SOON_S = 0.02
LIMIT_S = 30.0
RANK_0 = World(rank=0, size=8, local_rank=0, local_size=4, node_rank=0, launcher="srun")


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_WORD_S", SOON_S)
    monkeypatch.setattr(module, "SECOND_WORD_S", 2 * SOON_S)


def test_a_wait_speaks_after_10_s_and_at_doubled_times() -> None:
    assert list(itertools.islice(module._times(), 5)) == [10, 60, 120, 240, 480]


def test_a_short_wait_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    for keeps_lock in (False, True):
        with waiting(RANK_0, "rank 0", "Check it.", keeps_lock=keeps_lock):
            pass
    assert capfd.readouterr() == ("", "")
    assert "dualeval-waiting" not in {thread.name for thread in threading.enumerate()}


def test_a_long_wait_says_what_is_known_each_time(soon: None, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = iter(["", "ranks 4 to 7 have not come", "rank 7 has not come"])
    fourth = threading.Event()

    def known() -> str:
        text = next(outcomes, None)
        if text is None:
            fourth.set()
        return text or ""

    with waiting(RANK_0, "all ranks at n1, port 7", "Check that they run.", known=known):
        assert fourth.wait(LIMIT_S)
    who = f"dualeval: rank 0 of 8 on {os.uname().nodename} has waited "
    assert capsys.readouterr().err.splitlines()[:3] == [
        f"{who}0.02 s for all ranks at n1, port 7. Check that they run.",
        f"{who}0.04 s for all ranks at n1, port 7: ranks 4 to 7 have not come. Check that they run.",
        f"{who}0.08 s for all ranks at n1, port 7: rank 7 has not come. Check that they run.",
    ]


def test_a_closed_standard_error_ends_no_wait(soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Semaphore(0)
    closed = os.fdopen(os.dup(2), "w")
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)

    def known() -> str:
        asked.release()
        return ""

    with waiting(RANK_0, "all ranks", "", known=known):
        for _ in range(3):
            assert asked.acquire(timeout=LIMIT_S)


@contextmanager
def standard_error_in_a_pipe() -> Iterator[int]:
    """Yields the end from which everything is read that is written to this process's standard error."""
    own = os.dup(2)
    end, other = os.pipe()
    try:
        os.dup2(other, 2)
        yield end
    finally:
        os.dup2(own, 2)
        for number in (own, end, other):
            os.close(number)


def test_a_wait_that_keeps_pythons_lock_speaks_too(soon: None) -> None:
    """As MPI_Init does in mpi4py: no thread of the process can speak."""
    library = ctypes.PyDLL(None)  # calls of it keep the lock
    with standard_error_in_a_pipe() as end:
        # struct pollfd: the file, what is waited for, what was found.
        request = ctypes.create_string_buffer(end.to_bytes(4, sys.byteorder) + b"\1\0\0\0", 8)
        with waiting(RANK_0, "all ranks {to} join MPI", "Check it.", keeps_lock=True):
            assert library.poll(request, 1, int(1000 * LIMIT_S)) == 1
        assert select.select([end], [], [], 0)[0]
        text = os.read(end, 65536).decode()
    assert text.startswith(
        f"dualeval: rank 0 of 8 on {os.uname().nodename} has waited 0.02 s for all ranks {{to}}"
    )
    assert text.splitlines()[0].endswith(" join MPI. Check it.")


def worlds(local_sizes: Sequence[int]) -> list[World]:
    """All ranks of a world, node after node."""
    size = sum(local_sizes)
    places = [(node, local) for node, local_size in enumerate(local_sizes) for local in range(local_size)]
    return [
        world_at("srun", rank, size, local, local_sizes[node], node)
        for rank, (node, local) in enumerate(places)
    ]


@pytest.mark.parametrize(
    ("local_sizes", "of_all", "of_each_node"),
    [
        ([1], [], []),
        ([2], [0, 1], [0, 1]),
        ([4], [0, 3], [0, 1]),
        ([1, 1], [0, 1], [0, 1]),
        ([4, 4], [0, 7], [0, 1, 4]),
        ([2, 1, 3], [0, 5], [0, 1, 2, 3]),
        ([8] * 125, [0, 999], [0, 1, *range(8, 1000, 8)]),
    ],
)
def test_the_first_and_last_rank_or_one_of_each_node_speak(
    local_sizes: list[int], of_all: list[int], of_each_node: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand ranks do not say the same; where rank 0 is what is missing, somebody says so."""
    spoken: list[object] = []

    @contextmanager
    def speak(sentence: object) -> Iterator[None]:
        spoken.append(sentence)
        yield

    def speaks(world: World, each_node: bool) -> bool:
        spoken.clear()
        with waiting(world, "", "", each_node=each_node):
            return bool(spoken)

    monkeypatch.setattr(module, "_spoken_by_a_thread", speak)
    ranks = worlds(local_sizes)
    assert [world.rank for world in ranks if speaks(world, each_node=False)] == of_all
    assert [world.rank for world in ranks if speaks(world, each_node=True)] == of_each_node


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([3], "rank 3"),
        ([1, 2], "ranks 1 to 2"),
        ([1, 3], "ranks 1 and 3"),
        ([7, 1, 2, 3], "ranks 1 to 3 and 7"),
        ([1, 3, 5, 6, 7], "ranks 1, 3 and 5 to 7"),
        (range(1, 1000), "ranks 1 to 999"),
        (range(1, 1000, 2), "ranks 1, 3, 5, 7, 9, 11, 13, 15 and 492 more"),
    ],
)
def test_ranks_in_a_message_are_ranges_of_which_many_are_counted(ranks: Sequence[int], expected: str) -> None:
    assert name_ranks(ranks) == expected
    assert not_come(ranks) == f"{expected} {'has' if len(ranks) == 1 else 'have'} not come"
    assert not_come([]) == ""


def read_until(stream: IO[str], pattern: str) -> str:
    """Read lines until one has a pattern; returns all that was read, and fails at the end of the stream."""
    read = ""
    for line in stream:
        read += line
        if re.search(pattern, line):
            return read
    pytest.fail(f"nobody has said {pattern!r}, but: {read}")


# What is said of who joins, by launcher.
TORCHRUN = r"has waited \S+ s for all ranks to come to torchrun's store at \S+:\d+"
HOROVODRUN = r"has waited \S+ s for all ranks to join Horovod\. Check"
GUEST = (
    r"has waited \S+ s for the other ranks to evaluate, too\. Every rank of the script's group must make "
    r"the same call"
)
MPIRUN = r"has waited \S+ s for all ranks to join MPI \(MPI_Init\)\. Check"


@pytest.mark.parametrize(
    ("launcher", "backend", "late", "joining"),
    [
        way("torchrun", "torch", 1, f"{TORCHRUN}: rank 1 has not come"),
        way("torchrun", "guest", 1, GUEST),
        way("torchrun", "torch", 0, f"{TORCHRUN}\\. Check that every rank", long=True),
        way("horovodrun", "horovod", 1, HOROVODRUN, long=True),
        *(way("mpirun", backend, 1, MPIRUN, long=True) for backend in ("mpi", "horovod", "torch")),
    ],
)
def test_ranks_that_wait_for_a_late_one_say_so_and_go_on(
    launcher: str, backend: str, late: int, joining: str, launch: Launch, tmp_path: Path
) -> None:
    """The others say so at each place where they wait, and go on when it has come."""
    other = 1 - late
    who = rf"rank {other} of 2 on \S+ has waited \S+ s for"
    first = rf"{who} all ranks' first collective\. Check that every rank"
    # Rank 0, which serves it, knows who has not come.
    missing = r": rank 1 has not come\. Check" if late == 1 else r"\. Check"
    control = rf"{who} all ranks at the control plane, 127\.0\.0\.1:\d+{missing}"
    cores = rf"{who} the cores of all ranks\. Check that every rank"
    command: list[str | Path] = [
        *start(launcher, 2),
        sys.executable,
        WORKER,
        "waits",
        backend,
        str(late),
        tmp_path,
    ]
    with launch.started(command, variables={"OMP_NUM_THREADS": "1"}) as process:
        assert process.stderr is not None
        read_until(process.stderr, f"rank {other} of 2 on .*{joining}")
        (tmp_path / "join").touch()
        for place, said in (("first", first), ("control", control)):
            read_until(process.stderr, said)
            (tmp_path / place).touch()
        read_until(process.stderr, cores)
        (tmp_path / "cores").touch()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors


@pytest.mark.long
@pytest.mark.needs("horovod", "mpi")
@pytest.mark.timeout(600)
def test_a_rank_90_s_late_is_awaited_without_a_core(launch: Launch, tmp_path: Path) -> None:
    """Longer than Horovod's own limit of 30 s; on all backends at the same time."""
    seconds, size = 90.0, 3

    def run(way: tuple[str, str]) -> None:
        too_much = wait(way, "first")
        # Over MPI a thread of Horovod's looks without a pause for as long as the cycles of the ranks happen
        # to begin apart: mostly a few hundredths, in one start of some twenty more than half of each cycle.
        if too_much and way == ("mpirun", "horovod"):
            too_much = wait(way, "second")
        assert not too_much, too_much

    def wait(way: tuple[str, str], attempt: str) -> list[str]:
        """Start ranks of which the last is late; says which of the others took too much of a core."""
        launcher, backend = way
        reports = tmp_path / f"{launcher}-{backend}-{attempt}"
        reports.mkdir()
        too_much = []
        command: list[str | Path] = [
            *(*start(launcher, size), sys.executable),
            *(WORKER, "late", backend, str(seconds), reports),
        ]
        done = launch(command, timeout=2 * seconds + 150, variables={"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, f"{way}: {done.stdout} {done.stderr}"
        for rank in range(size - 1):
            for what, (waited, cpu) in zip(
                ("joining", "reducing"), json.loads((reports / f"rank-{rank}.json").read_text()), strict=True
            ):
                report = f"{way}, rank {rank}, {what}: {cpu:.1f} s of a core in {waited:.1f} s"
                print(report)
                assert waited > 0.7 * seconds, report
                # Joining imports the library meanwhile: a second and a half at most.
                if cpu >= 0.3 * waited + 1.5:
                    too_much.append(report)
        return too_much

    ways = [("torchrun", "torch"), ("horovodrun", "horovod")]
    ways += [("mpirun", backend) for backend in ("torch", "horovod", "mpi")]
    with ThreadPoolExecutor(len(ways)) as pool:
        for finished in [pool.submit(run, way) for way in ways]:
            finished.result()
