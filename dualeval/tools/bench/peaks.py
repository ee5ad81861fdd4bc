"""The most memory that this process has held."""

from __future__ import annotations

from pathlib import Path

import torch


def peak_of_process() -> int:
    """The most memory that this process has held at once, in bytes; without its reading processes.

    ``VmHWM`` of proc(5). ``ru_maxrss`` would count what was there before the program was started.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.split()[0]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


def peak_of_gpus(device: torch.device) -> int | None:
    """The most memory that torch's tensors have held on this process's GPUs, in bytes; None without GPUs."""
    if device.type != "cuda":
        return None
    return sum(torch.cuda.max_memory_allocated(number) for number in range(torch.cuda.device_count()))
