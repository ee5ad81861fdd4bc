"""No launcher: one process, which may start ranks of its own (``--nproc``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dualeval.launch.launchers.base import Launcher, Way
from dualeval.launch.launchers.slurm import one_a_node
from dualeval.world import World

if TYPE_CHECKING:
    from dualeval.launch.site import Site


def _lacks_nproc(site: Site, on_nodes: Sequence[int], backend: str) -> str | None:
    if len(on_nodes) > 1:
        return "--nproc starts ranks on one node"
    return site.libraries.lack_horovod("gloo") if backend == "horovod" else None


LAUNCHER = Launcher(
    name="none",
    page="local",
    title="no launcher",
    start="dualeval run",
    read=lambda environment: World.alone(),
    backends={"single": ""},
    may_start=True,
    ways=(
        Way(
            name="none",
            backends=("single",),
            words=one_a_node,
            after=lambda ranks: ["--launcher", "none"],
            lacks=lambda site, on_nodes, backend: "one process" if sum(on_nodes) > 1 else None,
        ),
        Way(
            name="nproc",
            backends=("torch", "horovod"),
            words=one_a_node,
            after=lambda ranks: ["--nproc", str(ranks)],
            lacks=_lacks_nproc,
            has_doctor=False,
        ),
    ),
)
