"""Paired differences: intervals, bounds and tests, and the smallest difference that could have been shown.

Each has ``value``, B - A in the metric's own unit; ``is_zero``, whether both runs have the same number for
every sample; ``p_value()``, two-sided, of "there is no difference"; ``bounds(tail)``, a lower and an upper
bound, each wrong with probability ``tail``; ``rough``, why both may be wrong more often, else None; and
``detectable()``, the smallest difference found with 80 % power at the two-sided 5 % level, None if unknown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from dualeval.metrics.intervals import SHOWN_FROM_RESAMPLED, few_decide, from_cubic

LEVEL = 0.05
POWER = 0.8
_Key = TypeVar("_Key")


@dataclass(frozen=True, kw_only=True)
class MeanDifference:
    """The difference of two means, ratios or functions of them.

    Student's t, and the same after P. Hall's cubic transformation of the studentised difference ("On the
    removal of skewness by transformation", JRSS B 54, 1992): the interval ends where the farther of the two
    does, and the larger p-value counts. Alone, t errs too often where the differences are skewed, and Hall's
    where they are symmetric with heavy tails.
    """

    # B - A.
    value: float
    error: float
    # Of the influences, m3 / m2**1.5.
    skewness: float
    # Number of independent samples or clusters, at least 2.
    units: int
    # Whether they are clusters.
    clustered: bool = False
    # How many of them have nearly all the weight, where they are weighted; see `Spread.effective`.
    effective: int | None = None
    # Of the means, where the value is a function of each, as rmse is. It never falls, so that "there is no
    # difference" is one hypothesis, which the means decide.
    of_means: MeanDifference | None = None

    @property
    def is_zero(self) -> bool:
        return self.error == 0 and self.value == 0

    @property
    def _slants(self) -> tuple[float, float]:
        """The coefficient of Hall's transformation, without and with the skewness."""
        return 0.0, self.skewness / math.sqrt(self.units)

    @property
    def test(self) -> str:
        return "paired t and Hall's" + (" by cluster" if self.clustered else "")

    @property
    def rough(self) -> str | None:
        units = "clusters" if self.clustered else "samples"
        reason = few_decide(self.units, self.skewness, units, most=self.effective)
        return reason or (None if self.of_means is None else self.of_means.rough)

    def p_value(self) -> float:
        from scipy import stats

        if self.of_means is not None:
            return self.of_means.p_value()
        if self.error == 0:
            # Of equal runs; where all differences are equal and not 0, nothing is compared.
            return 1.0
        t = self.value / self.error
        nearest = min(abs(t + a * t**2 / 3 + a**2 * t**3 / 27 + a / 6) for a in self._slants)
        return float(2 * stats.t.sf(nearest, self.units - 1))

    def bounds(self, tail: float) -> tuple[float, float]:
        quantile = t_quantile(1 - tail, self.units - 1)
        high, low = (
            [self.value - self.error * from_cubic(x, a) if self.error else self.value for a in self._slants]
            for x in (-quantile, quantile)
        )
        return min(low), max(high)

    def detectable(self) -> float | None:
        """(t + z) times the standard error (H. S. Bloom, "Minimum detectable effects", Evaluation Review
        19, 1995), with the quantiles t of 0.975 and z of the power."""
        if self.error == 0:
            return None
        freedom = self.units - 1
        return (t_quantile(1 - LEVEL / 2, freedom) + t_quantile(POWER, freedom)) * self.error


@dataclass(frozen=True, kw_only=True)
class ProportionDifference:
    """The difference of two paired proportions."""

    # Number of samples that are 1 in A and 0 in B.
    lost: int
    # Number of samples that are 0 in A and 1 in B.
    gained: int
    # Number of pairs.
    samples: int
    # What the proportions are multiplied by, 100 for percent.
    factor: float = 1.0
    test: str = "McNemar mid-p"
    rough: None = None

    @property
    def value(self) -> float:
        return self.factor * (self.gained - self.lost) / self.samples

    @property
    def is_zero(self) -> bool:
        return self.lost == self.gained == 0

    def p_value(self) -> float:
        """McNemar's mid-p (M. W. Fagerland, S. Lydersen, P. Laake, BMC Medical Research Methodology 13:91,
        2013): the exact p-value less the probability of the outcome itself."""
        from scipy import stats

        pairs = self.lost + self.gained
        two_tails = 2 * float(stats.binom.cdf(min(self.lost, self.gained), pairs, 0.5))
        return min(1.0, two_tails - float(stats.binom.pmf(self.lost, pairs, 0.5)))

    def p_exact(self) -> float:
        """The p-value of McNemar's exact test (Q. McNemar, Psychometrika 12, 1947): a binomial test."""
        from scipy import stats

        pairs = self.lost + self.gained
        return 1.0 if not pairs else float(stats.binomtest(self.lost, pairs, 0.5).pvalue)

    def bounds(self, tail: float) -> tuple[float, float]:
        """Score bounds (T. Tango, Statistics in Medicine 17, 1998): sound with few samples that differ.

        One-sided ones of 95 % have what is left of a correction by half a sample, as counts have steps, less
        (z**2 - 1) / 6, as a few losses are skewed (E. Cornish, R. Fisher, 1938): nothing at z = 1.96, of the
        interval. benchmarks/comparison.py computes how often gates then err.
        """
        quantile = normal_quantile(1 - tail)
        return self.factor * self._bound(quantile), self.factor * self._bound(-quantile)

    def _bound(self, quantile: float) -> float:
        """The difference at which the score statistic has the given value; it falls as this grows."""
        from scipy import optimize

        edge = 1.0 if quantile < 0 else -1.0
        if self.gained - self.lost == edge * self.samples:
            return edge
        estimate = (self.gained - self.lost) / self.samples
        left = max(0.0, (normal_quantile(1 - LEVEL / 2) ** 2 - quantile**2) / 6)
        correction = math.copysign(left, quantile)
        return float(
            optimize.brentq(
                lambda at: self._score(at, correction) - quantile, *sorted((estimate, edge)), xtol=1e-14
            )
        )

    def _score(self, difference: float, correction: float) -> float:
        """Tango's statistic: (gained - lost - n difference) over its standard error under ``difference``."""
        n, b, c = self.samples, self.gained, self.lost
        linear = -b - c + (2 * n - b + c) * difference
        constant = -c * difference * (1 - difference)
        root = math.sqrt(max(0.0, linear * linear - 8 * n * constant))
        # The maximum likelihood estimate of the fraction lost; the second form keeps its digits.
        lost = (root - linear) / (4 * n) if linear <= 0 else -2 * constant / (root + linear)
        variance = n * (2 * lost + difference * (1 - difference))
        distance = b - c - n * difference
        if variance <= 0:
            return 0.0 if distance == 0 else math.copysign(math.inf, distance)
        return (distance - correction) / math.sqrt(variance)

    def detectable(self) -> float | None:
        """Where n = (z sqrt(d) + z' sqrt(d - x**2))**2 / x**2 (R. J. Connor, Biometrics 43, 1987); d is the
        fraction of samples that differ, z and z' are the quantiles of 0.975 and of the power."""
        from scipy import optimize

        differing = (self.lost + self.gained) / self.samples
        z, of_power = normal_quantile(1 - LEVEL / 2), normal_quantile(POWER)

        def missing(x: float) -> float:
            spread = z * math.sqrt(differing) + of_power * math.sqrt(max(0.0, differing - x * x))
            return x * math.sqrt(self.samples) - spread

        # No difference is larger than the fraction that differs.
        if not differing or missing(differing) <= 0:
            return None
        return self.factor * float(optimize.brentq(missing, 0.0, differing, xtol=1e-14))


# Times the variance of as many flips of independent samples.
_FLIP_TOGETHER_FROM = 1.5


@dataclass(frozen=True, kw_only=True)
class ClusteredProportionDifference:
    """The difference of two paired proportions over samples in clusters.

    Clusters that hardly differ say little of how far others do. So the interval is never shorter, and the
    p-value never smaller, than for independent samples.
    """

    # From the clusters' sums.
    by_cluster: MeanDifference
    # As if each sample were independent.
    independent: ProportionDifference

    @property
    def value(self) -> float:
        return self.independent.value

    @property
    def is_zero(self) -> bool:
        return self.independent.is_zero

    @property
    def test(self) -> str:
        return self.by_cluster.test

    @property
    def rough(self) -> str | None:
        # The bounds of independent samples hold however few flip, unless samples of a cluster flip together.
        pairs = self.independent
        alone = pairs.factor**2 * (pairs.lost + pairs.gained) / pairs.samples**2
        together = self.by_cluster.error**2 > _FLIP_TOGETHER_FROM * alone
        return few_decide(self.by_cluster.units, self.by_cluster.skewness if together else 0.0, "clusters")

    def p_value(self) -> float:
        return max(self.by_cluster.p_value(), self.independent.p_value())

    def bounds(self, tail: float) -> tuple[float, float]:
        lows, highs = zip(self.by_cluster.bounds(tail), self.independent.bounds(tail), strict=True)
        return min(lows), max(highs)

    def detectable(self) -> float | None:
        effects = [each.detectable() for each in (self.by_cluster, self.independent)]
        return max((one for one in effects if one is not None), default=None)


@dataclass(frozen=True, kw_only=True)
class ResampledDifference(MeanDifference):
    """The difference of two figures of all samples together, as average precision is.

    Student's t, of the difference and of the same without its bias: the interval ends where the farther of
    the two does, and the larger p-value counts. The standard error is the deviation of the differences when
    the same samples are drawn again for both (B. Efron, Annals of Statistics 7, 1979).
    """

    skewness: float = 0.0
    # By how much the mean of the resamples' differences is above the value.
    bias: float
    # How many samples, or clusters, were drawn; `units` is one more than the degrees of freedom.
    drawn: int

    @property
    def rough(self) -> str | None:
        units = "clusters" if self.clustered else "samples"
        return few_decide(self.drawn, self.skewness, units, most=self.units, least=SHOWN_FROM_RESAMPLED)

    @property
    def test(self) -> str:
        return "paired bootstrap" + (" by cluster" if self.clustered else "")

    def p_value(self) -> float:
        without = replace(self, value=self.value - self.bias, bias=0.0) if self.bias else None
        return max(super().p_value(), 0.0 if without is None else without.p_value())

    def bounds(self, tail: float) -> tuple[float, float]:
        low, high = super().bounds(tail)
        return low - max(0.0, self.bias), high - min(0.0, self.bias)


Difference: TypeAlias = MeanDifference | ProportionDifference | ClusteredProportionDifference


def largest_loss(difference: Difference, tail: float, direction: str) -> float:
    """The most by which B is worse, a bound that is wrong with probability ``tail``; negative for better."""
    low, high = difference.bounds(tail)
    return -low if direction == "higher" else high


@lru_cache(maxsize=64)
def t_quantile(probability: float, freedom: int) -> float:
    """Of Student's t distribution with so many degrees of freedom."""
    from scipy import stats

    return float(stats.t.ppf(probability, freedom))


@lru_cache(maxsize=64)
def normal_quantile(probability: float) -> float:
    """Of the standard normal distribution."""
    from scipy import stats

    return float(stats.norm.ppf(probability))


def mean_difference(
    value: float,
    influences: npt.NDArray[np.float64],
    clusters: npt.NDArray[np.int64] | None = None,
    weights: npt.NDArray[np.float64] | None = None,
) -> MeanDifference:
    """Make a difference of what each pair contributes to it, and of the weights of pairs that have any.

    Standard error: sqrt(n / (n - 1) sum(u**2)), the delta method (W. G. Cochran, *Sampling Techniques*, 1977,
    section 6.4). With clusters each u is a cluster's sum, and n their number (S.-Y. Liang and S. L. Zeger,
    Biometrika 73, 1986).
    """
    u = influences if clusters is None else np.bincount(clusters, weights=influences)
    n = len(u)
    # Powers of tiny numbers would vanish.
    scale = float(np.abs(u).max()) or 1.0
    squares = (u / scale) ** 2
    total = math.fsum(squares)
    error = scale * math.sqrt(n / (n - 1) * total)
    skewness = math.fsum(squares * (u / scale)) / n / (total / n) ** 1.5 if total else 0.0
    effective = None
    if weights is not None:
        effective = effective_number(weights if clusters is None else np.bincount(clusters, weights=weights))
    return MeanDifference(
        value=value,
        error=error,
        skewness=skewness,
        units=n,
        clustered=clusters is not None,
        effective=effective,
    )


def effective_number(weights: npt.NDArray[Any]) -> int:
    """As `Spread.effective`, of the weights; all of them if they are equal, or add up to 0."""
    sizes = np.abs(weights) / (np.abs(weights).max() or 1.0)
    square, cube = math.fsum(sizes**2), math.fsum(sizes**3)
    if not cube:
        return len(weights)
    # Rounding must take none of equal weights away.
    return math.floor(min(math.fsum(sizes) ** 2 / square, square**3 / cube**2) * (1 + 1e-9))


def holm(p_values: Mapping[_Key, float]) -> dict[_Key, float]:
    """Adjust p-values for their number (S. Holm, Scandinavian Journal of Statistics 6, 1979)."""
    adjusted: dict[_Key, float] = {}
    largest = 0.0
    ordered: list[Any] = sorted(p_values.items(), key=lambda item: item[1])
    for place, (name, p_value) in enumerate(ordered):
        largest = max(largest, min(1.0, (len(ordered) - place) * p_value))
        adjusted[name] = largest
    return adjusted
