"""Counts kernels: what a loop costs for every batch, without a clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class CountedKernels(TorchDispatchMode):
    """Counts the operators that compute or copy, and leaves out views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type[Any]],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not func.is_view:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))
