"""World: who this process is among the processes of one run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class World:
    """One process's place in a run; every field comes from one launcher.

    Attributes:
        rank: number of this process, 0 <= rank < size.
        size: number of processes in the run.
        local_rank: number of this process on its node, 0 <= local_rank < local_size.
        local_size: number of processes on this node.
        node_rank: number of this node; None where the launcher does not tell.
        launcher: the name of the launcher that started the process (a name of ``launch.detect``).
        master: host name or address and port where the ranks first meet; None where nobody has to.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int | None
    launcher: str
    master: tuple[str, int] | None = None

    @property
    def is_main(self) -> bool:
        """True on rank 0, the only rank that prints and that writes the result."""
        return self.rank == 0

    @classmethod
    def alone(cls) -> World:
        """The world of a process that no launcher started."""
        return cls(rank=0, size=1, local_rank=0, local_size=1, node_rank=0, launcher="none")
