"""The end of a process whose threads may hang, and whose output nobody may read any more."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NoReturn, TextIO

from dualeval.errors import DualevalError, PeerError, text_of

_WITHIN_S = 0.5


def say(line: str) -> None:
    """Write a line on standard error, if that goes without waiting."""

    def write() -> None:
        stream = sys.stderr
        if stream is None:  # it was closed when this process started
            return
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.write(f"{line}\n")
            stream.flush()

    _try(write)


def error_stream() -> TextIO:
    """Give a stream on a file, for what writes to its descriptor, as ``faulthandler``.

    That is standard error. Where that is no file, as in a notebook, it is the one with which the process
    started; where that was closed, /dev/null.
    """
    for stream in (sys.stderr, sys.__stderr__):
        with suppress(AttributeError, OSError, ValueError):  # None; no file, as io.StringIO; closed
            os.fstat(stream.fileno())  # type: ignore[union-attr]
            return stream  # type: ignore[return-value]
    return _nowhere()


@cache
def _nowhere() -> TextIO:
    return Path(os.devnull).open("w")


def end_process(code: int) -> NoReturn:
    """End the process and its reading processes at once, whatever its threads are in."""
    try:
        for worker in multiprocessing.active_children():
            worker.kill()
        _try(_flush)
    finally:
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            if stream is not None:
                stream.flush()


def _try(action: Callable[[], None]) -> None:
    """Do something that may hang, for a moment: a thread may hold the stream, or its reader stand still."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(_WITHIN_S)


def spoken(error: DualevalError, rank: int) -> str:
    """What a rank says of the first failure: which rank, where, and why; once."""
    if not isinstance(error, PeerError):
        return f"dualeval: error: {text_of(error)}"
    text = f"{error.where}: {text_of(error)}" if error.where else text_of(error)
    return f"dualeval: error: {text}" if rank == 0 else f"dualeval: rank {rank} ends: {text}"
