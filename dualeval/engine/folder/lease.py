"""The lease of an output folder, which keeps two runs from working in one folder at once.

It saves waste and nothing more: no result depends on it, and in rare races of newcomers on a disk without
locks two runs hold it until the next ``renew``.

The holder keeps counting in lease.json. A newcomer watches by its own clock whether the count moves, so that
the clocks of two hosts need not agree. On one kernel a lock tells at once that the holder has died.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic, sleep

from dualeval.errors import UsageError

# How often the holder calls ``renew``.
RENEW_EVERY_S = 2.0
# A lease that stands still for so long is a dead run's, or that of a run that hangs.
TAKE_OVER_AFTER_S = 20.0
LOOK_EVERY_S = 0.25
LEASE = "lease.json"
# Bytes. Every rewriting covers the one before it.
_LENGTH = 512
# NFS says ESTALE of a file that another host has removed.
_GONE = (errno.ENOENT, errno.ESTALE)


class Lease:
    """A run's hold on its output folder; ``take`` makes it.

    The holder's process must not open lease.json again: closing it, whatever the descriptor, drops the lock
    until the next ``renew``.
    """

    def __init__(self, path: Path, descriptor: int, claim: _Claim) -> None:
        self._path = path
        self._descriptor: int | None = descriptor
        self._claim = claim
        # Released while another thread renews, the descriptor's number could be another file's by then.
        self._busy = threading.Lock()

    @classmethod
    def take(cls, folder: Path, token: str, *, waiting: Callable[[], None] = lambda: None) -> Lease:
        """Take the lease of a folder, from a dead run where need be.

        Args:
            folder: the output folder.
            token: names this run apart from any other, in a file's name too.
            waiting: called at every look at another run's lease, ``LOOK_EVERY_S`` apart.

        Raises:
            UsageError: another run is at work in the folder.
            OSError: the folder cannot be written.
        """
        path = folder / LEASE
        while True:
            try:
                return cls._create(path, token)
            except FileExistsError:
                _clear_the_way(path, token, waiting)

    @classmethod
    def _create(cls, path: Path, token: str) -> Lease:
        claim = _Claim(host=socket.gethostname(), pid=os.getpid(), boot="", token=token, counter=0)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        lease = cls(path, descriptor, claim)
        try:
            lease._write(descriptor)
        except BaseException:
            lease.release()
            raise
        return lease

    def renew(self) -> bool:
        """Show that this run lives; returns whether the lease is still its own."""
        with self._busy:
            if self._descriptor is None:
                return False
            try:
                if not _is_at(self._path, self._descriptor):
                    return False
                self._claim = replace(self._claim, counter=self._claim.counter + 1)
                self._write(self._descriptor)
            except OSError as error:
                if error.errno not in _GONE:
                    raise
                return False
        return True

    def release(self) -> None:
        """Give the lease back; another run's, which has taken it over, stays. A second call does nothing."""
        with self._busy:
            if self._descriptor is None:
                return
            descriptor, self._descriptor = self._descriptor, None
            try:
                # Removed under the lock: nobody on this kernel can have taken it over in between.
                if _is_at(self._path, descriptor):
                    self._path.unlink()
            except OSError as error:
                if error.errno not in _GONE:
                    raise
            finally:
                os.close(descriptor)

    def _write(self, descriptor: int) -> None:
        """Write the claim in place, under the lock: a newcomer may find the lock free as soon as it reads."""
        # Not flock: loader processes, forked later, would inherit that one and keep it after this process.
        boot = _kernel_and_processes() if _lock(descriptor) else ""
        self._claim = replace(self._claim, boot=boot)
        os.pwrite(descriptor, self._claim.to_bytes(), 0)
        os.fsync(descriptor)


@dataclass(frozen=True, kw_only=True)
class _Claim:
    """What lease.json says.

    Attributes:
        host, pid: the holder, for people.
        boot: the holder's kernel and process namespace; empty where it could not lock the file.
        token: the run's.
        counter: how often it was renewed.
    """

    host: str
    pid: int
    boot: str
    token: str
    counter: int

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode().ljust(_LENGTH - 1) + b"\n"

    @classmethod
    def parse(cls, content: bytes) -> _Claim | None:
        """Read a claim; None where its holder died before writing it, or something has damaged it."""
        try:
            return cls(**json.loads(content))
        except (ValueError, TypeError):
            return None

    def is_told_by_the_lock(self) -> bool:
        """Whether a free lock means that the holder is dead. A process is never refused its own lock."""
        return self.boot == _kernel_and_processes() and self.pid != os.getpid()


def _clear_the_way(path: Path, token: str, waiting: Callable[[], None]) -> None:
    """Watch another run's lease until it is gone, or dead and removed.

    Raises:
        UsageError: its holder is alive.
    """
    watched: bytes | None = None
    since = 0.0
    while True:
        try:
            # Opened anew for each look: NFS shows what other hosts have written to who opens a file.
            with path.open("r+b", buffering=0) as file:
                content = file.read(_LENGTH)
                claim = _Claim.parse(content)
                if watched is None:
                    watched, since = content, monotonic()
                elif content != watched:
                    raise UsageError(_in_use(path.parent, claim))
                stands_still = monotonic() - since >= TAKE_OVER_AFTER_S
                if stands_still or (claim is not None and claim.is_told_by_the_lock()):
                    # A run that hangs has its lock still. Otherwise the lock keeps other newcomers back.
                    free = _lock(file.fileno())
                    if (free or stands_still) and _remove(path, file.fileno(), content, token):
                        return
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return
        waiting()
        sleep(LOOK_EVERY_S)


def _remove(path: Path, descriptor: int, content: bytes, token: str) -> bool:
    """Remove a dead run's lease; False where it has been renewed, or is another newcomer's already."""
    if not _is_at(path, descriptor):
        return False
    # Of several newcomers one gets to rename it.
    aside = path.with_name(f"{path.name}.{token}")
    path.rename(aside)
    dead = _is_at(aside, descriptor) and aside.read_bytes()[:_LENGTH] == content
    if not dead:
        with suppress(FileExistsError):
            path.hardlink_to(aside)
    aside.unlink()
    return dead


def _is_at(path: Path, descriptor: int) -> bool:
    return os.path.samestat(path.stat(), os.fstat(descriptor))


def _lock(descriptor: int) -> bool:
    """Lock a file for this process, without waiting; False where another has it or the disk has no locks."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _kernel_and_processes() -> str:
    """What two processes share if and only if they see the same processes of the same kernel."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return f"{boot}.{Path('/proc/self/ns/pid').stat().st_ino}"


def _in_use(folder: Path, claim: _Claim | None) -> str:
    holder = "an unknown host" if claim is None else f"{claim.host} (pid {claim.pid})"
    return f"{folder} is in use by another run on {holder}. Wait for it to end, or give another --out."
