"""Divide the cores of a node among the ranks on it, as far as the kernel lets this process have them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from dualeval.world import host_identity

# Where the trees of cgroups are mounted: the second version's, and of the first the one for CPUs.
_SECOND = ("sys/fs/cgroup",)
_FIRST = ("sys/fs/cgroup/cpu,cpuacct", "sys/fs/cgroup/cpu")


@dataclass(frozen=True, kw_only=True)
class Cores:
    """The cores on which a rank may run."""

    host: str
    # The system's numbers of the cores there.
    numbers: Sequence[int]
    # Of how many cores' time the groups may have that it is in, by name, as `cpu_quotas` tells.
    quotas: Mapping[str, float] = field(default_factory=dict)


def own_cores() -> Cores:
    """Read this process's."""
    return Cores(host=host_identity(), numbers=sorted(os.sched_getaffinity(0)), quotas=cpu_quotas())


def usable_cores() -> int:
    """How many cores this process may keep busy by itself; at least 1."""
    cores = own_cores()
    return share_of_cores(cores, [cores])


def share_of_cores(mine: Cores, everyone: Sequence[Cores]) -> int:
    """How many cores are a rank's, where each core is divided among those that may run on it; at least 1.

    A launcher may have bound ranks to cores of their own (mpirun does), to a socket that several share, or
    not at all: the number of ranks on the node alone does not tell. A quota is divided among the ranks that
    are in its group.
    """
    neighbours = [cores for cores in everyone if cores.host == mine.host]
    allowed = [set(cores.numbers) for cores in neighbours]
    # Fractions: three thirds of a core as floats are less than one.
    shares = [Fraction(1, sum(core in numbers for numbers in allowed)) for core in mine.numbers]
    quotas = [cpus / sum(name in cores.quotas for cores in neighbours) for name, cpus in mine.quotas.items()]
    return max(1, int(min([sum(shares), *quotas])))


def cores_near(address: str, root: Path = Path("/")) -> list[int]:
    """List the cores of the NUMA node of a PCI device, as 0000:17:00.0; empty where none is known."""
    words = _text(root / "sys/bus/pci/devices" / address / "local_cpulist").strip()
    ends = [part.partition("-") for part in words.split(",") if part]
    return [core for first, _, last in ends for core in range(int(first), int(last or first) + 1)]


def cpu_quotas(root: Path = Path("/")) -> dict[str, float]:
    """Read the quotas that hold for this process.

    Each group around the process's own limits it, too: in a container with 8 CPUs in a pod with 4 it gets 4
    at most, less what the pod's other containers take.
    """
    quotas = {}
    for group in _groups(root):
        cpus = _quota_of(group)
        if cpus is not None:
            stat = group.stat()
            quotas[f"{stat.st_dev}:{stat.st_ino}"] = cpus
    return quotas


def _groups(root: Path) -> Iterator[Path]:
    """The folders of this process's cgroups that may limit CPUs, with those around them, as far as seen."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        places = _FIRST if "cpu" in controllers.split(",") else () if controllers else _SECOND
        top = next((root / place for place in places if (root / place).is_dir()), None)
        if top is None:
            continue
        folder = top / path.lstrip("/")
        if ".." in path or not folder.is_dir():
            # A container may see its own part of the tree alone, and be told its name in the whole.
            folder = top
        yield folder
        while folder != top:
            folder = folder.parent
            yield folder


def _quota_of(group: Path) -> float | None:
    """The CPUs that a group may use; None where it has no limit of its own."""
    words = (_text(group / "cpu.max") or _text(group / "cpu.cfs_quota_us")).split()
    if not words or words[0] in ("max", "-1"):
        return None
    period = words[1] if len(words) > 1 else _text(group / "cpu.cfs_period_us")
    # Anything but a pair of numbers sets no known limit.
    with suppress(ValueError, ZeroDivisionError):
        return int(words[0]) / int(period)
    return None


def _text(file: Path) -> str:
    # Not every group has every file (the outermost has none), and not every kernel has cgroups.
    with suppress(OSError):
        return file.read_text("utf-8", "replace")
    return ""
