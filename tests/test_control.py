"""The control plane: ranks meet, count together and hear of the first failure. Ranks are threads here."""

from __future__ import annotations

import queue
import re
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from torch.distributed import DistNetworkError

from dualeval import store
from dualeval.backends.base import Backend
from dualeval.engine.control import plane as control_module
from dualeval.engine.control.plane import ControlPlane, open_control_plane
from dualeval.errors import DualevalError, PeerError, UsageError
from dualeval.world import World

LIMIT_S = 30.0


class _OfferOnly:
    """The one thing that opening needs of a backend: rank 0's offer reaches the others."""

    def __init__(self, rank: int, size: int, offers: queue.Queue[Any]) -> None:
        self.world = World(
            rank=rank, size=size, local_rank=rank, local_size=size, node_rank=0, launcher="torchrun"
        )
        self._offers = offers

    def broadcast_json(self, value: Any, src: int = 0) -> Any:
        if self.world.is_main:
            for _ in range(self.world.size - 1):
                self._offers.put(value)
            return value
        return self._offers.get(timeout=LIMIT_S)


def on_ranks(size: int, work: Callable[[int, ControlPlane], Any]) -> list[Any]:
    """Run ``work(rank, control plane)`` on every rank at once; results, or the exception, in rank order."""
    offers: queue.Queue[Any] = queue.Queue()

    def rank(number: int) -> Any:
        control = open_control_plane(cast(Backend, _OfferOnly(number, size, offers)))
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


def test_alone_nothing_is_waited_for() -> None:
    def work(rank: int, control: ControlPlane) -> str:
        control.meet()
        control.raise_if_peer_failed()
        return str(control.fail(UsageError("wrong")))

    assert on_ranks(1, work) == ["wrong"]


def test_the_first_failure_is_everybodys() -> None:
    def work(rank: int, control: ControlPlane) -> Any:
        control.meet()
        if rank == 1:
            return control.fail(UsageError("rank 1 found it wrong"))
        control.meet()
        return None

    errors = on_ranks(3, work)
    assert [type(error) for error in errors] == [PeerError, PeerError, PeerError]
    assert {(str(error), error.rank, error.exit_code) for error in errors} == {
        ("rank 1 found it wrong", 1, 2)
    }


def test_an_unexpected_error_is_told_with_its_type() -> None:
    def work(rank: int, control: ControlPlane) -> Any:
        if rank == 0:
            return control.fail(ZeroDivisionError("division by zero"))
        control.meet()
        return None

    for error in on_ranks(2, work):
        assert (str(error), error.exit_code) == ("ZeroDivisionError: division by zero", 1)


def test_the_reporter_sums_over_ranks_and_hears_of_failures() -> None:
    counted, heard = threading.Event(), threading.Event()

    def show(done: int) -> None:
        if done == 30:
            counted.set()

    def work(rank: int, control: ControlPlane) -> Any:
        control.begin_run(show if rank == 0 else None)
        control.add_done(10 * (rank + 1))
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
    class Elsewhere(_OfferOnly):
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

        class Offered(_OfferOnly):
            def broadcast_json(self, value: Any, src: int = 0) -> Any:
                return {"token": "t", "offer": {"port": port, "addresses": ["127.0.0.1"]}}

        monkeypatch.setattr(store, "TCPStore", refuse)
        with pytest.raises(DualevalError) as caught:
            open_control_plane(cast(Backend, Offered(1, 2, queue.Queue())))
    assert str(caught.value) == (
        f"rank 1 cannot join rank 0 for the control plane at 127.0.0.1:{port}: the client socket has timed "
        "out"
    )


def test_without_rank_0_it_is_said_so() -> None:
    met, ended = threading.Event(), threading.Event()

    def work(rank: int, control: ControlPlane) -> Any:
        control.meet()
        if rank == 0:
            assert met.wait(LIMIT_S)
            control._store = control._server = None  # as when the process is gone
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
    monkeypatch.setattr(control_module, "_SAY_WITHIN_S", 0.1)
    spoken: list[int] = []
    others_spoke = threading.Event()

    def work(rank: int, control: ControlPlane) -> None:
        control.meet()
        if rank == 0:
            assert others_spoke.wait(LIMIT_S)

        def say() -> None:
            spoken.append(rank)
            others_spoke.set()

        control.fail(DualevalError("broken"))
        control.leave_after_message(say)

    on_ranks(3, work)
    assert len(spoken) == 1
    assert spoken[0] != 0


def test_rank_0_speaks_where_it_can() -> None:
    spoken: list[int] = []

    def work(rank: int, control: ControlPlane) -> None:
        control.fail(DualevalError("broken"))
        control.leave_after_message(lambda: spoken.append(rank))

    on_ranks(3, work)
    assert spoken == [0]


def test_as_a_context_it_tells_and_leaves() -> None:
    def work(rank: int, control: ControlPlane) -> None:
        with control:
            if rank == 1:
                raise UsageError("rank 1 alone")
            control.meet()

    errors = on_ranks(2, work)
    assert [type(error) for error in errors] == [PeerError, UsageError]
    assert str(errors[0]) == "rank 1 alone"


def test_a_second_run_counts_from_nothing() -> None:
    def work(rank: int, control: ControlPlane) -> list[int]:
        last = []
        for _ in range(2):
            shown: list[int] = []
            control.begin_run(shown.append if rank == 0 else None)
            control.add_done(5)
            if rank == 1:
                control.end_run()
            control.meet()
            control.end_run()
            control.meet()
            last.append(shown[-1] if shown else 0)
        return last

    assert on_ranks(2, work)[0] == [10, 10]
