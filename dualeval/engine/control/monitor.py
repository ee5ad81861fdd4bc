"""Finds ranks that make no progress, by their heartbeats.

Times of two hosts are never compared: what counts is how long the observer has seen no change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dualeval.engine.control.progress import Heartbeat, Name, Stage
from dualeval.world.waiting import limit_for

# A rank may stay in these stages as long as other ranks, or its caller, need.
_WAITING = (Stage.MEET, Stage.IDLE)
# These stages have no batches to count: any computing is progress, however long it takes.
_UNCOUNTED = (Stage.SETUP, Stage.WRITE, Stage.END)
# A rank that waits in a collective must not be blamed before the rank that has not come to it.
_COLLECTIVE_GRACE_S = 2.0
# Heartbeats lag: a rank that has passed a meeting seems to be there for a moment longer.
_LEFT_BEHIND_S = 3.0
_LATE_S = 10.0


class Clock:
    """Seconds for which the observer was awake; time in which it was suspended does not count."""

    def __init__(self, most_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._most_s = most_s
        self._monotonic = monotonic
        self._last = monotonic()
        self._now = 0.0

    def now(self) -> float:
        """Read the clock."""
        moment = self._monotonic()
        self._now += min(moment - self._last, self._most_s)
        self._last = moment
        return self._now


class Standstill:
    """How long a value has not changed, on the observer's clock."""

    def __init__(self, now: float) -> None:
        self._value: object = None
        self._since = now

    def seconds(self, value: object, now: float) -> float:
        """Compare the value with the last one; returns for how long it has been the same."""
        if value != self._value:
            self._value, self._since = value, now
        return now - self._since


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a rank may make no progress."""

    timeout_s: float
    # The same, while it computes a batch.
    forward_timeout_s: float


@dataclass(frozen=True, slots=True)
class Finding:
    """The state of a rank's main thread."""

    # "going": it makes progress; "computing" for longer than the timeout, to be reported; "collective": in
    # one for longer than the timeout, perhaps because of another rank; "stuck": to be given up.
    kind: Literal["going", "computing", "collective", "stuck"]
    # For how long.
    seconds: float = 0.0
    # A description for people; empty for "going".
    text: str = ""


_GOING = Finding("going")


class Judge:
    """Judges the progress of one rank's main thread, for rank 0 and for that rank's own watch."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._steps = Standstill(now)
        self._work = Standstill(now)

    def look(self, heartbeat: Heartbeat, now: float) -> Finding:
        """Take the rank's latest heartbeat."""
        still = self._steps.seconds(heartbeat.steps, now)
        idle = self._work.seconds((heartbeat.steps, heartbeat.work), now)
        timeout_s = self._limits.timeout_s
        if still <= timeout_s or heartbeat.stage in _WAITING or heartbeat.saved is not None:
            return _GOING
        if heartbeat.stage == Stage.COLLECTIVE:
            # What a rank computes while it waits in a collective is no progress.
            is_long = still > timeout_s + _COLLECTIVE_GRACE_S
            return Finding("collective", still, _no_progress(still, heartbeat)) if is_long else _GOING
        if idle > timeout_s and heartbeat.stage != Stage.DEVICE:
            return Finding("stuck", idle, _no_progress(idle, heartbeat))
        if heartbeat.stage in _UNCOUNTED:
            return _GOING
        longest_s = max(timeout_s, self._limits.forward_timeout_s)
        text = f"computing for {still:.0f} s, {heartbeat.position}"
        if still > longest_s:
            return Finding("stuck", still, f"{text}, longer than --forward-timeout {longest_s:g}")
        text += f"; the limit is {longest_s:,.0f} s (--forward-timeout)"
        return Finding("computing", still, text)


def _no_progress(seconds: float, heartbeat: Heartbeat) -> str:
    return f"no progress for {seconds:.0f} s, {heartbeat.position}"


