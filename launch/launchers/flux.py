"""Flux: the tasks of ``flux run``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from dualeval.launch.launchers.base import Environment, Launcher
from dualeval.world import World

# Those of the task; Flux's own PMI sets PMI_RANK, PMI_SIZE and PMI_FD besides. It tells no number of tasks on
# the node.
_RANK, _SIZE, _LOCAL_RANK, _JOB = "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_ID"


def _read(environment: Environment) -> World | None:
    """Flux gives its tasks no address to meet at.

    Its PMI, which it serves to each task at a file descriptor, passes one on; without PMI the user has to.
    """
    if not environment.are_whole():
        return None
    environ = environment.variables
    rank, size, local_rank = map(environment.number, (_RANK, _SIZE, _LOCAL_RANK))
    world = replace(environment.world(rank, size, local_rank, size), local_size=1)
    if size == 1:
        return replace(world, node_rank=0, node_sizes=(1,))
    world = replace(world, placed=False)
    pmi = {_RANK: "PMI_RANK", _SIZE: "PMI_SIZE"}
    if "PMI_FD" in environ and all(environ.get(pmi_name) == environ[name] for name, pmi_name in pmi.items()):
        from dualeval.world.meetings.served import OverPmi

        return replace(world, meeting=OverPmi(descriptor=environment.number("PMI_FD")))
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        from dualeval.world.meetings.address import AtAddress

        host, port = environment.address()
        return replace(world, meeting=AtAddress(host=host, port=port, run_id=f"flux.{environ[_JOB]}"))
    raise environment.error(
        "Flux gave this process no PMI (PMI_FD is missing), by which the ranks would meet",
        "Leave out '-o pmi=none', or add '--env=MASTER_ADDR=FIRST_HOST --env=MASTER_PORT=29500' to 'flux "
        "run', where FIRST_HOST is the host of task 0",
    )


def _not_handed_on(environ: Mapping[str, str]) -> Collection[str]:
    # Its PMI is for its own task.
    pmi = ("PMI_FD", "PMI_RANK", "PMI_SIZE") if _RANK in environ else ()
    return (_RANK, _SIZE, _LOCAL_RANK, _JOB, *pmi)


LAUNCHER = Launcher(
    name="flux",
    title="Flux",
    page="flux",
    rank=_RANK,
    size=_SIZE,
    local_rank=_LOCAL_RANK,
    others=(_JOB,),
    trace=(_RANK, _SIZE),
    contradicts=("openmpi", "mpich"),
    start="flux run -n N dualeval run",
    read=_read,
    backends={"torch": "", "horovod": "over gloo"},
    may_start=True,
    not_handed_on=_not_handed_on,
)
