"""The control plane: ranks meet here, share out chunks, report their progress, and learn of failures.

It is a torch ``TCPStore`` served by rank 0, whatever the backend, and carries a few bytes per rank and
second. Collectives carry the data; they run only among ranks that have met here.

A call to the store hangs while rank 0's host is suspended or unreachable. So the main thread and the
heartbeat thread have a client each, and the watch, which watches both, makes no call.
"""

from __future__ import annotations

import atexit
import json
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dualeval.backends.base import Backend
from dualeval.engine.control.ending import Ending, name_killed
from dualeval.engine.control.monitor import Clock, Limits, Monitor
from dualeval.engine.control.progress import Activity, Heartbeat, Name, Progress, Stage, Tally
from dualeval.engine.control.verdict import NO_VERDICT, VERDICT, Action, Turn, Verdict
from dualeval.errors import LaunchError, PeerError, Stopped
from dualeval.process.speech import say
from dualeval.world.waiting import CONNECTED, STARTED, pause_for, waiting

if TYPE_CHECKING:
    from dualeval.engine.control.meeting import Meetings

_TIMEOUT_S, _FORWARD_TIMEOUT_S = 60.0, 1800.0
_LEAVE_AFTER_FAILURE_S = 2.0
_BEAT_EVERY_S = 0.5
# mpirun leaves a second between SIGTERM and SIGKILL.
_BEAT_WHILE_STOPPING_S = 0.05
_REQUESTS_A_BEAT = 2
# Rank 0's one request for the heartbeats of all ranks takes a millisecond per hundred ranks.
_REQUESTS_A_LOOK = 0.25
_END_REPORTED_WITHIN_S = 0.3
_LAST_BEAT_WITHIN_S = 2.0
# All ranks come here from one collective; a rank that cannot reach rank 0 reports that sooner.
_FIRST_MEETING_WITHIN_S = 120.0
# Connections from each rank to rank 0: one of the main thread, one of the heartbeat thread.
_CONNECTIONS = 2
# A rank on which an attempt fails has begun fewer runs than others, so each attempt numbers its runs anew.
_RUNS_OF_AN_ATTEMPT = 1 << 20


