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


def plain(metric: str, measured: Measured) -> Measured:
    """What a metric has measured as plain JSON values; numpy's numbers become Python's.

    NaN and infinities are no JSON: they become None, and a warning says so.
    """
    if not isinstance(measured, Measured):
        raise UsageError(
            f"metric {metric!r} returned a {type(measured).__name__}, expected dualeval.Measured(values=...)"
        )
    values = _Values(metric)
    found = replace(
        measured,
        values=values.mapping("values", measured.values, at_top=True),
        intervals=values.intervals(measured.intervals, measured.values),
        rough=values.of_values("rough", measured.rough, measured.intervals, each=values.text),
        nonfinite=values.mapping("nonfinite", measured.nonfinite, each=values.counts),
        units=values.of_values("units", measured.units, measured.values, each=values.text),
        directions=values.of_values(
            "directions", measured.directions, measured.values, each=values.direction
        ),
        scores=values.of_values("scores", measured.scores, measured.values, each=values.score),
        work=values.counts("work", measured.work),
        warnings=values.warnings(measured.warnings),
    )
    found = replace(found, warnings=(*found.warnings, *values.lost))
    try:
        # As the digest and result.json are made.
        json.dumps(asdict(found), sort_keys=True, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"metric {metric!r} gave a text that is not Unicode (half a surrogate pair): {error.object!a}"
        ) from error
    return found


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


class _Values:
    """Checks the values of one metric."""

    def __init__(self, metric: str) -> None:
        self._metric = metric
        # A sentence for each value that is not finite.
        self.lost: list[str] = []

    def mapping(self, where: str, value: Any, *, each: Any = None, at_top: bool = False) -> dict[str, Any]:
        """A mapping of texts, each value checked by ``each``; at the top a key is named by itself."""
        if not isinstance(value, Mapping):
            raise self._unexpected(where, value, "a dict")
        for key in value:
            if not isinstance(key, str):
                raise UsageError(f"metric {self._metric!r}: {where} has the key {key!r}, expected a text")
        check = each or self._any
        return {key: check(key if at_top else f"{where}.{key}", entry) for key, entry in value.items()}

    def intervals(self, intervals: Any, values: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
        """Pairs of numbers for keys of ``values``; a pair that is not finite is left out."""
        found = {}
        for key, ends in self.mapping("intervals", intervals, each=lambda where, ends: ends).items():
            if key not in values:
                raise UsageError(
                    f"metric {self._metric!r} gave an interval for {key!r}, and no value of that name"
                )
            if not isinstance(ends, (tuple, list)) or len(ends) != 2:
                raise self._unexpected(f"the interval of {key}", ends, "a pair of numbers")
            low, high = (self._any(f"the interval of {key}", end) for end in ends)
            if not all(end is None or isinstance(end, (int, float)) for end in (low, high)):
                raise self._unexpected(f"the interval of {key}", ends, "a pair of numbers")
            if low is not None and high is not None:
                found[key] = (low, high)
        return found

    def counts(self, where: str, value: Any) -> dict[str, int]:
        """Whole numbers by name."""
        found = self.mapping(where, value)
        for key, count in found.items():
            if not isinstance(count, int):
                raise self._unexpected(f"{where}.{key}", count, "a whole number")
        return found

    def of_values(
        self, where: str, given: Any, values: Mapping[str, Any], *, each: Callable[[str, Any], Any]
    ) -> dict[str, Any]:
        """A mapping of texts whose keys are some of ``values``."""
        for key in (found := self.mapping(where, given, each=each)):
            if key not in values:
                raise UsageError(
                    f"metric {self._metric!r} gave {where} for {key!r}, and no value of that name"
                )
        return found

    def direction(self, where: str, value: Any) -> str:
        """One of the two."""
        if value not in DIRECTIONS:
            raise UsageError(
                f"metric {self._metric!r} gave {value!r} for {where}, expected {' or '.join(DIRECTIONS)}: "
                "which values are better"
            )
        return str(value)

    def score(self, where: str, value: Any) -> Score:
        """A Score."""
        if not isinstance(value, Score):
            raise self._unexpected(where, value, "a dualeval.metrics.Score")
        return value

    def text(self, where: str, value: Any) -> str:
        """A text."""
        if not isinstance(value, str):
            raise self._unexpected(where, value, "a text")
        return value

    def warnings(self, value: Any) -> tuple[str, ...]:
        """Sentences."""
        if not isinstance(value, (tuple, list)):
            raise self._unexpected("warnings", value, "a tuple of texts")
        return tuple(self.text("warnings", sentence) for sentence in value)

    def _any(self, where: str, value: Any) -> Any:
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, float) and not math.isfinite(value):
            self.lost.append(
                f"metric {self._metric!r} gave {value} for {where}, which is null in the result: give None "
                "where there is no finite value, and count such samples in Measured.nonfinite"
            )
            return None
        if isinstance(value, Mapping):
            return self.mapping(where, value)
        if isinstance(value, (list, tuple)):
            return [self._any(f"{where}[{place}]", entry) for place, entry in enumerate(value)]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise self._unexpected(
            where,
            value,
            "a number, a text, a list or dict of them, or None"
            + ("; a tensor of one number becomes one by .item()" if isinstance(value, Tensor) else ""),
        )

    def _unexpected(self, where: str, value: Any, expected: str) -> UsageError:
        return UsageError(
            f"metric {self._metric!r} gave a {type(value).__name__} for {where}, expected {expected}"
        )
