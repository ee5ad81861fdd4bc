"""The guardian's own process, which ``guardian.Guardian`` starts: the standard library alone, and no package.

Time is counted in looks that nothing came in: a suspension, of both processes, is one look long. Standard
input ends with the process that is guarded; but reading processes, which were forked from that one, may hold
the other end for some seconds more.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


class _Guarded:
    """The process that is guarded."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        # Readable once it has ended; None where the system has no such descriptors.
        self.descriptor: int | None = None
        with suppress(OSError, AttributeError):
            self.descriptor = os.pidfd_open(pid)

    def send(self, number: int) -> None:
        with suppress(OSError):
            if self.descriptor is None:
                os.kill(self._pid, number)
            else:
                signal.pidfd_send_signal(self.descriptor, number)

    def is_awake(self) -> bool:
        try:
            stat = Path(f"/proc/{self._pid}/stat").read_text(errors="replace")
            return stat.rpartition(")")[2].split()[0] not in "Tt"
        except OSError:
            return True


def main() -> None:
    """Guard until the process has ended; the arguments are those of ``Guardian``, as JSON."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    pid, most_looks, look_s, stacks_signal, name = json.loads(sys.argv[1])
    process = _Guarded(pid)
    awaited = [0] if process.descriptor is None else [0, process.descriptor]
    looks, idle, rest = 0, False, b""
    guarded: list[str] | None = None
    hung = ""
    while True:
        ready = select.select(awaited, [], [], look_s)[0]
        # What it has said before its end comes first.
        if 0 in ready:
            came = os.read(0, 65536)
            if not came:
                break
            *lines, rest = (rest + came).split(b"\n")
            looks = 0
            for line in filter(None, lines):
                message = json.loads(line)
                if message == "ends":
                    most_looks = None
                elif message in ("idle", "busy"):
                    idle = message == "idle"
                else:
                    guarded = message
            continue
        if ready:
            break
        looks += process.is_awake()
        if most_looks is not None and not idle and looks > most_looks:
            hung = (
                f"{name}: no progress for {looks * look_s:.0f} s, and the process does not respond: "
                "C code held Python's lock"
            )
            process.send(stacks_signal)
            time.sleep(look_s)
            process.send(signal.SIGKILL)
            break
    if guarded:
        _write_down(*guarded, name=name, hung=hung)


def _write_down(status: str, run: str, stacks: str, resume: str, *, name: str, hung: str) -> None:
    """Say how the run has ended, and write it into status.json, where the run has not."""
    message = (
        f"{hung}; {stacks} has its stacks"
        if hung
        else f"{name} exited without a message: it was killed or crashed"
    )
    message += f". {resume}"
    with suppress(OSError, ValueError, KeyError):
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
    main()
