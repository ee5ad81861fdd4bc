"""Choosing the state_dict in what a checkpoint holds, or saying why none can be chosen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dualeval.errors import UsageError
from dualeval.models.checkpoints.candidates import (
    KNOWN_KEYS,
    Candidate,
    candidates,
    is_of_an_optimizer,
    is_state_dict,
    listed,
    repeated_keys,
    state_dicts,
    values_under,
)
from dualeval.models.passed_over import PassedOver

_LISTED_AT_MOST = 8


def choose(path: Path, content: object, key: str | None) -> tuple[str, Mapping[str, Any]]:
    """The state_dict that is meant, and the keys that lead to it."""
    if is_state_dict(content):
        if key is not None:
            raise UsageError(
                f"--weights-key {key}: {path} is one state_dict, with no keys above it. Leave --weights-key "
                "out; --weights-prefix takes the tensors whose names begin with a prefix."
            )
        return "", content
    return _only_one(path, content) if key is None else _under(path, content, key)


def _only_one(path: Path, content: object, above: str = "") -> tuple[str, Mapping[str, Any]]:
    """The one state_dict under known keys."""
    found = candidates(content, above)
    if not found:
        raise _none_there(path, content, above)
    if len(found) > 1:
        raise _several(path, found)
    return found[0].key, found[0].content


def _several(path: Path, found: list[Candidate]) -> UsageError:
    twice = repeated_keys(found)
    clear = next((each.key for each in found if each.has_only_tensors and each.key not in twice), None)
    saved = "the one that is meant alone, with torch.save(model.state_dict(), PATH)."
    advice = (
        f"Save {saved}"
        if clear is None
        else f"Say which is meant: --weights-key KEY, such as --weights-key {clear}."
    )
    if twice:
        advice = f"Two things answer to {', '.join(twice)}. {advice}"
    if clear is not None and not all(each.has_only_tensors for each in found):
        advice = f"{advice} One with other things than tensors cannot be taken: save it alone."
    return UsageError(
        f"{path} holds {len(found)} state_dicts: {listed(found)}. They can give different results. {advice}"
    )


def _under(path: Path, content: object, key: str) -> tuple[str, Mapping[str, Any]]:
    """The state_dict that a key leads to, or the only one below it."""
    found = values_under(content, key)
    if not found:
        # Those of an optimizer are many, and not meant.
        elsewhere = [other for other in state_dicts(content) if not is_of_an_optimizer(other.key)]
        hint = f" State_dicts lie under {listed(elsewhere)}." if elsewhere else ""
        raise UsageError(f"--weights-key {key}: {path} holds no such key ({_keys_of(content)}).{hint}")
    if len(found) > 1:
        raise UsageError(
            f"--weights-key {key}: {len(found)} things in {path} answer to it, expected one. Save the one "
            "that is meant alone, with torch.save(model.state_dict(), PATH)."
        )
    [inner] = found
    if is_state_dict(inner):
        return key, inner
    if not isinstance(inner, (Mapping, list, tuple)):
        what = "an object" if isinstance(inner, PassedOver) else f"a {type(inner).__name__}"
        raise UsageError(
            f"--weights-key {key}: {path} holds {what} there, expected a state_dict (tensors by name)."
        )
    return _only_one(path, inner, key)


def _none_there(path: Path, content: object, above: str) -> UsageError:
    # What is there instead, under the known keys.
    nested = [content.get(key) for key in KNOWN_KEYS] if isinstance(content, Mapping) else []
    inner = next((value for value in nested if isinstance(value, Mapping)), content)
    others = state_dicts(content, above)
    hint = (
        f" State_dicts lie under other keys: {listed(others)}; --weights-key KEY takes one." if others else ""
    )
    place = f" under the key {above}" if above else ""
    return UsageError(
        f"{path} holds no state_dict{place} ({_keys_of(inner)}); expected tensors by name, or such a mapping "
        f"under one of {', '.join(KNOWN_KEYS)}.{hint} Save one with torch.save(model.state_dict(), PATH)."
    )


def _keys_of(content: object) -> str:
    if not isinstance(content, Mapping):
        return f"found: {type(content).__name__}"
    found = f"found: {', '.join(map(str, content))[:200]}"
    others = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if len(others) == len(content):
        return found
    return f"{found}; no tensor is {', '.join(others[:_LISTED_AT_MOST])}"
