"""The state_dict in what a training has saved: the one under a known key, or the one that is asked for."""

from __future__ import annotations

import re
from argparse import Namespace
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from math import isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeGuard

from torch import Tensor

from dualeval.errors import UsageError
from dualeval.messages import listed

# The file of torch.distributed.checkpoint that says what lies where.
METADATA = ".metadata"

# Where training scripts put state_dicts: the model's own, and averages of it over the training.
KNOWN_KEYS = (
    *("state_dict", "model_state_dict", "model", "net", "module"),
    *("model_ema", "state_dict_ema", "ema", "ema_state_dict", "ema_model", "shadow"),
    *("averaged_model", "swa_model", "swa_state_dict"),
)
# Momenta are many, by the names of parameters, and never meant.
_OF_AN_OPTIMIZER = "optim"

StateDict = Mapping[str, Any]

# Entries of a state_dict that need not be tensors: of a module, whatever it keeps; of a quantised linear
# layer or LSTM, a dtype, or weights and bias together.
_EXTRA_STATE = "_extra_state"
_PACKED = re.compile(r"(^|\.)_packed_params\.(dtype|_packed_params)")


class PassedOver:
    """Takes the place of an object in a file that is no tensor: it ignores all that the file says of it."""

    def __new__(cls, *_: object, **__: object) -> PassedOver:
        return object.__new__(cls)

    def __setstate__(self, _: object) -> None:
        """Keep nothing."""


class ArrayInFile(PassedOver):
    """Takes the place of one of numpy's arrays in a file."""


class NamespaceInFile(PassedOver):
    """Takes the place of a namespace in a file: it keeps what the file says, as a mapping."""

    held: object = None

    def __setstate__(self, state: object) -> None:
        """Keep the attributes apart from this object's own."""
        self.held = state


def _is_extra_state(name: str) -> bool:
    """Whether torch gives this name to what a module keeps beside tensors."""
    return name == _EXTRA_STATE or name.endswith(f".{_EXTRA_STATE}") or _PACKED.search(name) is not None


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


def is_state_dict(content: object) -> TypeGuard[StateDict]:
    """Whether it maps names to tensors; and ``_extra_state``, of which each module decides what it is."""
    return (
        isinstance(content, Mapping)
        and all(
            isinstance(name, str) and (isinstance(value, Tensor) or _is_extra_state(name))
            for name, value in content.items()
        )
        and any(isinstance(value, Tensor) for value in content.values())
    )


def choose(path: Path, content: object, key: str | None) -> tuple[str, StateDict]:
    """The state_dict that is meant, and the keys that lead to it."""
    if is_state_dict(content):
        if key is not None:
            raise UsageError(
                f"--weights-key {key}: {path} is one state_dict, with no keys above it. Leave --weights-key "
                "out; --weights-prefix takes the tensors whose names begin with a prefix."
            )
        return "", content
    return _only_one(path, content) if key is None else _under(path, content, key)


def _only_one(path: Path, content: object, above: str = "") -> tuple[str, StateDict]:
    """The one state_dict under known keys, where nothing else in the file could be meant in its place."""
    states = _state_dicts(content, above, known_only=True)
    if not states:
        raise _none_there(path, content, above)
    ids = {id(inner) for _, inner in states}
    rivals = [
        (key, inner)
        for key, inner in _mappings(content, above)
        if id(inner) not in ids and any(_last_names(state) <= _last_names(inner) for _, state in states)
    ]
    every = [*states, *rivals]
    if len(every) > 1:
        raise UsageError(
            f"{path} holds {len(every)} state_dicts: {_summary(every)}. They can give different results. Say "
            f"which is meant: --weights-key KEY, such as --weights-key {every[0][0]}."
        )
    return states[0]


def _last_names(content: Mapping[Any, Any]) -> Counter[str]:
    """How many tensors, or arrays, have each last part of a name; no scalars, as counters are."""
    return Counter(
        str(name).rpartition(".")[2]
        for name, value in content.items()
        if isinstance(value, PassedOver) or (isinstance(value, Tensor) and value.dim() > 0)
    )


def _under(path: Path, content: object, key: str) -> tuple[str, StateDict]:
    """The state_dict that a key leads to, or the only one below it."""
    values = list(_values_under(content, key))
    if len(values) != 1:
        others = _state_dicts(content)
        hint = f" State_dicts lie under {_summary(others)}." if others else ""
        many = f"{len(values)} things under this key" if values else "no such key"
        raise UsageError(f"--weights-key {key}: {path} holds {many} ({_keys_of(content)}).{hint}")
    inner = values[0]
    return (key, inner) if is_state_dict(inner) else _only_one(path, inner, key)


def _none_there(path: Path, content: object, above: str) -> UsageError:
    others = _state_dicts(content, above)
    hint = f" State_dicts lie under {_summary(others)}; --weights-key KEY takes one." if others else ""
    place = f" under the key {above}" if above else ""
    inside = [value for _, inner in _mappings(content, above) for value in inner.values()]
    if any(isinstance(value, ArrayInFile) for value in inside):
        return UsageError(
            f"{path} holds numpy arrays{place} ({_keys_of(content)}), expected tensors. Save them as "
            "tensors: torch.save({name: torch.as_tensor(value) for name, value in STATE.items()}, PATH)."
        )
    return UsageError(
        f"{path} holds no state_dict{place} ({_keys_of(content)}); expected tensors by name, or such a "
        f"mapping under one of {', '.join(KNOWN_KEYS)}.{hint} Save one with torch.save(model.state_dict(), "
        "PATH)."
    )


