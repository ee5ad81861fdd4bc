"""The end of a process whose threads may hang, and whose output nobody may read any more.

And its exception hook where a session owns it: an error that was concluded is not shown once more.
"""

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
from dualeval.own_code import own_code
from dualeval.wording import printable_lines

_WITHIN_S = 0.5
_FRAME = '\n  File "'
# What a run without --out calls its folder.
_NAMED_BY_TIME = re.compile(r"\d{8}T\d{6}(\.\d+)?-(several-)?[0-9a-f]{8}")


def say(line: str) -> None:
    """Write a line on standard error, if that goes without waiting."""

    def write() -> None:
        stream = sys.stderr
        if stream is None:  # it was closed when this process started
            return
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.write(f"{printable_lines(line)}\n")
            stream.flush()

    try_for(_WITHIN_S, write)


def show_until_end(close: Callable[[], None]) -> None:
    """Have a display closed before the last line is written: else half a bar stays."""
    _displays.append(close)


def close_displays() -> None:
    """Close what is shown of the run."""
    while _displays:
        try_for(_WITHIN_S, _displays.pop())


_displays: list[Callable[[], None]] = []


def say_traceback(error: BaseException, *, whole: bool, is_first: bool = True) -> None:
    """Write on standard error where an error was raised."""
    if whole:
        text = "".join(traceback.format_exception(error))
    elif not is_first:
        return
    elif isinstance(error, DualevalError) and _FRAME in text_of(error):
        return  # its text shows them
    elif lines := own_code(error):
        text = f"dualeval: in your code (--debug or DUALEVAL_DEBUG=1 shows the whole traceback):\n{lines}"
    elif isinstance(error, DualevalError):
        return
    else:
        text = "".join(traceback.format_exception(error))
    say(text.rstrip("\n"))


def end_process(code: int) -> NoReturn:
    """End the process and its reading processes at once, whatever its threads are in."""
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
    """Do something that may hang, and wait no longer for it: a disk, a store, or who reads a stream.

    It is done in a thread of its own, and goes on there.
    """
    thread = threading.Thread(target=action, name="dualeval-trying", daemon=True)
    thread.start()
    thread.join(seconds)


def spoken(error: DualevalError, rank: int) -> str:
    """What a rank says of the first failure: which rank, where, and why; once."""
    if not isinstance(error, PeerError):
        return f"dualeval: error: {text_of(error)}"
    text = f"{error.where}: {text_of(error)}" if error.where else text_of(error)
    return f"dualeval: error: {text}" if rank == 0 else f"dualeval: rank {rank} ends: {text}"


def how_to_resume(folder: Path | None) -> str:
    """What to type for a run to go on in its folder; None where it writes nothing."""
    # Without --out the next launch would make another folder. A run of several models has one inside its own.
    paths = () if folder is None else (folder.parent, folder)
    out = next((f", with --out {path}," for path in paths if _NAMED_BY_TIME.fullmatch(path.name)), "")
    return f"the same command again{out} to resume"


# -- errors that were concluded ----------------------------------------------------------------------------

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


class _QuietHook:
    """Ends a script with the exit code of an error that was concluded; ``previous`` shows any other."""

    def __init__(self, previous: _Hook) -> None:
        self.previous = previous
        # This one, or what was put around it while the session was opened.
        self.outermost: _Hook = self

    def __call__(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        code = getattr(error, "_dualeval_exit_code", None)
        if code is None:
            self.previous(kind, error, traceback)
        elif not (hasattr(sys, "ps1") or sys.flags.interactive):
            # Python takes what a hook raises.
            sys.exit(code)


# A process has one hook, and one session at a time.
_installed: _QuietHook | None = None


def install_hook() -> None:
    """Have errors that were concluded end a script with their exit code, and nothing more said of them."""
    global _installed
    remove_hook()  # of an earlier session that was concluded: an uncaught error would have ended the script
    sys.excepthook = _installed = _QuietHook(sys.excepthook)


def note_outer_hook() -> None:
    """Have ``remove_hook`` also remove torch's, put around it for each group, which torch never removes."""
    if _installed is not None:
        _installed.outermost = sys.excepthook


def remove_hook() -> None:
    """Put back what ``install_hook`` found, where nobody else has set a hook since."""
    global _installed
    if _installed is not None and sys.excepthook is _installed.outermost:
        sys.excepthook = _installed.previous
    _installed = None


def conclude_quietly(error: BaseException, code: int) -> None:
    """Mark an error as one of which all was said, and which ends a script with this code."""
    with suppress(AttributeError):  # a class with slots; then its traceback follows
        error._dualeval_exit_code = code  # type: ignore[attr-defined]
