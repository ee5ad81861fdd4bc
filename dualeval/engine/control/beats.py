"""Who has come to a standstill: what ranks tell of themselves, watched on the observer's own clock.

Progress counts, and life: a rank tells, twice a second, how many steps its main thread has made and how
often it has told so. Times of two hosts are never compared: what counts is how long the observer has seen no
change.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dualeval.engine.progress import Progress, Stage, described
from dualeval.network import host_identity

# In these a rank may be for as long as the others need, or has no batch to count: its life alone is watched,
# or the time that its main thread computes.
WAITING: tuple[Stage, ...] = ("meet", "idle")
UNCOUNTED: tuple[Stage, ...] = ("setup", "write", "end")
# A rank that is alone in not reducing holds up all others: they must not be named before it.
_REDUCE_GRACE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Name:
    """How a rank is named to people, and found on its host.

    Attributes:
        rank: its number.
        host: its host's name.
        pid: its process.
        space: what processes share whose numbers of processes mean the same.
    """

    rank: int
    host: str
    pid: int
    space: str

    @classmethod
    def own(cls, rank: int) -> Name:
        """The name of this process."""
        numbers = Path("/proc/self/ns/pid")
        space = f"{host_identity()}.{numbers.stat().st_ino if numbers.exists() else 'unknown'}"
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


@dataclass(frozen=True, kw_only=True)
class Sign:
    """What a rank tells of itself.

    Attributes:
        steps: grows as its main thread goes on.
        beat: how often it has told a sign.
        stage: what it is at.
        chunk: the chunk in hand.
        saved: number of chunks that it has saved, once it has nothing more to do; None before.
    """

    steps: int
    beat: int
    stage: str
    chunk: int | None = None
    saved: int | None = None

    @classmethod
    def read(cls, text: str) -> Sign:
        """Read what ``str`` gives."""
        steps, beat, stage, chunk, saved = text.split()
        return cls(
            steps=int(steps),
            beat=int(beat),
            stage=stage,
            chunk=None if chunk == "-" else int(chunk),
            saved=None if saved == "-" else int(saved),
        )

    def __str__(self) -> str:
        chunk, saved = ("-" if number is None else number for number in (self.chunk, self.saved))
        return f"{self.steps} {self.beat} {self.stage} {chunk} {saved}"

    @property
    def place(self) -> str:
        """Where the rank is, for people."""
        return described(self.stage, self.chunk)


class Pulse:
    """This rank's own signs."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._beats = 0
        self._clock = time.pthread_getcpuclockid(threading.get_ident())

    def steps(self) -> int:
        """Steps of the main thread; where it has no batches to count, what it computes counts."""
        place = self._progress.place
        if place.stage not in UNCOUNTED:
            return place.count
        # In hundredths of a second: what reads weights from a slow disk takes some, what hangs takes none.
        return place.count + int(100 * time.clock_gettime(self._clock))

    def sign(self, saved: int | None = None) -> Sign:
        """The next sign."""
        self._beats += 1
        place = self._progress.place
        return Sign(steps=self.steps(), beat=self._beats, stage=place.stage, chunk=place.chunk, saved=saved)


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


class Monitor:
    """Watches the signs of ranks.

    Args:
        names: of the ranks to watch.
        timeout_s: how long a rank may stand still.
        now: the time.
    """

    def __init__(self, names: Mapping[int, Name], timeout_s: float, now: float) -> None:
        self._names = names
        self._timeout_s = timeout_s
        self._steps = {rank: Standstill(now) for rank in names}
        self._beats = {rank: Standstill(now) for rank in names}

    def look(self, signs: Mapping[int, Sign], now: float) -> tuple[int, str] | None:
        """Take the latest signs; returns the rank that has come to a standstill, and how that is said."""
        found = []
        for rank, sign in signs.items():
            still = self._steps[rank].seconds(sign.steps, now)
            silent = self._beats[rank].seconds(sign.beat, now)
            if silent > self._timeout_s:
                said = f"no progress for {silent:.0f} s, {sign.place}, and no sign of life"
                found.append((0, -silent, rank, said))
            elif still > self._limit(sign):
                order = 2 if sign.stage == "reduce" else 1
                found.append((order, -still, rank, f"no progress for {still:.0f} s, {sign.place}"))
        if not found:
            return None
        _, _, rank, said = min(found)
        return rank, f"{self._names[rank]}: {said}"

    def _limit(self, sign: Sign) -> float:
        if sign.stage in WAITING or sign.saved is not None:
            return float("inf")
        return self._timeout_s + (_REDUCE_GRACE_S if sign.stage == "reduce" else 0.0)
