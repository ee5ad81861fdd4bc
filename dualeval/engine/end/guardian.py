"""Guardian: a small process beside this one, for what a process cannot do once its Python does not run.

It ends a process whose C code holds Python's lock, with its stacks written. ``faulthandler`` has a timer for
that, but one that counts the seconds in which the process was suspended, and then ends it as it wakes. And it
writes down the end of a run that is alone, and killed: where several ranks run, the others do.

This file is also what that process runs: the standard library alone, and no package.
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
# Nobody else's: it only has stacks written.
_STACKS_SIGNAL = signal.SIGRTMAX
# A launcher's variables would have it taken for a rank.
_VARIABLES = ("PATH", "LD_LIBRARY_PATH")


class Guardian:
    """Guards this process until ``leave``."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self._sending = threading.Lock()
        # Signals that this process waits for in a thread are blocked there, too: it ends with its input.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _VARIABLES if name in os.environ},
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        # It may be stopped, and read nothing.
        os.set_blocking(self._pipe.fileno(), False)
        self.tell(timeout_s=timeout_s)
        self.write_stacks_to(sys.__stderr__)

    def write_stacks_to(self, stream: TextIO | None) -> None:
        """Say where stacks go: nowhere, where that is closed."""
        faulthandler.unregister(_STACKS_SIGNAL)
        if stream is not None:
            with suppress(OSError, ValueError):
                faulthandler.register(_STACKS_SIGNAL, stream)

    def tell(self, **facts: Any) -> None:
        """Say that this process's Python runs, and what else it has to know.

        ``timeout_s``: how long Python may not run; ``idle``: for as long as it likes. ``guarded``: where an
        end is written down that this process cannot write down itself: status.json, the run's token, its file
        of stacks, what to type; None where that has been done.
        """
        # Full, where it is stopped; closed, where it was killed, or has been left.
        with self._sending, suppress(OSError, ValueError):
            os.write(self._pipe.fileno(), f"{json.dumps(facts)}\n".encode())

    def leave(self) -> None:
        """Guard no longer; a second call does nothing."""
        faulthandler.unregister(_STACKS_SIGNAL)
        with self._sending:
            self._pipe.close()
        # It has nothing to do any more.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GONE_WITHIN_S)


def _state_of(pid: int) -> str:
    """The letter of a process's state; empty where there is no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


# -- the process -------------------------------------------------------------------------------------------


def _guard(pid: int, name: str) -> None:
    """Guard the process that has started this one, until that has ended.

    Time is counted in looks that nothing came in: a suspension, of both processes, is one look long. Standard
    input ends with the process that is guarded; but reading processes, which were forked from that one, may
    hold the other end for some seconds more.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    facts: dict[str, Any] = {"timeout_s": float("inf"), "idle": False, "guarded": None}
    looks, rest, hung = 0, b"", ""
    while not hung:
        has_ended = os.getppid() != pid
        # What it has said before its end comes first.
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
                # Else it may be another process's number by now.
                if os.getppid() == pid:
                    os.kill(pid, number)
                    time.sleep(_LOOK_S)
    if facts["guarded"] is not None:
        _write_down(*facts["guarded"], name=name, hung=hung)


def _write_down(status: str, run: str, stacks: str, resume: str, *, name: str, hung: str) -> None:
    """Say how the run has ended, and write it into status.json, where the run has not."""
    message = (
        f"{hung}; {stacks} has its stacks"
        if hung
        else f"{name} exited without a message: it was killed or crashed"
    )
    message += f". {resume}"
    with suppress(OSError, ValueError, KeyError, TypeError):
        found: dict[str, Any] = json.loads(Path(status).read_text("utf-8"))
        is_own = found["run"] == run
        if is_own and found["state"] != "running":
            return
        sys.stderr.write(f"dualeval: error: {message}\n")
        if is_own:
            found.update(state="failed", exit_code=1, reason=message)
            partial = Path(f"{status}.{run}.partial")
            partial.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", "utf-8")
            partial.replace(status)


if __name__ == "__main__":
    _guard(int(sys.argv[1]), sys.argv[2])
