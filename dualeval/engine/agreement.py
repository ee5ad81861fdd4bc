"""What the ranks tell each other before they start: the same job, the same data, what machine each one is."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from dualeval.engine.accelerator import accelerator_of
from dualeval.engine.numerics_probe import numeric_bits
from dualeval.errors import UsageError
from dualeval.options.choices import CONTIGUOUS

# What every run computes with; a task names what else its results depend on.
_LIBRARIES = ("dualeval", "torch", "numpy")

_ATTRIBUTES = "structure_attributes."
_NAMED = (_ATTRIBUTES, "constants.")
_HASH = re.compile("[0-9a-f]{6,64}")
_SHOWN_OF_HASH = 16
_MOST_LISTED = 16


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


def check_same_job(jobs: list[dict[str, Any]], hosts: list[str], alone: list[dict[str, Any]]) -> None:
    """Check that every rank was given the same job, found the same data and built the same model.

    A field that holds a rank's number may also be as rank 0 has it in ``alone``: by name, its value with the
    number of a process alone.
    """
    for rank, job in enumerate(jobs):
        found = differences(jobs[0], job)
        differing = [each for each in found if each[0] not in alone[rank] or alone[rank][each[0]] != each[1]]
        if differing:
            shown = listing(differing, "on rank 0", "here")
            raise UsageError(
                f"rank {rank} on {hosts[rank]} does not have the same job as rank 0 on {hosts[0]} ({shown}). "
                "Start every rank with the same options, data and weights."
                f"{_weights_hint(differing, hosts[0], hosts[rank])}{structure_hint(differing)}"
            )


def layout_hint(found: Sequence[tuple[str, Any, Any]]) -> str:
    """A sentence on a difference in layout, which a job names where it is channels-last; else empty."""
    layouts = [values for name, *values in found if name.removeprefix("job.") == "layout"]
    if not layouts:
        return ""
    there = layouts[0][0] or CONTIGUOUS
    return (
        f" (The run there was computed {there}: with --layout {there} this one is, too. Before --layout "
        f"auto all runs were {CONTIGUOUS}.)"
    )


def _weights_hint(found: Sequence[tuple[str, Any, Any]], first: str, here: str) -> str:
    """A sentence on ranks that have loaded other weights; else empty."""
    if not any(name.partition(".")[0] == "weights" for name, _, _ in found):
        return ""
    where = f"on {here}" if first == here else f"on {first} and on {here}"
    return (
        " (weights is a digest of the tensors that a rank has in its model: the file of --weights is not "
        f"the same for all ranks. Compare it {where} with sha256sum, and copy it again, or give a path on a "
        "file system that all ranks share. A model of your own code may also draw its weights: seed it alike "
        "on every rank.)"
    )


def structure_hint(found: Sequence[tuple[str, Any, Any]]) -> str:
    """A sentence on a difference in the model's structure or a class's constants; else empty."""
    names = [name.removeprefix("job.") for name, _, _ in found]
    if not any(name.startswith(("structure.", *_NAMED)) for name in names):
        return ""
    return (
        " (structure.NAME is a hash of what the attributes of the model's module NAME hold, its class and "
        "its hooks, and constants.CLASS has the values that the methods of CLASS read: a rank, a time or a "
        "random number does not belong there. A class that says dualeval_identity_ignores = "
        '("NAME OF ATTRIBUTE",) leaves out what decides no number.)'
    )


def listing(found: Sequence[tuple[str, Any, Any]], there: str, here: str) -> str:
    """Differences in words; the attributes of the model's structure by name, where they are known."""
    attributes = [item for item in found if _ATTRIBUTES in item[0]]
    explained = {name.replace(_ATTRIBUTES, "structure.") for name, _, _ in attributes}
    named = [
        (name.replace(_ATTRIBUTES, "structure."), *values)
        for name, *values in found
        # The hash of a module says no more than those of its attributes.
        if "structure." not in name or not any(other.startswith(f"{name}.") for other in explained)
    ]
    # What can be read without knowing what was hashed comes first.
    named.sort(key=lambda item: _is_hash(item[1]) or _is_hash(item[2]))
    shown = [f"{name}: {_brief(one)} {there}, {_brief(other)} {here}" for name, one, other in named]
    more = [f"and {len(shown) - _MOST_LISTED} more"] if len(shown) > _MOST_LISTED else []
    return "; ".join(shown[:_MOST_LISTED] + more)


def _brief(value: Any) -> Any:
    if isinstance(value, Mapping):
        return f"{len(value)} values"
    return value[:_SHOWN_OF_HASH] if _is_hash(value) else value


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and _HASH.fullmatch(value) is not None


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Where two nests of plain values differ: name with dots, value in each (None where it is missing)."""
    found: list[tuple[str, Any, Any]] = []
    for name in dict.fromkeys([*one, *other]):
        first, second = one.get(name), other.get(name)
        if isinstance(first, Mapping) and isinstance(second, Mapping):
            found += [(f"{name}.{inner}", *values) for inner, *values in differences(first, second)]
        elif first != second:
            found.append((name, first, second))
    return found
