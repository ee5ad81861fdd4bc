"""Beats: what ranks report of themselves, and who of them has come to a standstill.

A rank reports, twice a second, how many steps its main thread has made, whether it computes, and how often it
has reported. Times of two hosts are never compared: what counts is how long the observer has seen no change.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from dualeval.engine.ending import say
from dualeval.engine.progress import Progress, described
from dualeval.network import host_identity

# A rank may be there for as long as the others, or its caller, need.
IDLE = "idle"
WAITING = ("meet", IDLE)
COLLECTIVE = "collective"
# There are no batches to count: what a rank computes there is progress, for however long.
UNCOUNTED = ("setup", "write", "end")
# The main thread waits without computing, for what the device computes.
_DEVICE = "device"
# Ranks that wait in a collective must not be named before one that has not come to it.
_COLLECTIVE_GRACE_S = 2.0
# One that has passed a meeting may be seen there for a moment longer.
_LEFT_BEHIND_S = 3.0
_LATE_S = 10.0
# In place of the sign of a rank that has left.
LEFT = "left"
# What a window of time must have in it to count as work: waiting loops take hundredths of a core, and reading
# from a slow disk may take no more, but moves bytes.
_WINDOW_S = 0.25
_LEAST_CORES = 0.1
_LEAST_BYTES_A_S = 65_536


@dataclass(frozen=True, kw_only=True)
class Name:
    """How a rank is named to people, and found on its host.

    Attributes:
        rank: its number.
        host: its host's name.
        pid: its process.
        space: what processes share whose process ids mean the same.
    """

    rank: int
    host: str
    pid: int
    space: str

    @classmethod
    def own(cls, rank: int) -> Name:
        """The name of this process."""
        try:
            inode = str(Path("/proc/self/ns/pid").stat().st_ino)
        except OSError:
            inode = f"no /proc on rank {rank}"  # shared with nobody: nobody can look whether it lives
        space = f"{host_identity()}.{inode}"
        return cls(rank=rank, host=socket.gethostname(), pid=os.getpid(), space=space)

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"

    def has_ended(self) -> bool:
        """Whether its process is known to have ended; only for one of the same ``space``."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            # Without a /proc nobody can say.
            return Path("/proc/self").exists()
        return state in "ZX"


class Sign(NamedTuple):
    """What a rank reports of itself. Rank 0 reads those of all ranks with every beat.

    Attributes:
        steps: grows as its main thread goes on.
        work: grows as it computes.
        beat: how often it has reported.
        stage: what it is at.
        chunk: the chunk in hand.
        saved: number of chunks that it has saved, once it has nothing more to do; None before.
        run: number of the run whose samples are counted; 0 where none is.
        done: this rank's samples of it so far.
    """

    steps: int
    work: int
    beat: int
    stage: str
    chunk: int | None = None
    saved: int | None = None
    run: int = 0
    done: int = 0

    @classmethod
    def read(cls, text: str) -> Sign:
        """Read what ``str`` gives."""
        steps, work, beat, stage, chunk, saved, run, done = text.split()
        return cls(
            int(steps),
            int(work),
            int(beat),
            stage,
            None if chunk == "-" else int(chunk),
            None if saved == "-" else int(saved),
            int(run),
            int(done),
        )

    def __str__(self) -> str:
        chunk, saved = ("-" if number is None else number for number in (self.chunk, self.saved))
        return f"{self.steps} {self.work} {self.beat} {self.stage} {chunk} {saved} {self.run} {self.done}"

    @property
    def position(self) -> str:
        """Where the rank is, for people."""
        return described(self.stage, self.chunk)


class Work:
    """Counts windows of time in which this process really worked; made on its main thread.

    It worked where its threads of Python, but for the engine's own helpers, took a tenth of a core, or where
    the main thread read or wrote. A library's own threads do not count: Horovod's and MPI's look for messages
    without a pause.
    """

    def __init__(self) -> None:
        self._main = threading.get_native_id()
        self._lock = threading.Lock()
        self._count = 0
        self._since = time.monotonic()
        self._cpu_s = self._seconds_by_thread()
        self._bytes = self._bytes_moved()

    def count(self) -> int:
        """Look, from any thread; grows where the process has worked since."""
        with self._lock:
            now = time.monotonic()
            seconds = now - self._since
            if seconds >= _WINDOW_S:
                before, self._cpu_s = self._cpu_s, self._seconds_by_thread()
                taken = sum(used - before.get(thread, 0.0) for thread, used in self._cpu_s.items())
                moved, self._bytes = -self._bytes, self._bytes_moved()
                moved += self._bytes
                self._since = now
                if taken >= _LEAST_CORES * seconds or moved >= _LEAST_BYTES_A_S * seconds:
                    self._count += 1
            return self._count

    def _seconds_by_thread(self) -> dict[int, float]:
        found = {}
        for thread in threading.enumerate():
            number = thread.native_id
            if number is not None and not _is_helper(thread.name):
                try:
                    # Linux: a thread's clock by its number; an error where it has ended.
                    found[number] = time.clock_gettime(~number << 3 | 6)
                except OSError:
                    continue
        return found

    def _bytes_moved(self) -> int:
        try:
            lines = Path(f"/proc/self/task/{self._main}/io").read_text().splitlines()
        except OSError:
            return 0
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))


