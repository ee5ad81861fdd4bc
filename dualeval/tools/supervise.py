"""Run a command to its end, or to a time limit, and leave none of its processes behind."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from types import FrameType

# Launchers start ranks in sessions of their own: they are found by this variable, however far they went.
_MARK = "DUALEVAL_STARTED_BY"
# How long a launcher that is told to end has for its ranks, on other hosts too.
_GRACE_S = 10.0
_PAUSE_S = 0.02
_LOOK_S = 0.2


class Interrupted(Exception):
    """A signal asked this process to end; ``str()`` is its name."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended."""

    # Its exit code, -N where signal N ended it; None where it ran into the time limit.
    code: int | None
    # How long it ran.
    seconds: float
    # The code in words.
    how: str


class Interrupts:
    """Notes SIGINT, SIGTERM and SIGHUP from ``with`` to its end; ``check`` then raises. In the main thread.

    The handler does not raise: raised while a command is being started, before its number is known, or while
    one is being ended, the exception would leave it running.
    """

    def __init__(self) -> None:
        self._received: signal.Signals | None = None

    def check(self) -> None:
        """Raise ``Interrupted`` once a signal has come."""
        if self._received is not None:
            raise Interrupted(self._received.name)

    def __enter__(self) -> Interrupts:
        wanted = [
            number
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN
        ]
        self._previous = {number: signal.signal(number, self._note) for number in wanted}
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._received is None:
            self._received = signal.Signals(number)


def run_supervised(
    command: Sequence[str],
    *,
    stdout: Path,
    stderr: Path,
    environ: Mapping[str, str],
    timeout_s: float,
    check: Callable[[], None] = lambda: None,
) -> Ended:
    """Run a command in a session of its own, with its output in files.

    Whatever happens, an exception in this process too, none of its processes on this host is left when this
    returns. Those on other hosts are the launcher's to end, which is given the time.
    """
    mark = uuid.uuid4().hex
    start = monotonic()
    with stdout.open("wb") as out, stderr.open("wb") as err:
        process = subprocess.Popen(
            command,
            env={**environ, _MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            code = process.poll()
            while code is None and monotonic() - start < timeout_s:
                check()
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(_LOOK_S)
        finally:
            _end(process, mark)
    if code is None:
        how = f"it did not end within {timeout_s:g} s"
    else:
        how = f"exit code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"
    return Ended(code=code, seconds=monotonic() - start, how=how)


def ask(
    command: Sequence[str],
    environ: Mapping[str, str],
    limit_s: float,
    check: Callable[[], None] = lambda: None,
) -> tuple[int | None, str, str]:
    """Run a short command as ``run_supervised`` does."""
    with tempfile.TemporaryDirectory(prefix="dualeval-") as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        ended = run_supervised(
            command, stdout=out, stderr=err, environ=environ, timeout_s=limit_s, check=check
        )
        return ended.code, out.read_text("utf-8", "replace"), err.read_text("utf-8", "replace")


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """End a command, and what it has started."""
    if process.poll() is None:
        _signal_group(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    # What ends by itself is left to, if it does so now.
    deadline = monotonic() + (1.0 if process.returncode == 0 else 0.0)
    while (left := _marked(mark)) and monotonic() < deadline:
        sleep(_PAUSE_S)
    while left:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        sleep(_PAUSE_S)
        left = _marked(mark)
    if process.poll() is None:
        _signal_group(process.pid, signal.SIGKILL)
    process.wait()


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number)


def _marked(mark: str) -> list[int]:
    """List this user's living processes that carry the mark."""
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        # Gone meanwhile, or another user's.
        with suppress(OSError):
            # A process that is only waited for has no variables any more.
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found
