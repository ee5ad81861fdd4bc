"""The launchers, one file each; a further one is a file beside these and a name in ``_FILES``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from dualeval.launch.launchers.base import Launcher, Way

__all__ = ["BACKENDS", "LAUNCHERS", "WAYS", "Launcher", "Way"]

# In the order in which they are asked, innermost launcher first: torchrun may run inside a task of any other,
# and horovodrun inside an allocation that sets MPI's variables. Flux may itself run in a step of Slurm's, and
# may set a part of Open MPI's. In a job of Slurm's, mpirun starts its own ranks through a step of one process
# a node. "env" is whoever sets such names, so launchers that have names of their own are asked before. "none"
# stays last: it always answers.
_FILES = ("torchrun", "horovodrun", "flux", "openmpi", "mpich", "slurm", "env", "none")
_ALL: list[Launcher] = [import_module(f"{__name__}.{file}").LAUNCHER for file in _FILES]
LAUNCHERS: Mapping[str, Launcher] = {launcher.name: launcher for launcher in _ALL}
# One process first: it is what the others are compared with.
_ONE_FIRST = (_ALL[-1], *_ALL)
# How ranks can be started, and the backends that they can use.
WAYS: Mapping[str, Way] = {way.name: way for launcher in _ONE_FIRST for way in launcher.ways}
BACKENDS = tuple(dict.fromkeys(name for launcher in _ONE_FIRST for name in launcher.backends))
