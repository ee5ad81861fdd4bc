"""What every metric says of its values: their name, their unit, and which way is better."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from dualeval.metrics.metric import Measured, Value
from dualeval.metrics.scores import Score
from dualeval.options.choices import check_kind

FRACTION = "fraction"
PERCENT = "percent"


def direction(higher_is_better: bool) -> str:
    """As ``Measured.directions`` has it."""
    return "higher" if higher_is_better else "lower"


class Described:
    """A metric with one value."""

    def __init__(self, name: str, unit: str | None, higher_is_better: bool | None) -> None:
        check_kind("name", name, isinstance(name, str) and bool(name), "a text")
        check_kind("unit", unit, unit is None or isinstance(unit, str), "a text, or None")
        known = higher_is_better is None or isinstance(higher_is_better, bool)
        check_kind("higher_is_better", higher_is_better, known, "True, False or None")
        self.name = name
        self.unit = unit
        self.higher_is_better = higher_is_better

    @property
    def score(self) -> Score | None:
        """How the value follows from a number of each sample; None where it does not."""
        return None

    def measured(
        self,
        value: Value,
        interval: tuple[float, float] | None = None,
        *,
        nonfinite: Mapping[str, int] | None = None,
        unit: str | None = None,
        rough: str | None = None,
        warnings: Iterable[str] = (),
    ) -> Measured:
        """The value under the metric's name."""
        unit = self.unit or unit
        known = interval is not None and all(map(math.isfinite, interval))
        return Measured(
            values={self.name: value},
            intervals={self.name: interval} if interval is not None and known else {},
            rough={self.name: rough} if rough is not None and known else {},
            nonfinite={self.name: dict(nonfinite)} if nonfinite else {},
            units={} if unit is None else {self.name: unit},
            directions={} if self.higher_is_better is None else {self.name: direction(self.higher_is_better)},
            scores={} if self.score is None else {self.name: self.score},
            warnings=tuple(warnings),
        )
