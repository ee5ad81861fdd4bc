"""Who is named for standing still, and when: signs as ranks tell them, on a clock that the test moves."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from dualeval.engine.control.beats import Clock, Monitor, Name, Pulse, Sign, Standstill
from dualeval.engine.progress import Progress

NAMES = {rank: Name(rank=rank, host=f"n{rank}", pid=4711, space="here") for rank in range(3)}
SIGN = Sign(steps=5, beat=1, stage="load", chunk=17)


def look(monitor: Monitor, now: float, **changed: Sign) -> tuple[int, str] | None:
    """What the monitor says where all ranks go on, but for those given as r0, r1, ...."""
    signs = {rank: Sign(steps=int(now * 100), beat=int(now * 10), stage="forward", chunk=1) for rank in NAMES}
    return monitor.look({**signs, **{int(name[1:]): sign for name, sign in changed.items()}}, now)


def test_a_sign_travels_as_text() -> None:
    for sign in (SIGN, Sign(steps=0, beat=3, stage="setup"), replace(SIGN, saved=12)):
        assert Sign.read(str(sign)) == sign


def test_who_goes_on_is_not_named() -> None:
    monitor = Monitor(NAMES, 60, 0)
    assert [look(monitor, now) for now in (1.0, 50.0, 100.0, 200.0)] == [None] * 4


def test_who_makes_no_progress_is_named_with_its_place() -> None:
    monitor = Monitor(NAMES, 60, 0)
    assert look(monitor, 10, r2=SIGN) is None
    assert look(monitor, 69, r2=replace(SIGN, beat=100)) is None
    assert look(monitor, 72, r2=replace(SIGN, beat=106)) == (
        2,
        "rank 2 on n2 (pid 4711): no progress for 62 s, chunk 17, stage load",
    )


def test_who_waits_for_others_is_not_named_as_long_as_it_lives() -> None:
    monitor = Monitor(NAMES, 60, 0)
    waiting = replace(SIGN, stage="meet", chunk=None)
    for now in range(0, 1000, 10):
        assert look(monitor, now, r1=replace(waiting, beat=now)) is None
    assert look(monitor, 1060, r1=replace(waiting, beat=990)) == (
        1,
        "rank 1 on n1 (pid 4711): no progress for 70 s, stage meet, and no sign of life",
    )


def test_who_does_not_live_is_named_before_those_it_holds_up() -> None:
    """All stand in a collective since the same moment; one of them was stopped there."""
    monitor = Monitor(NAMES, 60, 0)
    reducing = Sign(steps=9, beat=0, stage="reduce")
    for now in (0.0, 30.0):
        assert look(monitor, now, **{f"r{rank}": replace(reducing, beat=int(now)) for rank in NAMES}) is None
    found = look(
        monitor,
        91.0,
        r0=replace(reducing, beat=91),
        r1=replace(reducing, beat=30),
        r2=replace(reducing, beat=91),
    )
    assert found is not None
    assert found[0] == 1


def test_who_has_saved_everything_has_nothing_more_to_do() -> None:
    monitor = Monitor(NAMES, 60, 0)
    for now in (1.0, 200.0):
        assert look(monitor, now, r1=replace(SIGN, saved=4, beat=int(now))) is None


def test_an_observer_that_was_stopped_blames_nobody() -> None:
    moments = iter([0.0, 0.5, 1.0, 601.0, 601.5])
    clock = Clock(2.0, lambda: next(moments))
    assert [clock.now() for _ in range(4)] == [0.5, 1.0, 3.0, 3.5]


def test_a_standstill_begins_with_the_last_change() -> None:
    still = Standstill(0.0)
    assert [still.seconds(value, now) for value, now in ((1, 1.0), (1, 4.0), (2, 5.0), (2, 7.5))] == [
        0,
        3,
        0,
        2.5,
    ]


def test_setting_up_counts_what_is_computed() -> None:
    progress = Progress()
    pulse = Pulse(progress)
    before = pulse.steps()
    while pulse.steps() == before:
        sum(range(100_000))
    progress.step("load", 3)
    assert (pulse.steps(), pulse.sign().chunk) == (1, 3)


def test_a_process_that_has_ended_is_known() -> None:
    assert not Name.own(0).has_ended()
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    name = replace(Name.own(1), pid=child.pid)
    assert name.has_ended(), "a zombie"
    child.wait()
    assert name.has_ended()


@pytest.mark.parametrize("stage", ["load", "forward", "journal"])
def test_progress_is_one_value(stage: str) -> None:
    progress = Progress()
    progress.step(stage, 7)  # type: ignore[arg-type]
    assert (progress.place.count, str(progress.place)) == (1, f"chunk 7, stage {stage}")