class ControlPlane(Ending):
    """One rank's view of the control plane; ``open_control_plane`` makes it.

    Every rank calls ``meet`` the same number of times, in the same order.
    """

    def __init__(
        self,
        name: Name,
        rank_0: Name,
        meetings: Meetings | None,
        limits: Limits,
        server: TCPStore | None = None,
    ) -> None:
        super().__init__(name, meetings)
        self.rank_0 = rank_0
        self.limits = limits
        # What this rank's main thread is doing.
        self.progress = Progress()
        # Whether other ranks wait for this one in a collective that it will never enter, because its forward
        # raised: that ends the run, even if attempts are left.
        self.is_missed = False
        # Counts the store's answers to this rank's heartbeats.
        self.answers = 0
        self._server = server
        self._activity = Activity()
        self._attempt = 0
        self._runs = 0
        self._tally: Tally | None = None
        self._left = False
        self._beats: threading.Thread | None = None

    # -- meeting and sharing out, on the main thread -----------------------------------------------

    def meet(self, limit_s: float = float("inf"), *, stoppable: bool = True) -> None:
        """Sleep until every rank has come here."""
        check = self.check if stoppable else self.raise_if_peer_failed
        if self._meetings is None:
            check()
        else:
            with self.progress.inside(Stage.MEET):
                self._meetings.meet(check, limit_s)

    def check(self) -> None:
        """Raise PeerError or Stopped if the helper thread knows of a failure or a stop; cheap otherwise."""
        self.raise_if_peer_failed()
        if self.stopping is not None:
            raise Stopped(self.stopping)

    def is_stopping(self) -> bool:
        """Whether this rank knows of a stop; raises PeerError if another rank has failed."""
        self.raise_if_peer_failed()
        return self.stopping is not None

    def raise_if_peer_failed(self) -> None:
        """Raise PeerError if the helper thread knows of another rank's failure."""
        if self.failure is not None:
            raise self.failure
        held = self.verdict
        if held is not None and held.kind == "attempt" and held.attempt == self._attempt:
            raise held.to_error()

    # -- attempts, on the main thread --------------------------------------------------------------

    def fail_attempt(self, error: BaseException) -> None:
        """Report that the current attempt failed on this rank; the others then leave it, too.

        Every rank calls ``end_attempt`` next. If all ranks are ending already, that call raises the reason.
        """
        verdict = Verdict.own_failure(self.name.rank, error, str(self.name), self._attempt)
        if (meetings := self._meetings) is not None:
            with suppress(PeerError), meetings.asking():
                verdict = meetings.propose(meetings.store, verdict)
        elif self.verdict is not None and not verdict.replaces(self.verdict):
            return
        self._hear(verdict)

    def end_attempt(self, *, went_well: bool) -> PeerError | None:
        """Sleep until every rank has ended the attempt; then the next one begins."""

        def check() -> None:
            # The failure of the attempt itself is not raised here.
            if self.failure is not None:
                raise self.failure
            if self.stopping is not None and not went_well:
                raise Stopped(self.stopping)

        held = self.verdict
        if self._meetings is not None:
            with self.progress.inside(Stage.MEET):
                held = self._meetings.end_attempt(check)
        number, self._attempt = self._attempt, self._attempt + 1
        self._runs = self._attempt * _RUNS_OF_AN_ATTEMPT
        if held is None or (held.kind == "attempt" and held.attempt != number):
            return None
        if held.kind == "attempt":
            return held.to_error()
        if held.kind == "stop" and went_well:
            return None
        raise held.to_exception()

    # -- failures and the end ----------------------------------------------------------------------

    def report_end(self, code: int) -> None:
        """On rank 0: let the others exit; a launcher may then kill this rank at once."""
        # With the signal's name: a rank that was suspended meanwhile learns only of the end.
        end = Verdict(kind="end", rank=self.name.rank, exit_code=code, message=self.stopping or "")
        self._propose(end)
        if self._beats is not None:
            sleep(_END_REPORTED_WITHIN_S)

    def fail(self, error: BaseException) -> PeerError:
        """Report, from the main thread, that this rank failed and why."""
        verdict = Verdict.own_failure(self.name.rank, error, str(self.name))
        holds = verdict
        if (meetings := self._meetings) is not None:
            with suppress(PeerError), meetings.asking():
                holds = meetings.propose(meetings.store, verdict)
        return (holds if holds.kind == "failure" else verdict).to_error()

    @property
    def has_peers(self) -> bool:
        """Whether there are other ranks that this one has not left."""
        return self._meetings is not None and not self._left

    def own_heartbeat(self) -> Heartbeat:
        """This rank's progress at this moment, for ``monitor.Judge``."""
        at, tally = self.progress.position, self._tally
        run, done = (0, 0) if tally is None else (tally.number, tally.done)
        work = self._activity.count()
        return Heartbeat(at.steps, work, self.answers, at.stage, at.chunk, self._saved, run, done)

    # -- counting samples --------------------------------------------------------------------------

    def begin_run(self, show: Callable[[int], None] | None = None) -> Tally:
        """Begin the tally of a run's samples; the next beats report what is counted in it."""
        self._runs += 1
        tally = self._tally = Tally(self._runs, show)
        self._wake.set()
        return tally

    def claim(self) -> int:
        """Take the counted run's next number, from 0; no other rank gets the same."""
        tally = self._tally
        assert tally is not None and not tally.is_over, "numbers are claimed between begin_run and end_run"
        if self._meetings is not None:
            return self._meetings.claim(tally.number)
        return next(tally.claims)

    def end_run(self) -> None:
        """Stop counting; the next heartbeats still report what was done."""
        if self._tally is not None and not self._tally.is_over:
            self._wake.set()
            self._tally.end()

    # -- the helper thread -------------------------------------------------------------------------

    def start_beats(self) -> None:
        """Report this rank's heartbeats from here on."""
        assert self._meetings is not None
        client = self._meetings.store.clone()  # type: ignore[attr-defined]
        self._beats = threading.Thread(
            target=self._beat, args=(client, self._meetings), name="dualeval-beats", daemon=True
        )
        # Python aborts the process if it exits while a thread is in a call of torch.
        atexit.register(self.end_beats)
        self._beats.start()

    def _beat_every_s(self, *, stopping: bool) -> float:
        every = min(_BEAT_EVERY_S, self.limits.timeout_s / 6)
        # During a stop, rank 0 polls who has saved: one request, whatever the number of ranks.
        requests = _REQUESTS_A_LOOK if stopping and self.name.rank == 0 else _REQUESTS_A_BEAT
        return pause_for(self.size, requests, _BEAT_WHILE_STOPPING_S if stopping else every)

    def _beat(self, client: TCPStore, meetings: Meetings) -> None:
        """Report this rank's heartbeats and read the verdict; on rank 0, also watch all heartbeats."""
        # Twice, and a second more: the clock stops for a suspended process, not for a busy machine.
        clock = Clock(most_s=2 * self._beat_every_s(stopping=False) + 1.0)
        monitor: Monitor | None = None
        slept_s = 0.0
        while True:
            pause_s, start = self._beat_every_s(stopping=self.stopping is not None), monotonic()
            self._wake.wait(pause_s)
            slept_s = max(slept_s, monotonic() - start - pause_s)
            self._wake.clear()
            ending = self._left
            try:
                with meetings.asking():
                    if monitor is None:
                        monitor = self._monitor(client, meetings, clock.now())
                    self._observe(monitor, self._exchange(client, meetings, monitor), clock.now())
            except PeerError as error:
                gone = error
                meetings.is_reachable = False
                if slept_s > self.limits.timeout_s:
                    # Rank 0 exited while this process was suspended.
                    message = f"was stopped for {slept_s:.0f} s, and the other ranks have ended without it"
                    gone = Verdict.failure(self.name.rank, f"{self.name} {message}").to_error()
                self._hear_failure(gone)
                self.all_saved.set()
                return
            except Exception as error:
                # Without this thread the others would take this rank for dead, a minute later.
                self._hear_failure(Verdict.own_failure(self.name.rank, error, str(self.name)).to_error())
                raise
            self.answers += 1
            # Exit once all is sent: a call after rank 0 has gone makes torch print pages of frames.
            heard = self.failure is not None and not self._outbox
            if ending or (heard and not (self.name.rank == 0 and self.stopping is not None)):
                return

    def _monitor(self, client: TCPStore, meetings: Meetings, now: float) -> Monitor:
        """Make the monitor: on rank 0 it watches all ranks, on the others rank 0."""
        sees_all = self.name.rank == 0
        if sees_all:
            texts = client.multi_get(meetings.keys("name"))
            self._names = {name.rank: name for name in (Name(**json.loads(text)) for text in texts)}
        names = self._names if sees_all else {0: self.rank_0}
        return Monitor(
            names, self.limits, now, sees_all=sees_all, note=lambda text: say(f"dualeval: note: {text}")
        )

    def _exchange(self, client: TCPStore, meetings: Meetings, monitor: Monitor) -> dict[int, Heartbeat]:
        """Exchange messages with the store; returns the heartbeats of the watched ranks."""
        while self._outbox:
            self._outbox.popleft()(client)
        heartbeat = self.own_heartbeat()
        heartbeat = heartbeat._replace(stage=Stage.LEFT) if self._left else heartbeat
        client.set(meetings.key(f"heartbeat/{self.name.rank}"), str(heartbeat))
        keys = [meetings.key(f"heartbeat/{rank}") for rank in monitor.names]
        verdict, *texts = client.multi_get([meetings.key(VERDICT), *keys])
        if (holds := Verdict.read(verdict)) is not None:
            self._hear(holds)
        return dict(zip(monitor.names, map(Heartbeat.read, texts), strict=True))

    def _observe(self, monitor: Monitor, heartbeats: dict[int, Heartbeat], now: float) -> None:
        """Give up a rank whose process exited without a report, or that makes no progress."""
        gone: list[Name] = []
        if self.name.rank == 0:
            if self._tally is not None:
                self._tally.count(heartbeats)
            if not self.all_saved.is_set():
                saved = {rank: heartbeat.saved for rank, heartbeat in heartbeats.items()}
                self._saved_by_all |= {rank: count for rank, count in saved.items() if count is not None}
            gone = self._gone([rank for rank, last in heartbeats.items() if last.stage == Stage.LEFT])
            if self._saved is not None and len(self._saved_by_all) + len(gone) >= self.size:
                self.all_saved.set()
        if self.failure is not None or self.stopping is not None:
            return
        stuck = monitor.look(heartbeats, now)
        if gone:
            self.give_up(name_killed(gone[0]), rank=gone[0].rank)
        elif stuck is not None:
            self.give_up(stuck[1], rank=stuck[0])

    # -- leaving -----------------------------------------------------------------------------------

    def speak(self, turn: Turn, say: Action, do: Callable[[Action], object]) -> None:
        """Like ``Meetings.speak``; a rank that is alone just says it."""
        if self._meetings is None:
            say()
        else:
            self._meetings.speak(turn, say, do)

    def end_beats(self) -> None:
        """Stop the heartbeats; after a stop only as Python exits, for rank 0 serves the others until then."""
        self._left = True
        atexit.unregister(self.end_beats)
        if self._beats is not None:
            self._wake.set()
            # Limited: the daemon thread may hang in a call to the store.
            self._beats.join(_LAST_BEAT_WITHIN_S)
            self._beats = None

    def leave(self, limit_s: float = 10.0, *, together: bool = False) -> bool:
        """Leave in order: rank 0, who serves the others, goes last. Later calls do nothing."""
        self.end_run()
        self.end_beats()
        meetings, self._meetings = self._meetings, None
        all_left = meetings is None or meetings.leave(limit_s, together=together)
        # Drop the server and its threads now: collected in a forked process, it would wait for them there.
        self._server = None
        return all_left


