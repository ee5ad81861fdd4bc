"""The end of a process whose threads may hang, and whose output nobody may read any more."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from dualeval.errors import DualevalError, PeerError

_WITHIN_S = 0.5


def say(line: str) -> None:
    """Write a line on standard error, if that goes without waiting."""

    def write() -> None:
        with suppress(OSError, ValueError):  # nobody reads it any more
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()

    _try(write)


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
            stream.flush()


def _try(action: Callable[[], None]) -> None:
    """Do something that may hang, for a moment: a thread may hold the stream, or its reader stand still."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(_WITHIN_S)


def spoken(error: DualevalError, rank: int) -> str:
    """What a rank says of the first failure: which rank, where, and why; once."""
    if not isinstance(error, PeerError):
        return f"dualeval: error: {error}"
    text = f"{error.where}: {error}" if error.where else str(error)
    return f"dualeval: error: {text}" if rank == 0 else f"dualeval: rank {rank} ends: {text}"
