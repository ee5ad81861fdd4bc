"""Waits with messages: a long wait says what it waits for, and what to check.

Before the control plane is open, nothing watches the ranks, and most waits are calls of libraries that print
nothing. ``waiting`` is put around each of them; docs/waits.md lists them.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dualeval.world import World

# What to check if ranks are missing, and if they do not reach each other.
STARTED = "Check that every rank has been started, and what the launcher and the ranks that are missing say."
CONNECTED = (
    "Check that the nodes reach each other on the ports that the kernel picks: no firewall between them, and "
    "the interface that 'dualeval doctor' shows for each rank."
)
# Seconds until a wait's first and second message; from then on, the time doubles with each message.
FIRST_WORD_S = 10.0
SECOND_WORD_S = 60.0
# Seconds to wait for the thread's end: it may be waiting for an answer itself.
_LEAVE_S = 1.0
_MOST_RANGES = 8
# Requests a second to rank 0 for each of two purposes: ranks that wait in meetings also send heartbeats. Its
# store can answer several times as many, beside an evaluation.
_ANSWERS_A_S = 2500
_LIMITS_HOLD_FOR = 1000


@contextmanager
def waiting(
    world: World,
    what: str,
    check: str,
    *,
    known: Callable[[], str] | None = None,
    each_node: bool = False,
    keeps_lock: bool = False,
) -> Iterator[None]:
    """Say on standard error what the block waits for: after ten seconds, a minute, two, four and so on.

    Not every rank prints: a thousand would print the same. By default rank 0, which knows most, and the last
    rank do, in case rank 0 itself is missing. With ``each_node``, each node's first rank does (on rank 0's
    node, that may be rank 1).
    """
    of_node = world.local_rank == 0 or world.rank == 1
    if world.size == 1 or not (of_node if each_node else world.rank in (0, world.size - 1)):
        yield
    elif keeps_lock:
        with _spoken_by_a_process(_sentence(world, what, check)):
            yield
    else:

        def sentence() -> tuple[str, str]:
            now = known() if known else ""
            return _sentence(world, f"{what}: {now}" if now else what, check)

        with _spoken_by_a_thread(sentence):
            yield


def name_ranks(ranks: Iterable[int]) -> str:
    """Name ranks in a message: ``[3]`` is "rank 3", ``[1, 2, 3, 7]`` "ranks 1 to 3 and 7"."""
    ranges: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], rank)
        else:
            ranges.append((rank, rank))
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return f"rank {ranges[0][0]}"
    texts = [str(first) if first == last else f"{first} to {last}" for first, last in ranges]
    if len(texts) > _MOST_RANGES:
        more = sum(last - first + 1 for first, last in ranges[_MOST_RANGES:])
        texts[_MOST_RANGES:] = [f"{more} more"]
    return f"ranks {', '.join(texts[:-1])}{' and ' if len(texts) > 1 else ''}{texts[-1]}"


def not_come(ranks: Iterable[int]) -> str:
    """A sentence about the ranks that have not come; empty if there are none."""
    missing = list(ranks)
    return f"{name_ranks(missing)} {'has' if len(missing) == 1 else 'have'} not come" if missing else ""


def _sentence(world: World, what: str, check: str) -> tuple[str, str]:
    """The message's text before the number of seconds, and after it."""
    who = f"rank {world.rank} of {world.size} on {socket.gethostname()}"
    return f"dualeval: {who} has waited ", f" s for {what}. {check}"


def _times() -> Iterator[float]:
    """Seconds from the start of a wait to each of its messages."""
    yield FIRST_WORD_S
    for number in count():
        yield SECOND_WORD_S * 2**number


@contextmanager
def _spoken_by_a_thread(sentence: Callable[[], tuple[str, str]]) -> Iterator[None]:
    over = threading.Event()

    def speak() -> None:
        waited = 0.0
        for time in _times():
            if over.wait(time - waited):
                return
            waited = time
            before, after = sentence()
            if over.is_set():
                return
            # If nobody reads standard error any more, the wait itself continues.
            with suppress(OSError, ValueError):
                sys.stderr.write(f"{before}{time:g}{after}\n")
                sys.stderr.flush()

    speaker = threading.Thread(target=speak, name="dualeval-waiting", daemon=True)
    speaker.start()
    try:
        yield
    finally:
        over.set()
        speaker.join(_LEAVE_S)


# Exits when its standard input closes, and so with the waiting process, however that one ends.
_SPEAKER = """
import select, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
before, after, first, second = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
waited, time = 0.0, first
while not select.select([0], [], [], time - waited)[0]:
    sys.stderr.write(f"{before}{time:g}{after}\\n")
    waited, time = time, second if time == first else 2 * time
"""


@contextmanager
def _spoken_by_a_process(sentence: tuple[str, str]) -> Iterator[None]:
    times = (str(FIRST_WORD_S), str(SECOND_WORD_S))
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _SPEAKER, *sentence, *times],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    ):
        # Leaving the block closes the process's standard input, and waits for its exit.
        yield


def pause_for(size: int, requests: float, least_s: float) -> float:
    """How long each rank waits between its requests, so that rank 0 can answer all ranks."""
    return max(least_s, size * requests / _ANSWERS_A_S)


def limit_for(size: int, seconds: float) -> float:
    """How long to wait for other ranks at an exit, given the seconds that suffice for a thousand ranks.

    All limits that depend on the number of ranks are computed by it: they grow like ``pause_for``.
    """
    return seconds * max(1.0, size / _LIMITS_HOLD_FOR)
