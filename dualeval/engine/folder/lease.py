"""The lease of an output folder, which keeps two runs from working in one folder at once.

It saves waste and nothing more: no result depends on it, and in rare races two runs hold it until the next
``renew``.

The holder keeps counting in lease.json. A newcomer watches by its own clock whether the count moves, so that
the clocks of two hosts need not agree. A holder on the newcomer's own kernel is asked for directly.
No lock of the system is used: closing any descriptor of the file drops POSIX locks, and not every disk has
them.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from dualeval.engine.folder.layout import LEASE
from dualeval.engine.folder.process import Process
from dualeval.errors import UsageError
from dualeval.result import JOB, read_status
from dualeval.whole_files import whole_file

# How often the holder calls ``renew``.
RENEW_EVERY_S = 2.0
# A lease that stands still for so long is a dead run's, or that of a run that hangs.
TAKE_OVER_AFTER_S = 20.0
LOOK_EVERY_S = 0.25
# Renewals that do not find the folder, ``RENEW_EVERY_S`` apart: a network disk may be away for a moment.
_GONE_AFTER = 3
# Bytes: two host names of 64 letters, each written as \uXXXX. Every rewriting covers the one before it.
_LENGTH = 1024
_TURN = "turn"
# NFS says ESTALE of a file that another host has removed.
_GONE = (errno.ENOENT, errno.ESTALE)


class Lease:
    """A run's hold on its output folder; ``take`` makes it."""

    def __init__(self, path: Path, token: str) -> None:
        # Of lease.json.
        self.path = path
        # Names this run apart from any other.
        self.token = token
        self._process = Process.own()
        self._counter = 0
        self._released = False
        # The thread that renews must not make the file anew when it has just been given back.
        self._busy = threading.Lock()

    @classmethod
    def take(cls, folder: Path, token: str, *, waiting: Callable[[], None] = lambda: None) -> Lease:
        """Take the lease of a folder, from a dead run where need be."""
        lease = cls(folder / LEASE, token)
        while True:
            try:
                lease._create()
                return lease
            except FileExistsError:
                if _take_over(lease, waiting):
                    return lease

    def renew(self) -> bool:
        """Show that this run lives; returns whether it still has the lease, and no other run."""
        with self._busy:
            if self._released:
                return False
            self._counter += 1
            with self.path.open("r+b", buffering=0) as file:
                holder = _token_of(file.read(_LENGTH))
                is_own = holder in (self.token, None)
                if is_own:
                    # Through the same descriptor: a lease that takes this one's place now is another file.
                    os.pwrite(file.fileno(), self._content(), 0)
        return is_own

    def restore(self) -> None:
        """Write a lease.json anew that somebody has removed."""
        with self._busy, suppress(FileExistsError):
            if not self._released:
                self._create()

    def release(self) -> None:
        """Give the lease back; another run's, which has taken it over, stays. A second call does nothing."""
        with self._busy:
            if self._released:
                return
            self._released = True
            try:
                if _token_of(self.path.read_bytes()) == self.token:
                    self.path.unlink()
            except OSError as error:
                if error.errno not in _GONE:
                    raise

    def _create(self) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.pwrite(descriptor, self._content(), 0)
        except BaseException:
            self.path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def _content(self) -> bytes:
        claim = {**asdict(self._process), "token": self.token, "counter": self._counter}
        return json.dumps(claim).encode().ljust(_LENGTH - 1) + b"\n"


