"""Metrics of tasks on texts: what the texts took, and correlations of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dualeval.errors import UsageError
from dualeval.messages import counted, nearest
from dualeval.metrics.exact import nonfinite_counts
from dualeval.metrics.means import Mean
from dualeval.metrics.metric import Described, Measured, Metric, RowMetric
from dualeval.metrics.squad import WindowWork

_Numbers = npt.NDArray[np.float64]


class TextWork(WindowWork):
    """What the texts took, and how many were cut because they are too long; no metric of the model.

    Ledger: tokens, tokens computed with those that only fill up, and texts that were cut.
    """

    name = "text_work"
    columns = ("tokens", "padded_tokens", "truncated")

    def compute(self, ledger: Tensor) -> Measured:
        """No values; the three sums as work, and a warning where texts were cut."""
        measured = super().compute(ledger)
        if not (cut := measured.work["truncated"]):
            return measured
        text = f"{counted(cut, 'text')} {'is' if cut == 1 else 'are'} longer than --max-length and cut there"
        return replace(measured, warnings=(text,))


class Pearson(Described):
    """The correlation of the columns prediction and target, from all rows in their order; sums are exact.

    None with a value that is not finite, with fewer than two samples, or where one column is constant.
    """

    columns = ("prediction", "target")
    kind_name = "pearson"

    def __init__(self) -> None:
        super().__init__(self.kind_name, None, higher_is_better=True)

    def compute(self, columns: Mapping[str, Any]) -> Measured:
        """The coefficient under the metric's name."""
        pair = [np.asarray(columns[name], np.float64) for name in self.columns]
        counts = [int(np.logical_or(*map(of, pair)).sum()) for of in (np.isnan, np.isposinf, np.isneginf)]
        if any(counts):
            return self.measured(None, nonfinite=nonfinite_counts(counts))
        return self.measured(self._of(*pair))

    @staticmethod
    def _of(prediction: _Numbers, target: _Numbers) -> float | None:
        return _correlation(prediction, target)


class Spearman(Pearson):
    """The same of the ranks; equal values have the mean of their ranks."""

    kind_name = "spearman"

    @staticmethod
    def _of(prediction: _Numbers, target: _Numbers) -> float | None:
        return _correlation(_ranks(prediction), _ranks(target))


class R2(Pearson):
    """1 - (sum of squared errors) / (sum of squares of the targets around their mean).

    As ``r2_score`` of scikit-learn; None where the targets are all equal.
    """

    kind_name = "r2"

    @staticmethod
    def _of(prediction: _Numbers, target: _Numbers) -> float | None:
        if len(target) < 2 or (target == target[0]).all():
            return None
        around = target - math.fsum(target) / len(target)
        squares = math.fsum(around * around)
        return 1 - math.fsum(np.square(target - prediction)) / squares if squares else None


def _ranks(values: _Numbers) -> _Numbers:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: _Numbers = (counts.cumsum() - (counts - 1) / 2)[places]
    return ranks


def _correlation(one: _Numbers, other: _Numbers) -> float | None:
    if len(one) < 2 or (one == one[0]).all() or (other == other[0]).all():
        return None
    first, second = (values - math.fsum(values) / len(values) for values in (one, other))
    squares = math.fsum(first * first), math.fsum(second * second)
    # Squares of differences below 1e-162 are 0.
    return (
        math.fsum(first * second) / (math.sqrt(squares[0]) * math.sqrt(squares[1])) if all(squares) else None
    )


# Those of a regression, for the columns prediction, target, squared_error and absolute_error.
_OF_NUMBERS: dict[str, Callable[[], Metric | RowMetric]] = {
    "mse": lambda: Mean("squared_error", name="mse", higher_is_better=False, least=0),
    "rmse": lambda: Mean("squared_error", transform="sqrt", name="rmse", higher_is_better=False, least=0),
    "mae": lambda: Mean("absolute_error", name="mae", higher_is_better=False, least=0),
    "r2": R2,
    "pearson": Pearson,
    "spearman": Spearman,
}


def regression_metric(name: str, others: Collection[str] = ()) -> Metric | RowMetric:
    """The metric of a regression of that name; ``others`` are names that the caller knows besides."""
    if make := _OF_NUMBERS.get(name):
        return make()
    known = [*_OF_NUMBERS, "default", *others]
    raise UsageError(f"there is no metric {name!r} here.{nearest(name, known)} Metrics: {', '.join(known)}")
