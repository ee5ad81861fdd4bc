"""Guardian: a small process beside this one, which acts when this one's Python does not run.

It kills a process whose C code holds Python's lock, after the stacks are written. The timer of
``faulthandler`` would also count time in which the process was suspended, and kill it as it wakes. The
guardian also records the end of a killed run of one rank; where several ranks run, the others do that.

The guardian runs this file as its program, so it uses the standard library alone.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

_LOOK_S = 0.25
_GONE_WITHIN_S = 1.0
# A signal that nothing else uses; it only has stacks written.
_STACKS_SIGNAL = signal.SIGRTMAX
# With a launcher's variables the guardian would be taken for a rank.
_VARIABLES = ("PATH", "LD_LIBRARY_PATH")


class Guardian:
    """Guards this process until ``leave``."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self._sending = threading.Lock()
        # The guardian inherits this process's blocked signals; it ends when its standard input does.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _VARIABLES if name in os.environ},
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        # A suspended guardian reads nothing, and writing to it must not block.
        os.set_blocking(self._pipe.fileno(), False)
        self.tell(timeout_s=timeout_s)
        self.write_stacks_to(sys.__stderr__)

    def write_stacks_to(self, stream: TextIO | None) -> None:
        """Say where stacks go: nowhere if the stream is closed."""
        faulthandler.unregister(_STACKS_SIGNAL)
        if stream is not None:
            with suppress(OSError, ValueError):
                faulthandler.register(_STACKS_SIGNAL, stream)

    def tell(self, **facts: Any) -> None:
        """Say that this process's Python runs, and pass what else the guardian has to know.

        ``timeout_s``: how long Python may not run; ``idle``: whether it may pause for any time. ``guarded``:
        what is needed to record an end in place of this process (status.json, the run's token, its file of
        stacks, what to type); None once the end is recorded.
        """
        # The pipe is full if the guardian is suspended, and closed if it was killed or left.
        with self._sending, suppress(OSError, ValueError):
            os.write(self._pipe.fileno(), f"{json.dumps(facts)}\n".encode())

    def leave(self) -> None:
        """Stop guarding; a second call does nothing."""
        faulthandler.unregister(_STACKS_SIGNAL)
        with self._sending:
            self._pipe.close()
        # A guardian that is still there has nothing left to do.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GONE_WITHIN_S)


def _state_of(pid: int) -> str:
    """The letter of a process's state; empty without /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


# -- the process -------------------------------------------------------------------------------------------


def _guard(pid: int, name: str) -> None:
    """Guard the parent process until it ends.

    Time is counted in polls without a message: a suspension of both processes counts as one poll. Standard
    input ends with the guarded process; but reading processes, forked from that process, may hold the pipe
    open for some seconds more.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    facts: dict[str, Any] = {"timeout_s": float("inf"), "idle": False, "guarded": None}
    looks, rest, hung = 0, b"", ""
    while not hung:
        has_ended = os.getppid() != pid
        # Read the last messages of that process first.
        if select.select([0], [], [], 0 if has_ended else _LOOK_S)[0]:
            came = os.read(0, 65536)
            if not came:
                break
            *lines, rest = (rest + came).split(b"\n")
            looks = 0
            for line in lines:
                facts |= json.loads(line)
            continue
        if has_ended:
            break
        looks += _state_of(pid) not in ("T", "t")
        if looks * _LOOK_S > facts["timeout_s"] and not facts["idle"]:
            hung = (
                f"{name}: no progress for {looks * _LOOK_S:.0f} s, and the process does not respond: "
                "C code held Python's lock"
            )
            for number in (_STACKS_SIGNAL, signal.SIGKILL):
                # Otherwise the number may be another process's by now.
                if os.getppid() == pid:
                    os.kill(pid, number)
                    time.sleep(_LOOK_S)
    if facts["guarded"] is not None:
        _write_down(*facts["guarded"], name=name, hung=hung)


def _write_down(status: str, run: str, stacks: str, resume: str, *, name: str, hung: str) -> None:
    """Print how the run ended, and write it into status.json, unless the run itself has."""
    message = (
        f"{hung}; {stacks} has its stacks"
        if hung
        else f"{name} exited without a message: it was killed or crashed"
    )
    message += f". {resume}"
    with suppress(OSError, ValueError, KeyError, TypeError):
        content: dict[str, Any] = json.loads(Path(status).read_text("utf-8"))
        is_own = content["run"] == run
        if is_own and content["state"] != "running":
            return
        sys.stderr.write(f"dualeval: error: {message}\n")
        if is_own:
            content.update(state="failed", exit_code=1, reason=message)
            partial = Path(f"{status}.{run}.partial")
            partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")
            partial.replace(status)


if __name__ == "__main__":
    _guard(int(sys.argv[1]), sys.argv[2])
