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
        master_addresses: other addresses at which ``master`` may be, where that name leads nowhere.
        run_id: what tells this run from all others that might be met there; None where ``master`` is.
        words: host and port where the launcher keeps what ranks tell each other; None where it does not.
        node_sizes: number of ranks on each node, by its number; None where the launcher does not tell.
        mpi: whether the launcher gives its processes a way into MPI (mpirun; srun with --mpi=pmix or pmi2).
        node_gpus: number of GPUs that all ranks of this node have together; None where it does not tell.
        restarts: how often the launcher has started the ranks again.
        launch_id: what ranks that a launcher starts again have in common; None where it starts none again.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int | None
    launcher: str
    master: tuple[str, int] | None = None
    master_addresses: tuple[str, ...] = ()
    run_id: str | None = None
    words: tuple[str, int] | None = None
    node_sizes: tuple[int, ...] | None = None
    mpi: bool = False
    node_gpus: int | None = None
    restarts: int = 0
    launch_id: str | None = None

    @property
    def is_main(self) -> bool:
        """True on rank 0, the only rank that prints and that writes the result."""
        return self.rank == 0

    @property
    def is_one_node(self) -> bool:
        """True where all ranks run on one node."""
        return self.local_size == self.size

    @classmethod
    def alone(cls) -> World:
        """The world of a process that no launcher started."""
        return cls(rank=0, size=1, local_rank=0, local_size=1, node_rank=0, launcher="none")
