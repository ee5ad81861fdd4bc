"""What a process says, and its exit: lines that wait for no reader, since nobody may read them any more."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from dualeval.errors import DualevalError, PeerError, text_of
from dualeval.messages import printable_lines
from dualeval.process.status_line import LINE
from dualeval.user_code.origin import own_code

_WITHIN_S = 0.5
_FRAME = '\n  File "'
# Folder names of runs without --out.
_NAMED_BY_TIME = re.compile(r"\d{8}T\d{6}(\.\d+)?-(several-)?[0-9a-f]{8}")


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


# -- errors that were concluded: shown once, and a script that they end has their exit code ------------

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
