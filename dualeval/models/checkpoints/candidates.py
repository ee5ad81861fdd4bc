"""The state_dicts in what a training script has saved: the one that is there, or all that could be meant."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from dualeval.models.extra_state import is_extra_state
from dualeval.models.passed_over import PassedOverArray
from dualeval.models.prefixes import unwrapped

# Where training scripts put state_dicts: the model's own, and averages of it over the training.
KNOWN_KEYS = (
    *("state_dict", "model_state_dict", "model", "net", "module"),
    *("model_ema", "state_dict_ema", "ema", "ema_state_dict", "ema_model", "shadow"),
    *("averaged_model", "swa_model", "swa_state_dict"),
)
_LISTED_AT_MOST = 8
_OF_AN_OPTIMIZER = re.compile(r"(^|\.)optim", re.IGNORECASE)

# Shapes of tensors by name; None for an array, whose shape is not read.
_Shapes = dict[str, torch.Size | None]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A mapping in a file."""

    # The keys that lead to it, with dots between; those of lists are numbers.
    key: str
    content: Mapping[Any, Any]

    @property
    def has_only_tensors(self) -> bool:
        """Whether it is a state_dict, and not a mapping with other things too."""
        return is_state_dict(self.content)


def is_state_dict(content: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether it maps names to tensors; and ``_extra_state``, of which each module decides what it is."""
    return (
        isinstance(content, Mapping)
        and all(
            isinstance(name, str) and (isinstance(value, Tensor) or is_extra_state(name))
            for name, value in content.items()
        )
        and any(isinstance(value, Tensor) for value in content.values())
    )


def candidates(content: object, above: str = "") -> list[Candidate]:
    """State_dicts under known keys, and all that lies beside these and could be meant in their place."""
    known = list(_mappings(content, above, known_only=True))
    found: list[Candidate] = []
    for candidate in known:
        if candidate.has_only_tensors and not _is_among(candidate, found):
            found.append(candidate)
    if not found:
        return []
    layouts = [_layout(candidate.content) for candidate in found]
    keys = [candidate.key for candidate in found]
    for candidate in known:
        around = candidate.key == above or any(key.startswith(f"{candidate.key}.") for key in keys)
        if not candidate.has_only_tensors and not around and _holds_weights(candidate.content):
            found.append(candidate)
    for candidate in _mappings(content, above):
        if not _is_among(candidate, found) and not is_of_an_optimizer(candidate.key):
            shapes = _shapes(candidate.content)
            if any(_could_replace(shapes, layout) for layout in layouts):
                found.append(candidate)
    return found


def state_dicts(content: object, above: str = "") -> list[Candidate]:
    """All state_dicts in nested mappings, lists and tuples, the outer ones first."""
    return [candidate for candidate in _mappings(content, above) if candidate.has_only_tensors]


def values_under(content: object, key: str) -> list[object]:
    """The different things that keys with dots between lead to; a key may have dots of its own."""
    found: list[object] = []
    for value in _values_under(content, key):
        if not any(value is other for other in found):
            found.append(value)
    return found


def _values_under(content: object, key: str) -> Iterator[object]:
    for name, value in _items(content):
        if str(name) == key:
            yield value
        elif key.startswith(f"{name}."):
            yield from _values_under(value, key.removeprefix(f"{name}."))


def repeated_keys(found: list[Candidate]) -> list[str]:
    """Keys that more than one of them has."""
    return [key for key, count in Counter(candidate.key for candidate in found).items() if count > 1]


def listed(found: list[Candidate]) -> str:
    """Keys and numbers of tensors, for messages."""
    shown = [_described(candidate) for candidate in found]
    more = f" and {len(shown) - _LISTED_AT_MOST} more" if len(shown) > _LISTED_AT_MOST else ""
    return ", ".join(shown[:_LISTED_AT_MOST]) + more


def _described(candidate: Candidate) -> str:
    tensors = sum(isinstance(value, Tensor) for value in candidate.content.values())
    if candidate.has_only_tensors:
        return f"{candidate.key} ({tensors} tensors)"
    others = [str(name) for name, value in candidate.content.items() if not isinstance(value, Tensor)]
    named = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
    return f"{candidate.key or 'the file itself'} ({tensors} tensors, and {named})"


# -- walking ---------------------------------------------------------------------------------------------


def _items(content: object) -> list[tuple[Any, object]]:
    if isinstance(content, Mapping):
        return list(content.items())
    return list(enumerate(content)) if isinstance(content, (list, tuple)) else []


def _mappings(content: object, above: str, *, known_only: bool = False) -> Iterator[Candidate]:
    """All nested mappings, down to state_dicts; the outer ones first.

    What lies under a known key in a list, or by a number, is known too: an average of each decay.
    """
    waiting: deque[tuple[str, object]] = deque([(above, content)])
    # A file may hold one mapping in several places, or within itself.
    seen: set[int] = set()
    while waiting:
        key, inner = waiting.popleft()
        if is_state_dict(inner):
            yield Candidate(key=key, content=inner)
        elif id(inner) not in seen:
            seen.add(id(inner))
            if isinstance(inner, Mapping):
                yield Candidate(key=key, content=inner)
            waiting += [
                (f"{key}.{name}" if key else str(name), value)
                for name, value in _items(inner)
                if isinstance(value, (Mapping, list, tuple))
                and (not known_only or (name in KNOWN_KEYS if isinstance(name, str) else bool(key)))
            ]


def _is_among(candidate: Candidate, found: list[Candidate]) -> bool:
    return any(candidate.content is other.content for other in found)


# -- comparing -------------------------------------------------------------------------------------------


def _holds_weights(content: Mapping[Any, Any]) -> bool:
    """Whether tensors or arrays are in it. Not scalars: averages keep a decay and a number of updates."""
    return any(
        isinstance(value, PassedOverArray) or (isinstance(value, Tensor) and value.dim() > 0)
        for value in content.values()
    )


def is_of_an_optimizer(key: str) -> bool:
    """Whether it is a state by the names of parameters, such as momenta; an average may be kept there."""
    return bool(_OF_AN_OPTIMIZER.search(key)) and key.rpartition(".")[2] not in KNOWN_KEYS


def _shapes(content: Mapping[Any, Any]) -> _Shapes:
    return {
        name: value.shape if isinstance(value, Tensor) else None
        for name, value in content.items()
        if isinstance(name, str) and isinstance(value, (Tensor, PassedOverArray))
    }


def _layout(tensors: Mapping[str, Any]) -> _Shapes:
    return _shapes(unwrapped(OrderedDict(tensors))[-1].tensors)


def _could_replace(shapes: _Shapes, layout: _Shapes) -> bool:
    """Whether all of a layout is there, behind whatever prefix; or the same without one of its own."""
    if _prefix_of(shapes, layout) is not None:
        return True
    # Few names are in many modules (weight, bias): without its prefix a layout counts where it is all.
    return len(shapes) == len(layout) and _prefix_of(layout, shapes) is not None


def _prefix_of(shapes: _Shapes, layout: _Shapes) -> str | None:
    """The prefix behind which all of a layout is there."""
    if not layout or len(shapes) < len(layout):
        return None
    rarest = max(layout, key=len)
    for name in shapes:
        prefix = name.removesuffix(rarest)
        if (
            name.endswith(rarest)
            and not prefix[-1:].isalnum()
            and all(prefix + own in shapes for own in layout)
            and all(_are_alike(shapes[prefix + own], shape) for own, shape in layout.items())
        ):
            return prefix
    return None


def _are_alike(one: torch.Size | None, other: torch.Size | None) -> bool:
    return one is None or other is None or one == other
