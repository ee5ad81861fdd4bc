"""Open MPI's mpirun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dualeval.launch.launchers.base import Launcher, Way

if TYPE_CHECKING:
    from dualeval.launch.site import Site


def _words(site: Site, on_nodes: Sequence[int], number: int) -> list[str]:
    """The words of the mpirun that is there: MPICH's has the same name."""
    words = [site.programs.get("mpirun", "mpirun"), "-np", str(sum(on_nodes))]
    if site.has_open_mpi:
        words += ["--allow-run-as-root"] if site.is_root else []
        # In 5.0 --oversubscribe puts all ranks on the first host.
        words += ["--oversubscribe"] if site.has_open_mpi_4 else ["--map-by", "slot:oversubscribe"]
    if site.job is not None:
        words += ["-H" if site.has_open_mpi else "-hosts", site.hosts(on_nodes)]
    return words


def _lacks(site: Site, on_nodes: Sequence[int], backend: str) -> str | None:
    if site.libraries.no_mpi is not None:
        return site.libraries.no_mpi
    return site.libraries.lack_horovod("mpi") if backend == "horovod" else None


# OMPI_COMM_WORLD_NODE_RANK is not the number of a node.
LAUNCHER = Launcher(
    name="openmpi",
    title="mpirun (Open MPI)",
    page="mpirun",
    rank="OMPI_COMM_WORLD_RANK",
    size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    start="mpirun -np N dualeval run",
    backends={"horovod": "if built with MPI", "mpi": "otherwise", "torch": ""},
    starts_mpi=True,
    ways=(
        Way(
            name="mpirun", backends=("torch", "horovod", "mpi"), program="mpirun", words=_words, lacks=_lacks
        ),
    ),
)
