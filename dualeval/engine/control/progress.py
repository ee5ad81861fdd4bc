"""Progress: what a rank is at, what it reports of itself twice a second, and what rank 0 counts of that.

A rank reports how many steps its main thread has made, whether it computes, and how often it has reported.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from dualeval.engine.folder.lease import Process

# In the order in which a run goes through them; a batch goes through load to journal. "device" is the wait
# for what a GPU computes, "collective" any collective of the backend, "idle" between two runs.
Stage = Literal[
    "setup",
    "load",
    "transfer",
    "forward",
    "device",
    "metrics",
    "journal",
    "meet",
    "collective",
    "write",
    "end",
    "idle",
]
# In place of the heartbeat of a rank that has left.
LEFT = "left"
# What a window of time must have in it to count as work: waiting loops take hundredths of a core, and reading
# from a slow disk may take no more, but moves bytes.
_WINDOW_S = 0.25
_LEAST_CORES = 0.1
_LEAST_BYTES_A_S = 65_536
_SHOW_EVERY_S = 0.5
_LAST_SHOWN_WITHIN_S = 2.0


class Position(NamedTuple):
    """One moment of a rank."""

    # Grows with every step; a rank whose steps stand still makes no progress.
    steps: int = 0
    # What it is doing.
    stage: Stage = "setup"
    # The chunk in hand; None outside of the loop.
    chunk: int | None = None

    def __str__(self) -> str:
        return described(self.stage, self.chunk)


def described(stage: str, chunk: int | None) -> str:
    """Where a rank is, for people."""
    return f"stage {stage}" if chunk is None else f"chunk {chunk}, stage {stage}"


class Progress:
    """Where a rank is. Its main thread steps, until another one saves what it had; any thread may look."""

    def __init__(self) -> None:
        # The last step.
        self.position = Position()

    def step(self, stage: Stage, chunk: int | None = None) -> None:
        """Note that the main thread has come to a stage. Costs less than a microsecond."""
        # One assignment: another thread sees the old position or the new one, never a mixture.
        self.position = Position(self.position.steps + 1, stage, chunk)

    @contextmanager
    def inside(self, stage: Stage) -> Iterator[None]:
        """Note that the main thread is at a stage within the block, and then again where it was before."""
        before = self.position
        self.step(stage, before.chunk)
        try:
            yield
        finally:
            self.step(before.stage, before.chunk)


@dataclass(frozen=True, kw_only=True)
class Name(Process):
    """How a rank is named to people, and found on its host."""

    rank: int

    @classmethod
    def of(cls, rank: int) -> Name:
        """The name of this process."""
        return cls(rank=rank, **asdict(Process.own()))

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


class Heartbeat(NamedTuple):
    """What a rank reports of itself. Rank 0 reads those of all ranks with every beat."""

    # Grows as its main thread goes on.
    steps: int
    # Grows as it computes.
    work: int
    # How often it has reported.
    number: int
    # What it is at.
    stage: str
    # The chunk in hand.
    chunk: int | None = None
    # Number of chunks that it has saved, once it has nothing more to do; None before.
    saved: int | None = None
    # Number of the run whose samples are counted; 0 where none is.
    run: int = 0
    # This rank's samples of it so far.
    done: int = 0

    @classmethod
    def read(cls, text: bytes | str) -> Heartbeat:
        """Read what ``str`` gives."""
        return cls(*json.loads(text))

    def __str__(self) -> str:
        return json.dumps(tuple(self))

    @property
    def position(self) -> str:
        """Where the rank is, for people."""
        return described(self.stage, self.chunk)


class Work:
    """Counts windows of time in which this process really worked; made on its main thread."""

    # It worked where its threads of Python, but for the engine's own helpers, took a tenth of a core, or
    # where the main thread read or wrote. A library's own threads do not count: Horovod's and MPI's look for
    # messages without a pause.

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
                bytes_before, self._bytes = self._bytes, self._bytes_moved()
                moved = self._bytes - bytes_before
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


class Tally:
    """How many samples of a run are done, over all ranks, and its display."""

    def __init__(self, number: int, show: Callable[[int], None] | None) -> None:
        self.number = number
        # This rank's samples so far.
        self.done = 0
        # Numbers of chunks, where this rank is alone.
        self.claims = itertools.count()
        # On rank 0: samples of each rank, as far as they are known.
        self._done_by_all: dict[int, int] = {}
        # Whether it has come to its end; the last beats still report what was done.
        self.is_over = False
        self._show = show
        self._ended = threading.Event()
        self._display: threading.Thread | None = None
        if show is not None:
            self._display = threading.Thread(target=self._keep_showing, name="dualeval-display", daemon=True)
            self._display.start()

    def count(self, heartbeats: Mapping[int, Heartbeat]) -> None:
        """On rank 0: take note of what all ranks have done."""
        counts = {
            rank: heartbeat.done for rank, heartbeat in heartbeats.items() if heartbeat.run == self.number
        }
        self._done_by_all = {**self._done_by_all, **counts}

    def _keep_showing(self) -> None:
        assert self._show is not None
        while True:
            is_last = self._ended.wait(_SHOW_EVERY_S)
            try:
                self._show(sum(self._done_by_all.values()) or self.done)
            except (OSError, ValueError):
                return  # nobody reads it any more; the run goes on
            if is_last:
                return

    def end(self) -> None:
        """Show the last state. Limited: who reads what is shown may not do so any more."""
        self.is_over = True
        self._ended.set()
        if self._display is not None:
            self._display.join(_LAST_SHOWN_WITHIN_S)
