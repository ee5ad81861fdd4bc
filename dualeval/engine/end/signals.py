"""The signals that ask a run to end: taken by a thread of its own, whatever the main thread is in."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from types import FrameType

from dualeval.engine.end.process import close_displays, end_process, say
from dualeval.errors import EXIT_STOPPED, UsageError
from dualeval.process_start import DEFAULT_SIGNALS

# A terminal sends SIGINT to all processes, and a launcher then sends its ranks another one at once.
_SECOND_AFTER_S = 0.5
# Nobody can wait for these, or has to: the kernel sends the others to the thread that has erred.
_NEVER = {signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
_CLOSE = b"\0"  # no signal has this number


class Signals:
    """Takes signals in place of this process's main thread, until it is closed.

    They are blocked in the main thread. Reading processes that are forked from it inherit that: they must not
    end by the SIGTERM that Slurm sends to all processes of a step, which their rank would take for an error.
    They end with their rank (``process.end_process``, and the kernel).

    The kernel hands a signal to any thread that does not block it: the one that is begun here, or one that is
    older, as those of OpenBLAS in a script. It runs the handler of Python's that is set here: even where no
    Python runs, that writes the signal's number into a pipe, which the thread reads.

    Only the main thread can take signals: made in another one, this takes none (``is_active``).
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
        """Have ``stop`` called with the signal's name; before, a signal ends the process at once."""
        with self._lock:
            self._stop = stop

    def close(self) -> None:
        """Take no signals any more: handlers, blocked signals and wake-up descriptor are what they were."""
        if not self.is_active:
            return
        self.is_active = False
        os.write(self._write_end, _CLOSE)
        self._reading.join()
        self._put_back()
        # What has come meanwhile is now for whoever took it before.
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _open(self) -> None:
        global _active
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        # Before the handlers: a signal that finds one of them finds the pipe.
        self._wakeup = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, _leave_to_the_pipe) for number in self._numbers}
        _active = self
        self._reading = threading.Thread(target=self._read, name="dualeval-signals", daemon=True)
        self._reading.start()

    def _put_back(self) -> None:
        """Put handlers and wake-up descriptor back, but for those that somebody else has set since."""
        global _active
        _active = None
        for number, handler in self._handlers.items():
            if signal.getsignal(number) is _leave_to_the_pipe:
                # None where a library in C has set it, which cannot be put back.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        found = signal.set_wakeup_fd(self._wakeup)
        if found != self._write_end:
            signal.set_wakeup_fd(found)
        os.close(self._read_end)
        os.close(self._write_end)

    def _read(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._numbers)
        while _CLOSE[0] not in (numbers := os.read(self._read_end, 64)):
            for number in numbers:
                if number in self._numbers:
                    self._take(number)
                elif self._wakeup >= 0:
                    # Another one's, as SIGCHLD for asyncio.
                    with suppress(OSError):
                        os.write(self._wakeup, bytes([number]))

    def _take(self, number: int) -> None:
        name = signal.Signals(number).name
        with self._lock:
            if self._first is None:
                self._first = name, monotonic()
                if self._stop is None:
                    # Nothing has begun: there is nothing to save, and nobody knows yet whom to tell.
                    say(f"dualeval: stopped by {name}.")
                    end_process(EXIT_STOPPED)
                self._stop(name)
            elif number == signal.SIGINT and monotonic() - self._first[1] > _SECOND_AFTER_S:
                close_displays()
                say("dualeval: interrupted twice: ended at once.")
                end_process(128 + signal.SIGINT)


def numbers_of(names: Sequence[str]) -> tuple[signal.Signals, ...]:
    """The signals of these names; raises UsageError where one is none that can be waited for."""
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
    """Have a forked process not write into its parent's pipe; what is blocked stays blocked there."""
    if _active is not None:
        _active.is_active = False
        _active._put_back()


os.register_at_fork(after_in_child=_forget_in_child)
