"""What metrics measure, checked and brought to plain JSON values before it goes anywhere."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from torch import Tensor

from dualeval.errors import UsageError
from dualeval.metrics import DIRECTIONS, Measured
from dualeval.metrics.scores import Score

# Fields of ``Measured`` and of ``Result``.
_SAID_BY_KEY = ("intervals", "rough", "nonfinite", "units", "directions", "scores")


def _is_count(value: object) -> bool:
    return isinstance(value, int)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_pair(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    return all(end is None or isinstance(end, (int, float)) for end in value)


def _is_counts(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_count, value.values()))


_VALUE = "a number, a text, a list or dict of them, or None"
# Of the fields of ``Measured`` that are by key: what each entry has to be, and how that is said.
_EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "intervals": (_is_pair, "a pair of numbers"),
    "rough": (_is_text, "a text"),
    "nonfinite": (_is_counts, "a dict of whole numbers"),
    "units": (_is_text, "a text"),
    "directions": (lambda value: value in DIRECTIONS, " or ".join(DIRECTIONS)),
    "scores": (lambda value: isinstance(value, Score), "a dualeval.metrics.Score"),
    "work": (_is_count, "a whole number"),
}


def plain(metric: str, measured: Measured) -> Measured:
    """What a metric has measured as plain JSON values; numpy's numbers become Python's.

    NaN and infinities are no JSON: they become None, and a warning says so.
    """
    if not isinstance(measured, Measured):
        raise UsageError(
            f"metric {metric!r} returned a {type(measured).__name__}, expected dualeval.Measured(values=...)"
        )
    lost: list[str] = []
    fields = {name: _field(metric, name, getattr(measured, name), lost) for name in ("values", *_EXPECTED)}
    for name in ("intervals", "units", "directions", "scores", "rough"):
        known = measured.intervals if name == "rough" else measured.values
        for key in fields[name]:
            if key not in known:
                raise UsageError(f"metric {metric!r} gave {name} for {key!r}, and no value of that name")
    # One without an end is none.
    fields["intervals"] = {key: tuple(ends) for key, ends in fields["intervals"].items() if None not in ends}
    said = measured.warnings
    if not isinstance(said, (tuple, list)) or not all(map(_is_text, said)):
        raise _unexpected(metric, "warnings", said, "a tuple of texts")
    found = replace(measured, **fields, warnings=(*said, *lost))
    try:
        # As the digest and result.json are made.
        json.dumps(asdict(found), sort_keys=True, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"metric {metric!r} gave a text that is not Unicode (half a surrogate pair): {error.object!a}"
        ) from error
    return found


def _field(metric: str, field: str, given: Any, lost: list[str]) -> dict[str, Any]:
    """A field that is by key, its entries checked; of values a key is named by itself."""
    found = _mapping(metric, field, given, lost, at_top=field == "values")
    fits, expected = _EXPECTED.get(field, (lambda value: not isinstance(value, Score), _VALUE))
    for key, value in found.items():
        if not fits(value):
            raise _unexpected(metric, f"{field}.{key}", given[key], expected)
    return found


def _mapping(metric: str, where: str, given: Any, lost: list[str], *, at_top: bool = False) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise _unexpected(metric, where, given, "a dict")
    for key in given:
        if not isinstance(key, str):
            raise UsageError(f"metric {metric!r}: {where} has the key {key!r}, expected a text")
    return {
        key: _plain(metric, key if at_top else f"{where}.{key}", value, lost) for key, value in given.items()
    }


def _plain(metric: str, where: str, value: Any, lost: list[str]) -> Any:
    """A value as JSON has it; a sentence joins ``lost`` for each that is not finite."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        lost.append(
            f"metric {metric!r} gave {value} for {where}, which is null in the result: give None "
            "where there is no finite value, and count such samples in Measured.nonfinite"
        )
        return None
    if isinstance(value, Mapping):
        return _mapping(metric, where, value, lost)
    if isinstance(value, (list, tuple)):
        return [_plain(metric, f"{where}[{place}]", entry, lost) for place, entry in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str, Score)):
        return value
    hint = "; a tensor of one number becomes one by .item()" if isinstance(value, Tensor) else ""
    raise _unexpected(metric, where, value, _VALUE + hint)


def _unexpected(metric: str, where: str, value: Any, expected: str) -> UsageError:
    found = repr(value) if isinstance(value, str) else f"a {type(value).__name__}"
    return UsageError(f"metric {metric!r} gave {found} for {where}, expected {expected}")


def fields_of_result(measured: Sequence[Measured]) -> dict[str, Any]:
    """What metrics say, as the fields of a ``Result`` that are by key of a value."""
    merged: dict[str, dict[str, Any]] = {
        "metrics": _merged(part.values for part in measured),
        **{name: _merged(getattr(part, name) for part in measured) for name in _SAID_BY_KEY},
    }
    merged["scores"] = {key: score.to_json() for key, score in merged["scores"].items()}
    return merged


def rough_warnings(rough: Mapping[str, str]) -> list[str]:
    """A sentence for each reason why intervals may cover less than 95 %."""
    reasons = dict.fromkeys(rough.values())
    named = {why: ", ".join(key for key in rough if rough[key] == why) for why in reasons}
    return [f"the interval of {keys} is {why}" for why, keys in named.items()]


def _merged(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {key: value for part in parts for key, value in part.items()}


def check_keys(measured: Iterable[Measured]) -> None:
    """Check that no two metrics give a value of the same name."""
    seen: set[str] = set()
    for part in measured:
        for key in part.values:
            if key in seen:
                raise UsageError(
                    f"two metrics give a value called {key!r}, and only one could be in the result. Rename "
                    "one."
                )
            seen.add(key)
