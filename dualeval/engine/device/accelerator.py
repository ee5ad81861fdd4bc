"""Devices: streams, events, pinned memory and names, which no other module of the engine asks PyTorch for.

The host queues an accelerator's work in streams, which run concurrently. Without synchronization, memory that
another stream, or the host, is still writing is read with its old contents. An accelerator of another kind
needs an entry in ``ACCELERATORS`` only if PyTorch's common interface does not describe it well enough.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Batches that an accelerator may have under way before the host waits for the oldest: bounds memory.
_AHEAD = 2

_DRIVER = Path("/proc/driver/nvidia/version")
_MAPS = Path("/proc/self/maps")
# Variables that set cuBLAS's workspaces, switch TF32 without torch's knowledge, or choose library or kernel.
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
        """Other facts of the process and its node that can change a last bit."""
        return {}

    def release(self) -> None:
        """Wait for the device, then free the memory that PyTorch caches."""
        torch.accelerator.synchronize(self.device)
        torch.get_device_module(self.device).empty_cache()  # torch.accelerator.empty_cache needs 2.9

    def new_stream(self) -> Any:
        """A stream beside the current one."""
        return torch.Stream(self.device)

    def current_stream(self) -> Any:
        """The stream that receives work now; outside of any stream context, the computing stream."""
        return torch.accelerator.current_stream(self.device)

    def record_event(self) -> Any:
        """An event after all work queued in the current stream, for the host to wait on."""
        event = torch.Event(self.device)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def pinned(self, like: Tensor) -> Tensor:
        """Pinned host memory for a tensor's numbers, which the device reads and writes by itself.

        Dense, in the order of the tensor's strides: a model may compute differently in another order. Torch
        reuses the memory once nobody holds it and its copies are done.
        """
        return torch.empty_like(like, device="cpu", requires_grad=False, pin_memory=True)

    def empty(self, like: Tensor) -> Tensor:
        """Device memory of a tensor's shape, strides and dtype, allocated in the current stream."""
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self.device)

    def start_copy(self, source: Tensor, target: Tensor) -> None:
        """Queue a copy between pinned memory and the device in the current stream; the host does not wait."""
        target.copy_(source, non_blocking=True)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Tensors of bytes, one after the other, on the device: one kernel."""
        return parts[0] if len(parts) == 1 else torch.cat([*parts])

    def as_current(self) -> AbstractContextManager[object]:
        """The context in which "cuda", and pinned memory, mean this device in this thread."""
        context: AbstractContextManager[object] = torch.get_device_module(self.device).device(self.device)
        return context

    def keep_for(self, tensor: Tensor, stream: Any) -> None:
        """Keep a tensor's memory from reuse until a stream has finished the work queued in it so far."""
        tensor.record_stream(stream)


class Host(Accelerator):
    """The CPU, in whose memory everything is already."""

    is_host = True
    batches_ahead = 0

    def as_current(self) -> AbstractContextManager[object]:
        """No context: there is one CPU."""
        return nullcontext()

    def release(self) -> None:
        """Do nothing: unused memory is free already."""

    def model(self) -> str:
        """The CPU's name."""
        info = Path("/proc/cpuinfo")
        if info.exists():
            for line in info.read_text().splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        return platform.processor() or platform.machine()


class Cuda(Accelerator):
    """A GPU by NVIDIA, or by AMD: PyTorch calls both cuda."""

    def versions(self) -> dict[str, str]:
        """Versions of CUDA and cuDNN."""
        return {
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        }

    def runtime(self) -> dict[str, str | None]:
        """The loaded cuBLAS, the driver, and the variables that both read."""
        preferred = torch.backends.cuda.preferred_blas_library()
        libraries = {"cublas": _cublas(), "driver": nvidia_driver(), "blas": str(preferred)}
        return {**libraries, **{name: os.environ.get(name) for name in _VARIABLES}}

    def record_event(self) -> Any:
        """An event for which the host waits asleep, which leaves its core to the loader's workers."""
        # PyTorch's common event cannot do that: its option ``blocking`` does nothing.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event


def nvidia_driver() -> str | None:
    """Version of NVIDIA's driver; None if there is none."""
    with suppress(OSError):
        match = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", _DRIVER.read_text())
        return match[1] if match else None
    return None


def _cublas() -> str | None:
    """Version of the cuBLAS that this process has loaded; None if it has loaded none."""
    path = next(
        (line.split()[-1] for line in _MAPS.read_text().splitlines() if "/libcublas.so" in line), None
    )
    if path is None:
        return None
    numbers = [ctypes.c_int() for _ in range(3)]
    # libraryPropertyType of CUDA: major version, minor version, patch level.
    codes = [ctypes.CDLL(path).cublasGetProperty(kind, ctypes.byref(n)) for kind, n in enumerate(numbers)]
    return None if any(codes) else ".".join(str(number.value) for number in numbers)


# Device types that PyTorch's common interface does not describe well enough.
ACCELERATORS: dict[str, Callable[[torch.device], Accelerator]] = {"cpu": Host, "cuda": Cuda}


def accelerator_of(device: torch.device) -> Accelerator:
    """The engine's interface to a device."""
    return ACCELERATORS.get(device.type, Accelerator)(device)


def random_states() -> list[Tensor] | None:
    """The states of all GPUs' random generators; None if this process uses no GPU."""
    uses_cuda: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.get_rng_state_all() if uses_cuda else None


def set_random_states(states: list[Tensor] | None) -> None:
    """Restore the states that ``random_states`` returned."""
    if states is not None:
        torch.cuda.set_rng_state_all(states)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or the host, has no memory left."""
    from dualeval.torch_errors import TorchError

    # Libraries and the CPU's allocator raise plain RuntimeErrors.
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or bool(TorchError.NO_MEMORY.of(error))
