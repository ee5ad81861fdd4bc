"""The control plane: where ranks meet, share out chunks, report how far they are, and hear that one failed.

A torch ``TCPStore`` served by rank 0, whatever the backend. It carries a few bytes per rank and second, so
that collectives are left to the data: they run only among ranks that have met here.

A call to the store may hang for as long as rank 0's host is stopped or cut off. So the main thread and the
thread that sends this rank's beats each have a client of their own, and who watches them makes no call.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dualeval.engine.control.heartbeat import LEFT, Heartbeat, Name, OwnHeartbeats
from dualeval.engine.control.meeting import VERDICT, Meetings, rank_0_reachable
from dualeval.engine.control.monitor import Limits, Observer
from dualeval.engine.control.tally import Tally
from dualeval.engine.control.verdict import NO_VERDICT, Verdict
from dualeval.engine.progress import Progress
from dualeval.errors import DualevalError, LaunchError, PeerError, Stopped
from dualeval.world.network import at
from dualeval.world.store import join_store, limit_for, pause_for, serve_store
from dualeval.world.waiting import CONNECTED, STARTED, waiting

if TYPE_CHECKING:
    from dualeval.backends.base import Backend

FORWARD_TIMEOUT_S = 1800.0
_LEAVE_AFTER_FAILURE_S = 2.0
_BEAT_EVERY_S = 0.5
# mpirun leaves a second between SIGTERM and SIGKILL.
_BEAT_WHILE_STOPPING_S = 0.05
_REQUESTS_A_BEAT = 2
_END_REPORTED_WITHIN_S = 0.3
_LAST_BEAT_WITHIN_S = 2.0
# All ranks come to it from one collective; a rank that cannot reach rank 0 says so itself before this.
_FIRST_MEETING_WITHIN_S = 120.0
# What fails on all ranks does so between the same two collectives of a forward.
_FAILED_EVERYWHERE_WITHIN_S = 5.0
# Of each rank to rank 0: the main thread's, and that of the beats.
_CONNECTIONS = 2
# Ranks on which an attempt breaks have begun fewer runs than others; those of the next are numbered anew.
_RUNS_OF_AN_ATTEMPT = 1 << 20


class ControlPlane:
    """One rank's view of the control plane; ``open_control_plane`` makes it.

    Every rank calls ``meet`` the same number of times, in the same order.
    """

    def __init__(
        self,
        name: Name,
        rank_0: Name,
        size: int,
        store: TCPStore | None,
        token: str,
        server: TCPStore | None = None,
        timeout_s: float | None = None,
        forward_timeout_s: float = FORWARD_TIMEOUT_S,
    ) -> None:
        self.name = name
        self.rank_0 = rank_0
        self.timeout_s = timeout_s
        # Both, as `monitor` takes them; None where nobody is watched.
        self.limits: Limits | None = None
        if timeout_s is not None:
            self.limits = Limits(timeout_s=timeout_s, forward_timeout_s=forward_timeout_s)
        # What this rank's main thread is at.
        self.progress = Progress()
        # Grows with every answer of the store to this rank's beats.
        self.answers = 0
        # Set when another rank's failure or a stop has been heard of, for who watches.
        self.news = threading.Event()
        # Set on rank 0 when all ranks have reported that they have `saved`; on the others when rank 0 has
        # written that down.
        self.all_saved = threading.Event()
        # Why all ranks end, as the store has decided; None as long as nothing is known of it here.
        self.verdict: Verdict | None = None
        # The failure that was heard of first, which may be this rank's alone: rank 0 is gone.
        self.failure: PeerError | None = None
        self.size = size
        self._server = server
        self._own_heartbeats = OwnHeartbeats(self.progress)
        self._meetings: Meetings | None = None
        if store is not None:
            self._meetings = Meetings(store, token, size, name, rank_0, str(self._own_heartbeats.look()))
        self._attempt = 0
        self._failed = 0
        self._runs = 0
        self._tally: Tally | None = None
        self._stop: str | None = None
        self._proposals: deque[Verdict] = deque()
        self._saved: int | None = None
        self._saved_by_all: dict[int, int] = {}
        self._is_counted = False
        self._look_after = 0.0
        self._names: dict[int, Name] = {name.rank: name}
        self._end_reported = threading.Event()
        self._left = False
        self._is_unreachable = False
        self._wake = threading.Event()
        # Beats that were sent, and who waits for the next one.
        self._sent = threading.Condition()
        self._closing = threading.Event()
        self._beats: threading.Thread | None = None

    def __enter__(self) -> ControlPlane:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.leave()
        else:
            if not isinstance(error, PeerError):
                self.fail(error)
            self.leave(limit_for(self.size, _LEAVE_AFTER_FAILURE_S))

    # -- meeting and sharing out, on the main thread -----------------------------------------------

    def meet(self, limit_s: float = float("inf"), *, stoppable: bool = True) -> None:
        """Wait, asleep, until every rank has come here."""
        check = self.check if stoppable else self.raise_if_peer_failed
        if self._meetings is None:
            check()
            return
        with self.progress.inside("meet"):
            if not self._meetings.meet(check, limit_s):
                with rank_0_reachable(self.rank_0):
                    held = Verdict.read(self._meetings.store.get(self._meetings.key(VERDICT)))
                assert held is not None, "who ends a meeting has given the verdict before"
                raise held.to_exception()

    def names_of_absent(self) -> Callable[[], str]:
        """On rank 0: what says which ranks have not come to the control plane, for another thread."""
        assert self._meetings is not None
        return self._meetings.names_of_absent()

    def claim(self) -> int:
        """Take the next number of the run that is counted, from 0; no other rank gets it."""
        tally = self._counted()
        if self._meetings is not None:
            return self._meetings.claim(tally.number)
        tally.claimed += 1
        return tally.claimed - 1

    def check(self) -> None:
        """Raise PeerError or Stopped where the helper thread has heard of it; costs nothing otherwise."""
        self.raise_if_peer_failed()
        if self._stop is not None:
            raise Stopped(self._stop)

    def is_stopping(self) -> bool:
        """Whether this rank knows that the run is to end; raises PeerError where another rank has failed."""
        if self.failure is not None or self.verdict is not None:
            self.raise_if_peer_failed()
        return self._stop is not None

    def raise_if_peer_failed(self) -> None:
        """Raise PeerError where the helper thread has heard of another rank's failure."""
        if self.failure is not None:
            raise self.failure
        held = self.verdict
        if held is not None and held.kind == "attempt" and held.attempt == self._attempt:
            raise held.to_error()

    # -- attempts, on the main thread --------------------------------------------------------------

    def fail_attempt(self, error: BaseException) -> None:
        """Report that the attempt at hand failed on this rank: the others leave it, too.

        Every rank comes to ``end_attempt`` next. Where all ranks are ending already, that says why.
        """
        own = Verdict.own_failure(self.name.rank, error, str(self.name), self._attempt)
        if (meetings := self._reachable) is not None:
            with rank_0_reachable(self.rank_0):
                own = meetings.propose(meetings.store, own)
        elif self.verdict is not None and not own.replaces(self.verdict):
            return
        self._hear(own)

    def end_attempt(self, *, went_well: bool) -> PeerError | None:
        """Wait, asleep, until every rank has come to the end of the attempt; the next one begins."""
        held = self.verdict
        if self._meetings is not None:
            with self.progress.inside("meet"):
                held = self._meetings.end_attempt(self._check_failure if went_well else self._check_for_good)
        number, self._attempt = self._attempt, self._attempt + 1
        self._failed = 0
        self._runs = self._attempt * _RUNS_OF_AN_ATTEMPT
        if held is None or (held.kind == "attempt" and held.attempt != number):
            return None
        if held.kind == "attempt":
            return held.to_error()
        if held.kind == "stop" and went_well:
            return None
        raise held.to_exception()

    def _check_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _check_for_good(self) -> None:
        """As ``check``, but for the failure of an attempt."""
        self._check_failure()
        if self._stop is not None:
            raise Stopped(self._stop)

    def fails_everywhere(self, error: Exception) -> bool:
        """Whether what has failed here fails on all ranks, in the midst of collectives of all.

        Where it does not, the others wait for this rank in a collective that it will not come to: the error
        ends the run, whatever else was to be attempted.
        """
        if (meetings := self._reachable) is None:
            return True
        self._failed += 1
        with self.progress.inside("meet"):
            name = f"failed/{self._attempt}.{self._failed}"
            limit_s = limit_for(self.size, _FAILED_EVERYWHERE_WITHIN_S)
            if meetings.all_come(name, limit_s, self._check_failure):
                return True
        self._conclude(Verdict.own_failure(self.name.rank, error, str(self.name)))
        return False

    # -- failures and stops, from any thread -------------------------------------------------------

    @property
    def stopping(self) -> str | None:
        """The name of the signal that has asked the run to end; None where none has."""
        return self._stop

    @property
    def end_code(self) -> int | None:
        """What rank 0 ends with, once it has said so."""
        held = self.verdict
        return held.exit_code if held is not None and held.kind == "end" else None

    def stop(self, signal: str) -> None:
        """Ask all ranks to end: this one knows at once, the others with their next beat."""
        if self._stop is None:
            self._stop = signal
            self._propose(Verdict.stop(self.name.rank, signal))
        self.news.set()

    def saved(self, chunks: int) -> None:
        """Report that this rank has saved what it had finished, and does nothing more."""
        self._saved = chunks
        self._saved_by_all[self.name.rank] = chunks
        if self._beats is None:
            self.all_saved.set()
        self._wake.set()

    def fail_to_save(self, problem: str) -> None:
        """Report, in place of ``saved``, that this rank cannot save what it had."""
        error = DualevalError(f"what was finished could not be saved: {problem}")
        self._conclude(Verdict.own_failure(self.name.rank, error, str(self.name)))
        self.all_saved.set()

    def give_up(self, message: str, *, rank: int) -> None:
        """Report that a rank has failed; the others hear of it with the next beat."""
        self._conclude(Verdict.failure(rank, message))

    def report_end(self, code: int) -> None:
        """On rank 0: let the others end, whose end may have a launcher kill this rank at once."""
        self._propose(Verdict(kind="end", rank=self.name.rank, exit_code=code))
        if self._beats is not None and self._end_reported.wait(_END_REPORTED_WITHIN_S):
            # Until each has looked; torch prints pages of frames where the store has gone before.
            pause = self._beat_every_s(stopping=True)
            sleep(min(3 * pause, pause + 0.1))

    def fail(self, error: BaseException) -> PeerError:
        """Report, from the main thread, that this rank failed and why."""
        own = Verdict.own_failure(self.name.rank, error, str(self.name))
        holds = own
        if (meetings := self._reachable) is not None:
            with suppress(PeerError), rank_0_reachable(self.rank_0):
                holds = meetings.propose(meetings.store, own)
        return (holds if holds.kind == "failure" else own).to_error()

    @property
    def saved_by_all(self) -> int:
        """On rank 0: number of chunks saved by the ranks that have reported so."""
        return sum(self._saved_by_all.values())

    @property
    def missing(self) -> list[str]:
        """On rank 0: the ranks that have not reported that they have saved what they had."""
        return [
            str(self._names.get(rank, f"rank {rank}"))
            for rank in range(self.size)
            if rank not in self._saved_by_all
        ]

    @property
    def ended(self) -> str | None:
        """On rank 0: what is said of a missing rank whose process, on this host, has ended."""
        names = [name for rank, name in self._names.items() if rank not in self._saved_by_all]
        gone = [name for name in names if name.space == self.name.space and name.has_ended()]
        return _ended(gone[0]) if gone else None

    @property
    def has_peers(self) -> bool:
        """Whether there are other ranks that this one has not left."""
        return self._meetings is not None and not self._left

    @property
    def _reachable(self) -> Meetings | None:
        """The main thread's end of the store; None where there is none, or nobody answers any more."""
        # Whoever asks a store that has gone gets pages of frames from torch.
        return None if self._is_unreachable else self._meetings

    def own_heartbeat(self) -> Heartbeat:
        """How far this rank is at this moment, as ``monitor.Judge`` takes it."""
        return self._own_heartbeats.look(self._saved)

    def _conclude(self, failure: Verdict) -> None:
        # In this order: the helper thread ends once it has heard of a failure and has nothing to propose.
        self._propose(failure)
        self._hear_failure(failure.to_error())

    def _propose(self, verdict: Verdict) -> None:
        """Have the helper thread propose a verdict; a rank that is alone decides by itself."""
        if self._meetings is not None:
            self._proposals.append(verdict)
            self._wake.set()
        elif self.verdict is None or verdict.replaces(self.verdict):
            self._hear(verdict)

    def _hear_failure(self, failure: PeerError) -> None:
        if self.failure is None:
            self.failure = failure
        self.news.set()
        self._wake.set()

    def _hear(self, verdict: Verdict) -> None:
        """Take note of the verdict that holds."""
        before = self.verdict
        if verdict == before or (verdict.kind == "attempt" and before and not verdict.replaces(before)):
            return
        self.verdict = verdict
        if verdict.kind == "stop":
            self._stop = self._stop or verdict.message
        elif verdict.kind == "attempt":
            return  # the main thread looks for it
        else:
            # Nothing more of what is waited for will come.
            self.all_saved.set()
        if verdict.kind == "failure":
            self._hear_failure(verdict.to_error())
        self.news.set()

    # -- counting samples --------------------------------------------------------------------------

    def begin_run(self, show: Callable[[int], None] | None = None) -> None:
        """Count the samples of a run from here on."""
        self._runs += 1
        self._tally = Tally(self._runs, show)
        self._wake.set()

    def add_done(self, samples: int) -> None:
        """Count samples that this rank has finished; the next beat reports them."""
        tally = self._tally
        assert tally is not None and not tally.is_over, "samples are counted between begin_run and end_run"
        tally.done += samples

    def end_run(self) -> None:
        """Count no longer, after one last beat."""
        tally = self._tally
        if tally is None or tally.is_over:
            return
        # Limited: the store may not answer any more.
        limit = monotonic() + _LAST_BEAT_WITHIN_S
        with self._sent:
            wanted = self.answers + 2  # the next but one has begun after this moment
            while self._beats is not None and self.answers < wanted and monotonic() < limit:
                self._wake.set()
                if not self._beats.is_alive():
                    break
                self._sent.wait(0.05)
        tally.end()

    def _counted(self) -> Tally:
        tally = self._tally
        assert tally is not None and not tally.is_over, "samples are counted between begin_run and end_run"
        return tally

    # -- the helper thread -------------------------------------------------------------------------

    def start_beats(self) -> None:
        """Report this rank's heartbeats from here on."""
        assert self._meetings is not None
        client = self._meetings.store.clone()  # type: ignore[attr-defined]
        self._closing = threading.Event()
        self._beats = threading.Thread(
            target=self._beat, args=(client, self._meetings), name="dualeval-beats", daemon=True
        )
        self._beats.start()

    def _stop_beats(self) -> None:
        if self._beats is not None:
            self._closing.set()
            self._wake.set()
            # Limited: it may hang in a call to the store, and ends with the process.
            self._beats.join(_LAST_BEAT_WITHIN_S)
            self._beats = None

    def _beat_every_s(self, *, stopping: bool) -> float:
        every = _BEAT_EVERY_S if self.timeout_s is None else min(_BEAT_EVERY_S, self.timeout_s / 6)
        return pause_for(self.size, _REQUESTS_A_BEAT, _BEAT_WHILE_STOPPING_S if stopping else every)

    def _pause_s(self) -> float:
        if self._counts_saved:
            return _BEAT_WHILE_STOPPING_S  # it asks for a count, whatever the number of ranks
        return self._beat_every_s(stopping=self._stop is not None)

    @property
    def _counts_saved(self) -> bool:
        """Whether this is rank 0, in a stop."""
        return self.name.rank == 0 and self._stop is not None

    def _beat(self, client: TCPStore, meetings: Meetings) -> None:
        """Report this rank's heartbeats, look for a verdict, and on rank 0 at the heartbeats of all."""
        closing = self._closing
        observer: Observer | None = None
        slept_s = 0.0
        while True:
            pause_s, start = self._pause_s(), monotonic()
            self._wake.wait(pause_s)
            slept_s = max(slept_s, monotonic() - start - pause_s)
            self._wake.clear()
            ending = closing.is_set()
            try:
                with rank_0_reachable(self.rank_0):
                    if observer is None:
                        observer = self._observer(client, meetings)
                    self._exchange(client, meetings, observer)
            except PeerError as unreachable:
                self._is_unreachable = True
                self._hear_failure(self._woken(slept_s) or unreachable)
                self.all_saved.set()
                return
            except Exception as error:
                # Without this thread the others would take this rank for dead, a minute later.
                self._hear_failure(Verdict.own_failure(self.name.rank, error, str(self.name)).to_error())
                raise
            with self._sent:
                self.answers += 1
                self._sent.notify_all()
            # When all is said: torch prints pages of frames where rank 0 has gone meanwhile.
            heard = self.failure is not None and not self._proposals
            is_needed = self.name.rank == 0 and self._stop is not None and not self._end_reported.is_set()
            if ending or (heard and not is_needed):
                return

    def _woken(self, slept_s: float) -> PeerError | None:
        """What is to be said where rank 0 has gone while this process was stopped itself."""
        if self.timeout_s is None or slept_s <= self.timeout_s:
            return None
        message = f"was stopped for {slept_s:.0f} s, and the other ranks have ended without it"
        return Verdict.failure(self.name.rank, f"{self.name} {message}").to_error()

    def _exchange(self, client: TCPStore, meetings: Meetings, observer: Observer) -> None:
        """One round with the store."""
        while self._proposals:
            verdict = self._proposals[0]
            self._hear(meetings.propose(client, verdict))
            self._proposals.popleft()
            if verdict.kind == "end":
                self._end_reported.set()
        self._count_saved(client, meetings)
        if self._counts_saved:
            if monotonic() < self._look_after:
                return
            self._look_after = monotonic() + self._beat_every_s(stopping=True)
        tally = self._tally
        run, done = (0, 0) if tally is None else (tally.number, tally.done)
        heartbeat = self._own_heartbeats.next(self._saved, run, done)
        client.set(meetings.key(f"heartbeat/{self.name.rank}"), LEFT if self._left else str(heartbeat))
        keys = meetings.keys("heartbeat") if observer.sees_all else [meetings.key("heartbeat/0")]
        found, *texts = client.multi_get([meetings.key(VERDICT), *keys])
        holds = Verdict.read(found)
        if holds is not None:
            self._hear(holds)
        heartbeats = observer.read(texts)
        if tally is not None:
            tally.total = observer.samples_done(heartbeats, tally.number)
        self._observe(observer, heartbeats)

    def _count_saved(self, client: TCPStore, meetings: Meetings) -> None:
        """Count this rank's chunks once; rank 0 looks whether all ranks have."""
        ranks, chunks = meetings.key("saved-ranks"), meetings.key("saved-chunks")
        if self._saved is not None and not self._is_counted:
            self._is_counted = True
            client.add(chunks, self._saved)
            client.add(ranks, 1)
        if self._counts_saved and not self.all_saved.is_set() and client.add(ranks, 0) == self.size:
            # Whose they are is asked only where one is missing: by heartbeats, which come later.
            self._saved_by_all = {**dict.fromkeys(range(self.size), 0), 0: client.add(chunks, 0)}
            self.all_saved.set()

    def _observer(self, client: TCPStore, meetings: Meetings) -> Observer:
        """Whom this rank watches: rank 0 all of them, the others rank 0."""
        if self.name.rank == 0:
            texts = client.multi_get(meetings.keys("name"))
            self._names = {name.rank: name for name in (Name(**json.loads(text)) for text in texts)}
        names = self._names if self.name.rank == 0 else {0: self.rank_0}
        return Observer(self.name, names, self.limits, self._beat_every_s(stopping=False))

    def _observe(self, observer: Observer, heartbeats: dict[int, Heartbeat]) -> None:
        gone: list[int] = []
        if self.name.rank == 0:
            if not self.all_saved.is_set():
                saved = {rank: heartbeat.saved for rank, heartbeat in heartbeats.items()}
                self._saved_by_all.update({rank: count for rank, count in saved.items() if count is not None})
            gone = [rank for rank in observer.gone(heartbeats) if rank not in self._saved_by_all]
            if self._saved is not None and len(self._saved_by_all) + len(gone) >= self.size:
                self.all_saved.set()
        if self.failure is not None or self._stop is not None:
            return
        found = observer.look(heartbeats)
        if gone:
            self.give_up(_ended(observer.names[gone[0]]), rank=gone[0])
        elif found is not None:
            self.give_up(found[1], rank=found[0])

    # -- leaving -----------------------------------------------------------------------------------

    def may_speak(self) -> bool:
        """Whether this rank is to say why all end: rank 0, or another where that has not spoken for 3 s.

        Exactly one rank gets True, where rank 0 can be reached.
        """
        return (meetings := self._reachable) is None or meetings.may_speak()

    def has_spoken(self) -> None:
        """Let the others leave."""
        if (meetings := self._reachable) is not None:
            meetings.has_spoken()

    def leave(self, limit_s: float = 10.0, *, together: bool = False) -> bool:
        """Leave in order: rank 0, who serves the others, goes last. Later calls do nothing."""
        self._left = True
        self.end_run()
        self._stop_beats()
        all_left, meetings = self._meetings is None, self._reachable
        self._meetings = None
        if meetings is not None:
            all_left = meetings.leave(limit_s, together=together)
        # Its threads end with it; collected later, in a forked process, it would wait for them there.
        self._server = None
        return all_left


