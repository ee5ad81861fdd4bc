"""Entries ``_extra_state`` of a state_dict: what modules keep beside tensors, of whatever type."""

from __future__ import annotations

from collections.abc import Mapping

from dualeval.models.passed_over import PassedOver

_NAME = "_extra_state"


def is_extra_state(name: str) -> bool:
    """Whether torch gives this name to what a module's ``get_extra_state`` returns."""
    return name == _NAME or name.endswith(f".{_NAME}")


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
