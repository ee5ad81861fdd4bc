"""Devices: streams, events, pinned memory and names, which no other module of the engine asks PyTorch for.

Work that the host gives an accelerator waits in a stream, and streams run beside each other. Who reads what
another stream, or the host, has not finished, reads what was there before. An accelerator of another kind
takes one entry in ``ACCELERATORS``, if PyTorch's common interface does not describe it well enough already.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dualeval.errors import text_of

# Batches that an accelerator may have under way before the host waits for the oldest: bounds memory.
_AHEAD = 2

# cuBLAS, cuDNN and their relatives of CUDA and ROCm have a status of their own: CUBLAS_STATUS_ALLOC_FAILED,
# CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED, CUFFT_ALLOC_FAILED. "out of memory" is what the CUDA
# runtime, its driver and other accelerators' allocators say: "CUDA error: out of memory".
_NO_MEMORY = re.compile(
    r"DefaultCPUAllocator: |out of memory|not enough memory: you tried to allocate|Cannot allocate memory|"
    r"\b[A-Z]\w*_ALLOC(ATION)?_FAILED\b"
)

_DRIVER = Path("/proc/driver/nvidia/version")
_MAPS = Path("/proc/self/maps")
# cuBLAS's workspaces, TF32 switched off or on behind torch's back, and what chooses a library or a kernel.
_VARIABLES = (
    *("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "NVIDIA_TF32_OVERRIDE"),
    *("TORCH_BLAS_PREFER_CUBLASLT", "DISABLE_ADDMM_CUDA_LT", "PYTORCH_TUNABLEOP_ENABLED"),
)


class Accelerator:
    """A device that works beside the host, through PyTorch's common interface."""

    # Whether the device is the host itself: nothing is copied, and nothing runs beside it.
    is_host = False
    # Batches that may be under way before the host waits for the oldest.
    batches_ahead = _AHEAD

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def model(self) -> str:
        """The device's name, as its maker calls it."""
        return str(torch.get_device_module(self.device).get_device_name(self.device))

    def versions(self) -> dict[str, str]:
        """Versions of the device's libraries that can change a result."""
        return {}

    def runtime(self) -> dict[str, str | None]:
        """What else of the process and its node can change a last bit."""
        return {}

    def release(self) -> None:
        """Wait for the device, and give back memory that PyTorch keeps for later."""
        torch.accelerator.synchronize(self.device)
        torch.get_device_module(self.device).empty_cache()  # torch.accelerator's came with 2.9

    def new_stream(self) -> Any:
        """A stream beside the current one."""
        return torch.Stream(self.device)

    def current_stream(self) -> Any:
        """The stream that work goes into now; outside of any context the one that computes."""
        return torch.accelerator.current_stream(self.device)

    def record_event(self) -> Any:
        """An event behind all that the current stream has been given, for the host to wait on."""
        event = torch.Event(self.device)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def pinned(self, like: Tensor) -> Tensor:
        """Host memory that the device copies from and to by itself, for a tensor's numbers.

        Dense, in the order of the tensor's own strides: a model may compute otherwise in another order. Torch
        hands it out again once nobody holds it and the copies that were started with it are done.
        """
        return torch.empty_like(like, device="cpu", requires_grad=False, pin_memory=True)

    def empty(self, like: Tensor) -> Tensor:
        """Memory of the device, taken in the current stream, of a tensor's shape, strides and dtype."""
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self.device)

    def start_copy(self, source: Tensor, target: Tensor) -> None:
        """Have the current stream copy between pinned memory and the device; the host goes on."""
        target.copy_(source, non_blocking=True)

    def keep_for(self, tensor: Tensor, stream: Any) -> None:
        """Keep a tensor's memory, once nobody holds it, until a stream has done what it has been given."""
        tensor.record_stream(stream)


class Host(Accelerator):
    """The CPU, in whose memory everything is already."""

    is_host = True
    batches_ahead = 0

    def release(self) -> None:
        """Nothing: what nobody holds is free."""

    def model(self) -> str:
        """The CPU's name."""
        info = Path("/proc/cpuinfo")
        if info.exists():
            for line in info.read_text().splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        return platform.processor() or platform.machine()


class Cuda(Accelerator):
    """A GPU of NVIDIA's, or one of AMD's, which PyTorch calls the same."""

    def versions(self) -> dict[str, str]:
        """Versions of CUDA and cuDNN."""
        return {
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        }

    def runtime(self) -> dict[str, str | None]:
        """cuBLAS as it is loaded, the driver, and the variables that both read."""
        preferred = torch.backends.cuda.preferred_blas_library()
        found = {"cublas": _cublas(), "driver": nvidia_driver(), "blas": str(preferred)}
        return {**found, **{name: os.environ.get(name) for name in _VARIABLES}}

    def record_event(self) -> Any:
        """An event that the host waits for asleep, which leaves its core to the loader's workers."""
        # PyTorch's common event cannot do that: its option ``blocking`` does nothing.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event


def nvidia_driver() -> str | None:
    """Version of NVIDIA's driver; None where there is none."""
    with suppress(OSError):
        found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", _DRIVER.read_text())
        return found[1] if found else None
    return None


def _cublas() -> str | None:
    """Version of the cuBLAS that this process has loaded; None where it has none."""
    path = next(
        (line.split()[-1] for line in _MAPS.read_text().splitlines() if "/libcublas.so" in line), None
    )
    if path is None:
        return None
    numbers = [ctypes.c_int() for _ in range(3)]
    # libraryPropertyType of CUDA: major version, minor version, patch level.
    codes = [ctypes.CDLL(path).cublasGetProperty(kind, ctypes.byref(n)) for kind, n in enumerate(numbers)]
    return None if any(codes) else ".".join(str(number.value) for number in numbers)


# Device types that are not as PyTorch's common interface has them.
ACCELERATORS: dict[str, Callable[[torch.device], Accelerator]] = {"cpu": Host, "cuda": Cuda}


def accelerator_of(device: torch.device) -> Accelerator:
    """What the engine asks of a device."""
    return ACCELERATORS.get(device.type, Accelerator)(device)


def random_states() -> list[Tensor] | None:
    """The states of all GPUs' random generators; None where this process uses none."""
    uses_cuda: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.get_rng_state_all() if uses_cuda else None


def set_random_states(states: list[Tensor] | None) -> None:
    """Put back what ``random_states`` gave."""
    if states is not None:
        torch.cuda.set_rng_state_all(states)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or the host, has no memory left."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # What a library or the CPU's allocator raises has no type of its own.
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(text_of(error)) is not None
