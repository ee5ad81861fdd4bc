"""The control plane: where ranks meet, tell how far they are, and learn that another one failed.

A torch ``TCPStore`` served by rank 0, whatever the backend. It carries a few bytes per rank and second, so
that collectives are left to the data: they run only among ranks that have met here.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic, sleep
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch.distributed import DistNetworkError, DistStoreError, TCPStore  # type: ignore[attr-defined]

from dualeval.errors import EXIT_FAILED, PeerError, exit_code_of, message_of
from dualeval.store import join_store, serve_store

if TYPE_CHECKING:
    from dualeval.backends.base import Backend

_SAY_WITHIN_S = 10.0
_LEAVE_AFTER_FAILURE_S = 2.0
_REPORT_EVERY_S = 0.5
_SHORTEST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05
# Thousands of ranks waiting together look less often, so that rank 0 answers some 10,000 times a second.
_PAUSE_PER_RANK_S = 1e-4
_GO = "go"
_FAILED = "failed"


class ControlPlane:
    """One rank's view of the control plane; ``open_control_plane`` makes it.

    Every rank calls ``meet`` the same number of times, in the same order.

    Args:
        rank: this rank.
        size: number of ranks.
        store: a client of this rank's own; None where the rank is alone.
        token: start of every key, so that a stray client of another run changes nothing here.
        server: rank 0's serving end, kept alive until ``leave``.
    """

    def __init__(
        self, rank: int, size: int, store: TCPStore | None, token: str, server: TCPStore | None = None
    ) -> None:
        self._rank = rank
        self._size = size
        self._store = store
        self._token = token
        self._server = server
        self._meetings = 0
        self._done = 0
        self._runs = 0
        self._peer_failure: PeerError | None = None
        self._stop = threading.Event()
        self._reporter: threading.Thread | None = None

    def _key(self, name: str) -> str:
        return f"{self._token}/{name}"

    def __enter__(self) -> ControlPlane:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.leave()
        else:
            if not isinstance(error, PeerError):
                self.fail(error)
            self.leave(limit_s=_LEAVE_AFTER_FAILURE_S)

    def meet(self) -> None:
        """Wait, asleep, until every rank has come here.

        Raises:
            PeerError: another rank has failed instead of coming, or rank 0 can no longer be reached.
        """
        number = self._meetings
        self._meetings += 1
        if self._store is None:
            return
        with _rank_0_reachable():
            if self._store.add(self._key(f"arrived/{number}"), 1) == self._size:
                self._store.set(self._key(f"go/{number}"), _GO)
            if self._await(f"go/{number}") == _FAILED:
                raise self._first_failure(self._store)

    def _await(self, name: str, limit_s: float = float("inf")) -> str | None:
        """Wait until a key is set; None after ``limit_s`` seconds without it."""
        assert self._store is not None
        start = monotonic()
        # Looking now and then, not a blocking wait: that one cannot be interrupted, and torch logs its end.
        pause = _SHORTEST_PAUSE_S
        longest = max(_LONGEST_PAUSE_S, self._size * _PAUSE_PER_RANK_S)
        while not self._store.check([self._key(name)]):
            if monotonic() - start > limit_s:
                return None
            sleep(pause)
            pause = min(1.5 * pause, longest)
        return bytes(self._store.get(self._key(name))).decode()

    def fail(self, error: BaseException) -> PeerError:
        """Tell the others that this rank failed and why.

        Returns:
            The failure that was told first, which may be another rank's: the one to report. This rank's own
            where nobody can be told.
        """
        failure = {"rank": self._rank, "exit_code": exit_code_of(error), "message": message_of(error)}
        if self._store is None:
            return _to_error(failure)
        try:
            with _rank_0_reachable():
                if self._store.add(self._key("failures"), 1) == 1:
                    self._store.set(self._key("failure"), json.dumps(failure))
                # A rank can wait at most at the next meeting that this one would have come to.
                self._store.set(self._key(f"go/{self._meetings}"), _FAILED)
                return self._first_failure(self._store)
        except PeerError:
            return _to_error(failure)

    def raise_if_peer_failed(self) -> None:
        """Raise PeerError where the reporter has seen another rank's failure; costs nothing otherwise."""
        if self._peer_failure is not None:
            raise self._peer_failure

    def _first_failure(self, store: TCPStore) -> PeerError:
        """The failure that was told first."""
        # The store's get waits: the failure is counted a moment before it is written.
        return _to_error(json.loads(store.get(self._key("failure"))))

    def add_done(self, samples: int) -> None:
        """Count samples that this rank has finished; the reporter passes the sum on."""
        self._done += samples

    def start_reporting(self, show: Callable[[int], None] | None) -> None:
        """Start the thread that reports this rank's progress and looks for failures.

        Args:
            show: called with the samples done over all ranks, every half second, from that thread; None
                where nobody looks.
        """
        if self._store is None and show is None:
            return
        self._done = 0
        self._runs += 1
        client = None if self._store is None else self._store.clone()  # type: ignore[attr-defined]
        self._reporter = threading.Thread(
            target=self._report,
            args=(client, show, self._key(f"done/{self._runs}")),
            name="dualeval-reporter",
            daemon=True,
        )
        self._reporter.start()

    def _report(self, client: TCPStore | None, show: Callable[[int], None] | None, counter: str) -> None:
        told = 0
        stopped = False
        while not stopped:
            stopped = self._stop.wait(_REPORT_EVERY_S)
            done = total = self._done
            if client is not None:
                try:
                    with _rank_0_reachable():
                        total = client.add(counter, done - told)
                        if client.check([self._key("failure")]):
                            self._peer_failure = self._first_failure(client)
                except PeerError as unreachable:
                    self._peer_failure = unreachable
                    return
                told = done
            if show is not None:
                show(total)

    def stop_reporting(self) -> None:
        """End the reporter after one last report."""
        if self._reporter is not None:
            self._stop.set()
            self._reporter.join()
            self._reporter = None
            self._stop.clear()

    def leave(self, limit_s: float = 10.0) -> None:
        """Leave in order: rank 0, who serves the others, goes last. Later calls do nothing."""
        self.stop_reporting()
        if self._store is None:
            return
        # Where rank 0 has gone already there is no order to keep.
        with suppress(PeerError), _rank_0_reachable():
            if self._store.add(self._key("left"), 1) == self._size:
                self._store.set(self._key("all-left"), _GO)
            if self._rank == 0:
                self._await("all-left", limit_s)
        self._store = self._server = None

    def leave_after_message(self, say: Callable[[], None]) -> None:
        """Leave after a failure; one rank says why, rank 0 if it can, and all end together.

        A launcher ends all ranks when the first one fails; it must not end rank 0 before it has spoken. But
        rank 0 may be in the midst of a long batch: after ``_SAY_WITHIN_S`` another rank speaks for it.
        """
        first = True  # and if rank 0 is gone, nobody else is known to be there
        if self._store is not None:
            with suppress(PeerError), _rank_0_reachable():
                if self._rank != 0:
                    self._await("said", limit_s=_SAY_WITHIN_S)
                first = self._store.add(self._key("speakers"), 1) == 1
        if first:
            say()
        if self._store is not None:
            with suppress(PeerError), _rank_0_reachable():
                self._store.set(self._key("said"), _GO)
        self.leave(limit_s=_LEAVE_AFTER_FAILURE_S)


