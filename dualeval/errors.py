"""The errors that dualeval raises on purpose, and the exit code that each one becomes.

    DualevalError            1   something failed; the message says what
    ├── UsageError           2   the caller's input is wrong: an option, a file, a folder, a name
    │   ├── RefusedSamples   2   a library's metric takes the samples, and cannot compute from these alone
    │   └── LaunchError      2   the launcher's variables and the wanted backend do not fit together
    │       └── LibraryError 2   a library, or the code of a task, is missing or broken on this node
    ├── StoreError         1, 2  a store or web server refuses, or does not answer: no sample is at fault
    ├── BackendError         1   a collective was asked for something that no backend does, or it broke
    ├── ExactlyOnceError     1   after the reduction a sample was counted never, or more than once
    ├── PeerError            *   another rank failed first; carries that rank's message and exit code
    │   └── PeerUsageError   2   the same where the caller's input was wrong; a UsageError, too
    └── Stopped             75   a signal asked the run to end; what was finished is saved

A message says what was found, what was expected, and what to type. Anything else that reaches the top is
a bug or a failure of the machine: it keeps its traceback and exits 1.
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
# A gate of 'dualeval compare' has not passed.
EXIT_GATE = 3
# EX_TEMPFAIL of sysexits.h: the same command again goes on.
EXIT_STOPPED = 75


class DualevalError(Exception):
    """Base of every error that dualeval raises on purpose."""

    exit_code = EXIT_FAILED


def exit_code_of(error: BaseException) -> int:
    """The exit code that an error ends a rank with."""
    return error.exit_code if isinstance(error, DualevalError) else EXIT_FAILED


def message_of(error: BaseException) -> str:
    """What an error is called in a message to people."""
    return "interrupted" if isinstance(error, KeyboardInterrupt) else with_type(error)


def with_type(error: BaseException) -> str:
    """An error's text, behind its type where it is not one of ours, as "ValueError: text"."""
    said = text_of(error)
    return said if isinstance(error, DualevalError) else f"{type(error).__name__}: {said}"


def text_of(error: BaseException) -> str:
    """An error's text, which can be written as UTF-8 whatever a user's error makes of ``str()``."""
    try:
        text = str(error)
    except Exception as problem:  # noqa: BLE001 - whatever it is, the error itself is to be reported
        return f"its __str__ raised {type(problem).__name__}"
    # The name of a file that is no UTF-8 holds halves of surrogate pairs.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class UsageError(DualevalError):
    """The caller's input is wrong: an option, a file, a folder or a name."""

    exit_code = EXIT_USAGE


class RefusedSamples(UsageError):
    """A metric of a library has taken the samples and computes nothing of them; of more it may."""


class LaunchError(UsageError):
    """The launcher's environment is incomplete or contradicts what was asked for."""


class LibraryError(LaunchError):
    """A library, or the code of a task, is missing or broken on this node; on others it may be whole."""


class StoreError(DualevalError):
    """An object store or web server cannot be read, whichever of its files is asked for.

    No sample is at fault, so ``--on-error skip`` leaves none out.
    """

    def __init__(self, message: str, *, exit_code: int = EXIT_USAGE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class BackendError(DualevalError):
    """A collective was asked for something that no backend does, or it broke."""


class ExactlyOnceError(DualevalError):
    """The reduced ledger shows a chunk that was not counted exactly once."""


class PeerError(DualevalError):
    """Another rank failed first; ``str()`` is that rank's message, ``exit_code`` its exit code.

    Attributes:
        rank: the rank that failed first.
        where: the same with its host and process, as "rank 3 on n2 (pid 4711)"; None where another rank has
            noticed the failure, whose message begins with that.
    """

    def __init__(self, message: str, *, rank: int, exit_code: int, where: str | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code
        self.where = where


class PeerUsageError(PeerError, UsageError):
    """Another rank found the caller's input wrong: ``except UsageError`` catches it on every rank."""


class Stopped(DualevalError):
    """A signal asked the run to end; ``str()`` is the signal's name."""

    exit_code = EXIT_STOPPED
