"""The signals that ask a process to end, taken in place of its main thread.

Threads may hang. So a separate thread takes signals, whatever the main thread is doing.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from types import FrameType

from dualeval.errors import EXIT_STOPPED, UsageError
from dualeval.process.speech import close_displays, end_process, say
from dualeval.process.start import DEFAULT_SIGNALS, NOTHING_STARTED

# A terminal sends SIGINT to all processes, and a launcher then sends its ranks another one at once.
_SECOND_AFTER_S = 0.5
# SIGKILL and SIGSTOP cannot be caught; the kernel sends the others to the thread that caused them.
_NEVER = {signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
_CLOSE = b"\0"  # no signal has this number


class Signals:
    """Takes signals in place of this process's main thread, until it is closed.

    The main thread blocks them, and reading processes forked from it inherit that. Slurm sends SIGTERM to all
    processes of a step: reading processes must not end by it, because their rank would take that for an
    error. They end with their rank (``end_process``, and the kernel).

    The kernel hands a signal to any thread that does not block it: the thread started here, or an older one,
    such as those of OpenBLAS in a script. There Python's handler writes the signal's number into a pipe, even
    while no Python code runs; the thread started here reads the pipe.

    Only the main thread can take signals: an object made in another thread takes none (``is_active``).
    """

    def __init__(self, names: Sequence[str] = DEFAULT_SIGNALS) -> None:
        numbers = numbers_of(names)
        self._numbers = {number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN}
        self._stop: Callable[[str], None] | None = None
        self._first: tuple[str, float] | None = None
        self._lock = threading.Lock()
        in_main_thread = threading.current_thread() is threading.main_thread()
        # Whether it takes signals.
        self.is_active = in_main_thread and bool(self._numbers)
        if self.is_active:
            self._open()

    def call(self, stop: Callable[[str], None]) -> None:
        """Have ``stop`` called with the signal's name; until this call, a signal ends the process at once."""
        with self._lock:
            self._stop = stop

    def close(self) -> None:
        """Take no more signals; restores handlers, blocked signals and the wake-up descriptor."""
        if not self.is_active:
            return
        self.is_active = False
        os.write(self._write_end, _CLOSE)
        self._reading.join()
        self._put_back()
        # Signals that came meanwhile go to the earlier handlers.
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _open(self) -> None:
        global _active
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        # Set before the handlers, so that no handled signal misses the pipe.
        self._wakeup = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, _leave_to_the_pipe) for number in self._numbers}
        _active = self
        self._reading = threading.Thread(target=self._read, name="dualeval-signals", daemon=True)
        self._reading.start()

    def _put_back(self) -> None:
        """Restore handlers and wake-up descriptor, except those that somebody else has set since."""
        global _active
        _active = None
        for number, handler in self._handlers.items():
            if signal.getsignal(number) is _leave_to_the_pipe:
                # None if a C library had set the handler, which cannot be restored.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        descriptor = signal.set_wakeup_fd(self._wakeup)
        if descriptor != self._write_end:
            signal.set_wakeup_fd(descriptor)
        os.close(self._read_end)
        os.close(self._write_end)

    def _read(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._numbers)
        while _CLOSE[0] not in (numbers := os.read(self._read_end, 64)):
            for number in numbers:
                if number in self._numbers:
                    self._take(number)
                elif self._wakeup >= 0:
                    # For the earlier descriptor, such as SIGCHLD for asyncio.
                    with suppress(OSError):
                        os.write(self._wakeup, bytes([number]))

    def _take(self, number: int) -> None:
        name = signal.Signals(number).name
        with self._lock:
            if self._first is None:
                self._first = name, monotonic()
                if self._stop is None:
                    # There is nothing to save, and nobody knows yet whom to tell.
                    close_displays()
                    say(f"dualeval: stopped by {name}. {NOTHING_STARTED}")
                    end_process(EXIT_STOPPED)
                self._stop(name)
            elif number == signal.SIGINT and monotonic() - self._first[1] > _SECOND_AFTER_S:
                close_displays()
                say("dualeval: interrupted twice: ended at once.")
                end_process(128 + signal.SIGINT)


def numbers_of(names: Sequence[str]) -> tuple[signal.Signals, ...]:
    """The signals with these names; raises UsageError for a name that cannot stop a run."""
    numbers = []
    for name in names:
        number = getattr(signal.Signals, name, None)
        if not isinstance(number, signal.Signals) or number in _NEVER:
            raise UsageError(
                f"--stop-signals: {name!r} is not a signal that can stop a run. Write names separated by "
                f"commas, such as {','.join(DEFAULT_SIGNALS)}."
            )
        numbers.append(number)
    return tuple(numbers)


_active: Signals | None = None


def _leave_to_the_pipe(number: int, frame: FrameType | None) -> None:
    """Do nothing: the number has been written into the pipe already."""


def _forget_in_child() -> None:
    """Keep a forked process from writing into its parent's pipe; its signals stay blocked."""
    if _active is not None:
        _active.is_active = False
        _active._put_back()


os.register_at_fork(after_in_child=_forget_in_child)
