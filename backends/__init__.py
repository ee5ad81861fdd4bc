"""Backends: collectives between the ranks of a run, one interface over several libraries.

``connect`` is the way in; ``dualeval.launch.launchers`` says which backend goes with which launcher.
Callers: joining, and whoever is handed a ``Backend``. Keep: the five rules of ``base.py``, which all backends
pass.
"""

from __future__ import annotations

if __name__ != "dualeval.backends":
    # A second import under another name would make two classes of one: isinstance would fail between them.
    raise ImportError(
        f"This package is 'dualeval.backends', not {__name__!r}: write 'import dualeval.backends'."
    )

import importlib
import sys

from dualeval.backends.base import Backend, no_mesh
from dualeval.errors import LaunchError, UsageError
from dualeval.launch.launchers import BACKENDS, LAUNCHERS, Launcher, launcher_of
from dualeval.messages import did_you_mean
from dualeval.world import World

__all__ = [
    *("Backend", "check_mesh", "choose_backend", "class_of", "connect", "group_of_caller", "world_of_caller")
]


def connect(name: str | None, world: World) -> Backend:
    """Join the ranks of a world over the backend of a name, or the launcher's own. It needs no GPU."""
    implementation = class_of(choose_backend(name, world))
    if world.size > 1:
        from dualeval.world.store import JOINING, allow_connections

        allow_connections(JOINING * world.size, f"rank {world.rank}")
    return implementation(world)


def class_of(name: str) -> type[Backend]:
    """``NameBackend`` of the module of that name, which is imported when it is chosen."""
    module = importlib.import_module(f"dualeval.backends.{name}")
    kind: type[Backend] = getattr(module, f"{name.capitalize()}Backend")
    return kind


def choose_backend(name: str | None, world: World) -> str:
    """Choose the name of the backend: the same on every rank whose host has the same libraries."""
    if world.launcher not in LAUNCHERS:
        known = ", ".join(LAUNCHERS)
        raise LaunchError(f"There is no backend for the launcher {world.launcher!r}, only for: {known}.")
    launcher = launcher_of(world.launcher)
    if name is None:
        return _default(launcher)
    if name not in BACKENDS:
        hint = did_you_mean(name, BACKENDS, most=3, cutoff=0.5)
        raise UsageError(
            f"There is no backend {name!r}.{hint} --backend takes one of: {', '.join(BACKENDS)}."
        )
    if name not in launcher.backends:
        started_by, start = launcher.title or launcher.name, class_of(name).start
        raise LaunchError(
            f"--backend {name} cannot run with world size {world.size}, started by {started_by}. Start it "
            f"with {start}, or leave --backend out to take {_default(launcher)}."
        )
    if name == "mpi" and not world.mpi:
        raise LaunchError(
            f"{world.launcher} started these processes without a way into MPI. Type 'srun --mpi=pmix' for "
            f"Open MPI or 'srun --mpi=pmi2' for MPICH ('srun --mpi=list' shows what this Slurm has), or "
            f"leave --backend out to take {_default(launcher)}."
        )
    return name


def check_mesh(name: str) -> None:
    """Check that a model can be divided over the ranks of a backend, as ``Backend.mesh`` will."""
    if name not in ("single", "torch"):
        raise no_mesh(name)


def group_of_caller() -> str | None:
    """The backend over whose library the caller has joined ranks already; None where there is no group."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return "torch"
    horovod = sys.modules.get("horovod.torch")
    if horovod is not None and horovod.is_initialized():
        return "horovod"
    return None


def world_of_caller(name: str, place: World | None) -> World:
    """This process's place in the caller's group; ``place`` is that by the launcher's variables.

    Where these say something else, or nothing, the ranks were started in another way
    (``torch.multiprocessing.spawn``), and the group is right.
    """
    if name == "torch":
        import torch.distributed as group

        # Which ranks share a node they tell each other.
        world = World(
            rank=group.get_rank(), size=group.get_world_size(), local_rank=0, local_size=1, node_rank=None,
            launcher="env", placed=False,
        )  # fmt: skip
    else:
        hvd = sys.modules["horovod.torch"]
        world = World(
            rank=hvd.rank(), size=hvd.size(), local_rank=hvd.local_rank(), local_size=hvd.local_size(),
            node_rank=None, launcher="env",
        )  # fmt: skip
    if place is None or place.launcher == "none" or (place.rank, place.size) != (world.rank, world.size):
        return world
    return place


def _default(launcher: Launcher) -> str:
    """What a launcher's ranks use where --backend does not say otherwise."""
    if launcher.starts_mpi:
        from dualeval.backends.horovod import runs_over_mpi

        return "horovod" if runs_over_mpi() else "mpi"
    return next(iter(launcher.backends))
