"""torchrun, torch's own launcher, and its older form, ``python -m torch.distributed.launch``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dualeval.launch.launchers.base import MARK_OF_TORCHRUN, Environment, Launcher, Way
from dualeval.launch.launchers.srun import one_a_node
from dualeval.world import World

if TYPE_CHECKING:
    from dualeval.launch.site import Site

_TRACE = (MARK_OF_TORCHRUN, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
# How often the ranks were started again, by --max-restarts.
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
# Variables that it takes for its options.
_OPTIONS = "PET_"
# Where its agents on several nodes meet; each start takes the next port.
_FIRST_PORT, _PORTS = 29500, 100


def _read(environment: Environment) -> World | None:
    """All of torchrun's variables, or none of those that place a process.

    MASTER_ADDR and MASTER_PORT alone are no trace of it: job scripts export them for any launcher, and an
    address makes no process a rank.
    """
    world = environment.world_of_four()
    if world is None:
        return None
    from dualeval.world.meetings.address import AtTorchrun

    return replace(
        world,
        node_rank=environment.number("GROUP_RANK"),
        meeting=AtTorchrun(
            address=environment.address(),
            restarts=environment.number(_RESTARTS, default=0),
            launch_id=environment.variables.get(MARK_OF_TORCHRUN),
        ),
    )


def _words(site: Site, on_nodes: Sequence[int], number: int) -> list[str]:
    # --standalone: a port that the kernel picks, where torchrun's own may be another run's.
    meeting = ["--standalone"]
    if len(on_nodes) > 1:
        meeting = [
            f"--nnodes={len(on_nodes)}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={site.nodes[0].host}:{_FIRST_PORT + number % _PORTS}",
            f"--rdzv-id={site.job}-{number}",
        ]
    each = f"--nproc-per-node={max(on_nodes)}"
    torchrun = site.programs.get("torchrun", "torchrun")
    return [*one_a_node(site, on_nodes, number), torchrun, *meeting, each, "--no-python"]


def _lacks(site: Site, on_nodes: Sequence[int], backend: str) -> str | None:
    if len(set(on_nodes)) > 1:
        return (
            f"one command starts the same number of ranks on each node, and {sum(on_nodes)} on "
            f"{len(on_nodes)} is uneven"
        )
    return None


LAUNCHER = Launcher(
    name="torchrun",
    page="torchrun",
    rank="RANK",
    size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_size="LOCAL_WORLD_SIZE",
    others=("GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    mark=MARK_OF_TORCHRUN,
    is_shared=True,
    trace=_TRACE,
    start="torchrun --nproc-per-node N -m dualeval run",
    read=_read,
    backends={"torch": ""},
    not_handed_on=lambda environ: [name for name in environ if name in _TRACE or name.startswith(_OPTIONS)],
    ways=(Way(name="torchrun", backends=("torch",), program="torchrun", words=_words, lacks=_lacks),),
)
