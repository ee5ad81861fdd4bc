"""How much CPU time the kernel lets this process have: the quotas of its cgroups, as containers set them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, kw_only=True)
class _Mount:
    """A part of a tree of cgroups: ``root`` is which group one finds at ``point``."""

    kind: str
    root: str
    point: str


def cpu_quotas(root: Path = Path("/")) -> dict[str, float]:
    """Read the quotas that hold for this process.

    Each group around the process's own limits it, too: in a container with 8 CPUs in a pod with 4 it gets 4
    at most, less what the pod's other containers take.
    """
    quotas = {}
    for group in _groups(root):
        cpus = _quota_of(group)
        if cpus is not None:
            found = group.stat()
            quotas[f"{found.st_dev}:{found.st_ino}"] = cpus
    return quotas


def _groups(root: Path) -> Iterator[Path]:
    """The folders of this process's cgroups that may limit CPUs, with those around them, as far as seen."""
    mounts = list(_mounts(_text(root / "proc/self/mountinfo")))
    for line in _text(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        kind = "cgroup" if "cpu" in controllers.split(",") else "" if controllers else "cgroup2"
        own = [mount for mount in mounts if mount.kind == kind]
        if not own:
            continue
        # A container may see a part of the tree alone: what the process is in, or something around that.
        mount = next((mount for mount in own if _is_within(path, mount.root)), None)
        below = PurePosixPath(path).relative_to(mount.root) if mount else PurePosixPath()
        top = root / (mount or own[-1]).point.lstrip("/")
        folder = top / below
        yield folder
        while folder != top:
            folder = folder.parent
            yield folder


def _is_within(path: str, root: str) -> bool:
    # With '..' the namespace's own root is below the mount's, under a name that is not told.
    return ".." not in f"{path}{root}" and PurePosixPath(path).is_relative_to(root)


def _mounts(mountinfo: str) -> Iterator[_Mount]:
    """The mounted trees of cgroups: the second version's, and of the first the one for CPUs."""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = (*after.split(" ", 2), "", "")[:3]
        if kind == "cgroup2" or (kind == "cgroup" and "cpu" in options.split(",")):
            words = before.split(" ")
            if len(words) > 4:
                yield _Mount(kind=kind, root=_unescaped(words[3]), point=_unescaped(words[4]))


def _unescaped(name: str) -> str:
    """A name without mountinfo's octal numbers for blanks and the like."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), name)


def _quota_of(group: Path) -> float | None:
    """The CPUs that a group may use; None where it has no limit of its own."""
    words = (_text(group / "cpu.max") or _text(group / "cpu.cfs_quota_us")).split()
    if not words or words[0] in ("max", "-1"):
        return None
    period = words[1] if len(words) > 1 else _text(group / "cpu.cfs_period_us")
    # Of what is no pair of numbers, no limit is known.
    with suppress(ValueError, ZeroDivisionError):
        return int(words[0]) / int(period)
    return None


def _text(file: Path) -> str:
    # Not every group has every file (the outermost has none), and not every kernel has cgroups.
    with suppress(OSError):
        # A mount point may have a name in any encoding.
        return os.fsdecode(file.read_bytes())
    return ""
