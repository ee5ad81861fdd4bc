"""What the ranks tell each other before they start: the same job, the same data, what machine each one is."""

from __future__ import annotations

import hashlib
import inspect
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dualeval.engine.numerics_probe import numeric_bits
from dualeval.errors import UsageError

# What every run computes with; a task names what else its results depend on.
_LIBRARIES = ("dualeval", "torch", "numpy")


def model_fingerprint(model: nn.Module) -> dict[str, Any]:
    """sha256 over names, dtypes, shapes and bytes of all parameters and buffers, and their element count.

    Returns:
        {"fingerprint": hex, "elements": int}
    """
    digest = hashlib.sha256()
    elements = 0
    for name, tensor in sorted(model.state_dict().items()):
        content = tensor.detach().cpu().contiguous()
        digest.update(f"{name}\0{content.dtype}\0{tuple(content.shape)}\0".encode())
        digest.update(content.flatten().view(torch.uint8).numpy().data)
        elements += content.numel()
    return {"fingerprint": digest.hexdigest(), "elements": elements}


def source_fingerprint(objects: Iterable[object]) -> str:
    """sha256 over the source files that define the classes of some objects, and the classes that these derive
    from, with the modules' names.

    Weights say nothing of what a forward does with them; a file that was edited before a run is resumed does.
    """
    digest = hashlib.sha256()
    for module in sorted({kind.__module__ for item in objects for kind in type(item).__mro__}):
        digest.update(f"{module}\0".encode())
        found = sys.modules.get(module)
        try:
            source = None if found is None else inspect.getsourcefile(found)
        except TypeError:  # a builtin module: Python's version stands for it
            source = None
        if source is not None and Path(source).is_file():
            digest.update(hashlib.sha256(Path(source).read_bytes()).digest())
    return digest.hexdigest()


def machine_facts(
    device: torch.device, libraries: Sequence[str], precision: str | None = None
) -> dict[str, Any]:
    """What of this rank's machine can change a bit: device model, CPU capability, versions, and its bits.

    Args:
        device: what computes.
        libraries: packages whose version can change a result, besides torch and numpy.
        precision: what the bits are computed in, inside ``numerics.settings``; None leaves them out.
    """
    versions = {"python": platform.python_version()}
    for library in (*_LIBRARIES, *libraries):
        try:
            versions[library] = version(library)
        except PackageNotFoundError:  # run from a checkout that is not installed
            versions[library] = "not installed"
    versions["torch"] = torch.__version__
    if device.type == "cuda":
        model = torch.cuda.get_device_name(device)
        versions["cuda"] = str(torch.version.cuda)
        versions["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    else:
        model = _cpu_model()
    return {
        "device": device.type,
        "model": model,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "versions": versions,
        **({} if precision is None else {"bits": numeric_bits(device, precision)}),
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def check_same_job(jobs: list[dict[str, Any]], hosts: list[str]) -> None:
    """Check that every rank was given the same job, found the same data and built the same model.

    Args:
        jobs: each rank's fingerprint fields, in rank order.
        hosts: each rank's host.

    Raises:
        UsageError: names the first rank that differs from rank 0, and the fields.
    """
    for rank, job in enumerate(jobs):
        differing = differences(jobs[0], job)
        if differing:
            shown = "; ".join(f"{name}: {first} on rank 0, {own} here" for name, first, own in differing)
            raise UsageError(
                f"rank {rank} on {hosts[rank]} does not have the same job as rank 0 on {hosts[0]} ({shown}). "
                "Start every rank with the same options, data and weights."
            )


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