def _keys_of(content: object) -> str:
    if not isinstance(content, Mapping):
        return "found: " + ("an object" if isinstance(content, PassedOver) else type(content).__name__)
    others = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    only = "" if len(others) == len(content) else f"; no tensor is {listed(others)}"
    return f"found: {', '.join(map(str, content))[:200]}{only}"


def _summary(states: list[tuple[str, StateDict]]) -> str:
    """Keys and numbers of tensors."""
    return listed(f"{key or 'the file itself'} ({_counted(content)})" for key, content in states)


def _counted(content: Mapping[Any, Any]) -> str:
    others = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    tensors = f"{len(content) - len(others)} tensors"
    return tensors if is_state_dict(content) else f"{tensors}, and {listed(others, 3)}"


# -- names of classes ------------------------------------------------------------------------------------

# Where trainings keep them, as a list, or as a dict of index and name in either order; and what these lie in.
_CLASSES = ("class_to_idx", "idx_to_class", "id2label", "class_names", "CLASSES", "classes", "names")
_AROUND = ((), ("hyper_parameters",), ("meta",), ("meta", "dataset_meta"))


def class_names_in(content: object) -> tuple[str, tuple[str, ...]]:
    """The key and the names of classes, by index, that a checkpoint has beside tensors; none without."""
    for keys in _AROUND:
        inner = content
        for key in keys:
            inner = dict(_items(inner)).get(key)
        of_keys = dict(_items(inner))
        for key in _CLASSES:
            if names := _by_index(of_keys.get(key)):
                return key, names
    return "", ()


def _by_index(table: object) -> tuple[str, ...]:
    """Names in the order of their indices; none where these are not 0 to n - 1, or 1 to n, and differ."""
    pairs = _items(table)
    if all(type(value) is int for _, value in pairs):
        pairs = [(value, name) for name, value in pairs]
    names = {str(index): name for index, name in pairs}
    first = int("0" not in names)
    ordered = tuple(names.get(str(first + index)) for index in range(len(pairs)))
    are_names = all(isinstance(name, str) for name in ordered) and len({*ordered}) == len(ordered)
    return tuple(map(str, ordered)) if are_names else ()


# -- arguments of what makes the model -------------------------------------------------------------------

# Where trainings keep them; and in each of these, as Lightning keeps a namespace that a module was given.
_ARGUMENTS = (
    "model_args",
    "model_kwargs",
    "model_config",
    "hyper_parameters",
    "hparams",
    "config",
    "cfg",
    "args",
)


def arguments_in(content: object) -> dict[str, Any]:
    """Plain values by name that a checkpoint has beside tensors: at its top, and under known keys."""
    groups: list[Mapping[Any, Any]] = [_by_name(content)]
    for _ in range(2):
        groups += [_by_name(group.get(key)) for group in groups for key in _ARGUMENTS]
    return {key: value for group in reversed(groups) for key, value in group.items() if is_plain(value)}


def is_plain(value: object) -> bool:
    """Whether a value is None, a bool, a finite number, a text, or a list of these."""
    if isinstance(value, (list, tuple)):
        return all(is_plain(each) and not isinstance(each, (list, tuple)) for each in value)
    return value is None or isinstance(value, (int, str)) or (isinstance(value, float) and isfinite(value))


def _by_name(content: object) -> Mapping[Any, Any]:
    if isinstance(content, (Namespace, SimpleNamespace)):  # of a file that was trusted
        return vars(content)
    inner = content.held if isinstance(content, NamespaceInFile) else content
    return inner if isinstance(inner, Mapping) else {}


# -- walking ---------------------------------------------------------------------------------------------


def _items(content: object) -> list[tuple[Any, object]]:
    if isinstance(content, Mapping):
        return list(content.items())
    return list(enumerate(content)) if isinstance(content, (list, tuple)) else []


def _values_under(content: object, key: str) -> Iterator[object]:
    """What keys with dots between lead to; a key may have dots of its own."""
    for name, value in _items(content):
        if str(name) == key:
            yield value
        elif key.startswith(f"{name}."):
            yield from _values_under(value, key.removeprefix(f"{name}."))


def _state_dicts(
    content: object, above: str = "", *, known_only: bool = False
) -> list[tuple[str, StateDict]]:
    """Nested state_dicts with their keys, each once, the outer ones first."""
    mappings = _mappings(content, above, known_only=known_only)
    return [(key, inner) for key, inner in mappings if is_state_dict(inner)]


def _mappings(
    content: object, above: str, *, known_only: bool = False
) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """All nested mappings down to state_dicts, but for those of optimizers; the outer ones first.

    What lies under a known key in a list, or by a number, is known too: an average of each decay.
    """
    waiting: deque[tuple[str, object]] = deque([(above, content)])
    # A file may hold one mapping in several places, or within itself.
    seen: set[int] = set()
    while waiting:
        key, inner = waiting.popleft()
        if id(inner) in seen:
            continue
        seen.add(id(inner))
        if isinstance(inner, Mapping):
            yield key, inner
        if is_state_dict(inner):
            continue
        for name, value in _items(inner):
            is_known = name in KNOWN_KEYS if isinstance(name, str) else bool(key)
            if is_known or not (known_only or str(name).startswith(_OF_AN_OPTIMIZER)):
                waiting.append((f"{key}.{name}" if key else str(name), value))