def _ended(name: Name) -> str:
    return f"{name} exited without a message: it was killed or crashed"


def open_control_plane(
    backend: Backend, timeout_s: float | None = None, *, forward_timeout_s: float = FORWARD_TIMEOUT_S
) -> ControlPlane:
    """Open the control plane of a run. A collective: every rank calls it.

    Rank 0 serves on a port that the kernel picks and offers its addresses through the backend; each rank
    takes the first that answers. Collectives of this backend count as progress from then on.
    """
    world = backend.world
    own = Name.own(world.rank)
    if world.size == 1:
        return ControlPlane(own, own, 1, None, "", None, timeout_s, forward_timeout_s)
    server = None
    payload: dict[str, Any] | None = None
    if world.is_main:
        try:
            server, offer = serve_store(world, connections=_CONNECTIONS)
        except LaunchError as error:
            payload = {"refused": str(error)}
        else:
            token = f"{secrets.token_hex(8)}.{world.meeting.restarts}"
            server.set(f"{token}/{VERDICT}", NO_VERDICT)
            payload = {"token": token, "offer": offer, "rank_0": asdict(own)}
    with waiting(world, "all ranks' first collective", STARTED):
        payload = backend.broadcast_json(payload, src=0)
        # Rank 0 may be through a broadcast before the others have come to it.
        backend.barrier()
    assert isinstance(payload, dict)
    if "refused" in payload:
        raise LaunchError(payload["refused"])
    where = at(payload["offer"]["addresses"][0], payload["offer"]["port"])
    with waiting(world, f"rank 0's control plane at {where}", CONNECTED, each_node=True):
        store = join_store(payload["offer"], world.rank, "the control plane")
    rank_0 = Name(**payload["rank_0"])
    control = ControlPlane(
        own, rank_0, world.size, store, payload["token"], server, timeout_s, forward_timeout_s
    )
    backend.around_collective = lambda: control.progress.inside("collective")
    missing = None if server is None else control.names_of_absent()
    try:
        with waiting(world, f"all ranks at the control plane, {where}", STARTED, known=missing):
            control.meet(limit_s=max(_FIRST_MEETING_WITHIN_S, timeout_s or 0.0))
    except PeerError as error:
        failure = control.fail(error)
        control.leave(_LEAVE_AFTER_FAILURE_S)
        raise failure from error
    control.start_beats()
    return control
