"""How the C library keeps the memory that units have let go of, where they lie in host memory."""

from __future__ import annotations

import ctypes
import sys

# Of mallopt(3).
_M_MMAP_THRESHOLD = -3
_MAPPED_FROM_BYTES = 128 * 1024


def return_large_blocks() -> None:
    """Have the C library give each large block back to the system as soon as it is freed, from now on.

    glibc raises the size from which it does so, up to 32 MiB, as blocks are freed, and keeps smaller ones in
    a heap for each thread. Units are gathered by several threads: a model of 1 GB on two ranks then took 1.4
    GB of a rank instead of 0.57. The price is that pages of gathered units are mapped again each time.
    Other C libraries do not have the call.
    """
    if sys.platform != "linux":
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)
