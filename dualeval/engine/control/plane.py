"""The control plane: where ranks meet, share out chunks, tell how far they are, and learn that one failed.

A torch ``TCPStore`` served by rank 0, whatever the backend. It carries a few bytes per rank and second, so
that collectives are left to the data: they run only among ranks that have met here.

A call to the store may hang for as long as rank 0's host is stopped or cut off. So the main thread and the
thread that tells this rank's signs each have a client of their own, and who watches them makes no call.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from time import monotonic, sleep
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch.distributed import DistNetworkError, DistStoreError, TCPStore  # type: ignore[attr-defined]

from dualeval.engine.control.beats import Clock, Monitor, Name, Pulse, Sign
from dualeval.engine.progress import Progress
from dualeval.errors import EXIT_FAILED, DualevalError, PeerError, Stopped, exit_code_of, message_of
from dualeval.network import at
from dualeval.store import join_store, names_of_absent, serve_store
from dualeval.waiting import CONNECTED, STARTED, waiting

if TYPE_CHECKING:
    from dualeval.backends.base import Backend

_SAY_WITHIN_S = 3.0
_LEAVE_AFTER_FAILURE_S = 2.0
_BEAT_EVERY_S = 0.5
# mpirun leaves a second between SIGTERM and SIGKILL.
_BEAT_WHILE_STOPPING_S = 0.05
_END_TOLD_WITHIN_S = 0.3
_LAST_REPORT_WITHIN_S = 2.0
_SHORTEST_PAUSE_S = 0.001
_SHORTEST_WAIT_S = 0.05
_LONGEST_PAUSE_S = 0.05
# Thousands of ranks waiting together look less often, so that rank 0 answers some 10,000 times a second.
_PAUSE_PER_RANK_S = 1e-4
_GO = "go"
_FAILED = "failed"
# What the key "news" holds, which every rank looks at with every beat.
_NO_NEWS = "-"
_FAILURE = "failure"
_STOP = "stop"
_ENDED = "ended"
_LEFT = "left"


@dataclass
class _Counted:
    """A run whose samples are being counted.

    Attributes:
        key: where all ranks' samples are added up.
        show: called with that sum; None where nobody looks.
        done: this rank's samples so far.
        told: how many of them have been added.
        claimed: chunks that were taken, where this rank is alone.
        total: samples of all ranks, as far as is known here.
        last: set where the next report is to be the last.
        summed: set when ``total`` holds what all had done then.
        ended: set when that has been shown.
    """

    key: str
    show: Callable[[int], None] | None
    last: threading.Event
    summed: threading.Event
    ended: threading.Event
    done: int = 0
    total: int | None = None
    told: int = 0
    claimed: int = 0


class ControlPlane:
    """One rank's view of the control plane; ``open_control_plane`` makes it.

    Every rank calls ``meet`` the same number of times, in the same order.

    Args:
        name: this rank.
        first: rank 0.
        size: number of ranks.
        store: a client of this rank's own; None where the rank is alone.
        token: start of every key, so that a stray client of another run, or of this one before a restart,
            changes nothing here.
        server: rank 0's serving end, kept alive until ``leave``.
        timeout_s: how long a rank may stand still; None watches nobody.

    Attributes:
        progress: what this rank's main thread is at.
        timeout_s: as given.
        answers: grows with every answer of the store to this rank's signs.
        news: set when another rank's failure or a stop has been heard of, for who watches.
        all_saved: set on rank 0 when all ranks have told that they have ``saved``; on the others when rank 0
            has written that down.
        end_code: on the others, then: what rank 0 ends with.
    """

    def __init__(
        self,
        name: Name,
        first: Name,
        size: int,
        store: TCPStore | None,
        token: str,
        server: TCPStore | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.name = name
        self.first = first
        self.timeout_s = timeout_s
        self.progress = Progress()
        self.answers = 0
        self.news = threading.Event()
        self.all_saved = threading.Event()
        self.end_code: int | None = None
        self._rank = name.rank
        self._size = size
        self._store = store
        self._token = token
        self._server = server
        self._pulse = Pulse(self.progress)
        self._meetings = 0
        self._counted_runs = 0
        self._counted: _Counted | None = None
        self._each: Callable[[], str | None] | None = None
        self._peer_failure: PeerError | None = None
        self._own_failure: dict[str, Any] | None = None
        self._stop: str | None = None
        self._stop_told = False
        self._saved: int | None = None
        self._saved_by_all: dict[int, int] = {}
        self._names: dict[int, Name] = {name.rank: name}
        self._end: str | None = None
        self._end_told = threading.Event()
        self._left = False
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._beats: threading.Thread | None = None
        self._attending = threading.Lock()
        self._attend_now = threading.Event()
        self._attendant: threading.Thread | None = None

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

    # -- meeting and sharing out, on the main thread -----------------------------------------------

    def meet(self) -> None:
        """Wait, asleep, until every rank has come here.

        Raises:
            PeerError: another rank has failed instead of coming, or rank 0 can no longer be reached.
            Stopped: a signal has asked the run to end.
        """
        number = self._meetings
        self._meetings += 1
        if self._store is None:
            self.check()
            return
        before = self.progress.place
        self.progress.step("meet", before.chunk)
        with _rank_0_reachable(self.first):
            if self._store.add(self._key(f"arrived/{number}"), 1) == self._size:
                self._store.set(self._key(f"go/{number}"), _GO)
            if self._await(f"go/{number}", watch=True) == _FAILED:
                raise self._first_failure(self._store)
        self.progress.step(before.stage, before.chunk)

    def _await(self, name: str, limit_s: float = float("inf"), *, watch: bool = False) -> str | None:
        """Wait until a key is set; None after ``limit_s`` seconds without it."""
        assert self._store is not None
        start = monotonic()
        # Looking now and then, not a blocking wait: that one cannot be interrupted, and torch logs its end.
        pause = _SHORTEST_PAUSE_S
        longest = max(_LONGEST_PAUSE_S, self._size * _PAUSE_PER_RANK_S)
        while not self._store.check([self._key(name)]):
            if monotonic() - start > limit_s:
                return None
            if watch:
                self.raise_if_peer_failed()
                # All may have come, a moment before the signal.
                if self._stop is not None and not self._store.check([self._key(name)]):
                    raise Stopped(self._stop)
            sleep(pause)
            pause = min(1.5 * pause, longest)
        return bytes(self._store.get(self._key(name))).decode()

    def claim(self) -> int:
        """Take the next number of the run that is counted, from 0; no other rank gets it."""
        assert self._counted is not None, "chunks are claimed between begin_run and end_run"
        if self._store is None:
            self._counted.claimed += 1
            return self._counted.claimed - 1
        with _rank_0_reachable(self.first):
            return int(self._store.add(f"{self._counted.key}/claims", 1)) - 1

    def check(self) -> None:
        """Raise PeerError or Stopped where the helper thread has heard of it; costs nothing otherwise."""
        self.raise_if_peer_failed()
        if self._stop is not None:
            raise Stopped(self._stop)

    def raise_if_peer_failed(self) -> None:
        """Raise PeerError where the helper thread has heard of another rank's failure."""
        if self._peer_failure is not None:
            raise self._peer_failure

    # -- failures and stops ------------------------------------------------------------------------

    @property
    def stopping(self) -> str | None:
        """The name of the signal that has asked the run to end; None where none has."""
        return self._stop

    @property
    def failure(self) -> PeerError | None:
        """The failure that has been heard of."""
        return self._peer_failure

    def stop(self, signal: str) -> None:
        """Ask all ranks to end, from any thread: this one knows at once, the others with their next beat."""
        if self._stop is None:
            self._stop = signal
        self.news.set()
        self._wake.set()

    def saved(self, chunks: int) -> None:
        """Tell, from any thread, that this rank has saved what it had finished, and does nothing more."""
        self._saved = chunks
        self._saved_by_all[self._rank] = chunks
        if self._store is None or self._beats is None:
            self.all_saved.set()
        self._wake.set()

    def fail_to_save(self, problem: str) -> None:
        """Tell, from any thread and in place of ``saved``, that this rank cannot save what it had."""
        failure = self._failure_of(DualevalError(f"what was finished could not be saved: {problem}"))
        self._own_failure = failure
        self._hear(_to_error(failure))
        self.all_saved.set()

    @property
    def saved_by_all(self) -> int:
        """On rank 0: number of chunks saved by the ranks that have told so."""
        return sum(self._saved_by_all.values())

    def tell_end(self, code: int) -> None:
        """On rank 0: let the others end, whose end may have a launcher kill this rank at once.

        Args:
            code: the exit code, of all of them.
        """
        self._end = f"{_ENDED} {code}"
        self._wake.set()
        if self._store is not None and self._beats is not None and self._end_told.wait(_END_TOLD_WITHIN_S):
            # They look that often; and torch prints pages of frames where the store has gone before.
            sleep(3 * _BEAT_WHILE_STOPPING_S)

    @property
    def missing(self) -> list[str]:
        """On rank 0: the ranks that have not told that they have saved what they had."""
        return [
            str(self._names.get(rank, f"rank {rank}"))
            for rank in range(self._size)
            if rank not in self._saved_by_all
        ]

    @property
    def has_peers(self) -> bool:
        """Whether there are other ranks that this one has not left."""
        return self._store is not None and not self._left

    def steps(self) -> int:
        """How far this rank's main thread is, as the others see it."""
        return self._pulse.steps()

    def give_up(self, message: str, *, rank: int) -> None:
        """Say, from any thread, that a rank has failed; the others hear of it with the next beat."""
        failure = {"rank": rank, "exit_code": EXIT_FAILED, "message": message, "where": None}
        self._own_failure = failure
        self._hear(_to_error(failure))

    def _hear(self, failure: PeerError) -> None:
        if self._peer_failure is None:
            self._peer_failure = failure
        self.news.set()
        self._wake.set()

    def fail(self, error: BaseException) -> PeerError:
        """Tell the others that this rank failed and why.

        Returns:
            The failure that was told first, which may be another rank's: the one to report. This rank's own
            where nobody can be told.
        """
        failure = self._failure_of(error)
        if self._store is None:
            return _to_error(failure)
        try:
            with _rank_0_reachable(self.first):
                return self._tell_failure(self._store, failure)
        except PeerError:
            return _to_error(failure)

    def _failure_of(self, error: BaseException) -> dict[str, Any]:
        return {
            "rank": self._rank,
            "exit_code": exit_code_of(error),
            "message": message_of(error),
            "where": str(self.name),
        }

    def _tell_failure(self, store: TCPStore, failure: dict[str, Any]) -> PeerError:
        if store.add(self._key("failures"), 1) == 1:
            store.set(self._key("failure"), json.dumps(failure))
            store.set(self._key("news"), _FAILURE)
        # A rank can wait at most at the next meeting that this one would have come to.
        store.set(self._key(f"go/{self._meetings}"), _FAILED)
        return self._first_failure(store)

    def _first_failure(self, store: TCPStore) -> PeerError:
        """The failure that was told first."""
        # The store's get waits: the failure is counted a moment before it is written.
        return _to_error(json.loads(store.get(self._key("failure"))))

    # -- counting samples --------------------------------------------------------------------------

    def add_done(self, samples: int) -> None:
        """Count samples that this rank has finished; the helper thread passes the sum on."""
        assert self._counted is not None, "samples are counted between begin_run and end_run"
        self._counted.done += samples

    def attend(self, each: Callable[[], str | None] | None) -> None:
        """Have something done with every beat, from the helper thread; None ends it.

        Args:
            each: returns what is wrong with this rank, where something is.
        """
        with self._attending:
            self._each = each
            if each is not None:
                self._start_attendant()

    def begin_run(self, show: Callable[[int], None] | None = None) -> None:
        """Count the samples of a run from here on.

        Args:
            show: called with the samples done over all ranks, every half second, from the helper thread; None
                where nobody looks.
        """
        self._counted_runs += 1
        self._counted = _Counted(
            key=self._key(f"done/{self._counted_runs}"),
            show=show,
            last=threading.Event(),
            summed=threading.Event(),
            ended=threading.Event(),
        )
        if show is not None:
            with self._attending:
                self._start_attendant()
        self._wake.set()

    def end_run(self) -> None:
        """Count no longer, after one last report."""
        counted = self._counted
        if counted is None:
            return
        counted.last.set()
        self._wake.set()
        # Limited: the store, or who reads what is shown, may not answer any more.
        limit = monotonic() + _LAST_REPORT_WITHIN_S
        while self._beats is not None and self._beats.is_alive() and monotonic() < limit:
            if counted.summed.wait(_SHORTEST_WAIT_S):
                break
        self._attend_now.set()
        if counted.show is not None:
            counted.ended.wait(_LAST_REPORT_WITHIN_S)
        self._counted = None

    # -- the helper thread -------------------------------------------------------------------------

    def _start_beats(self) -> None:
        assert self._store is not None
        client = self._store.clone()  # type: ignore[attr-defined]
        self._closing = threading.Event()
        self._beats = threading.Thread(target=self._beat, args=(client,), name="dualeval-beats", daemon=True)
        self._beats.start()

    def _stop_beats(self) -> None:
        if self._beats is not None:
            self._closing.set()
            self._wake.set()
            # Limited: it may hang in a call to the store, and ends with the process.
            self._beats.join(_LAST_REPORT_WITHIN_S)
            self._beats = None

    def _beat(self, client: TCPStore) -> None:
        """Tell this rank's signs, look for news, and on rank 0 at the signs of all."""
        every = _BEAT_EVERY_S if self.timeout_s is None else min(_BEAT_EVERY_S, self.timeout_s / 6)
        closing = self._closing
        observer: _Observer | None = None
        while True:
            self._wake.wait(every if self._stop is None else _BEAT_WHILE_STOPPING_S)
            self._wake.clear()
            ending = closing.is_set()
            try:
                with _rank_0_reachable(self.first):
                    if observer is None:
                        observer = self._observer(client, every)
                    self._exchange(client, observer)
            except PeerError as unreachable:
                self._hear(unreachable)
                self.all_saved.set()
                return
            except Exception as error:
                # Without this thread the others would take this rank for dead, a minute later.
                self._hear(_to_error(self._failure_of(error)))
                raise
            self.answers += 1
            # When all is said: torch prints pages of frames where rank 0 has gone meanwhile.
            said = self._peer_failure is not None and self._own_failure is None
            if ending or (said and (self._rank != 0 or self._end_told.is_set() or self._stop is None)):
                return

    def _exchange(self, client: TCPStore, observer: _Observer) -> None:
        """One round with the store."""
        if self._own_failure is not None:
            failure, self._own_failure = self._own_failure, None
            self._tell_failure(client, failure)
        if self._stop is not None and not self._stop_told:
            self._stop_told = True
            if client.add(self._key("stops"), 1) == 1:
                client.set(self._key("stop"), self._stop)
                if client.add(self._key("failures"), 0) == 0:
                    client.set(self._key("news"), _STOP)
        sign = self._pulse.sign(saved=self._saved)
        client.set(self._key(f"sign/{self._rank}"), _LEFT if self._left else str(sign))
        news, *texts = client.multi_get(
            [self._key("news"), *(self._key(f"sign/{rank}") for rank in observer.ranks)]
        )
        if news == _FAILURE.encode() and self._peer_failure is None:
            self._hear(self._first_failure(client))
            # Nothing of what is waited for then will come.
            self.all_saved.set()
        elif news == _STOP.encode() and self._stop is None:
            self._stop_told = True
            self.stop(client.get(self._key("stop")).decode())
        elif news.startswith(_ENDED.encode()):
            self.end_code = int(news.split()[1])
            self.all_saved.set()
        self._observe(observer, [text.decode() for text in texts])
        if self._end is not None and not self._end_told.is_set():
            client.set(self._key("news"), self._end)
            self._end_told.set()
        counted = self._counted
        if counted is not None:
            last, done = counted.last.is_set(), counted.done
            counted.total = int(client.add(counted.key, done - counted.told))
            counted.told = done
            if last:
                counted.summed.set()

    def _observer(self, client: TCPStore, every: float) -> _Observer:
        """Whom this rank watches: rank 0 all of them, the others rank 0."""
        if self._rank != 0:
            return _Observer({0: self.first}, self.timeout_s, every)
        keys = [self._key(f"name/{rank}") for rank in range(self._size)]
        names = [Name(**json.loads(text)) for text in client.multi_get(keys)]
        self._names = {name.rank: name for name in names}
        return _Observer(self._names, self.timeout_s, every)

    def _observe(self, observer: _Observer, texts: list[str]) -> None:
        now = observer.clock.now()
        signs = {
            rank: Sign.read(text) for rank, text in zip(observer.ranks, texts, strict=True) if text != _LEFT
        }
        if self._rank == 0:
            saved = {rank: sign.saved for rank, sign in signs.items() if sign.saved is not None}
            self._saved_by_all.update(saved)
            gone = [rank for rank in self._gone(observer, signs) if rank not in self._saved_by_all]
            if self._saved is not None and len(self._saved_by_all) + len(gone) >= self._size:
                self.all_saved.set()
        else:
            gone = []
        if self._peer_failure is not None or self._stop is not None:
            return
        found = observer.monitor.look(signs, now) if observer.monitor else None
        if gone:
            self.give_up(
                f"{observer.names[gone[0]]} has ended without a word: it was killed, or crashed", rank=gone[0]
            )
        elif found is not None:
            self.give_up(found[1], rank=found[0])

    def _gone(self, observer: _Observer, signs: dict[int, Sign]) -> list[int]:
        """Ranks on this host whose process has ended, though they have not left."""
        return [
            rank
            for rank in signs
            if observer.names[rank].space == self.name.space and observer.names[rank].has_ended()
        ]

    # -- what is to be done on this host, by a thread that may hang there ------------------------------

    def _start_attendant(self) -> None:
        if self._attendant is None:
            self._attendant = threading.Thread(target=self._attend, name="dualeval-attendant", daemon=True)
            self._attendant.start()

    def _attend(self) -> None:
        """Show how far the run is, and let it look whether all is well, as long as there is either."""
        while True:
            self._attend_now.wait(_BEAT_EVERY_S)
            self._attend_now.clear()
            with self._attending:
                wrong = None if self._each is None else self._each()
                counted = self._counted
                if self._each is None and (counted is None or counted.show is None):
                    self._attendant = None
                    return
            if wrong is not None:
                self.give_up(wrong, rank=self._rank)
            if counted is not None and counted.show is not None:
                last = counted.last.is_set()
                try:
                    counted.show(counted.done if counted.total is None else counted.total)
                except (OSError, ValueError):
                    # Nobody reads it any more; the run goes on.
                    counted.show = None
                if last:
                    counted.ended.set()

    # -- leaving -----------------------------------------------------------------------------------

    def leave(self, limit_s: float = 10.0) -> None:
        """Leave in order: rank 0, who serves the others, goes last. Later calls do nothing."""
        self._left = True
        self.attend(None)
        self.end_run()
        self._stop_beats()
        if self._store is None:
            return
        # Where rank 0 has gone already there is no order to keep.
        with suppress(PeerError), _rank_0_reachable(self.first):
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
            with suppress(PeerError), _rank_0_reachable(self.first):
                if self._rank != 0:
                    self._await("said", limit_s=_SAY_WITHIN_S)
                first = self._store.add(self._key("speakers"), 1) == 1
        if first:
            say()
        if self._store is not None:
            with suppress(PeerError), _rank_0_reachable(self.first):
                self._store.set(self._key("said"), _GO)
        self.leave(limit_s=_LEAVE_AFTER_FAILURE_S)


