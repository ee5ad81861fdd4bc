"""Score: how a metric's value follows from a number of each sample, for intervals and comparisons of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from dualeval.errors import UsageError
from dualeval.metrics.intervals import TRANSFORMS
from dualeval.options.choices import check_choice

# Units of values, as ``Measured.units`` has them.
FRACTION, PERCENT = "fraction", "percent"


@dataclass(frozen=True, kw_only=True)
class Score:
    """A value of the form factor * transform(sum(y) / sum(x)), with y and x of each sample.

    y is the sample's entry in ``column``, or 1 where that is below ``below`` and 0 elsewhere; with a weight
    it is multiplied by the weight. x is 1, or the weight, or the entry in ``over``.

    Attributes:
        column: has one number a sample.
        below: y is whether the entry is below this number, such as a rank below 5.
        weight: a column of weights.
        over: a column of denominators, such as numbers of tokens.
        where: a column of bools or texts; only samples where it is ``where_is`` count.
        where_is: a bool, or the texts of which it is to be one.
        factor: 100 for percent.
        transform: "exp", "sqrt" or "log" of the mean.
        least: of the mean before its transform, 0 of a loss; no part of what a metric is.
    """

    column: str
    below: float | None = None
    weight: str | None = None
    over: str | None = None
    where: str | None = None
    where_is: bool | Sequence[str] = True
    factor: float = 1.0
    transform: str | None = None
    least: float | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.transform is not None:
            check_choice("transform", self.transform, tuple(TRANSFORMS))
        if not isinstance(self.where_is, bool):
            object.__setattr__(self, "where_is", tuple(self.where_is))  # JSON has a list

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it reads."""
        return tuple(name for name in (self.column, self.weight, self.over, self.where) if name is not None)

    def terms(
        self, rows: Mapping[str, npt.NDArray[Any]]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        """y and x of each sample, and which samples count; y and x are 0 where a sample does not.

        Args:
            rows: the columns by name, each of shape (samples,) or (samples, 1).

        Returns:
            three arrays of shape (samples,).
        """
        one_each = {name: np.asarray(rows[name]).reshape(-1) for name in self.columns}
        numbers = one_each[self.column]
        y = (numbers < self.below if self.below is not None else numbers).astype(np.float64)
        x = np.ones_like(y)
        if self.weight is not None:
            x = one_each[self.weight].astype(np.float64)
            y = y * x
        if self.over is not None:
            x = one_each[self.over].astype(np.float64)
        counts = np.ones(len(y), np.bool_)
        if self.where is not None:
            held = one_each[self.where]
            if isinstance(self.where_is, bool):
                counts = held.astype(np.bool_) == self.where_is
            else:
                counts = np.isin(held, self.where_is)
            y, x = np.where(counts, y, 0.0), np.where(counts, x, 0.0)
        return y, x, counts

    def to_json(self) -> dict[str, Any]:
        """Plain values, without those at their defaults."""
        defaults = {each.name: each.default for each in fields(self) if each.compare}
        return {name: value for name, value in asdict(self).items() if value != defaults.get(name, value)}


def score_from(content: Mapping[str, Any]) -> Score:
    """Make a score of what ``to_json`` gave."""
    try:
        return Score(**content)
    except TypeError as error:
        raise UsageError(f"a score reads {dict(content)}, expected the fields of a Score: {error}") from error
