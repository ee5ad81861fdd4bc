"""horovodrun, where the ranks meet over gloo. Over MPI it starts mpirun, and the ranks are that one's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dualeval.launch.launchers.base import Environment, Launcher, Way
from dualeval.launch.launchers.srun import under_srun
from dualeval.world import World

if TYPE_CHECKING:
    from dualeval.launch.site import Site

_RENDEZVOUS = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")


def _read(environment: Environment) -> World | None:
    """Where the ranks meet is the rendezvous of the host where horovodrun was typed, not rank 0's.

    HOROVOD_CROSS_RANK numbers the nodes that have this local rank, which is not all of them.
    """
    world = environment.world_of_four()
    if world and environment.variables.get("HOROVOD_ELASTIC") == "1":
        raise environment.error(
            "horovodrun started this process in its elastic mode, in which ranks come and go",
            f"Start a fixed number of them with '{environment.launcher.start}'",
        )
    if world is None:
        return None
    from dualeval.world.meetings.served import AtHorovodrun

    return replace(world, meeting=AtHorovodrun(address=environment.address(*_RENDEZVOUS)))


def _words_gloo(site: Site, on_nodes: Sequence[int], number: int) -> list[str]:
    words = _words(site, on_nodes, "--gloo")
    # horovodrun may take another network where all ranks are away from it.
    return words if site.at_a_node else [*under_srun(site, [1]), *words]


def _words_mpi(site: Site, on_nodes: Sequence[int], number: int) -> list[str]:
    # Open MPI 4 counts cores, and a job's tasks, as places; two ranks may share a core.
    oversubscribe = ["--mpi-args=--oversubscribe"] if site.has_open_mpi_4 else []
    return [*_words(site, on_nodes, "--mpi"), *oversubscribe]


def _words(site: Site, on_nodes: Sequence[int], controller: str) -> list[str]:
    words = [site.programs.get("horovodrun", "horovodrun"), controller, "-np", str(sum(on_nodes))]
    return words if site.job is None else [*words, "-H", site.hosts(on_nodes)]


def _lacks_gloo(site: Site, on_nodes: Sequence[int], backend: str) -> str | None:
    return site.libraries.lack_horovod("gloo") or (site.no_ssh if len(on_nodes) > 1 else None)


def _lacks_mpi(site: Site, on_nodes: Sequence[int], backend: str) -> str | None:
    if not site.mpirun:
        return "there is no mpirun on the PATH"
    return site.libraries.lack_horovod("mpi") or site.libraries.no_mpi


LAUNCHER = Launcher(
    name="horovodrun",
    page="horovodrun",
    rank="HOROVOD_RANK",
    size="HOROVOD_SIZE",
    local_rank="HOROVOD_LOCAL_RANK",
    local_size="HOROVOD_LOCAL_SIZE",
    others=_RENDEZVOUS,
    start="horovodrun -np N dualeval run",
    read=_read,
    backends={"horovod": ""},
    ways=tuple(
        Way(name=name, backends=("horovod",), program="horovodrun", words=words, lacks=lacks)
        for name, words, lacks in (
            ("horovodrun", _words_gloo, _lacks_gloo),
            ("horovodrun-mpi", _words_mpi, _lacks_mpi),
        )
    ),
)
