"""Many ranks of one control plane in few processes: each rank is a thread with the real clients of the store.

For tests, and for benchmarks/control_plane.py. The ranks of a process share its lock, so what is measured is
an upper bound: a rank of its own has a process of its own.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import queue
import threading
import time
import traceback
from collections.abc import Callable
from time import monotonic
from typing import Any, cast

from dualeval.backends.base import Backend
from dualeval.engine.control.plane import ControlPlane, open_control_plane
from dualeval.engine.end.conclusion import ALL_SAVED_WITHIN_S
from dualeval.errors import EXIT_STOPPED, UsageError
from dualeval.world import World
from dualeval.world.waiting import limit_for

LIMIT_S = 300.0


class OfferOnly:
    """The one thing that opening needs of a backend: rank 0's offer reaches the others."""

    def __init__(self, rank: int, size: int, offers: Any) -> None:
        self.world = World(
            rank=rank, size=size, local_rank=rank, local_size=size, node_rank=0, launcher="torchrun"
        )
        self._offers = offers

    def broadcast_json(self, value: Any, src: int = 0) -> Any:
        if self.world.is_main:
            for _ in range(self.world.size - 1):
                self._offers.put(value)
            return value
        return self._offers.get(timeout=LIMIT_S)

    def barrier(self) -> None:
        """Who has the offer is there."""


# Called on each rank; what it returns or raises is sent back.
Work = Callable[[int, ControlPlane], Any]


def _run_ranks(ranks: range, size: int, offers: Any, work: Work, timeout_s: float, results: Any) -> None:
    """Be some of the ranks: a thread each."""
    # torch asks for the name of each address that connects; hundreds at once are too many for a name server.
    ctypes.CDLL(None).__nss_configure_lookup(b"hosts", b"files")
    threading.stack_size(512 * 1024)

    def rank(number: int) -> None:
        try:
            backend = cast(Backend, OfferOnly(number, size, offers))
            control = open_control_plane(backend, timeout_s)
            try:
                found = work(number, control)
            finally:
                control.leave(limit_s=LIMIT_S)
        except Exception:  # noqa: BLE001 - told to who waits for the results
            found = traceback.format_exc()
        results.put((number, found))

    threads = [threading.Thread(target=rank, args=(number,)) for number in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def on_many_ranks(size: int, processes: int, work: Work, timeout_s: float = 60.0) -> list[Any]:
    """Run ``work(rank, control plane)`` on all ranks at once, forked from this process."""
    context = multiprocessing.get_context("fork")
    offers, results = context.Queue(), context.Queue()
    shares = [range(1)]
    share = -(-(size - 1) // processes)
    shares += [range(first, min(first + share, size)) for first in range(1, size, share)]
    children = [
        context.Process(target=_run_ranks, args=(ranks, size, offers, work, timeout_s, results))
        for ranks in shares
    ]
    for child in children:
        child.start()
    try:
        found: dict[int, Any] = {}
        while len(found) < size:
            try:
                number, result = results.get(timeout=LIMIT_S)
            except queue.Empty:
                raise AssertionError(f"{size - len(found)} ranks have not come to their end") from None
            found[number] = result
    finally:
        for child in children:
            child.join(5.0)
            child.kill()
    return [found[rank] for rank in range(size)]


def until(control: ControlPlane, condition: Callable[[], object]) -> None:
    """Wait for something that the control plane has news of."""
    while not condition():
        assert control.news.wait(LIMIT_S)
        control.news.clear()


# -- what ranks do, with moments on the clock that the processes of a host share ---------------------------


def fail_in_the_middle(rank: int, control: ControlPlane) -> dict[str, float]:
    """Meet twice, with seconds of beats between; then one rank fails, and all others hear of it."""
    moments = {"opened": monotonic()}
    control.meet()
    moments["met"] = monotonic()
    if rank == 0:
        moments |= _watched(control, 3.0)
    control.meet()
    moments["met again"] = monotonic()
    if rank == control.size // 2:
        moments["failed"] = monotonic()
        assert str(control.fail(UsageError("it was this one"))) == "it was this one"
        return moments
    until(control, lambda: control.failure)
    assert str(control.failure) == "it was this one", control.failure
    moments["heard"] = monotonic()
    return moments


def stop_all(rank: int, control: ControlPlane) -> dict[str, float]:
    """A signal reaches one rank; all save, rank 0 learns of all in time, and they of the exit code."""
    control.begin_run().done = rank
    moments = {}
    control.meet()
    if rank == control.size // 2:
        moments["signalled"] = monotonic()
        control.stop("SIGTERM")
    until(control, lambda: control.stopping)
    moments["heard"] = monotonic()
    control.saved(2)
    # As rank 0 of a run waits, which reports a failure then.
    assert control.all_saved.wait(LIMIT_S if rank else limit_for(control.size, ALL_SAVED_WITHIN_S))
    moments["all saved"] = monotonic()
    if rank == 0:
        assert (control.missing, control.saved_by_all) == ([], 2 * control.size)
        control.report_end(EXIT_STOPPED)
    else:
        assert control.end_code == EXIT_STOPPED
    moments["ended"] = monotonic()
    return moments


def _watched(control: ControlPlane, seconds: float) -> dict[str, float]:
    """Beats a second of a rank meanwhile, and cores that its process and its thread of beats take."""
    [beats] = [thread for thread in threading.enumerate() if thread.name == "dualeval-beats"]
    assert beats.ident is not None
    clock = time.pthread_getcpuclockid(beats.ident)
    before = control.answers, time.process_time(), time.clock_gettime(clock), monotonic()
    time.sleep(seconds)
    passed = monotonic() - before[3]
    return {
        "beats a second": (control.answers - before[0]) / passed,
        "cores": (time.process_time() - before[1]) / passed,
        "cores of beats": (time.clock_gettime(clock) - before[2]) / passed,
    }