class _Observer:
    """Whom a rank watches, and on which clock."""

    def __init__(self, names: dict[int, Name], timeout_s: float | None, every: float) -> None:
        self.names = names
        self.ranks = tuple(names)
        # Twice, and a second: a busy machine is no reason to stop the clock, a stopped process is.
        self.clock = Clock(most_s=2 * every + 1.0)
        self.monitor = None if timeout_s is None else Monitor(names, timeout_s, self.clock.now())


@contextmanager
def _rank_0_reachable(first: Name) -> Iterator[None]:
    """Turn the store's errors into the news that rank 0 is gone."""
    try:
        yield
    except (DistNetworkError, DistStoreError) as error:
        raise PeerError(
            f"{first} can no longer be reached: it ended, or its host or network did",
            rank=0,
            exit_code=EXIT_FAILED,
        ) from error


def _to_error(failure: dict[str, Any]) -> PeerError:
    return PeerError(
        failure["message"], rank=failure["rank"], exit_code=failure["exit_code"], where=failure["where"]
    )


def open_control_plane(backend: Backend, timeout_s: float | None = None) -> ControlPlane:
    """Open the control plane of a run. A collective: every rank calls it.

    Rank 0 serves on a port that the kernel picks and offers its addresses through the backend; each rank
    takes the first that answers.

    Args:
        backend: carries rank 0's offer.
        timeout_s: how long a rank may stand still before the others hear that it failed; None watches nobody.

    Raises:
        BackendError: no address answered; names those that were tried.
    """
    world = backend.world
    own = Name.own(world.rank)
    if world.size == 1:
        return ControlPlane(own, own, 1, None, "", timeout_s=timeout_s)
    server = None
    words: dict[str, Any] | None = None
    if world.is_main:
        server, offer = serve_store(world)
        token = f"{secrets.token_hex(8)}.{world.restarts}"
        server.set(f"{token}/news", _NO_NEWS)
        words = {"token": token, "offer": offer, "first": asdict(own)}
    with waiting(world, "all ranks' first collective", STARTED):
        words = backend.broadcast_json(words, src=0)
    assert isinstance(words, dict)
    where = at(words["offer"]["addresses"][0], words["offer"]["port"])
    with waiting(world, f"rank 0's control plane at {where}", CONNECTED, each_node=True):
        store = join_store(words["offer"], world.rank, "the control plane")
    first = Name(**words["first"])
    control = ControlPlane(own, first, world.size, store, words["token"], server, timeout_s)
    with _rank_0_reachable(first):
        store.set(control._key(f"name/{world.rank}"), json.dumps(asdict(own)))
        store.set(control._key(f"sign/{world.rank}"), str(control._pulse.sign()))
    # After it rank 0 finds the names and signs of all.
    names = [control._key(f"name/{rank}") for rank in range(world.size)]
    missing = names_of_absent(server, lambda: names) if server is not None else None
    with waiting(world, f"all ranks at the control plane, {where}", STARTED, known=missing):
        control.meet()
    control._start_beats()
    return control
