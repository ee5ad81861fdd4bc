"""Processes, as files name them: whether the one that wrote a file still runs, and who started it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dualeval.world import World

# Of the fields of /proc/PID/stat behind the process's name.
_STATE, _START_TIME = 0, 19


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process, for people and for whoever asks whether it still runs."""

    host: str
    # Its number there.
    pid: int
    # Its kernel's boot and its PID namespace; "" where there is no /proc, as on other systems.
    space: str
    # When it began, in the kernel's ticks; "" likewise.
    start: str

    @classmethod
    def own(cls) -> Process:
        """This process."""
        stat = _stat(os.getpid())
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            space=_space(),
            start="" if stat is None else stat[_START_TIME],
        )

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Process | None:
        """Read the fields of a mapping; None where it does not describe a process."""
        try:
            return cls(**{name: content[name] for name in cls.__dataclass_fields__})
        except (KeyError, TypeError):
            return None

    @property
    def has_ended(self) -> bool:
        """Whether it is known to have ended; False where it runs, and where nothing is known of it."""
        if not self.space or self.space != _space():
            return False  # it could not be seen from here
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return True
        except PermissionError:
            pass
        stat = _stat(self.pid)
        # Another user's may be hidden. Another start: the number is another process's by now.
        return stat is not None and (stat[_START_TIME] != self.start or stat[_STATE] in "ZX")


def launch_of(world: World) -> str | None:
    """What the ranks have in common that one agent of torchrun starts, and starts again.

    The number of restarts is no help: an agent does not count those that another node has caused.
    """
    if world.meeting.launch_id is None:
        return None
    agent = _stat(os.getppid())
    # A process id may be another one's later; along with the time of its start it is not.
    start = "" if agent is None else f" {agent[_START_TIME]}"
    return f"{world.meeting.launch_id} {socket.gethostname()} {os.getppid()}{start}"


@cache
def _space() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot}.{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _stat(pid: int) -> list[str] | None:
    """The fields of a process behind its name; None where they cannot be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
