"""Divide the cores of a node among the ranks on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, kw_only=True)
class Cores:
    """The cores on which a rank may run.

    Attributes:
        host: name of its host.
        numbers: the system's numbers of the cores there.
    """

    host: str
    numbers: Sequence[int]


def share_of_cores(own: Cores, everyone: Sequence[Cores]) -> int:
    """How many cores are a rank's, where each core is divided among those that may run on it; at least 1.

    A launcher may have bound ranks to cores of their own (mpirun does), to a socket that several share, or
    not at all: the number of ranks on the node alone does not tell.

    Args:
        own: the rank's.
        everyone: all ranks', this one's too.
    """
    neighbours = [set(cores.numbers) for cores in everyone if cores.host == own.host]
    # Fractions: three thirds of a core as floats are less than one.
    parts = [Fraction(1, sum(core in numbers for numbers in neighbours)) for core in own.numbers]
    return max(1, int(sum(parts)))
