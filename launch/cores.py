"""Divide the cores of a node among the ranks on it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from dualeval.launch.quotas import cpu_quotas
from dualeval.world.network import host_identity


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
    own = own_cores()
    return share_of_cores(own, [own])


def share_of_cores(own: Cores, everyone: Sequence[Cores]) -> int:
    """How many cores are a rank's, where each core is divided among those that may run on it; at least 1.

    A launcher may have bound ranks to cores of their own (mpirun does), to a socket that several share, or
    not at all: the number of ranks on the node alone does not tell. A quota is divided among the ranks that
    are in its group.
    """
    neighbours = [cores for cores in everyone if cores.host == own.host]
    allowed = [set(cores.numbers) for cores in neighbours]
    # Fractions: three thirds of a core as floats are less than one.
    parts = [Fraction(1, sum(core in numbers for numbers in allowed)) for core in own.numbers]
    quotas = [cpus / sum(name in cores.quotas for cores in neighbours) for name, cpus in own.quotas.items()]
    return max(1, int(min([sum(parts), *quotas])))
