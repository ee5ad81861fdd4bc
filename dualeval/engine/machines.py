"""Which machines have computed a result, and which may add to it.

A machine is what ``machine_facts`` says of a rank: device type and model, CPU capability, the bits
of a few kernels, versions. Machines of one kind (device type, versions, libraries' sources) may add to each
other's results: last bits can differ, and the result says so. Machines of different kinds may only where the
user wants it.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from dualeval.engine.accelerator import accelerator_of
from dualeval.engine.differences import differences
from dualeval.engine.numerics_probe import numeric_bits
from dualeval.errors import UsageError

Machine = Mapping[str, Any]

# What every run computes with; a task names what else its results depend on.
_LIBRARIES = ("dualeval", "torch", "numpy")


def machine_facts(
    device: torch.device, libraries: Sequence[str], precision: str | None = None
) -> dict[str, Any]:
    """What of this rank's machine can change a bit: device model, CPU capability, versions, and its bits."""
    versions = {"python": platform.python_version()}
    for library in (*_LIBRARIES, *libraries):
        try:
            versions[library] = version(library)
        except PackageNotFoundError:  # run from a checkout that is not installed
            versions[library] = "not installed"
    versions["torch"] = torch.__version__
    accelerator = accelerator_of(device)
    versions |= accelerator.versions()
    return {
        "device": device.type,
        "model": accelerator.model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "versions": versions,
        **({} if precision is None else {"bits": numeric_bits(device, precision)}),
        # After the bits, which load its libraries.
        **({"runtime": runtime} if (runtime := accelerator.runtime()) else {}),
    }


def kind_of(machine: Machine) -> dict[str, Any]:
    """Device type, versions, and hashes of the libraries' sources of a machine."""
    return {name: machine[name] for name in ("device", "versions", "libraries")}


def is_same(one: Machine, other: Machine) -> bool:
    """Whether two are one machine; ``runtime`` counts where both say it, which older results do not."""
    one_sided = {"runtime"} - (one.keys() & other.keys())
    names = (one.keys() | other.keys()) - {"chunks"} - one_sided
    return all(one.get(name) == other.get(name) for name in names)


def check_kinds_of_ranks(machines: Sequence[Machine], hosts: Sequence[str], *, mix: bool) -> None:
    """Check that all ranks are of one kind."""
    for rank, machine in enumerate(machines):
        found = differences(kind_of(machines[0]), kind_of(machine))
        if found and not mix:
            shown = "; ".join(f"{name}: {first} on rank 0, {own} there" for name, first, own in found)
            raise UsageError(
                f"rank {rank} on {hosts[rank]} computes on another kind of machine than rank 0 on {hosts[0]} "
                f"({shown}). Start all ranks on the same devices and versions, or add --mix-machines: the "
                "result then says homogeneous: false."
            )


def check_kinds_of_parts(
    folder: object, parts: Iterable[Machine], own: Machine, *, mix: bool, to_start_over: str = "--fresh"
) -> None:
    """Check that what is in a folder was computed on this kind of machine."""
    for machine in parts:
        found = differences(kind_of(machine), kind_of(own))
        if found and not mix:
            shown = "; ".join(f"{name}: {there} there, {now} now" for name, there, now in found)
            raise UsageError(
                f"{folder} holds work from another kind of machine ({shown}). Give another --out, or "
                f"{to_start_over} to start over; --mix-machines continues from it, and the result then has "
                "homogeneous: false."
            )


def chunks_by_machine(parts: Iterable[tuple[Machine, int]]) -> list[dict[str, Any]]:
    """Add up the chunks of equal machines."""
    counted: list[dict[str, Any]] = []
    for machine, chunks in parts:
        if not chunks:
            continue
        for known in counted:
            if is_same(machine, known):
                known["chunks"] += chunks
                break
        else:
            counted.append({**machine, "chunks": chunks})
    return counted
