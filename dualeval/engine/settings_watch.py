"""Changes of numeric settings inside a forward, also those that it puts back itself.

Python's profile function sees every call that sets something, in the module's own code too. Hooks on the
modules, or a mode of torch's, would see less, and switch off fused kernels: other bits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import nn

from dualeval.engine.numerics import NumericSettings


@contextmanager
def watch_settings(settings: NumericSettings) -> Iterator[set[str]]:
    """Collect the changes of settings that this thread makes inside the context.

    Nothing is seen where a profiler has this thread already.

    Args:
        settings: those in force.

    Yields:
        The changes so far, for ``NumericSettings.check_after_loop``.
    """
    seen: set[str] = set()

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "return":
            name = frame.f_code.co_name
        elif event == "c_return":
            name = getattr(arg, "__name__", "")
        else:
            return
        # torch._C._set_cudnn_benchmark, ContextProp.__set__, and what a default device is put on.
        if "set" in name or "push_on_torch_function_stack" in name:
            seen.update(settings.changes_in_forward())

    if sys.getprofile() is not None:
        yield seen
        return
    sys.setprofile(profile)
    try:
        yield seen
    finally:
        sys.setprofile(None)


def is_compiled(model: nn.Module) -> bool:
    """Whether a part of a model is compiled: the compiler sets and puts back settings of its own."""
    return any(
        type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
        for module in model.modules()
    )
