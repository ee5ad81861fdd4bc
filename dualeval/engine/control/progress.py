"""Progress: what a rank is doing, what it reports twice a second, and what rank 0 counts of the reports.

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
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from dualeval.process.identity import Process

# A span of time counts as work above one of these. Waiting loops take hundredths of a core; reading from a
# slow disk may take no more, but moves bytes.
_SPAN_S = 0.25
_LEAST_CORES = 0.1
_LEAST_BYTES_A_S = 65_536
_SHOW_EVERY_S = 0.5
_LAST_SHOWN_WITHIN_S = 2.0


class Stage(str, Enum):
    """What a rank's main thread is doing, in the order of a run."""

    SETUP = "setup"
    LOAD = "load"  # a batch goes from here to JOURNAL
    TRANSFER = "transfer"
    FORWARD = "forward"
    DEVICE = "device"  # waiting for what a GPU computes
    METRICS = "metrics"
    JOURNAL = "journal"
    MEET = "meet"
    COLLECTIVE = "collective"  # any of the backend
    WRITE = "write"
    END = "end"
    IDLE = "idle"  # between two runs
    LEFT = "left"  # it has left the other ranks

    __str__ = str.__str__


class Position(NamedTuple):
    """Where a rank's main thread is at one moment."""

    # Grows with every step; a rank whose steps stand still makes no progress.
    steps: int = 0
    # What it is doing.
    stage: Stage = Stage.SETUP
    # The chunk in hand; None outside of the loop.
    chunk: int | None = None

    def __str__(self) -> str:
        return f"stage {self.stage}" if self.chunk is None else f"chunk {self.chunk}, stage {self.stage}"


class Progress:
    """Where a rank is. The main thread steps, or the thread that saves in its place; any thread may read."""

    def __init__(self) -> None:
        # The last step.
        self.position = Position()

    def step(self, stage: Stage, chunk: int | None = None) -> None:
        """Note that the main thread has come to a stage. Costs less than a microsecond."""
        # One assignment: another thread sees the old position or the new one, never a mixture.
        self.position = Position(self.position.steps + 1, stage, chunk)

    @contextmanager
    def inside(self, stage: Stage) -> Iterator[None]:
        """Note a stage of the main thread for the block, and the earlier stage again afterwards."""
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
    """A rank's report of itself. Rank 0 reads the heartbeats of all ranks each time it sends its own."""

    # Grows with each step of the main thread.
    steps: int
    # Grows as it computes.
    work: int
    # How often it has reported.
    number: int
    # The stage of the main thread.
    stage: Stage
    # The chunk in hand.
    chunk: int | None = None
    # Number of chunks that it has saved, once it has nothing more to do; None before.
    saved: int | None = None
    # Number of the run whose samples are counted; 0 without one.
    run: int = 0
    # Samples of that run that this rank has finished.
    done: int = 0

    @classmethod
    def read(cls, text: bytes | str) -> Heartbeat:
        """Parse the text that ``str`` gives."""
        steps, work, number, stage, *rest = json.loads(text)
        return cls(steps, work, number, Stage(stage), *rest)

    def __str__(self) -> str:
        return json.dumps(tuple(self))

    @property
    def position(self) -> Position:
        """Where the rank is."""
        return Position(self.steps, self.stage, self.chunk)


class Activity:
    """Counts spans of time in which this process really worked; create it on the main thread."""

    # The process worked if its Python threads, without the engine's helpers, took a tenth of a core, or if
    # the main thread read or wrote. Native threads of libraries do not count: those of Horovod and MPI poll
    # without a pause.

    def __init__(self) -> None:
        self._main = threading.get_native_id()
        self._lock = threading.Lock()
        self._count = 0
        self._since = time.monotonic()
        self._cpu_s = self._seconds_by_thread()
        self._bytes = self._bytes_moved()

    def count(self) -> int:
        """Number of these spans so far; any thread may ask."""
        with self._lock:
            now = time.monotonic()
            seconds = now - self._since
            if seconds >= _SPAN_S:
                before, self._cpu_s = self._cpu_s, self._seconds_by_thread()
                cpu_s = sum(used - before.get(thread, 0.0) for thread, used in self._cpu_s.items())
                bytes_before, self._bytes = self._bytes, self._bytes_moved()
                moved = self._bytes - bytes_before
                self._since = now
                if cpu_s >= _LEAST_CORES * seconds or moved >= _LEAST_BYTES_A_S * seconds:
                    self._count += 1
            return self._count

    def _seconds_by_thread(self) -> dict[int, float]:
        seconds = {}
        for thread in threading.enumerate():
            number = thread.native_id
            if number is not None and not _is_helper(thread.name):
                try:
                    # On Linux, the CPU clock of a thread by its id; an error if the thread has ended.
                    seconds[number] = time.clock_gettime(~number << 3 | 6)
                except OSError:
                    continue
        return seconds

    def _bytes_moved(self) -> int:
        try:
            lines = Path(f"/proc/self/task/{self._main}/io").read_text().splitlines()
        except OSError:
            return 0
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))


def _is_helper(name: str) -> bool:
    return name.startswith("dualeval-") and not name.startswith("dualeval-compute")


class Tally:
    """Counts a run's finished samples over all ranks, and shows the count."""

    def __init__(self, number: int, show: Callable[[int], None] | None) -> None:
        self.number = number
        # This rank's samples so far.
        self.done = 0
        # Chunk numbers to claim, if this rank is alone.
        self.claims = itertools.count()
        # On rank 0: the number of samples that each rank has last reported.
        self._done_by_all: dict[int, int] = {}
        # Whether the run is over; the last heartbeats still report what was done.
        self.is_over = False
        self._show = show
        self._ended = threading.Event()
        self._display: threading.Thread | None = None
        if show is not None:
            self._display = threading.Thread(target=self._keep_showing, name="dualeval-display", daemon=True)
            self._display.start()

    def count(self, heartbeats: Mapping[int, Heartbeat]) -> None:
        """On rank 0: record how many samples each rank has done."""
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
        """Show the last state. Limited: nobody may be reading the display any more."""
        self.is_over = True
        self._ended.set()
        if self._display is not None:
            self._display.join(_LAST_SHOWN_WITHIN_S)
