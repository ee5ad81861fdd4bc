"""No launcher: one process, which may start ranks of its own (``--nproc``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dualeval.launch.launchers.base import Launcher, Way
from dualeval.world import World

if TYPE_CHECKING:
    from dualeval.launch.site import Site


def _words(site: Site, on_nodes: Sequence[int], number: int) -> list[str]:
    from dualeval.launch.launchers.srun import one_a_node  # a plain run is none of its steps

    return one_a_node(site, on_nodes, number)


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
            words=_words,
            after=lambda ranks: ["--launcher", "none"],
            lacks=lambda site, on_nodes, backend: "one process" if sum(on_nodes) > 1 else None,
        ),
        Way(
            name="nproc",
            backends=("torch", "horovod"),
            words=_words,
            after=lambda ranks: ["--nproc", str(ranks)],
            lacks=_lacks_nproc,
            has_doctor=False,
        ),
    ),
)
