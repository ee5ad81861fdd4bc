"""The exception hook of a process that a session owns: an error that was concluded is not shown once more."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


class _QuietHook:
    """Ends a script with the exit code of an error that was concluded; ``previous`` shows any other."""

    def __init__(self, previous: _Hook) -> None:
        # The hook that was found.
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
    _installed = _QuietHook(sys.excepthook)
    sys.excepthook = _installed


def note_outer_hook() -> None:
    """Have ``remove_hook`` also remove what is around the hook now.

    torch puts a hook around it for each group that is opened, and never removes that.
    """
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