def open_control_plane(
    backend: Backend, timeout_s: float = _TIMEOUT_S, *, forward_timeout_s: float = _FORWARD_TIMEOUT_S
) -> ControlPlane:
    """Open the control plane of a run. A collective: every rank calls it.

    Rank 0 serves on a port that the kernel picks and offers its addresses through the backend; each rank
    takes the first that answers. Collectives of this backend count as progress from then on.
    """
    world = backend.world
    name = Name.of(world.rank)
    limits = Limits(timeout_s=timeout_s, forward_timeout_s=forward_timeout_s)
    if world.size == 1:
        return ControlPlane(name, name, None, limits)
    # For several ranks alone.
    from dualeval.engine.control.meeting import Meetings
    from dualeval.world.network import at
    from dualeval.world.store import join_store, serve_store

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
            payload = {"token": token, "offer": offer, "rank_0": asdict(name)}
    with waiting(world, "all ranks' first collective", STARTED):
        payload = backend.broadcast_json(payload, src=0)
        # Rank 0 may leave a broadcast before the others have entered it.
        backend.barrier()
    assert isinstance(payload, dict)
    if "refused" in payload:
        raise LaunchError(payload["refused"])
    where = at(payload["offer"]["addresses"][0], payload["offer"]["port"])
    with waiting(world, f"rank 0's control plane at {where}", CONNECTED, each_node=True):
        store = join_store(payload["offer"], world.rank, "the control plane")
    rank_0 = Name(**payload["rank_0"])
    meetings = Meetings(store, payload["token"], world.size, name, rank_0)
    control = ControlPlane(name, rank_0, meetings, limits, server)
    backend.around_collective = lambda: control.progress.inside(Stage.COLLECTIVE)
    meetings.come(str(control.own_heartbeat()))
    missing = None if server is None else meetings.names_of_absent()
    try:
        with waiting(world, f"all ranks at the control plane, {where}", STARTED, known=missing):
            control.meet(limit_s=max(_FIRST_MEETING_WITHIN_S, timeout_s))
    except PeerError as error:
        failure = control.fail(error)
        control.leave(_LEAVE_AFTER_FAILURE_S)
        raise failure from error
    control.start_beats()
    return control
