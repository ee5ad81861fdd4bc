"""Which process it is: for people, and for whoever asks whether it still runs."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

# Positions in /proc/PID/stat after the process's name.
_STATE, _START_TIME = 0, 19


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process, for people and for whoever asks whether it still runs."""

    host: str
    # Its number there.
    pid: int
    # Its kernel's boot and its PID namespace; "" on systems without /proc.
    space: str
    # When it began, in the kernel's ticks; "" likewise.
    start: str

    @classmethod
    def of(cls, pid: int) -> Process:
        """A process of this host."""
        stat = _stat(pid)
        start = "" if stat is None else stat[_START_TIME]
        return cls(host=socket.gethostname(), pid=pid, space=_space(), start=start)

    @classmethod
    def own(cls) -> Process:
        """This process."""
        return cls.of(os.getpid())

    def __str__(self) -> str:
        # A process id may be reused; with its start time it is unique.
        return f"{self.host} {self.pid} {self.start}".rstrip()

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Process | None:
        """Read the fields of a mapping; None if it does not describe a process."""
        try:
            fields = {name: content[name] for name in cls.__dataclass_fields__}
        except (KeyError, TypeError):
            return None
        is_whole = all(type(value) is (int if name == "pid" else str) for name, value in fields.items())
        return cls(**fields) if is_whole else None

    @property
    def has_ended(self) -> bool:
        """Whether it is known to have ended; False if it runs, or if nothing is known of it."""
        if not self.space or self.space != _space():
            return False  # it could not be seen from here
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return True
        except PermissionError:
            pass
        stat = _stat(self.pid)
        # None: another user's process may be hidden. Another start time: the process id was reused.
        return stat is not None and (stat[_START_TIME] != self.start or stat[_STATE] in "ZX")


@cache
def _space() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot}.{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the process's name; None if they cannot be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