class Monitor:
    """Watches heartbeats: rank 0 watches all ranks, the others watch rank 0."""

    def __init__(
        self,
        names: Mapping[int, Name],
        limits: Limits,
        now: float,
        *,
        sees_all: bool,
        note: Callable[[str], None],
    ) -> None:
        self.names = names
        self._limits = limits
        self._sees_all = sees_all
        self._note = note
        self._judges = {rank: Judge(limits, now) for rank in names}
        self._beats = {rank: Standstill(now) for rank in names}
        self._named: set[int] = set()
        self._alone = Standstill(now)
        self._late = Standstill(now)
        self._has_named_late = False

    def look(self, heartbeats: Mapping[int, Heartbeat], now: float) -> tuple[int, str] | None:
        """Take the latest heartbeats; returns the rank to give up, if any, and a message."""
        by_stage: dict[Stage, list[int]] = {}
        for rank, heartbeat in heartbeats.items():
            by_stage.setdefault(heartbeat.stage, []).append(rank)
        waiting, left = by_stage.get(Stage.MEET, []), by_stage.pop(Stage.LEFT, [])
        self._name_late(waiting, by_stage.get(Stage.IDLE, []), now)
        alone_s = self._alone.seconds(bool(waiting and left), now)
        if waiting and left and alone_s >= limit_for(len(self.names), _LEFT_BEHIND_S):
            return left[0], (
                f"{self.names[left[0]]} has left, and {self.names[waiting[0]]} waits for all ranks: every "
                "rank has to evaluate the same, and to ask for the result"
            )
        return self._stuck({rank: beat for rank, beat in heartbeats.items() if beat.stage != Stage.LEFT}, now)

    def _stuck(self, heartbeats: Mapping[int, Heartbeat], now: float) -> tuple[int, str] | None:
        """The rank to give up because it makes no progress, if any, and a message."""
        stuck, collective, computing = [], [], []
        others_are_waited_for = False
        for rank, heartbeat in heartbeats.items():
            finding = self._judges[rank].look(heartbeat, now)
            silent = self._beats[rank].seconds(heartbeat.number, now)
            # The caller of an idle rank may be in long C code that holds Python's lock.
            is_idle = heartbeat.stage == Stage.IDLE
            silent_s = self._limits.forward_timeout_s if is_idle else self._limits.timeout_s
            if silent > silent_s:
                text = f"{_no_progress(silent, heartbeat)}, and the process does not respond"
                stuck.append((0, -silent, rank, text))
            elif finding.kind == "stuck" and silent == 0:
                # Only by a fresh heartbeat: without one, "does not respond" is the better message.
                stuck.append((1, -finding.seconds, rank, finding.text))
            elif finding.kind == "collective":
                collective.append((2, -finding.seconds, rank, finding.text))
            else:
                if finding.kind == "computing":
                    computing.append((rank, finding.text))
                if heartbeat.stage not in (Stage.MEET, Stage.COLLECTIVE) and heartbeat.saved is None:
                    others_are_waited_for = True
        self._name_computing(computing)
        if self._sees_all and not others_are_waited_for:
            stuck += collective
        if not stuck:
            return None
        _, _, rank, text = min(stuck)
        return rank, f"{self.names[rank]}: {text}"

    def _name_computing(self, computing: list[tuple[int, str]]) -> None:
        new = [(rank, text) for rank, text in computing if rank not in self._named]
        if new and self._sees_all:
            self._named.update(rank for rank, _ in new)
            rank, text = new[0]
            more = f" (and {len(new) - 1} more ranks)" if len(new) > 1 else ""
            self._note(f"{self.names[rank]}{more}: {text}")

    def _name_late(self, waiting: Sequence[int], idle: Sequence[int], now: float) -> None:
        """Report, once, a rank that has not come while others wait for all."""
        seconds = self._late.seconds(bool(waiting and idle), now)
        if waiting and idle and seconds >= _LATE_S and self._sees_all and not self._has_named_late:
            self._has_named_late = True
            self._note(
                f"{self.names[waiting[0]]} has waited {seconds:.0f} s for {self.names[idle[0]]}, which has "
                "not called evaluate, or asked for the result, yet"
            )
