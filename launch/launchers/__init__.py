"""The launchers, one file each, imported where one of its variables is set.

A further one is a file beside these and a line in ``VARIABLES``.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from dualeval.launch.launchers.base import Launcher
from dualeval.process.start import VARIABLES
from dualeval.world import World

__all__ = ["BACKENDS", "LAUNCHERS", "Launcher"]

# In the order of detection.
LAUNCHERS = tuple(VARIABLES)
# The backends that ranks can use.
BACKENDS = ("single", "torch", "horovod", "mpi")


def launcher_of(name: str) -> Launcher:
    """The launcher of a name."""
    launcher: Launcher = import_module(f"{__name__}.{name}").LAUNCHER
    return launcher


def launchers_in(environ: Mapping[str, str]) -> dict[str, Launcher]:
    """Those of whose variables any is set: no other has to be asked. "none" needs none."""
    return {
        name: launcher_of(name)
        for name, starts in VARIABLES.items()
        if not starts or any(variable.startswith(starts) for variable in environ)
    }


def may_start_ranks(world: World) -> bool:
    """Whether a process may start ranks of its own: no launcher made it one of several."""
    return launcher_of(world.launcher).may_start and world.size == 1
