"""The control plane: ranks meet, count together and hear of the first failure. Ranks are threads here."""

from __future__ import annotations

import queue
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]

from dualeval.backends.base import Backend
from dualeval.engine.control import meeting, plane
from dualeval.engine.control.plane import ControlPlane, open_control_plane
from dualeval.engine.control.verdict import NO_VERDICT, Turn, Verdict, propose
from dualeval.engine.end.conclusion import ALL_SAVED_WITHIN_S
from dualeval.errors import EXIT_STOPPED, DualevalError, LaunchError, PeerError, Stopped, UsageError
from dualeval.world import store
from dualeval.world.waiting import limit_for, pause_for
from tests.vehicles.control_ranks import OfferOnly, fail_in_the_middle, on_many_ranks, stop_all, until
from tests.vehicles.faults import LOADED_S

LIMIT_S = 30.0


def on_ranks(size: int, work: Callable[[int, ControlPlane], Any]) -> list[Any]:
    """Run ``work(rank, control plane)`` on every rank at once; results, or the exception, in rank order."""
    offers: queue.Queue[Any] = queue.Queue()

    def rank(number: int) -> Any:
        control = open_control_plane(cast(Backend, OfferOnly(number, size, offers)))
        try:
            return work(number, control)
        except DualevalError as error:
            return error
        finally:
            control.leave()

    with ThreadPoolExecutor(size) as pool:
        return [future.result(LIMIT_S) for future in [pool.submit(rank, number) for number in range(size)]]


def test_nobody_goes_on_before_the_last_has_come() -> None:
    came = threading.Event()

    def work(rank: int, control: ControlPlane) -> bool:
        if rank == 2:
            came.set()
        control.meet()
        return came.is_set()

    assert on_ranks(3, work) == [True, True, True]


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        (UsageError("rank 1 found it wrong"), "rank 1 found it wrong", 2),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero", 1),
    ],
)
def test_the_first_failure_is_that_of_all_ranks(error: Exception, said: str, code: int) -> None:
    def work(rank: int, control: ControlPlane) -> Any:
        control.meet()
        if rank == 1:
            return control.fail(error)
        control.meet()
        return None

    told = on_ranks(3, work)
    assert {(str(each), each.rank, each.exit_code) for each in told} == {(said, 1, code)}
    assert all(isinstance(each, PeerError) and isinstance(each, UsageError) == (code == 2) for each in told)


def test_the_reporter_sums_over_ranks_and_hears_of_failures() -> None:
    counted, heard = threading.Event(), threading.Event()

    def show(done: int) -> None:
        if done == 30:
            counted.set()

    def work(rank: int, control: ControlPlane) -> Any:
        control.begin_run(show if rank == 0 else None).done = 10 * (rank + 1)
        if rank == 0:
            assert counted.wait(LIMIT_S)
            control.fail(DualevalError("enough"))
            heard.set()
            return None
        assert heard.wait(LIMIT_S)
        while True:  # ends by the error that the reporter brings
            control.raise_if_peer_failed()

    assert str(on_ranks(2, work)[1]) == "enough"


def test_unreachable_addresses_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(OfferOnly):
        def broadcast_json(self, value: Any, src: int = 0) -> Any:
            return {"token": "t", "offer": {"port": 1, "addresses": ["127.0.0.1", "127.0.0.2"]}}

    backend = cast(Backend, Elsewhere(1, 2, queue.Queue()))
    with pytest.raises(DualevalError, match=r"rank 1 cannot reach .*127.0.0.1:1 \(.*127.0.0.2:1 \("):
        open_control_plane(backend)


def test_a_store_that_cannot_be_joined_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a line: torch's own error is pages of C++ frames."""

    def refuse(*_: Any, **__: Any) -> None:
        raise DistNetworkError("the client socket has timed out\nException raised from throwTimeoutError")

    with socket.create_server(("127.0.0.1", 0)) as reachable:
        port = reachable.getsockname()[1]

        class Offered(OfferOnly):
            def broadcast_json(self, value: Any, src: int = 0) -> Any:
                return {"token": "t", "offer": {"port": port, "addresses": ["127.0.0.1"]}}

        monkeypatch.setattr(store, "TCPStore", refuse)
        with pytest.raises(DualevalError) as caught:
            open_control_plane(cast(Backend, Offered(1, 2, queue.Queue())))
    assert str(caught.value) == (
        f"rank 1 cannot join rank 0 for the control plane at 127.0.0.1:{port}: the client socket has timed "
        "out"
    )