def _is_helper(name: str) -> bool:
    return name.startswith("dualeval-") and not name.startswith("dualeval-compute")


class Pulse:
    """This rank's own signs; made on its main thread."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._beats = 0
        self._work = Work()

    def look(self, saved: int | None = None, run: int = 0, done: int = 0) -> Sign:
        """The sign of this moment, as it would be reported."""
        at = self._progress.position
        return Sign(at.steps, self._work.count(), self._beats, at.stage, at.chunk, saved, run, done)

    def beat(self, saved: int | None = None, run: int = 0, done: int = 0) -> Sign:
        """The next sign to report."""
        self._beats += 1
        return self.look(saved, run, done)


class Clock:
    """Seconds that the observer has been awake for; those in which it was stopped itself do not count.

    Args:
        most_s: the longest time that counts between two looks.
        monotonic: the clock behind it.
    """

    def __init__(self, most_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._most_s = most_s
        self._monotonic = monotonic
        self._last = monotonic()
        self._now = 0.0

    def now(self) -> float:
        """Look at the clock."""
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
        """Take a look at the value."""
        if value != self._value:
            self._value, self._since = value, now
        return now - self._since


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a rank may make no progress.

    Attributes:
        timeout_s: without computing.
        forward_timeout_s: with a batch in hand, where it computes.
    """

    timeout_s: float
    forward_timeout_s: float


@dataclass(frozen=True, slots=True)
class Finding:
    """How a rank's main thread goes on.

    Attributes:
        kind: "going" on; "computing" for longer than the timeout, so that it is named; "collective": in one
            for longer than that, where another rank may be the cause; "stuck": to be given up.
        seconds: for how long.
        text: why, for people; empty where it is going on.
    """

    kind: Literal["going", "computing", "collective", "stuck"]
    seconds: float = 0.0
    text: str = ""


_GOING = Finding("going")


class Judge:
    """Judges how one rank's main thread goes on: for rank 0, and for that rank's own watch."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._steps = Standstill(now)
        self._signs_of_work = Standstill(now)

    def look(self, sign: Sign, now: float) -> Finding:
        """Take the rank's latest sign."""
        still = self._steps.seconds(sign.steps, now)
        idle = self._signs_of_work.seconds((sign.steps, sign.work), now)
        timeout_s = self._limits.timeout_s
        if still <= timeout_s or sign.stage in WAITING or sign.saved is not None:
            return _GOING
        if sign.stage == COLLECTIVE:
            # What its waiting loop computes is no progress.
            is_long = still > timeout_s + _COLLECTIVE_GRACE_S
            return Finding("collective", still, _no_progress(still, sign)) if is_long else _GOING
        if idle > timeout_s and sign.stage != _DEVICE:
            return Finding("stuck", idle, _no_progress(idle, sign))
        if sign.stage in UNCOUNTED:
            return _GOING
        longest_s = max(timeout_s, self._limits.forward_timeout_s)
        text = f"computing for {still:.0f} s, {sign.position}"
        if still > longest_s:
            return Finding("stuck", still, f"{text}, longer than --forward-timeout {longest_s:g}")
        text += f"; the limit is {longest_s:,.0f} s (--forward-timeout)"
        return Finding("computing", still, text)


def _no_progress(seconds: float, sign: Sign) -> str:
    return f"no progress for {seconds:.0f} s, {sign.position}"


class Monitor:
    """Watches the signs of ranks.

    Args:
        names: of the ranks to watch.
        limits: how long they may make no progress.
        now: the time.
        sees_all: whether these are all ranks; who waits in a collective is judged only by who sees them all.
        note: called with a sentence for people, once for each rank that computes for long.
    """

    def __init__(
        self,
        names: Mapping[int, Name],
        limits: Limits,
        now: float,
        *,
        sees_all: bool,
        note: Callable[[str], None],
    ) -> None:
        self._names = names
        self._limits = limits
        self._sees_all = sees_all
        self._note = note
        self._judges = {rank: Judge(limits, now) for rank in names}
        self._beats = {rank: Standstill(now) for rank in names}
        self._named: set[int] = set()

    def look(self, signs: Mapping[int, Sign], now: float) -> tuple[int, str] | None:
        """Take the latest signs; returns the rank that has come to a standstill, and how that is said."""
        stuck, collective, computing = [], [], []
        others_are_waited_for = False
        for rank, sign in signs.items():
            finding = self._judges[rank].look(sign, now)
            silent = self._beats[rank].seconds(sign.beat, now)
            # Its caller may be in C code that keeps Python's lock, for as long as it likes.
            silent_s = self._limits.forward_timeout_s if sign.stage == IDLE else self._limits.timeout_s
            if silent > silent_s:
                text = f"{_no_progress(silent, sign)}, and the process does not respond"
                stuck.append((0, -silent, rank, text))
            elif finding.kind == "stuck":
                stuck.append((1, -finding.seconds, rank, finding.text))
            elif finding.kind == "collective":
                collective.append((2, -finding.seconds, rank, finding.text))
            else:
                if finding.kind == "computing":
                    computing.append((rank, finding.text))
                if sign.stage not in ("meet", COLLECTIVE) and sign.saved is None:
                    others_are_waited_for = True
        self._name_computing(computing)
        if self._sees_all and not others_are_waited_for:
            stuck += collective
        if not stuck:
            return None
        _, _, rank, text = min(stuck)
        return rank, f"{self._names[rank]}: {text}"

    def _name_computing(self, computing: list[tuple[int, str]]) -> None:
        new = [(rank, text) for rank, text in computing if rank not in self._named]
        if new and self._sees_all:
            self._named.update(rank for rank, _ in new)
            rank, text = new[0]
            more = f" (and {len(new) - 1} more ranks)" if len(new) > 1 else ""
            self._note(f"{self._names[rank]}{more}: {text}")


