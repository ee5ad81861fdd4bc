"""Backends: collectives between the ranks of a run, one interface over several libraries.

``connect`` is the way in; the table below says which backend goes with which launcher.
"""

from __future__ import annotations

if __name__ != "dualeval.backends":
    # A second import under another name would make two classes of one: isinstance would fail between them.
    raise ImportError(
        f"This package is 'dualeval.backends', not {__name__!r}: write 'import dualeval.backends'."
    )

import difflib
import importlib
import re
from dataclasses import dataclass

import torch

from dualeval.backends.base import Backend
from dualeval.errors import LaunchError, UsageError
from dualeval.world import World

__all__ = ["Backend", "choose_backend", "choose_device", "connect"]


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One backend of the table.

    Attributes:
        module: where it is implemented; imported when it is chosen.
        class_name: the subclass of Backend there.
        launchers: the launchers under which it can run.
        start: what to type to run it.
    """

    module: str
    class_name: str
    launchers: tuple[str, ...]
    start: str


_BACKENDS = {
    "single": _Entry(
        module="dualeval.backends.single",
        class_name="SingleBackend",
        launchers=("none", "torchrun"),
        start="'dualeval run'",
    ),
    "torch": _Entry(
        module="dualeval.backends.torch_distributed",
        class_name="TorchBackend",
        launchers=("torchrun",),
        start="'dualeval run --nproc N' or 'torchrun --nproc-per-node N -m dualeval run'",
    ),
}
# What a launcher's ranks use where --backend does not say otherwise.
_DEFAULTS = {"none": "single", "torchrun": "torch"}


def connect(name: str | None, world: World, device: str | None = None) -> Backend:
    """Join the ranks of a world and return the backend over which they talk.

    Args:
        name: "single" or "torch"; None takes the launcher's own (torchrun: torch; none: single).
        world: this process's place, from ``dualeval.launch.detect``.
        device: as for ``choose_device``.

    Raises:
        UsageError: there is no such backend, or no such device here.
        LaunchError: this backend cannot run under this launcher.
        BackendError: the group could not be joined.
    """
    entry = _BACKENDS[choose_backend(name, world)]
    place = choose_device(device, world)
    if place.type == "cuda":
        # What allocates on "cuda" or pins memory takes the current device; by default 0 on all ranks.
        torch.cuda.set_device(place)
    # With cuda:N all ranks of a node share one GPU. NCCL refuses that, so they meet in host memory. Decided
    # by the option alone, which is the same on every rank; the device itself may be the rank's own on some.
    shared = device is not None and ":" in device and world.size > 1
    implementation: type[Backend] = getattr(importlib.import_module(entry.module), entry.class_name)
    return implementation(world, place, torch.device("cpu") if shared else None)


def choose_backend(name: str | None, world: World) -> str:
    """Choose the name of the backend; the same on every rank of a world, from its launcher and size alone.

    Args:
        name: as for ``connect``.
        world: any rank's place.

    Raises:
        UsageError: there is no such backend.
        LaunchError: this backend cannot run under this launcher.
    """
    if name is None:
        if world.launcher not in _DEFAULTS:
            known = ", ".join(_DEFAULTS)
            raise LaunchError(f"There is no backend for the launcher {world.launcher!r}, only for: {known}.")
        name = _DEFAULTS[world.launcher]
    if name not in _BACKENDS:
        near = difflib.get_close_matches(name, _BACKENDS, cutoff=0.5) or list(_BACKENDS)
        raise UsageError(
            f"There is no backend {name!r}. Did you mean {' or '.join(near)}? "
            f"--backend takes one of: {', '.join(_BACKENDS)}."
        )
    entry = _BACKENDS[name]
    if world.launcher not in entry.launchers or (name == "single" and world.size != 1):
        found = "no launcher" if world.launcher == "none" else world.launcher
        raise LaunchError(
            f"--backend {name} cannot run a world of {world.size} started by {found}. Start it with "
            f"{entry.start}, or leave --backend out to take {_DEFAULTS.get(world.launcher, 'single')}."
        )
    return name


def choose_device(wanted: str | None, world: World) -> torch.device:
    """Choose where this rank's model and batches belong.

    Args:
        wanted: "cpu"; "cuda", the GPU with this rank's local number; "cuda:N", that GPU on every rank; None,
            the same as "cuda" where a GPU is visible and else the CPU.
        world: this process's place; its ``local_rank`` counts.

    Raises:
        UsageError: it is none of these, or this node has no such GPU.
    """
    if wanted is not None and not re.fullmatch(r"cpu|cuda(:[0-9]+)?", wanted):
        raise UsageError(f"--device {wanted!r} is no device: it takes cpu, cuda (one GPU a rank) or cuda:N.")
    if wanted == "cpu" or (wanted is None and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        reason = "sees no GPU" if torch.version.cuda else "is built without CUDA"
        raise UsageError(f"--device {wanted}: torch {torch.__version__} {reason}. Type --device cpu.")
    index = int(wanted.partition(":")[2]) if wanted and ":" in wanted else world.local_rank
    count = torch.cuda.device_count()
    if index >= count:
        who = f"--device {wanted}" if wanted and ":" in wanted else f"The rank with local number {index}"
        raise UsageError(
            f"{who} needs GPU {index}, but this node shows {count} (0 to {count - 1}). Start at most {count} "
            f"processes a node, or type --device cpu, or --device cuda:0 to share one GPU."
        )
    return torch.device("cuda", index)
