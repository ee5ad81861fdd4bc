"""World: who this process is among the processes of one run.

Callers: launch makes one, backends and the engine take it. Keep: it is a plain value, read once; no torch
here.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """The way in which ranks meet; this base class is for a single process, which has no ranks to meet."""

    # How often the launcher has started the ranks again.
    restarts: int = 0
    # An id that all restarts by a launcher share; None if it restarts no ranks.
    launch_id: str | None = None

    @property
    def host_of_rank_0(self) -> str | None:
        """Name or address of rank 0's host; None if the launcher does not tell."""
        return None

    def open(self, world: World, purpose: str) -> AbstractContextManager[tuple[Any, str, int | None]]:
        """Open the store of all ranks; yields it, rank 0's host and, on rank 0, the port. A collective."""
        raise AssertionError(f"a process of {world.launcher} has no ranks to meet")


@dataclass(frozen=True, kw_only=True)
class World:
    """One process's place in a run; every field comes from one launcher.

    Attributes:
        rank: number of this process, 0 <= rank < size.
        size: number of processes in the run.
        local_rank: number of this process on its node, 0 <= local_rank < local_size.
        local_size: number of processes on this node.
        node_rank: number of this node; None if the launcher does not tell.
        launcher: the name of the launcher that started the process (a name of ``LAUNCHERS``).
        meeting: how this process finds the others.
        node_sizes: number of ranks on each node, by its number; None if the launcher does not tell.
        mpi: whether the launcher gives its processes a way into MPI (mpirun; srun with --mpi=pmix or pmi2).
        promised_gpus: the variable by which a launcher says that this process was given GPUs, with its value;
            empty if none does.
        placed: False if the launcher does not tell which ranks share a node. Until ``place_by_hosts`` has
            found them, ``local_rank`` is the launcher's value, or 0, and ``local_size`` is 1.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int | None
    launcher: str
    meeting: Meeting = field(default_factory=Meeting)
    node_sizes: tuple[int, ...] | None = None
    mpi: bool = False
    promised_gpus: str = ""
    placed: bool = True

    @property
    def is_main(self) -> bool:
        """True on rank 0, the only rank that prints and that writes the result."""
        return self.rank == 0

    @property
    def is_one_node(self) -> bool:
        """True if all ranks run on one node."""
        return self.local_size == self.size

    @classmethod
    def alone(cls) -> World:
        """The world of a process that no launcher started."""
        return cls(rank=0, size=1, local_rank=0, local_size=1, node_rank=0, launcher="none")


def place_by_hosts(world: World, hosts: Sequence[Hashable], local_ranks: Sequence[int]) -> World:
    """Find a rank's place on its node from the hosts on which all ranks run."""
    ranks_on: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_on.setdefault(host, []).append(rank)
    own_host = hosts[world.rank]
    neighbours = ranks_on[own_host]
    numbers = [local_ranks[rank] for rank in neighbours]
    position = neighbours.index(world.rank)
    return replace(
        world,
        local_rank=numbers[position] if sorted(numbers) == list(range(len(numbers))) else position,
        local_size=len(neighbours),
        node_rank=list(ranks_on).index(own_host),
        node_sizes=tuple(len(ranks) for ranks in ranks_on.values()),
        placed=True,
    )


def host_identity() -> str:
    """A text that two processes share if and only if they see the same network interfaces of the same kernel.

    Without such files in /proc, as in some sandboxes: the host's name and its addresses.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot}.{Path('/proc/self/ns/net').stat().st_ino}"
    except FileNotFoundError:
        from dualeval.world.network import named_by_addresses

        return named_by_addresses()
