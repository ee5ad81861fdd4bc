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
from typing import NoReturn

from dualeval.errors import DualevalError, PeerError, text_of
from dualeval.messages import printable_lines
from dualeval.process.status_line import LINE
from dualeval.user_code.tracebacks import own_code

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
