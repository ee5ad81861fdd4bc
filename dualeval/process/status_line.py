"""What is done before the first batch, for whoever waits: "importing torch", "building the model".

On the terminal of a command it is one line, drawn in place, and erased before anything else is written.
Elsewhere, and from a script, whose terminal is its own, a line is written of what takes long.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from contextlib import contextmanager, suppress
from time import monotonic, sleep

TYPE_CHECKING = False  # as in process_start
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO

# Seconds between two drawings of the line, and until one is written elsewhere.
DRAW_EVERY_S, LONG_S = 0.5, 5.0
_START = "starting"
_STANDARD_STREAMS = (0, 1, 2)


class StatusLine:
    """What this process is doing; one rank's is shown."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Show nothing, in a fork, which has no thread for it, and perhaps a lock that is held."""
        # One that a signal's handler may take again.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        # Of a command's terminal.
        self._screen: int | None = None
        self.is_of_command = self._speaks = self._is_drawn = self._is_within_line = False
        # What is done now, since when, and how much of it is.
        self.name: str | None = None
        self._since, self.count = 0.0, 0
        # What has taken long.
        self._written: set[str] = set()

    def begin(self, *, speaks: bool) -> None:
        """Show what a command does from its start on."""
        if on_screen(sys.stderr) and os.environ.get("TERM") != "dumb":
            self._screen = sys.stderr.fileno()
        # Drawn at once: what is loaded next may keep Python's lock for seconds.
        self.is_of_command, self._speaks, self._is_drawn = True, speaks, speaks
        self.show(_START)

    def speak(self, *, speaks: bool) -> None:
        """Show it from now on, or no more."""
        if not speaks:
            self.show(None)
        self._speaks = speaks

    def show(self, name: str | None) -> str | None:
        """Show what is done now, None for nothing; returns what was done before."""
        with self._lock:
            before, self.name, self._since, self.count = self.name, name, monotonic(), 0
            if self._is_drawn:
                self._draw(str(self) if name else "")
            if name and self._speaks and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="dualeval-status", daemon=True)
                self._thread.start()
        return before

    def write(self, line: str) -> None:
        """Write a line while this process shows what it does; another rank, or a fork, writes nothing."""
        if self._speaks:
            self.before_output(b"\n")
            with suppress(OSError, ValueError, AttributeError):
                sys.stderr.write(f"{line}\n")
                sys.stderr.flush()

    def before_output(self, data: bytes | memoryview) -> None:
        """Make room for what a command is about to write."""
        with self._lock:
            # Another rank does not know whether rank 0 has drawn.
            if self._is_drawn or (self.name and not self._speaks and not self._is_within_line):
                self._draw("")
            self._is_within_line = bytes(data[-1:]) not in (b"\n", b"\r")

    def __str__(self) -> str:
        torch = getattr(sys.modules.get("torch"), "__spec__", None)
        is_loading = self.name == _START and getattr(torch, "_initializing", False)
        name = "importing torch" if is_loading else self.name
        count = f": {self.count:,}" if self.count else ""
        text = f"dualeval: {name}{count} ({monotonic() - self._since:.0f} s)"
        # A path may hold what moves the cursor.
        return "".join(each if each.isprintable() else "?" for each in text)

    def _run(self) -> None:
        while True:
            sleep(DRAW_EVERY_S)
            with self._lock:
                name, text = self.name, str(self)
                if name is None or not self._speaks:
                    self._thread = None
                    return
                # Behind a bar, which ends without a new line, there is no place.
                if not self._is_within_line:
                    self._draw(text)
                is_long = monotonic() - self._since >= LONG_S and name not in self._written
            if is_long and self._screen is None:
                self._written.add(name)
                # Without the lock: nobody may read it.
                with suppress(OSError, ValueError, AttributeError):
                    sys.stderr.write(f"{text}\n")
                    sys.stderr.flush()

    def _draw(self, text: str) -> None:
        # A terminal that is halted (Ctrl-S) takes nothing, and is not waited for.
        if self._screen is not None and select.select([], [self._screen], [], 0)[1]:
            with suppress(OSError):
                width = (os.get_terminal_size(self._screen).columns or 80) - 1
                # The cursor stays before it: what another process writes goes over it.
                os.write(self._screen, f"\r\x1b[K{text[:width]}\r".encode("utf-8", "backslashreplace"))
                self._is_drawn = bool(text)


LINE = StatusLine()
os.register_at_fork(after_in_child=LINE.reset)


@contextmanager
def doing(name: str) -> Iterator[StatusLine]:
    """Show that this is done within the block, or the function."""
    before = LINE.show(name)
    try:
        yield LINE
    finally:
        LINE.show(before)


def on_screen(stream: TextIO | None) -> bool:
    """Tell whether a stream of this process is the terminal that a person looks at.

    Open MPI gives the standard output of each rank a terminal of its own, whose lines mpirun then puts where
    its own go, horovodrun with the rank before each. A person's terminal has the standard input or error of
    the process as well, unless both are redirected: then nothing but colours and the moving bar is lost.
    """
    if stream is None or not stream.isatty():
        return False
    return any(os.isatty(number) for number in _STANDARD_STREAMS if number != stream.fileno())
