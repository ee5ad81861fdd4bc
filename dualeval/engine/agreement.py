"""What the ranks tell each other before they start: the same job, the same data, what machine each one is."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dualeval.errors import UsageError

# Libraries whose version can change a result: they compute, decode or resize.
_LIBRARIES = ("dualeval", "torch", "torchvision", "numpy", "pillow")


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


def machine_facts(device: torch.device) -> dict[str, Any]:
    """What of this rank's machine can change a bit: device model, CPU capability, versions."""
    versions = {"python": platform.python_version()}
    for library in _LIBRARIES:
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
        differing = [name for name in jobs[0] if job.get(name) != jobs[0][name]]
        if differing:
            shown = "; ".join(
                f"{name}: {jobs[0][name]} on rank 0, {job.get(name)} here" for name in differing
            )
            raise UsageError(
                f"rank {rank} on {hosts[rank]} does not have the same job as rank 0 on {hosts[0]} ({shown}). "
                "Start every rank with the same options, data and weights."
            )
