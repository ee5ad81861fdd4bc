"""The end of a process: the signals that ask for it, the last lines it writes, and its exit.

Threads may hang, and nobody may read the output any more. So a separate thread takes signals, whatever the
main thread is doing. If a session owns the exception hook, a concluded error is not shown a second time.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from types import FrameType, TracebackType
from typing import Any, NoReturn

from dualeval.errors import EXIT_STOPPED, DualevalError, PeerError, UsageError, text_of
from dualeval.own_code import own_code
from dualeval.process_start import DEFAULT_SIGNALS, NOTHING_STARTED
from dualeval.status_line import LINE
from dualeval.wording import printable_lines

_WITHIN_S = 0.5
_FRAME = '\n  File "'
# Folder names of runs without --out.
_NAMED_BY_TIME = re.compile(r"\d{8}T\d{6}(\.\d+)?-(several-)?[0-9a-f]{8}")
# A terminal sends SIGINT to all processes, and a launcher then sends its ranks another one at once.
_SECOND_AFTER_S = 0.5
# SIGKILL and SIGSTOP cannot be caught; the kernel sends the others to the thread that caused them.
_NEVER = {signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
_CLOSE = b"\0"  # no signal has this number


def say(line: str) -> None:
    """Write a line on standard error, without waiting for a reader that hangs."""

    def write() -> None:
        stream = sys.stderr
        if stream is None:  # it was closed when this process started
            return
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.write(f"{printable_lines(line)}\n")
            stream.flush()

    try_for(_WITHIN_S, write)


def show_until_end(close: Callable[[], None]) -> None:
    """Have a display closed before the last line is written; otherwise half a bar stays on the screen."""
    _displays.append(close)


def close_displays() -> None:
    """Close the displays of the run."""
    LINE.speak(speaks=False)
    while _displays:
        try_for(_WITHIN_S, _displays.pop())


_displays: list[Callable[[], None]] = []


def say_traceback(error: BaseException, *, whole: bool, is_first: bool = True) -> None:
    """Write on standard error where an error was raised."""
    if text := traceback_of(error, whole=whole, is_first=is_first):
        say(text)


def traceback_of(error: BaseException, *, whole: bool, is_first: bool = True) -> str:
    """Where an error was raised, for people; "" where its text says it."""
    if whole:
        text = "".join(traceback.format_exception(error))
    elif not is_first:
        return ""
    elif isinstance(error, DualevalError) and _FRAME in text_of(error):
        return ""  # its text shows the frames
    elif lines := own_code(error):
        text = f"dualeval: in your code (--debug or DUALEVAL_DEBUG=1 shows the whole traceback):\n{lines}"
    elif isinstance(error, DualevalError):
        return ""
    else:
        text = "".join(traceback.format_exception(error))
    return text.rstrip("\n")


def end_process(code: int) -> NoReturn:
    """End the process and its reading processes at once, whatever its threads are doing."""
    try:
        for worker in multiprocessing.active_children():
            worker.kill()
        close_displays()
        try_for(_WITHIN_S, _flush)
    finally:
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            if stream is not None:
                stream.flush()


def try_for(seconds: float, action: Callable[[], object]) -> None:
    """Do something that may hang (on a disk, a store, a stream's reader), and wait no longer than this.

    The action runs in a thread of its own, and goes on there.
    """
    thread = threading.Thread(target=action, name="dualeval-trying", daemon=True)
    thread.start()
    thread.join(seconds)


def spoken(error: DualevalError, rank: int) -> str:
    """The line that a rank prints of the first failure: which rank, where, and why."""
    if not isinstance(error, PeerError):
        return f"dualeval: error: {text_of(error)}"
    text = f"{error.where}: {text_of(error)}" if error.where else text_of(error)
    return f"dualeval: error: {text}" if rank == 0 else f"dualeval: rank {rank} ends: {text}"


def how_to_resume(folder: Path | None) -> str:
    """What to type to resume a run in its folder; ``folder`` is None if the run writes nothing."""
    # Without --out the next launch would make another folder. One of several models has its folder in the
    # run's.
    paths = () if folder is None else (folder.parent, folder)
    out = next((f", with --out {path}," for path in paths if _NAMED_BY_TIME.fullmatch(path.name)), "")
    return f"the same command again{out} to resume"


# -- errors that were concluded ----------------------------------------------------------------------------

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


class _QuietHook:
    """Ends a script with the exit code of a concluded error; ``previous`` shows any other error."""

    def __init__(self, previous: _Hook) -> None:
        self.previous = previous
        # This hook, or one that was put around it while the session was opened.
        self.outermost: _Hook = self

    def __call__(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        code = getattr(error, "_dualeval_exit_code", None)
        for text in getattr(error, "_dualeval_unsaid", ()):
            say(text)
        if code is None:
            self.previous(kind, error, traceback)
        elif not (hasattr(sys, "ps1") or sys.flags.interactive):
            # Python obeys the SystemExit that a hook raises.
            sys.exit(code)


# A process has one hook, and one session at a time.
_installed: _QuietHook | None = None


def install_hook() -> None:
    """Have a concluded error end a script with its exit code, without a traceback."""
    global _installed
    remove_hook()  # left by a concluded session whose error the script has caught
    sys.excepthook = _installed = _QuietHook(sys.excepthook)


def note_outer_hook() -> None:
    """Have ``remove_hook`` also remove torch's hook: torch sets one per process group and leaves it."""
    if _installed is not None:
        _installed.outermost = sys.excepthook


def remove_hook() -> None:
    """Restore the hook that ``install_hook`` replaced, unless somebody else has set one since."""
    global _installed
    if _installed is not None and sys.excepthook is _installed.outermost:
        sys.excepthook = _installed.previous
    _installed = None


def conclude_quietly(error: BaseException, code: int) -> None:
    """Mark an error as reported; if nobody catches it, it ends a script with this exit code."""
    with suppress(AttributeError):  # a class with slots; then its traceback follows
        error._dualeval_exit_code = code  # type: ignore[attr-defined]


def say_if_uncaught(error: Exception, text: str) -> None:
    """Say an error where it ends the script: who catches it has its text, and may go on."""
    try:
        error.__dict__.setdefault("_dualeval_unsaid", []).append(text)
    except AttributeError:  # as above
        say(text)


# -- signals -----------------------------------------------------------------------------------------------


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
