"""The variables that torch.distributed itself reads (init_method "env://"), whoever has set them.

Many do: PyTorchJob, AzureML, DeepSpeed, Composer, Ray Train, own scripts. Only some tell the place on the
node.
"""

from __future__ import annotations

from dataclasses import replace

from dualeval.launch.launchers.base import Environment, Launcher
from dualeval.world import World

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OPTIONAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")


def _read(environment: Environment) -> World | None:
    if not environment.are_whole():
        return None
    rank, size = environment.number("RANK"), environment.number("WORLD_SIZE")
    _refuse_missing_ranks(environment)
    from dualeval.world.meetings.address import AtMaster

    meeting = AtMaster(address=environment.address())
    local_rank, local_size = (
        environment.number(name) if name in environment.variables else default
        for name, default in zip(_OPTIONAL, (0, size), strict=True)
    )
    world = environment.world(rank, size, local_rank, local_size)
    if size == 1:
        return replace(world, node_rank=0, node_sizes=(1,))
    return replace(world, local_size=1, placed=False, meeting=meeting)


def _refuse_missing_ranks(environment: Environment) -> None:
    """Raise in a pod of a PyTorchJob which is to start several ranks, by torchrun, and starts one."""
    count = environment.variables.get("PET_NPROC_PER_NODE", "1")
    if count.isdecimal() and int(count) > 1 and "LOCAL_RANK" not in environment.variables:
        raise environment.error(
            f"this pod is to start {count} ranks (PET_NPROC_PER_NODE), and WORLD_SIZE counts all of them",
            "Start with 'torchrun -m dualeval run', which reads the PET_ variables, or leave out "
            "nprocPerNode",
        )


LAUNCHER = Launcher(
    name="env",
    title="whoever set RANK and WORLD_SIZE",
    page="env",
    rank="RANK",
    size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_size="LOCAL_WORLD_SIZE",
    others=_NEEDED[2:],
    optional=_OPTIONAL,
    is_shared=True,
    start="RANK=0 WORLD_SIZE=N MASTER_ADDR=FIRST_HOST MASTER_PORT=29500 dualeval run",
    read=_read,
    backends={"torch": "", "horovod": "over gloo"},
    may_start=True,
    not_handed_on=lambda environ: (*_NEEDED, *_OPTIONAL),
)
