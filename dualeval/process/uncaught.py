"""Errors that were concluded: shown once, and a script that they end has their exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from dualeval.process.speech import say

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