class KeptLease:
    """A lease that a thread of its own renews until ``close``; it waits for nothing but the disk."""

    def __init__(self, lease: Lease, is_there: Callable[[], bool]) -> None:
        self._lease = lease
        self._is_there = is_there
        self._folder = lease.path.parent
        self._renewals_without_folder = 0
        self._telling = threading.Lock()
        self._lost: Callable[[str], None] | None = None
        self._reason: str | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="dualeval-lease", daemon=True)
        self._thread.start()

    def call_when_lost(self, lost: Callable[[str], None]) -> None:
        """Have that called once, with a sentence, from the lease's thread; now where it is lost already."""
        with self._telling:
            self._lost = lost
            reason = self._reason
        if reason is not None:
            lost(reason)

    def close(self) -> None:
        """Give the lease back. Waits for the disk, which may hang."""
        self._closing.set()
        self._thread.join()
        self._lease.release()

    def _keep(self) -> None:
        while not self._closing.wait(RENEW_EVERY_S):
            reason = self.renew()
            if reason is not None:
                with self._telling:
                    self._reason, lost = reason, self._lost
                if lost is not None:
                    lost(reason)
                return

    def renew(self) -> str | None:
        """Renew the lease; returns why the run cannot go on in the folder, None where it can."""
        try:
            if self._lease.renew():
                self._renewals_without_folder = 0
                return None
        except FileNotFoundError:
            status = read_status(self._folder)
            if status is None or status.run in (None, self._lease.token):
                if not self._is_there():
                    self._renewals_without_folder += 1
                    return gone(self._folder) if self._renewals_without_folder >= _GONE_AFTER else None
                with suppress(OSError):
                    self._lease.restore()
                return None
        except OSError:
            # The next renewal is in two seconds; and whoever cannot write rows will say so.
            return None
        return (
            f"another run has taken over {self._folder}: this one stood still for too long. What it has "
            "finished is saved, and the other continues from there."
        )


def gone(path: Path) -> str:
    """What is said where the output folder is no longer there, or no longer this run's."""
    if path.is_dir():
        return (
            f"the output folder {path} was emptied or replaced: this run's {JOB} is not there any more. Type "
            "the same command again: all samples are evaluated again. Where the folder was renamed, bring it "
            "back before, to go on."
        )
    return (
        f"the output folder {path} is gone: somebody has removed or renamed it. Bring it back and type the "
        "same command again, to go on; without it all samples are evaluated again."
    )


def _take_over(lease: Lease, waiting: Callable[[], None]) -> bool:
    """Watch another run's lease until it is gone, which is False, or dead and replaced by this one."""
    path = lease.path
    watched: bytes | None = None
    since = 0.0
    while True:
        try:
            # Opened anew for each look: NFS shows what other hosts have written to who opens a file.
            content = path.read_bytes()
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return False
        holder = Process.read(_parsed(content))
        if watched is None:
            watched, since = content, monotonic()
        elif content != watched:
            raise UsageError(_in_use(path.parent, holder))
        still_s = monotonic() - since
        is_dead = still_s >= TAKE_OVER_AFTER_S or (holder is not None and holder.has_ended)
        if is_dead and _replace(lease, content, force=still_s >= 2 * TAKE_OVER_AFTER_S):
            return True
        waiting()
        sleep(LOOK_EVERY_S)


def _replace(lease: Lease, dead: bytes, *, force: bool) -> bool:
    """Put a lease in a dead one's place; False where another newcomer is at it, or that one was renewed."""
    path = lease.path
    own, turn = (path.with_name(f"{path.name}.{name}") for name in (lease.token, _TURN))
    if force:
        turn.unlink(missing_ok=True)
    try:
        # Newcomers come here one at a time; the next one finds another content.
        os.close(os.open(turn, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except FileExistsError:
        return False
    try:
        if path.read_bytes() != dead:
            return False
        with whole_file(path, own):
            own.write_bytes(lease._content())
        return True
    finally:
        turn.unlink(missing_ok=True)


def _parsed(content: bytes) -> Any:
    """What a lease says; None where its holder died before writing it, or something has damaged it."""
    try:
        return json.loads(content)
    except ValueError:
        return None


def _token_of(content: bytes) -> str | None:
    claim = _parsed(content)
    return claim.get("token") if isinstance(claim, dict) else None


def _in_use(folder: Path, holder: Process | None) -> str:
    named = "an unknown host" if holder is None else f"{holder.host} (pid {holder.pid})"
    return f"{folder} is in use by another run on {named}. Wait for it to end, or give another --out."
