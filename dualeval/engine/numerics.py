"""The numeric settings that make equal inputs give equal bits, set for a run and put back after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# What --precision takes, and the autocast type that it stands for (None: no autocast).
PRECISIONS: dict[str, torch.dtype | None] = {
    "fp32": None,
    "tf32": None,
    "amp-bf16": torch.bfloat16,
    "amp-fp16": torch.float16,
}


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """The autocast context of a precision; one that does nothing where it has none."""
    dtype = PRECISIONS[precision]
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


@contextmanager
def settings(precision: str, device: torch.device) -> Iterator[None]:
    """Set what equal bits need: no TF32 unless asked for, no choice of kernels by timing, deterministic ones,
    and on a CPU one thread a kernel, as the kernel's last bits may depend on their number.

    Where an operation has no deterministic kernel PyTorch warns and goes on.
    """
    tf32 = precision == "tf32"
    threads = torch.get_num_threads()
    deterministic = torch.get_deterministic_debug_mode()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    benchmark = torch.backends.cudnn.benchmark
    # The same as use_deterministic_algorithms(True, warn_only=True), which imports the compiler: a second.
    torch.set_deterministic_debug_mode("warn")
    # Filling every new tensor costs time, and hides nothing: the engine reads no uninitialised memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = False
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.backends.cuda.matmul.allow_tf32 = matmul
        torch.backends.cudnn.allow_tf32 = cudnn
        torch.backends.cudnn.benchmark = benchmark
        torch.set_num_threads(threads)
