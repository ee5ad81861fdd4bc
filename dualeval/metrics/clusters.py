"""95 % intervals of samples that are not independent: those of one cluster, such as an article."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dualeval.metrics.exact import DOUBLE_UNIT_BITS, ExactColumn
from dualeval.metrics.intervals import (
    TRANSFORMS,
    Ends,
    Spread,
    clustered_interval,
    few_decide,
    from_least,
    rounded,
    skewed_ends,
)
from dualeval.metrics.metric import Value
from dualeval.metrics.scores import FRACTION, PERCENT, Score

# Fewer clusters in effect with a wrong answer have not been shown to cover, of values of 0 to 1.
_DIFFERING_SHOWN_FROM = 5
_PIECE = 1 << 20
# A residual below so many units in the last place of what it is a difference of is 0.
_NOISE = 8 * 2.0**-52
# Means of 0 to 1 that differ by less differ by rounding alone.
_ROUNDING = 2.0**-40

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class ClusterIntervals:
    """What clusters say of values."""

    # How many clusters there are.
    count: int
    # By key, cluster-robust 95 % intervals.
    intervals: dict[str, Ends] = field(default_factory=dict)
    # By key, why an interval may cover less.
    rough: dict[str, str] = field(default_factory=dict)
    # One sentence for each missing interval: why there is none.
    warnings: tuple[str, ...] = ()


class Clusters:
    """Which samples go together; takes 4 bytes of memory a sample."""

    def __init__(self, column: Any) -> None:
        self._places = np.empty(len(column), np.int32)
        known: dict[Any, int] = {}
        for piece in _pieces(len(column)):
            names = column[piece]
            places: Any = slice(None)
            if isinstance(names, np.ndarray):
                distinct, places = np.unique(names, return_inverse=True)
                names = distinct.tolist()
            numbers = [known.setdefault(name, len(known)) for name in names]
            self._places[piece] = np.array(numbers, np.int32)[places]
        # How many clusters there are.
        self.count = len(known)

    def pieces(self) -> Iterator[tuple[slice, npt.NDArray[np.int32]]]:
        """The samples a piece at a time, with the number of the cluster of each."""
        for piece in _pieces(len(self._places)):
            yield piece, self._places[piece]


def _pieces(samples: int) -> Iterator[slice]:
    for start in range(0, samples, _PIECE):
        yield slice(start, min(start + _PIECE, samples))


def cluster_intervals(
    name: str,
    rows: Mapping[str, Any],
    values: Mapping[str, Value],
    scores: Mapping[str, Score],
    units: Mapping[str, str],
) -> ClusterIntervals:
    """Cluster-robust intervals of all values that follow from a number of each sample."""
    clusters = Clusters(rows[name])
    intervals, rough = {}, {}
    without: dict[str, list[str]] = {}
    for key, score in scores.items():
        if not isinstance(values.get(key), (int, float)):
            continue
        sums = _Sums(clusters, rows, score)
        ends = sums.interval(bounded=units.get(key) in (FRACTION, PERCENT))
        if isinstance(ends, str):
            without.setdefault(ends, []).append(key)
            continue
        ends = from_least(ends, score.least, sums.ratio)
        if score.transform is not None:
            transformed = TRANSFORMS[score.transform].of_ends(ends)
            if transformed is None:
                continue
            ends = transformed
        low, high = sorted((score.factor * ends[0], score.factor * ends[1]))
        if not (math.isfinite(low) and math.isfinite(high)):
            continue
        intervals[key] = (low, high)
        if sums.rough is not None:
            rough[key] = sums.rough
    warnings = tuple(f"no interval of {', '.join(keys)} by {name}: {why}" for why, keys in without.items())
    return ClusterIntervals(count=clusters.count, intervals=intervals, rough=rough, warnings=warnings)


class _Sums:
    """What the clusters' samples add up to for one score."""

    # Why the interval may cover less; from `interval` on.
    rough: str | None = None

    def __init__(self, clusters: Clusters, rows: Mapping[str, Any], score: Score) -> None:
        """Two passes: sums of y and x, and then of the residuals, which cancel in no sum."""
        names = score.columns
        above = below = samples = 0
        self._lies_between = True
        of_clusters = np.zeros(clusters.count, np.int64)
        for piece, places in clusters.pieces():
            with np.errstate(over="ignore", invalid="ignore"):
                y, x, counts = score.terms({name: rows[name][piece] for name in names})
            above, below = above + _total(y), below + _total(x)
            samples += int(np.count_nonzero(counts))
            of_clusters += np.bincount(places[counts], minlength=clusters.count)
            self._lies_between = self._lies_between and bool(((y >= 0) & (y <= x)).all())
        present = of_clusters > 0
        # Of clusters with a sample that counts.
        self.count = int(np.count_nonzero(present))
        self._samples = samples
        # Infinite only for a score that does not fit its metric: that has no value of nothing.
        self.ratio = ratio = rounded(Fraction(above, below)) if below else math.inf
        residuals, weights = np.zeros(clusters.count), np.zeros(clusters.count)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            for piece, places in clusters.pieces():
                y, x, _ = score.terms({name: rows[name][piece] for name in names})
                fitted = ratio * x
                left = y - fitted
                left[np.abs(left) <= _NOISE * np.maximum(np.abs(y), np.abs(fitted))] = 0.0
                residuals += np.bincount(places, left, minlength=clusters.count)
                weights += np.bincount(places, x, minlength=clusters.count)
            whole = rounded(Fraction(below, 1 << DOUBLE_UNIT_BITS))
            self._shares, residuals = weights[present] / whole, residuals[present] / whole
        self._is_known = all(np.isfinite(each).all() for each in (whole, self._shares, residuals))
        # Times a power of two of their size: their cubes are neither beyond a float64 nor 0.
        self._power = math.frexp(np.abs(residuals).max())[1] if self._is_known and len(residuals) else 0
        self._residuals = np.ldexp(residuals, -self._power)

    def interval(self, *, bounded: bool) -> Ends | str:
        """The ends of the interval of the ratio of sums; or why there is none."""
        bounded = bounded and self._lies_between
        if self.count < 2:
            return "all samples are in one cluster"
        if not self._is_known:
            return "a sum of a cluster is beyond what a float64 holds"
        shares = self._shares
        if not (shares < 1).all():
            return "one cluster has all the weight"
        degrees = degrees_of_freedom(shares)
        # Pustejovsky and Tipton's way of writing what Bell and McCaffrey call bias-reduced linearisation.
        square = _sum(self._residuals**2 / (1 - shares))
        if bounded:
            return self._bounded_interval(math.ldexp(square, 2 * self._power), degrees)
        if square == 0:
            return f"its {self.count} clusters are all equal, and do not show how far others may be"
        second, third = _sum(self._residuals**2), _sum(self._residuals**3)
        spread = Spread(
            samples=self.count,
            variance=Fraction(square) * Fraction(4) ** self._power,
            skewness=math.sqrt(self.count) * third / (second * math.sqrt(second)),
            degrees=degrees,
        )
        low, high = skewed_ends(spread)
        self.rough = few_decide(self.count, spread.skewness, "clusters")
        return self.ratio + low, self.ratio + high

    def _bounded_interval(self, variance: float, degrees: float) -> Ends:
        """That of values of 0 to 1."""
        mean, shares, squares = self.ratio, self._shares, _sum(self._shares**2)
        above = mean * shares + np.ldexp(self._residuals, self._power)
        differing, which = min(
            (_effective(shares - above, 1 - mean), "below 100 %"), (_effective(above, mean), "above 0 %")
        )
        if differing < _DIFFERING_SHOWN_FROM:
            tenths = math.floor(10 * differing) / 10
            self.rough = (
                f"about {tenths:g} of {self.count} clusters have values {which}, and with fewer than "
                f"{_DIFFERING_SHOWN_FROM} it may be too short: evaluate more clusters"
            )
        return clustered_interval(
            mean,
            # Means of clusters that only rounding tells apart do not differ.
            variance if variance > _ROUNDING * _ROUNDING * squares else 0.0,
            samples=self._samples,
            clusters=1 / squares,
            differing=differing,
            degrees=degrees,
        )