@contextmanager
def _rank_0_reachable() -> Iterator[None]:
    """Turn the store's errors into the news that rank 0 is gone."""
    try:
        yield
    except (DistNetworkError, DistStoreError) as error:
        raise PeerError(
            "rank 0 can no longer be reached: it ended, or its host or network did",
            rank=0,
            exit_code=EXIT_FAILED,
        ) from error


def _to_error(failure: dict[str, Any]) -> PeerError:
    return PeerError(failure["message"], rank=failure["rank"], exit_code=failure["exit_code"])


def open_control_plane(backend: Backend) -> ControlPlane:
    """Open the control plane of a run. A collective: every rank calls it.

    Rank 0 serves on a port that the kernel picks and offers its addresses through the backend; each rank
    takes the first that answers.

    Raises:
        BackendError: no address answered; names those that were tried.
    """
    world = backend.world
    if world.size == 1:
        return ControlPlane(0, 1, None, "")
    server = None
    words: dict[str, Any] | None = None
    if world.is_main:
        server, offer = serve_store(world)
        words = {"token": secrets.token_hex(8), "offer": offer}
    words = backend.broadcast_json(words, src=0)
    assert isinstance(words, dict)
    store = join_store(words["offer"], world.rank, "the control plane")
    return ControlPlane(world.rank, world.size, store, words["token"], server)
