"""The launchers, one file each, imported where one of its variables is set.

A further one is a file beside these and a line in ``VARIABLES``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module

from dualeval.launch.launchers.base import Launcher
from dualeval.process.start import VARIABLES
from dualeval.world import World

__all__ = ["BACKENDS", "LAUNCHERS", "Launcher"]

# The backends that ranks can use.
BACKENDS = ("single", "torch", "horovod", "mpi")


class _Launchers(Mapping[str, Launcher]):
    """The launchers by name, in the order of detection."""

    def __getitem__(self, name: str) -> Launcher:
        if name not in VARIABLES:
            raise KeyError(name)
        launcher: Launcher = import_module(f"{__name__}.{name}").LAUNCHER
        return launcher

    def __iter__(self) -> Iterator[str]:
        return iter(VARIABLES)

    def __len__(self) -> int:
        return len(VARIABLES)

    def __contains__(self, name: object) -> bool:
        return name in VARIABLES


LAUNCHERS = _Launchers()


def is_traced(name: str, environ: Mapping[str, str]) -> bool:
    """Whether any variable of a launcher's is set: no other has to be asked. "none" needs none."""
    starts = VARIABLES[name]
    return not starts or any(variable.startswith(starts) for variable in environ)


def may_start_ranks(world: World) -> bool:
    """Whether a process may start ranks of its own: no launcher made it one of several."""
    return LAUNCHERS[world.launcher].may_start and world.size == 1
