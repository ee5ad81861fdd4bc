"""The signals that ask a run to end: taken by a thread of their own, whatever the main thread is in."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from time import monotonic

from dualeval.engine.ending import end_process, say
from dualeval.errors import EXIT_STOPPED, UsageError

DEFAULT_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR2")
# A terminal sends SIGINT to all processes, and a launcher then sends its ranks another one at once.
_SECOND_AFTER_S = 0.5
# Nobody can wait for these, or has to: the kernel sends the others to the thread that has erred.
_NEVER = {signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}


class Signals:
    """Blocks signals in this process, and waits for them in a thread.

    Make it in the main thread before any other thread is there: they inherit what is blocked, and so do
    reading processes. These must not end by the SIGTERM that Slurm sends to all processes of a step: their
    rank would take that for an error. They end with their rank (``ending.end_process``, and the kernel).

    Args:
        names: of the signals, as "SIGTERM".

    Raises:
        UsageError: one of them is no signal that can be waited for.
    """

    def __init__(self, names: Sequence[str] = DEFAULT_SIGNALS) -> None:
        numbers = numbers_of(names)
        # A signal that is ignored here (nohup, a job in a shell's background) stays ignored.
        self._numbers = {number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN}
        self._stop: Callable[[str], None] | None = None
        self._first: tuple[str, float] | None = None
        self._lock = threading.Lock()
        signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)
        threading.Thread(target=self._wait, name="dualeval-signals", daemon=True).start()

    def tell(self, stop: Callable[[str], None]) -> None:
        """Have ``stop`` called with the signal's name; before, a signal ends the process at once."""
        with self._lock:
            self._stop = stop

    def close(self) -> None:
        """Take them no more."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._numbers)

    def _wait(self) -> None:
        while True:
            number = signal.Signals(signal.sigwait(self._numbers))
            with self._lock:
                if self._first is None:
                    self._first = number.name, monotonic()
                    if self._stop is None:
                        # Nothing has begun: there is nothing to save, and nobody knows yet whom to tell.
                        say(f"dualeval: stopped by {number.name}.")
                        end_process(EXIT_STOPPED)
                    self._stop(number.name)
                elif number == signal.SIGINT and monotonic() - self._first[1] > _SECOND_AFTER_S:
                    say("dualeval: interrupted twice: ended at once.")
                    end_process(128 + signal.SIGINT)


def numbers_of(names: Sequence[str]) -> tuple[signal.Signals, ...]:
    """The signals of these names; raises UsageError where one is none that can be waited for."""
    numbers = []
    for name in names:
        number = getattr(signal.Signals, name, None)
        if not isinstance(number, signal.Signals) or number in _NEVER:
            raise UsageError(
                f"--stop-signals: {name!r} is no signal to wait for. Write names with commas between, as "
                f"{','.join(DEFAULT_SIGNALS)}."
            )
        numbers.append(number)
    return tuple(numbers)