def _effective(shares: _Floats, whole: float) -> float:
    """How many equal parts of the same sum would have the same sum of squares (Kish); 0 of nothing."""
    squares = _sum(shares * shares)
    return whole * whole / squares if squares > 0 else 0.0


def degrees_of_freedom(shares: _Floats) -> float:
    """Of the variance of a mean over clusters of unequal size, by Satterthwaite's approximation.

    R. Bell, D. McCaffrey, "Bias reduction in standard errors for linear regression with multi-stage samples",
    Survey Methodology 28 (2002), 169-181, of cluster means of equal variance: with G clusters of one size it
    is G - 1.
    """
    # The variance is a quadratic form with the matrix (1 - 1 h') diag(c) (1 - h 1'); (tr M)**2 / tr(M**2).
    h, c = shares, shares * shares / (1 - shares)
    s, a, b, d = _sum(c), _sum(c * h), _sum(h * h), _sum(c * c)
    trace = s - 2 * a + s * b
    of_square = d - 4 * _sum(c * c * h) + 2 * s * _sum(c * h * h)
    of_square += 2 * a * a + 2 * d * b - 4 * s * a * b + s * s * b * b
    return max(1.0, trace * trace / of_square)


def _total(values: _Floats) -> int:
    """The exact sum, in units of 2**-1074."""
    return ExactColumn(torch.from_numpy(np.ascontiguousarray(values))).total()


def _sum(values: _Floats) -> float:
    """The sum, rounded once: numpy adds in another order on another machine."""
    return _total(values) / (1 << DOUBLE_UNIT_BITS)
