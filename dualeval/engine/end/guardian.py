"""Guardian: a small process beside this one, for what a process cannot do once its Python does not run.

It ends a process whose C code holds Python's lock, with its stacks written. ``faulthandler`` has a timer for
that, but one that counts the seconds in which the process was suspended, and then ends it as it wakes. And it
writes down the end of a run that is alone, and killed: where several ranks run, the others do.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TextIO

_SCRIPT = Path(__file__).with_name("guardian_process.py")
_LOOK_S = 0.25
_GONE_WITHIN_S = 1.0
# Nobody else's: it only has stacks written.
_STACKS_SIGNAL = signal.SIGRTMAX
# A launcher's variables would have it taken for a rank.
_VARIABLES = ("PATH", "LD_LIBRARY_PATH")


class Guardian:
    """Guards this process until ``leave``."""

    def __init__(self, name: str, timeout_s: float | None, stream: TextIO) -> None:
        most_looks = None if timeout_s is None else timeout_s / _LOOK_S
        self._facts = (os.getpid(), most_looks, _LOOK_S, int(_STACKS_SIGNAL), name)
        self._sending = threading.Lock()
        # What another one has to know.
        self._guarded, self._idle = "null", '"busy"'
        self._start()
        self.write_stacks_to(stream)

    def _start(self) -> None:
        # Signals that this process waits for in a thread are blocked there, too: it ends with its input.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SCRIPT), json.dumps(self._facts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _VARIABLES if name in os.environ},
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        # It may be stopped, and read nothing.
        os.set_blocking(self._pipe.fileno(), False)

    def write_stacks_to(self, stream: TextIO) -> None:
        """Say where stacks go. A stream without a descriptor takes none."""
        with suppress(OSError, ValueError, RuntimeError, AttributeError):
            faulthandler.register(_STACKS_SIGNAL, stream)

    def beat(self) -> None:
        """Say that this process's Python runs; starts another guardian where it was killed or stopped."""
        with self._sending, suppress(OSError):
            if not self._pipe.closed and not self._is_awake():
                self._process.kill()
                self._process.wait()
                self._pipe.close()
                self._start()
                os.write(self._pipe.fileno(), f"{self._guarded}\n{self._idle}\n".encode())
        self._send("")

    def _is_awake(self) -> bool:
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text(errors="replace")
        except OSError:
            return self._process.poll() is None
        return stat.rpartition(")")[2].split()[0] not in "TtZX"

    def guard(self, status: Path, run: str, stacks: Path, resume: str) -> None:
        """Have the end of a run written down that this process cannot write down itself."""
        self._guarded = json.dumps((str(status), run, str(stacks), resume))
        self._send(self._guarded)

    def forget(self) -> None:
        """Say that how the run ended has been written down."""
        self._guarded = "null"
        self._send(self._guarded)

    def set_idle(self, *, idle: bool) -> None:
        """Say that this process may keep Python's lock for as long as it likes, or no longer."""
        self._idle = '"idle"' if idle else '"busy"'
        self._send(self._idle)

    def ends(self) -> None:
        """Say that this process ends by itself, and beats no more."""
        self._send('"ends"')

    def leave(self) -> None:
        """Guard no longer; a second call does nothing."""
        faulthandler.unregister(_STACKS_SIGNAL)
        with self._sending:
            self._pipe.close()
        # It has nothing to do any more.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GONE_WITHIN_S)

    def _send(self, line: str) -> None:
        # Full, where it is stopped; closed, where it was killed: the next beat starts another.
        with self._sending, suppress(OSError, ValueError):
            os.write(self._pipe.fileno(), f"{line}\n".encode())