def test_a_missing_rank_0_is_named() -> None:
    met, ended = threading.Event(), threading.Event()

    def work(rank: int, control: ControlPlane) -> Any:
        control.meet()
        if rank == 0:
            assert met.wait(LIMIT_S)
            control._meetings = control._server = None  # as when the process is gone
            ended.set()
            return None
        met.set()
        assert ended.wait(LIMIT_S)
        try:
            control.meet()
        except PeerError as error:
            # Its own failure is still told, if only to whoever reads this rank's output.
            return str(error), str(control.fail(UsageError("mine")))
        return None

    seen, own = on_ranks(2, work)[1]
    assert re.match(r"rank 0 on \S+ \(pid \d+\) can no longer be reached", seen)
    assert own == "mine"


def test_another_rank_speaks_where_rank_0_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_SPEAK_WITHIN_S", 0.1)
    spoken: list[int] = []
    others_spoke = threading.Event()

    def say(rank: int) -> None:
        spoken.append(rank)
        others_spoke.set()

    def work(rank: int, control: ControlPlane) -> None:
        control.meet()
        if rank == 0:
            assert others_spoke.wait(LIMIT_S)

        control.fail(DualevalError("broken"))
        control.speak(Turn.IF_FIRST, lambda: say(rank), lambda action: action())
        control.leave()

    on_ranks(3, work)
    assert len(spoken) == 1
    assert spoken[0] != 0


# -- the verdict -------------------------------------------------------------------------------------------


