"""The lease of an output folder, which keeps two runs from working in it at once; and who holds the lease.

The lease only prevents wasted work: no result depends on it, and in rare races two runs hold it until the
next ``renew``.

The holder increments a counter in lease.json. A newcomer watches by its own clock whether the counter moves,
so that the clocks of two hosts need not agree. A holder on the newcomer's own kernel is looked up directly.
File locks are not used: closing any descriptor of a file drops POSIX locks, and not every disk has them.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from dualeval.atomic_files import whole_file
from dualeval.errors import UsageError
from dualeval.process.identity import Process
from dualeval.result import JOB

LEASE = "lease.json"
# How often the holder calls ``renew``.
RENEW_EVERY_S = 2.0
# A lease that does not change for so long belongs to a run that is dead or hangs.
TAKE_OVER_AFTER_S = 20.0
LOOK_EVERY_S = 0.25
# Bytes: two host names of 64 letters, each as \uXXXX; fixed, so that each rewrite covers the last one.
_LENGTH = 1024
# NFS says ESTALE of a file that another host has removed.
_GONE = (errno.ENOENT, errno.ESTALE)


class Lease:
    """A run's hold on its output folder: ``take`` makes it, and a thread renews it until ``close``."""

    def __init__(self, path: Path, token: str, lost: Callable[[str], None]) -> None:
        # The path of lease.json.
        self.path = path
        # Identifies this run.
        self.token = token
        self._process = Process.own()
        self._counter = 0
        self._lost = lost
        self._closing = threading.Event()
        # This thread waits for nothing but the disk.
        self._thread = threading.Thread(target=self._keep, name="dualeval-lease", daemon=True)

    @classmethod
    def take(
        cls,
        folder: Path,
        token: str,
        *,
        waiting: Callable[[], None] = lambda: None,
        lost: Callable[[str], None] = lambda reason: None,
    ) -> Lease:
        """Take the lease of a folder, if need be from a dead run.

        The lease's thread calls ``lost`` once, with a sentence, if another run takes the lease over.
        """
        lease = cls(folder / LEASE, token, lost)
        while not lease._create() and not lease._take_over(waiting):
            pass
        lease._thread.start()
        return lease

    def close(self) -> None:
        """Give the lease back, unless another run has taken it over. Waits for the disk."""
        self._closing.set()
        self._thread.join()
        # If the disk fails, the next run sees that this process has ended.
        with suppress(OSError):
            if _claim(self.path.read_bytes()).get("token") == self.token:
                self.path.unlink()

    def renew(self) -> str | None:
        """Show that this run lives; returns why it cannot go on in the folder, or None if it can."""
        self._counter += 1
        try:
            with self.path.open("r+b", buffering=0) as file:
                if _claim(file.read(_LENGTH)).get("token", self.token) == self.token:
                    # Through the same descriptor: a lease that replaces this one now is another file.
                    os.pwrite(file.fileno(), self._content(), 0)
                    return None
        except OSError:
            # The next renewal is in two seconds. If the lease or its folder was removed, the next write of
            # rows reports that.
            return None
        return (
            f"another run has taken over {self.path.parent}: this one stood still for too long. What it has "
            "finished is saved, and the other continues from there."
        )

    def _keep(self) -> None:
        while not self._closing.wait(RENEW_EVERY_S):
            reason = self.renew()
            if reason is not None:
                self._lost(reason)
                return

    def _create(self) -> bool:
        """Write a lease; returns False if there is one already."""
        try:
            file = self.path.open("xb", buffering=0)
        except FileExistsError:
            return False
        with file:
            try:
                file.write(self._content())
            except BaseException:
                self.path.unlink(missing_ok=True)
                raise
        return True

    def _take_over(self, waiting: Callable[[], None]) -> bool:
        """Watch another run's lease; returns False once it is gone, True once this one has replaced it."""
        replacement = self.path.with_name(f"{LEASE}.{self.token}")
        watched: bytes | None = None
        since = monotonic()
        while True:
            # Open the file anew each time: NFS shows other hosts' writes only on opening.
            if (content := _lease_of(self.path.parent)) is None:
                return False
            if content == self._content():
                return True
            holder = Process.read(_claim(content))
            watched = content if watched is None else watched
            if content != watched:
                named = "an unknown host" if holder is None else f"{holder.host} (pid {holder.pid})"
                raise UsageError(
                    f"{self.path.parent} is in use by another run on {named}. Wait for it to end, or give "
                    "another --out."
                )
            if monotonic() - since >= TAKE_OVER_AFTER_S or (holder is not None and holder.has_ended):
                # Of several newcomers the last one wins; each of them sees that at its next look.
                with whole_file(self.path, replacement):
                    replacement.write_bytes(self._content())
            else:
                waiting()
            sleep(LOOK_EVERY_S)

    def _content(self) -> bytes:
        claim = {**asdict(self._process), "token": self.token, "counter": self._counter}
        return json.dumps(claim).encode().ljust(_LENGTH - 1) + b"\n"


def at_work(folders: Iterable[Path], step: Callable[[], None]) -> list[Path]:
    """The folders in which a run is alive; a lease that does not change is watched as by ``take``."""
    watched = {folder: content for folder in folders if (content := _lease_of(folder)) is not None}
    alive, since = [], monotonic()
    while watched and monotonic() - since < TAKE_OVER_AFTER_S:
        for folder, content in [*watched.items()]:
            now = _lease_of(folder)
            holder = Process.read(_claim(content))
            if now is None or (holder is not None and holder.has_ended):
                del watched[folder]
            elif now != content:
                alive.append(folder)
                del watched[folder]
        step()
        if watched:
            sleep(LOOK_EVERY_S)
    return alive


def gone(path: Path, file: str = JOB) -> str:
    """The message if the output folder is gone, or is no longer this run's: ``file`` is gone."""
    if path.is_dir():
        return (
            f"the output folder {path} was emptied or replaced: this run's {file} no longer exists. Type the "
            "same command again: all samples are evaluated again. If the folder was renamed, bring it back "
            "first, to go on."
        )
    return (
        f"the output folder {path} is gone: somebody has removed or renamed it. Bring it back and type the "
        "same command again, to go on; without it all samples are evaluated again."
    )


def _lease_of(folder: Path) -> bytes | None:
    try:
        return (folder / LEASE).read_bytes()
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return None


def _claim(content: bytes) -> Mapping[str, Any]:
    """The content of a lease; empty if its holder died before writing it, or if it is damaged."""
    try:
        claim = json.loads(content)
    except ValueError:
        return {}
    return claim if isinstance(claim, dict) else {}
