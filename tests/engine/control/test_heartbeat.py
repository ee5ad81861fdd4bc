"""Who is named for standing still, and when: by heartbeats, on a clock that the test moves."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dualeval.backends.base import Op
from dualeval.backends.single import SingleBackend
from dualeval.engine.control.monitor import Clock, Judge, Limits, Monitor
from dualeval.engine.control.progress import Activity, Heartbeat, Name, Progress, Stage
from dualeval.world import World

NAMES = {rank: Name(rank=rank, host=f"n{rank}", pid=4711, space="here", start="1") for rank in range(3)}
HEARTBEAT = Heartbeat(steps=5, work=0, number=1, stage=Stage.LOAD, chunk=17)
LIMITS = Limits(timeout_s=60, forward_timeout_s=1800)


def watching(notes: list[str] | None = None, *, sees_all: bool = True) -> Monitor:
    found = [] if notes is None else notes
    return Monitor(NAMES, LIMITS, 0, sees_all=sees_all, note=found.append)


def look(monitor: Monitor, now: float, **changed: Heartbeat) -> tuple[int, str] | None:
    """What the monitor says where all ranks go on, but for those given as r0, r1, ...."""
    heartbeats = {rank: Heartbeat(int(now * 100), 0, int(now * 10), Stage.FORWARD, 1) for rank in NAMES}
    return monitor.look(
        {**heartbeats, **{int(name[1:]): heartbeat for name, heartbeat in changed.items()}}, now
    )


def test_a_heartbeat_travels_as_text() -> None:
    for heartbeat in (HEARTBEAT, Heartbeat(0, 7, 3, Stage.SETUP), HEARTBEAT._replace(saved=1, run=2, done=6)):
        assert Heartbeat.read(str(heartbeat)) == heartbeat


def test_who_goes_on_is_not_named() -> None:
    monitor = watching()
    assert [look(monitor, now) for now in (1.0, 50.0, 100.0, 200.0)] == [None] * 4


def test_who_makes_no_progress_is_named_with_its_place() -> None:
    monitor = watching()
    assert look(monitor, 10, r2=HEARTBEAT) is None
    assert look(monitor, 69, r2=HEARTBEAT._replace(number=100)) is None
    assert look(monitor, 72, r2=HEARTBEAT._replace(number=106)) == (
        2,
        "rank 2 on n2 (pid 4711): no progress for 62 s, chunk 17, stage load",
    )


def test_who_ends_within_a_slow_step_is_named_as_not_responding() -> None:
    """Its last heartbeat came after its last progress: the one limit is over before the other."""
    monitor = watching()
    last = HEARTBEAT._replace(number=2)
    seen = [look(monitor, 10, r2=HEARTBEAT), *(look(monitor, now, r2=last) for now in (11, 70.5, 71.5))]
    assert seen[:3] == [None] * 3
    assert seen[3] is not None and seen[3][1].endswith("stage load, and the process does not respond")


def test_who_waits_for_others_is_not_named_as_long_as_it_lives() -> None:
    monitor = watching()
    waiting = HEARTBEAT._replace(stage=Stage.MEET, chunk=None)
    for now in range(0, 1000, 10):
        assert look(monitor, now, r1=waiting._replace(number=now)) is None
    assert look(monitor, 1060, r1=waiting._replace(number=990)) == (
        1,
        "rank 1 on n1 (pid 4711): no progress for 70 s, stage meet, and the process does not respond",
    )


def test_who_does_not_live_is_named_before_those_it_holds_up() -> None:
    """All stand in a collective since the same moment; one of them was stopped there."""
    monitor = watching()

    def reducing(*numbers: int) -> dict[str, Heartbeat]:
        return {f"r{rank}": Heartbeat(9, 0, number, Stage.COLLECTIVE) for rank, number in enumerate(numbers)}

    for now in (0, 30):
        assert look(monitor, now, **reducing(now, now, now)) is None
    found = look(monitor, 91.0, **reducing(91, 30, 91))
    assert found is not None and found[0] == 1


def test_who_has_saved_everything_has_nothing_more_to_do() -> None:
    monitor = watching()
    for now in (1.0, 200.0):
        assert look(monitor, now, r1=HEARTBEAT._replace(saved=4, number=int(now))) is None


def test_an_observer_that_was_stopped_blames_nobody() -> None:
    moments = iter([0.0, 0.5, 1.0, 601.0, 601.5])
    clock = Clock(2.0, lambda: next(moments))
    assert [clock.now() for _ in range(4)] == [0.5, 1.0, 3.0, 3.5]


@contextmanager
def computing(name: str, share: float) -> Iterator[None]:
    """A thread that computes for that share of each hundredth of a second."""
    over = threading.Event()

    def compute() -> None:
        while not over.wait(0.01 * (1 - share)):
            end = time.thread_time() + 0.01 * share
            while time.thread_time() < end:
                pass

    thread = threading.Thread(target=compute, name=name)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def windows_of_work(seconds: float) -> int:
    """How many windows count as work while this thread sleeps."""
    work = Activity()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.05)
        work.count()
    return work.count()


def test_what_computes_works() -> None:
    work = Activity()
    while work.count() == 0:
        sum(range(100_000))


def test_what_sleeps_or_looks_now_and_then_does_not_work() -> None:
    """The waiting loops of MPI and Horovod take some hundredths of a core."""
    with computing("user", 0.02):
        assert windows_of_work(0.8) == 0


def test_threads_that_compute_a_batch_work_and_helpers_do_not() -> None:
    with computing("dualeval-beats", 0.9):
        assert windows_of_work(0.8) == 0
    with computing("dualeval-compute_0", 0.9):
        assert windows_of_work(0.8) > 0


def test_who_reads_from_a_slow_disk_works(tmp_path: Path) -> None:
    """It takes no tenth of a core, but moves bytes."""
    file = tmp_path / "weights"
    file.write_bytes(bytes(1 << 20))
    work = Activity()
    with file.open("rb", buffering=0) as content:
        while content.read(1 << 15):
            time.sleep(0.02)
    assert work.count() > 0


def judged(stage: str, *, works: bool, until: int = 2000) -> list[tuple[int, str]]:
    """(second, kind) of each change of how a rank is judged whose steps stand still."""
    judge = Judge(LIMITS, 0)
    found: list[tuple[int, str]] = []
    for now in range(until):
        kind = judge.look(Heartbeat(3, now if works else 0, now, Stage(stage), 17), now).kind
        if not found or found[-1][1] != kind:
            found.append((now, kind))
    return found


LATE = [(61, "computing"), (1801, "stuck")]
# By kind of stage: whether it works, and what follows "going".
JUDGED: dict[str, tuple[list[str], bool, list[tuple[int, str]]]] = {
    "a batch computes": (["load", "transfer", "forward", "metrics"], True, LATE),
    "nothing computes": (["load", "forward", "journal", "setup", "write", "end"], False, [(61, "stuck")]),
    # The main thread sleeps while it waits for a GPU.
    "a GPU computes": (["device"], False, LATE),
    "no batch computes": (["setup", "write", "end"], True, []),
    "a collective polls": (["collective"], True, [(63, "collective")]),
}


@pytest.mark.parametrize(
    ("stage", "works", "later"),
    [
        pytest.param(stage, works, later, id=f"{name} {stage}")
        for name, (stages, works, later) in JUDGED.items()
        for stage in stages
    ],
)
def test_when_a_standstill_is_named_and_given_up(
    stage: str, *, works: bool, later: list[tuple[int, str]]
) -> None:
    assert judged(stage, works=works) == [(0, "going"), *later]


def test_a_forward_that_hangs_after_it_has_computed_is_given_up_soon() -> None:
    judge = Judge(LIMITS, 0)
    kinds = [judge.look(Heartbeat(3, min(now, 100), now, Stage.FORWARD, 17), now).kind for now in range(200)]
    assert kinds.index("stuck") == 161


def test_long_computing_is_said_once() -> None:
    notes: list[str] = []
    monitor = watching(notes)
    for now in range(0, 300, 5):
        assert look(monitor, now, r1=Heartbeat(5, now, now, Stage.FORWARD, 17)) is None
    assert notes == [
        "rank 1 on n1 (pid 4711): computing for 65 s, chunk 17, stage forward; the limit is 1,800 s "
        "(--forward-timeout)"
    ]


def test_who_waits_in_a_collective_for_one_that_works_is_not_named() -> None:
    """All but one have come; that one builds its model for longer than the timeout."""
    monitor = watching()
    found = []
    for now in range(0, 400, 5):
        waiting = Heartbeat(9, now, now, Stage.COLLECTIVE)
        builds = Heartbeat(5, min(now, 295), now, Stage.SETUP)
        found.append(look(monitor, now, r0=waiting, r1=builds, r2=waiting))
    first = next(one for one in found if one is not None)
    assert found.index(first) == 360 // 5
    assert first == (1, "rank 1 on n1 (pid 4711): no progress for 65 s, stage setup")


def test_a_collective_that_hangs_for_all_is_named() -> None:
    """One of them has come to a meeting instead."""
    monitor = watching()
    found = []
    for now in range(0, 71, 2):
        waiting = Heartbeat(9, now, now, Stage.COLLECTIVE)
        found.append(look(monitor, now, r0=waiting, r1=waiting._replace(stage=Stage.MEET), r2=waiting))
    assert found.index((0, "rank 0 on n0 (pid 4711): no progress for 64 s, stage collective")) == 64 // 2


def test_a_backends_collectives_are_steps_of_their_own() -> None:
    progress = Progress()
    seen: list[str] = []

    class Seen(SingleBackend):
        def _all_reduce(self, tensor: torch.Tensor, op: Op) -> None:
            seen.append(progress.position.stage)

        def _broadcast(self, payload: torch.Tensor, src: int) -> None:
            seen.append(progress.position.stage)

        def _gather(self, payload: torch.Tensor, dst: int | None) -> list[torch.Tensor]:
            seen.append(progress.position.stage)
            return super()._gather(payload, dst)

    backend = Seen(World.alone())
    backend.around_collective = lambda: progress.inside(Stage.COLLECTIVE)
    backend.barrier()
    backend.all_reduce(torch.ones(3))
    backend.reduce_mean(torch.ones(3))
    backend.broadcast(torch.ones(3))
    backend.all_gather_json({"a": 1})
    assert seen == ["collective"] * 6
    assert (progress.position.stage, progress.position.steps) == ("setup", 12)


def test_a_process_that_has_ended_is_known() -> None:
    assert not Name.of(0).has_ended
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    start = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
    name = replace(Name.of(1), pid=child.pid, start=start)
    assert name.has_ended, "a zombie"
    child.wait()
    assert name.has_ended
