"""The tally: how many samples of a run are done, over all ranks, and its display."""

from __future__ import annotations

import threading
from collections.abc import Callable

_SHOW_EVERY_S = 0.5
_LAST_SHOWN_WITHIN_S = 2.0


class Tally:
    """Counts the samples of one run."""

    def __init__(self, number: int, show: Callable[[int], None] | None) -> None:
        self.number = number
        # This rank's samples so far.
        self.done = 0
        # Chunks that were taken, where this rank is alone.
        self.claimed = 0
        # Samples of all ranks; None where no other rank's are known.
        self.total: int | None = None
        # Whether it has come to its end; the last beats still report what was done.
        self.is_over = False
        self._show = show
        self._ended = threading.Event()
        self._display: threading.Thread | None = None
        if show is not None:
            self._display = threading.Thread(target=self._keep_showing, name="dualeval-display", daemon=True)
            self._display.start()

    def _keep_showing(self) -> None:
        assert self._show is not None
        while True:
            is_last = self._ended.wait(_SHOW_EVERY_S)
            try:
                self._show(self.done if self.total is None else self.total)
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
