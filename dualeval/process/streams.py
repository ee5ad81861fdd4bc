"""The standard streams of a process of the command line, and what it could not write to them."""

from __future__ import annotations

import errno
import io
import os
import sys

from dualeval.process.status_line import LINE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class _Output(io.FileIO):
    """Standard output or error, where a failed write ends nothing: what it was to hold is dropped.

    The work of a run is in its folder. A full disk under its log, or a reader that has gone, must not lose
    it: ``unwritten`` says at the end that something is missing.
    """

    was_closed = False
    problem: OSError | None = None

    def write(self, data: Any, /) -> int:
        problem = OSError(errno.EBADF, os.strerror(errno.EBADF)) if self.was_closed else None
        LINE.before_output(data)
        try:
            # None: it would block, which is no failure.
            return super().write(data)
        except OSError as error:
            problem = error
            return memoryview(data).nbytes
        finally:
            self.problem = self.problem or problem


_output: _Output | None = None


def open_standard_streams() -> None:
    """Open descriptors 0, 1 and 2 on /dev/null where they are closed, and make streams of them.

    Else a file that is opened later, a result's, gets such a number, and whoever prints writes into it.
    """
    global _output
    closed = set()
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # The kernel gives the lowest number that is free.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            closed.add(number)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for the life of the process
    if sys.stdout is sys.__stdout__:
        _output = _Output(1, "wb", closefd=False)
        _output.was_closed = 1 in closed
        sys.stdout = _text(_output, sys.__stdout__)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text(_Output(2, "wb", closefd=False), sys.__stderr__)


def _text(raw: _Output, previous: io.TextIOWrapper | None) -> io.TextIOWrapper:
    """A text stream like the one that Python has made at its start, if it has, on another raw one."""
    raw.name = "<stdout>" if raw.fileno() == 1 else "<stderr>"
    if previous is None:
        return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace")
    unbuffered = previous.write_through and not isinstance(previous.buffer, io.BufferedWriter)
    text = io.TextIOWrapper(
        # As Python does with -u: text goes to the raw stream at once.
        raw if unbuffered else io.BufferedWriter(raw),
        encoding=previous.encoding,
        errors=previous.errors,
        line_buffering=previous.line_buffering,
        write_through=previous.write_through,
    )
    text.mode = "w"  # type: ignore[misc]  # as Python sets it
    return text


def unwritten() -> OSError | None:
    """Why some of standard output could not be written since the last call; None where all of it was."""
    sys.stdout.flush()
    if _output is None:
        return None
    problem, _output.problem = _output.problem, None
    return problem
