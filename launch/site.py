"""Where ranks can be started: the nodes, the programs and the libraries that are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node on which ranks can be started."""

    # The name by which launchers reach it.
    host: str
    # How many cores ranks may use there.
    cores: int
    # How many GPUs.
    gpus: int = 0


@dataclass(frozen=True, kw_only=True)
class Libraries:
    """What the environment has beside torch."""

    # Of "gloo", "mpi" and "nccl", with what Horovod is built.
    horovod: frozenset[str] = frozenset()
    # Why Horovod cannot be used; None where it can.
    no_horovod: str | None = None
    # Mpi4py's version and the MPI library that it loads, such as "4.1.2 (Open MPI v4.1.4)".
    mpi: str = ""
    # Why mpi4py cannot be used; None where it can.
    no_mpi: str | None = None

    def lack_horovod(self, controller: str) -> str | None:
        """Why Horovod cannot be used over a controller, "gloo" or "mpi"; None where it can."""
        if self.no_horovod is None and controller not in self.horovod:
            return f"Horovod is built without {'MPI' if controller == 'mpi' else controller}"
        return self.no_horovod


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where ranks can be started, and with what."""

    # This machine alone, or those of the Slurm job.
    nodes: tuple[Node, ...]
    # Path of each launcher that was found, by name.
    programs: Mapping[str, str] = field(default_factory=dict)
    libraries: Libraries = field(default_factory=Libraries)
    # Number of the Slurm job whose nodes they are; None for this machine alone.
    job: str | None = None
    # This process is a step of that job itself, whose cores it holds.
    in_step: bool = False
    # This process runs on one of the nodes.
    at_a_node: bool = True
    # First line of `srun --version`.
    slurm: str = ""
    # What `srun --mpi=list` shows.
    srun_mpi: tuple[str, ...] = ()
    # First line of `mpirun --version`.
    mpirun: str = ""
    # Why the nodes are not reached through ssh; None where they are, or there is one node.
    no_ssh: str | None = None
    # This user is root, for whom Open MPI starts nothing unless told so.
    is_root: bool = False

    @property
    def has_open_mpi(self) -> bool:
        """Whether ``mpirun`` is Open MPI's."""
        return "Open MPI" in self.mpirun

    @property
    def has_open_mpi_4(self) -> bool:
        """Whether it is that of version 4, whose options differ from later ones'."""
        return self.has_open_mpi and ") 4." in self.mpirun

    def hosts(self, on_nodes: Sequence[int]) -> str:
        """The first nodes with the number of ranks on each, as horovodrun and mpirun take them."""
        return ",".join(f"{node.host}:{count}" for node, count in zip(self.nodes, on_nodes, strict=False))


def spread(ranks: int, nodes: int) -> list[int]:
    """Say how many ranks each node gets, evenly, the first ones one more: 3 ranks on 2 nodes are [2, 1]."""
    used = min(ranks, nodes)
    each, more = divmod(ranks, used)
    return [each + (node < more) for node in range(used)]


def default_ranks(site: Site, device: str) -> list[int]:
    """Choose numbers of ranks: one, two, one a node, and one a GPU (on CPUs: up to four a node)."""
    each = min(node.gpus if device != "cpu" else min(node.cores, 4) for node in site.nodes)
    most = each * len(site.nodes)
    return sorted({number for number in (1, 2, len(site.nodes), most) if number <= max(most, 1)})
