"""What an error of torch says: the one place that knows how torch words what went wrong.

tests/test_torch_errors.py has torch raise each of these: one that a new torch words otherwise is seen there.
"""

from __future__ import annotations

import re
from enum import Enum

from dualeval.errors import text_of


class TorchError(Enum):
    """What went wrong, and the pattern of the texts that say so; several may fit one text."""

    # The CPU's allocator, the CUDA runtime, its driver and other accelerators' allocators; then the status of
    # cuBLAS, cuDNN and similar libraries of CUDA and ROCm: CUBLAS_STATUS_ALLOC_FAILED,
    # CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED, CUFFT_ALLOC_FAILED.
    NO_MEMORY = (
        r"DefaultCPUAllocator: |out of memory|not enough memory: you tried to allocate|"
        r"Cannot allocate memory|\b[A-Z]\w*_ALLOC(ATION)?_FAILED\b"
    )
    # A loader's worker has exited: its process, and how.
    LOST_WORKER = (
        r"\ADataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) "
        r"(?:is )?(killed by signal: [^.]+|exited unexpectedly[^.]*)"
    )
    # A tensor found no place in shared memory: it is full, or no file can be opened.
    NOT_SHARED = r"\Aunable to .*shared memory"
    PORT_IN_USE = r"EADDRINUSE"
    # In the code of a GPU: an index out of range.
    ON_DEVICE = r"device-side assert"
    WRONG_SHAPE = r"shape|size|channels|dimension|elements"
    # A matrix product: the columns of the left matrix, and the rows of the right one.
    WRONG_WIDTH = r"\(\d+x(\d+) and (\d+)x\d+\)"
    # Of a layer whose parameters have another dtype than its input.
    OTHER_DTYPE = r"same dtype|should be the same|expected scalar type|expected m1 and m2"
    # Of any operation whose tensors have several.
    MIXED_DTYPES = r"dtype|same type|scalar type|should be the same|expected m1 and m2"
    ANY_TYPE = r"type"
    NO_KERNEL = r"not implemented for"
    NOT_CONTIGUOUS = r"view size is not compatible"
    NOT_GATHERED = r"mixed torch\.Tensor and DTensor"
    NOT_THROUGH_ROOT = r"forward through the root module first|already been lazily initialized"
    # A compiled model whose inputs came in too many shapes.
    RECOMPILED = r"recompile"
    # A tensor on the meta device, and one that cannot take its place.
    NO_VALUES = r"meta tensor|incompatible tensor type"
    # What a safe load refuses: the class, or any reason.
    REFUSED_CLASS = r"(?i)unsupported global(?:: global)? (\S+)"
    REFUSED_PICKLE = r"WeightsUnpickler error:\s+(.+)"
    # PyPI's torchvision beside a CPU build of torch.
    OTHER_TORCHVISION = r"torchvision::nms does not exist"

    def search(self, text: str) -> re.Match[str] | None:
        """Where an error's text says this; None where it does not."""
        return re.search(self.value, text)

    def of(self, error: BaseException) -> re.Match[str] | None:
        """The same of an error's text, if it is of the type that torch raises."""
        return self.search(text_of(error)) if isinstance(error, RuntimeError) else None