class Observer:
    """Whom a rank watches, and on which clock: rank 0 all ranks, the others rank 0.

    Args:
        own: this rank.
        names: of the ranks that it watches.
        limits: how long they may make no progress; None watches nobody.
        every_s: how often it looks.

    Attributes:
        names: as given.
        sees_all: whether these are all ranks.
    """

    def __init__(self, own: Name, names: Mapping[int, Name], limits: Limits | None, every_s: float) -> None:
        self.names = names
        self.sees_all = own.rank == 0
        # Twice, and a second: a busy machine is no reason to stop the clock, a stopped process is.
        self._clock = Clock(most_s=2 * every_s + 1.0)
        self._monitor = None
        if limits is not None:
            self._monitor = Monitor(names, limits, self._clock.now(), sees_all=self.sees_all, note=_note)
        # On this host, where it can be seen that a process has ended.
        self._near = [rank for rank, name in names.items() if name.space == own.space]
        self._done: dict[int, int] = {}
        self._run = 0
        self._left: set[int] = set()
        self._alone = Standstill(0.0)
        self._late = Standstill(0.0)
        self._has_named_late = False

    def read(self, texts: Sequence[bytes]) -> dict[int, Sign]:
        """The signs of the ranks that have not left, by rank."""
        pairs = [(rank, text.decode()) for rank, text in zip(self.names, texts, strict=True)]
        self._left = {rank for rank, text in pairs if text == LEFT}
        return {rank: Sign.read(text) for rank, text in pairs if text != LEFT}

    def look(self, signs: Mapping[int, Sign]) -> tuple[int, str] | None:
        """Take the latest signs; returns the rank that is to be given up, and how that is said."""
        now = self._clock.now()
        waiting = [rank for rank, sign in signs.items() if sign.stage == "meet"]
        self._name_late(waiting, signs, now)
        stuck = self._left_behind(waiting, now)
        if stuck is None and self._monitor is not None:
            stuck = self._monitor.look(signs, now)
        return stuck

    def _left_behind(self, waiting: Sequence[int], now: float) -> tuple[int, str] | None:
        """A rank that has left though another waits for all."""
        seconds = self._alone.seconds(bool(waiting and self._left), now)
        if not (waiting and self._left) or seconds < _LEFT_BEHIND_S:
            return None
        rank = min(self._left)
        return rank, (
            f"{self.names[rank]} has left, and {self.names[waiting[0]]} waits for all ranks: every rank has "
            "to evaluate the same, and to ask for the result"
        )

    def _name_late(self, waiting: Sequence[int], signs: Mapping[int, Sign], now: float) -> None:
        """Say, once, which rank has not come where others wait for all."""
        idle = [rank for rank, sign in signs.items() if sign.stage == IDLE]
        seconds = self._late.seconds(bool(waiting and idle), now)
        if waiting and idle and seconds >= _LATE_S and self.sees_all and not self._has_named_late:
            self._has_named_late = True
            _note(
                f"{self.names[waiting[0]]} has waited {seconds:.0f} s for {self.names[idle[0]]}, which has "
                "not called evaluate, or asked for the result, yet"
            )

    def gone(self, signs: Mapping[int, Sign]) -> list[int]:
        """Ranks on this host whose process has ended, though they have not left."""
        return [rank for rank in self._near if rank in signs and self.names[rank].has_ended()]

    def samples_done(self, signs: Mapping[int, Sign], run: int) -> int | None:
        """On rank 0: the samples of a run that all ranks have done; None on the others."""
        if not self.sees_all:
            return None
        if run != self._run:
            self._run, self._done = run, {}
        self._done.update({rank: sign.done for rank, sign in signs.items() if sign.run == run})
        return sum(self._done.values())


def _note(sentence: str) -> None:
    say(f"dualeval: note: {sentence}")
