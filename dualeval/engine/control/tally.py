"""The tally: how many samples of a run are done, over all ranks, and its display."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping

from dualeval.engine.control.heartbeat import Heartbeat

_SHOW_EVERY_S = 0.5
_LAST_SHOWN_WITHIN_S = 2.0


class Tally:
    """Counts the samples of one run."""

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