@pytest.fixture
def clients() -> list[TCPStore]:
    """A store with no verdict yet, and a client of each of two ranks."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set("verdict", NO_VERDICT)
    return [server, server.clone()]  # type: ignore[attr-defined]


# What a rank may propose, by its number.
VERDICTS: dict[str, Callable[[int], Verdict]] = {
    "stop": lambda rank: Verdict.stop(rank, "SIGTERM"),
    "failure": lambda rank: Verdict.failure(rank, "it hangs"),
    "attempt": lambda rank: Verdict.own_failure(rank, DualevalError("this one"), f"rank {rank}", 1),
    "next attempt": lambda rank: Verdict.own_failure(rank, DualevalError("the next"), f"rank {rank}", 2),
    "end": lambda rank: Verdict(kind="end", rank=rank, exit_code=75),
}


def test_another_ranks_usage_error_is_caught_as_ones_own() -> None:
    error = Verdict.own_failure(1, UsageError("wrong"), "rank 1 on n1 (pid 1)").to_error()
    assert isinstance(error, UsageError)
    assert (str(error), error.rank, error.exit_code, error.where) == ("wrong", 1, 2, "rank 1 on n1 (pid 1)")
    assert not isinstance(VERDICTS["failure"](1).to_error(), UsageError)


@pytest.mark.parametrize(
    ("first", "second", "holds"),
    [
        *((first, later, 0) for first in ("failure", "end") for later in ("failure", "stop", "end")),
        *(("stop", "stop", 0), ("stop", "failure", 1), ("stop", "end", 1)),
        *(("attempt", later, 1) for later in ("failure", "stop", "end", "next attempt")),
        *((earlier, "attempt", 0) for earlier in VERDICTS),
    ],
)
def test_the_first_verdict_holds_but_a_stop_gives_way(
    clients: list[TCPStore], first: str, second: str, holds: int
) -> None:
    """The first one, but that a stop gives way; whoever proposes reads what holds."""
    proposed = [VERDICTS[first](0), VERDICTS[second](1)]
    assert propose(clients[0], "verdict", proposed[0]) == proposed[0]
    assert propose(clients[1], "verdict", proposed[1]) == proposed[holds]
    assert Verdict.read(clients[0].get("verdict")) == proposed[holds]


def test_one_of_many_verdicts_at_once_holds_for_all(clients: list[TCPStore]) -> None:
    """All proposed at the same moment, each by its rank."""
    with ThreadPoolExecutor(16) as pool:
        stores = [clients[0].clone() for _ in range(16)]  # type: ignore[attr-defined]
        together = threading.Barrier(16)

        def give(rank: int) -> tuple[Verdict, Verdict]:
            own = VERDICTS["failure"](rank)
            together.wait(LIMIT_S)
            return own, propose(stores[rank], "verdict", own)

        given = list(pool.map(give, range(16)))
    assert len({held for _, held in given}) == 1
    assert given[0][1] == Verdict.read(clients[0].get("verdict"))


def test_a_stop_that_one_rank_cannot_save_is_a_failure() -> None:
    def work(rank: int, control: ControlPlane) -> Any:
        control.meet()
        if rank == 0:
            control.stop("SIGINT")
        # The failure may have taken the stop's place before this rank has looked.
        until(control, lambda: control.stopping or control.failure)
        if rank == 1:
            control.fail_to_save("no room")
        else:
            control.saved(1)
        assert control.all_saved.wait(LIMIT_S)
        until(control, lambda: control.verdict is not None and control.verdict.kind != "stop")
        return control.verdict and control.verdict.kind, str(control.failure)

    assert on_ranks(3, work) == [("failure", "what was finished could not be saved: no room")] * 3


def test_rank_0_counts_who_has_saved() -> None:
    """By their heartbeats, which come as soon as a rank has saved."""

    def work(rank: int, control: ControlPlane) -> Any:
        control.meet()
        if rank == 0:
            control.stop("SIGTERM")
        until(control, lambda: control.stopping)
        control.saved(rank + 1)
        assert control.all_saved.wait(LIMIT_S / 2)
        if rank != 0:
            return control.end_code
        control.report_end(EXIT_STOPPED)
        return control.missing, control.saved_by_all

    assert on_ranks(4, work) == [([], 1 + 2 + 3 + 4), EXIT_STOPPED, EXIT_STOPPED, EXIT_STOPPED]


def test_a_rank_that_hears_of_the_end_first_is_stopped() -> None:
    """It was suspended while the others were asked to end."""

    def work(rank: int, control: ControlPlane) -> Any:
        control.meet()
        if rank == 0:
            control.stopping = "SIGINT"
            control.report_end(EXIT_STOPPED)
        until(control, lambda: control.stopping)
        return control.stopping, control.end_code

    assert on_ranks(2, work) == [("SIGINT", EXIT_STOPPED)] * 2


@pytest.mark.parametrize(
    ("size", "limit"), [(1, 4.0), (64, 4.0), (1000, 4.0), (3072, 12.288), (4096, 16.384)]
)
def test_more_ranks_are_waited_for_longer(size: int, limit: float) -> None:
    """Rank 0 of 3,072 knew that all had saved after 5.67 s, and gave them up after 4."""
    assert limit_for(size, ALL_SAVED_WITHIN_S) == pytest.approx(limit)
    # The others hear of a stop with a beat, and rank 0 that they have saved with the next.
    assert limit > 2 * pause_for(size, 2, 0.05)


@pytest.mark.parametrize("size", [1, 3])
def test_an_attempt_that_fails_ends_on_all_ranks_and_the_next_begins(size: int) -> None:
    """Ranks have met, and begun to count, more often than the one on which it breaks."""
    bad = size - 1

    def work(rank: int, control: ControlPlane) -> list[Any]:
        found: list[Any] = []
        for number in range(3):
            try:
                control.meet()
                if rank == bad and number == 1:
                    raise ValueError("broken")
                control.begin_run()
                claimed = control.claim()
                control.meet()
            except (ValueError, PeerError) as error:
                if not isinstance(error, PeerError):
                    control.fail_attempt(error)
                failure = control.end_attempt(went_well=False)
                found.append((str(failure), failure and failure.rank))
            else:
                assert control.end_attempt(went_well=True) is None
                found.append(claimed)
            control.end_run()
        return found

    ranks = on_ranks(size, work)
    failed = ("ValueError: broken", bad)
    assert [found[1] for found in ranks] == [failed] * size
    for number in (0, 2):
        assert sorted(found[number] for found in ranks) == [*range(size)]


def test_a_rank_that_was_through_hears_that_the_attempt_failed() -> None:
    def work(rank: int, control: ControlPlane) -> str | None:
        control.meet()
        if rank == 1:
            control.fail_attempt(DualevalError("after the last meeting"))
        failure = control.end_attempt(went_well=rank != 1)
        return None if failure is None else str(failure)

    assert on_ranks(2, work) == ["after the last meeting"] * 2


@pytest.mark.parametrize("went_well", [False, True])
def test_a_stop_ends_the_wait_for_an_attempt_that_did_not_go_well(went_well: bool) -> None:
    def work(rank: int, control: ControlPlane) -> Any:
        control.stop("SIGTERM")
        return control.end_attempt(went_well=went_well)

    [found] = on_ranks(1, work)
    assert found is None if went_well else isinstance(found, Stopped)


# -- many ranks --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """All came to the collective before; ranks 1 and 3 never come to the control plane."""
    monkeypatch.setattr(plane, "_FIRST_MEETING_WITHIN_S", 0.3)
    offers: queue.Queue[Any] = queue.Queue()

    def rank(number: int) -> str:
        backend = OfferOnly(number, 4, offers)
        if number in (1, 3):
            backend.broadcast_json(None)
            return ""
        with pytest.raises(PeerError) as caught:
            open_control_plane(cast(Backend, backend), 0.3)
        return str(caught.value)

    with ThreadPoolExecutor(4) as pool:
        said = [future.result(LIMIT_S) for future in [pool.submit(rank, number) for number in range(4)]]
    assert said[0] == said[2]
    assert said[0] == (
        "ranks 1 and 3 have not come to the control plane within 0 s of a collective that all ranks had "
        "reached"
    )


@pytest.mark.long
def test_rank_0_may_open_as_many_files_as_it_has_ranks() -> None:
    """In a process of its own: the hard limit does not go up again."""
    code = (
        "import resource\n"
        "from dualeval.errors import LaunchError\n"
        "from dualeval.world.store import allow_connections\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))\n"
        "allow_connections(200, 'rank 0')\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1024, 4096)\n"
        "allow_connections(2 * 1000, 'rank 0')\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (4096, 4096)\n"
        "try:\n"
        "    allow_connections(2 * 2000, 'rank 0')\n"
        "except LaunchError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    wanted = r"rank 0 needs 4,\d+ open files.* may have 4,096 \(ulimit -Hn\)\. Type 'ulimit -n 4\d+'"
    assert re.match(wanted, done.stdout), done


def test_too_few_files_are_said_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise LaunchError("rank 0 needs 9,000 open files")

    monkeypatch.setattr(store, "serve_store", refuse)
    offers: queue.Queue[Any] = queue.Queue()

    def rank(number: int) -> str:
        with pytest.raises(LaunchError) as caught:
            open_control_plane(cast(Backend, OfferOnly(number, 3, offers)))
        return str(caught.value)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(rank, range(3))) == ["rank 0 needs 9,000 open files"] * 3


# -- many ranks on one machine, few as its cores may be: one control plane, and the digest of one process


CONTROLLED = pytest.mark.parametrize(
    ("size", "processes"),
    [(128, 2), pytest.param(1000, 4, marks=[pytest.mark.long, pytest.mark.timeout(600)])],
)


@CONTROLLED
def test_a_failure_reaches_all(size: int, processes: int) -> None:
    """Promised within 2 s of a rank's failure; the ranks of a process are in each other's way here."""
    moments = on_many_ranks(size, processes, fail_in_the_middle)
    assert all(isinstance(of_rank, dict) for of_rank in moments), moments
    failed = moments[size // 2]["failed"]
    heard = [of_rank["heard"] - failed for of_rank in moments if "failed" not in of_rank]
    print(f"{size} ranks: heard after {max(heard):.2f} s; {moments[0]}")
    assert max(heard) < 2.0 + LOADED_S
    # Rank 0 evaluates beside it.
    assert moments[0]["cores of beats"] < 0.1


@CONTROLLED
def test_a_stop_is_concluded_by_all(size: int, processes: int) -> None:
    moments = on_many_ranks(size, processes, stop_all)
    assert all(isinstance(of_rank, dict) for of_rank in moments), moments
    signalled = moments[size // 2]["signalled"]
    ended = max(of_rank["ended"] for of_rank in moments) - signalled
    print(f"{size} ranks: ended after {ended:.2f} s")
    assert ended < 5.0 + LOADED_S
