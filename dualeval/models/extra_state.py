"""Entries of a state_dict that need not be tensors: ``_extra_state``, packed weights of quantised layers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dualeval.models.passed_over import PassedOver

_NAME = "_extra_state"
# Of a quantised linear layer or LSTM: a dtype; weights and bias together.
_PACKED = re.compile(r"(^|\.)_packed_params\.(dtype|_packed_params)")


def is_extra_state(name: str) -> bool:
    """Whether torch gives this name to what a module keeps beside tensors."""
    return name == _NAME or name.endswith(f".{_NAME}") or _PACKED.search(name) is not None


def is_read(value: object) -> bool:
    """Whether nothing in a value was passed over when the file was read."""
    waiting = [value]
    seen: set[int] = set()
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, PassedOver):
            return False
        if isinstance(inner, (Mapping, list, tuple, set)) and id(inner) not in seen:
            seen.add(id(inner))
            waiting += [*inner, *inner.values()] if isinstance(inner, Mapping) else inner
    return True
