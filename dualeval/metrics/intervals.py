"""95 % intervals of means and of what is computed from them.

Only additions, multiplications, divisions and square roots, which IEEE arithmetic rounds alike on every
machine, and exact integers: equal sums give equal bits.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import TypeAlias

NORMAL_95 = 1.959963984540054  # the 0.975 quantile of the standard normal distribution
# Of fewer samples or clusters in effect benchmarks/coverage.py has not shown that intervals of means cover.
_SHOWN_FROM = 30
# Nor, of fewer images in effect, benchmarks/detection_intervals.py that those of average precision do.
SHOWN_FROM_RESAMPLED = 100
# The means of Poisson variables that are at least 1, 2 and 3 in 5 % of all cases.
_FEW = (0.05129329438755053, 0.35536151069866195, 0.8176914471639534)

Ends: TypeAlias = tuple[float, float]

# Decimal's exp, ln and sqrt are rounded correctly, the same on every machine; those of a C library are not.
_CONTEXT = decimal.Context(prec=60, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN, traps=[])
_ROOT_BITS = 64
_MOST_ALIKE = Fraction(10) ** 30
# The 0.975 quantiles of Student's distribution with 1, 2, ... degrees of freedom.
_STUDENT_95 = (
    *(12.706204736174694, 4.302652729749462, 3.1824463052837078, 2.7764451051977934, 2.5705818356363146),
    *(2.4469118511449786, 2.364624251592784, 2.306004135204166, 2.262157162798205, 2.228138851986274),
    *(2.200985160091639, 2.1788128296672284, 2.1603686564627913, 2.144786687917804, 2.131449545559776),
    *(2.1199052992212546, 2.1098155778333156, 2.1009220402410382, 2.0930240544083087, 2.085963447265864),
    *(2.0796138447276795, 2.0738730679040254, 2.0686576104190486, 2.0638985616280245, 2.0595385527532972),
    *(2.0555294386428735, 2.0518305164802846, 2.0484071417952454, 2.045229642132703, 2.0422724563012378),
)


def student_95(degrees: float) -> float:
    """The 0.975 quantile of Student's distribution with so many degrees of freedom, at least 1.

    Beyond 30 by its expansion (M. Abramowitz, I. Stegun, "Handbook of Mathematical Functions", 1964, 26.7.5),
    which is then right to 8 digits. Below, between whole numbers, it is a little larger than the quantile.
    """
    if degrees < len(_STUDENT_95):
        whole = int(degrees)
        below, above = _STUDENT_95[whole - 1], _STUDENT_95[whole]
        # On a line in 1 / degrees, above which the quantile nowhere is.
        part = (1 / degrees - 1 / (whole + 1)) / (1 / whole - 1 / (whole + 1))
        return below if degrees == whole else above + (below - above) * part
    z, n = NORMAL_95, degrees
    square = z * z
    first = (square + 1) * z / 4
    second = ((5 * square + 16) * square + 3) * z / 96
    third = (((3 * square + 19) * square + 17) * square - 15) * z / 384
    fourth = ((((79 * square + 776) * square + 1482) * square - 1920) * square - 945) * z / 92160
    return z + (first + (second + (third + fourth / n) / n) / n) / n


def wilson_interval(successes: int, trials: int) -> Ends:
    """The 95 % score interval of a proportion, for trials >= 1.

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927), with
    numerator and denominator multiplied by the number of trials. With 1 to 3 successes or failures the end
    near them is that of L. Brown, T. Cai, A. DasGupta ("Interval estimation for a binomial proportion",
    Statistical Science 16, 2001, section 4.1): Wilson's alone then covers down to 84 %.
    """
    z_squared = NORMAL_95 * NORMAL_95
    centre = successes + z_squared / 2
    half_width = NORMAL_95 * math.sqrt(successes * (trials - successes) / trials + z_squared / 4)
    # The ends are exactly 0 and 1 there; the subtraction would leave a rounding error.
    low = 0.0 if successes == 0 else (centre - half_width) / (trials + z_squared)
    high = 1.0 if successes == trials else (centre + half_width) / (trials + z_squared)
    of_few = _few_of(successes, trials), _few_of(trials - successes, trials)
    return min(low, of_few[0] / trials), max(high, 1 - of_few[1] / trials)


def _few_of(count: int | Fraction, trials: int) -> float:
    """The least mean of a Poisson variable that is so large in 5 %; infinite for more than a few."""
    return _FEW[int(count) - 1] if 1 <= count < min(4, trials) else math.inf


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How far a mean of independent samples may be from that of their population."""

    # Their number, at least 2.
    samples: int
    # Of the mean: the sample variance over the number of samples; above 0.
    variance: Fraction
    # Of the samples: the third central moment over the second one's power of 3/2.
    skewness: float
    # Of freedom of the variance; None for one less than samples.
    degrees: float | None = None
    # How many samples have nearly all the weight x, rounded down; None for samples. The smaller one of
    # (sum of x)**2 / sum of x**2 (L. Kish, "Survey Sampling", 1965, section 11.7) and of (sum of x**2)**3 /
    # (sum of x**3)**2: both are k where k have it.
    effective: int | None = None

    def rough(self) -> str | None:
        """Why Hall's interval may cover less than 95 %; None where it was shown to cover."""
        return few_decide(self.samples, self.skewness, "samples", most=self.effective)


def few_decide(
    count: int, skewness: float, units: str, *, most: int | None = None, least: int = _SHOWN_FROM
) -> str | None:
    """Why an interval may be too short where few of a number of samples decide their mean; None if enough do.

    In effect N / (1 + skewness**2) do, and at most ``most``: k, where k of many are 1 and all others 0. What
    the fourth moment gives, (sum of d**2)**2 / sum of d**4, is at most this (K. Pearson, Philosophical
    Transactions A 216, 1916), and small for symmetric heavy tails, too, where intervals cover.
    """
    effective = min(count / (1 + skewness * skewness), count if most is None else most)
    if effective >= least:
        return None
    of = f"it comes from {count} {units}"
    if count >= least:
        of = f"the value depends on about {max(1, math.floor(effective))} of {count} {units}"
    return f"{of}, and with fewer than {least} it may be too short: evaluate more {units}"


def spread_of_mean(samples: int, total: int, squares: int, cubes: int, unit_bits: int) -> Spread | None:
    """The spread of a mean; None of a single sample, and of samples that are all equal."""
    second = samples * squares - total * total
    if samples < 2 or second <= 0:
        return None
    third = samples * samples * cubes - 3 * samples * total * squares + 2 * total**3
    return Spread(
        samples=samples,
        variance=Fraction(second, samples * samples * (samples - 1) << 2 * unit_bits),
        # The powers of the number of samples cancel.
        skewness=_skewness(third, second),
    )


@dataclass(frozen=True, kw_only=True)
class PairSums:
    """Sums over samples of a numerator y and a denominator x, in powers of one unit."""

    samples: int
    # The sum of x; not 0.
    x: int
    # Those of yy, xx and xy.
    products: Sequence[int]
    # Those of yyy, yyx, yxx and xxx.
    cubes: Sequence[int]


def spread_of_ratio(ratio: Fraction, sums: PairSums) -> Spread | None:
    """The spread of a ratio of sums of y and x, linearised: that of the residuals y - ratio * x.

    Its variance is N / (N - 1) * sum of residuals**2 / (sum of x)**2 (W. G. Cochran, "Sampling Techniques",
    1977, section 6.4, for an infinite population).
    """
    above, below, samples = ratio.numerator, ratio.denominator, sums.samples
    yy, xx, xy = sums.products
    second = below * below * yy - 2 * above * below * xy + above * above * xx
    # Products that were rounded may leave a sum of squares below 0.
    if samples < 2 or second <= 0:
        return None
    yyy, yyx, yxx, xxx = sums.cubes
    third = below**3 * yyy - 3 * above * below**2 * yyx + 3 * above**2 * below * yxx - above**3 * xxx
    return Spread(
        samples=samples,
        variance=Fraction(samples * second, (samples - 1) * (below * sums.x) ** 2),
        # Over a negative sum of x it is mirrored.
        skewness=math.sqrt(samples) * _skewness(third if sums.x > 0 else -third, second),
        effective=min(sums.x * sums.x // xx, xx**3 // xxx**2 if xxx else samples),
    )


def _skewness(third: int, second: int) -> float:
    """third / second**1.5, of exact integers."""
    size = square_root(Fraction(third * third, second**3))
    return size if third > 0 else -size


def skewed_ends(spread: Spread) -> Ends:
    """The ends of the 95 % interval of a mean, as distances from it; the first one is below 0.

    P. Hall, "On the removal of skewness by transformation", Journal of the Royal Statistical Society B 54
    (1992), 221-228: a cubic polynomial of the studentised mean has hardly any skewness left, and its inverse
    gives the ends. The quantiles are those of Student's distribution.
    """
    error = square_root(spread.variance)
    skew = spread.skewness / math.sqrt(spread.samples)
    quantile = student_95(spread.samples - 1 if spread.degrees is None else spread.degrees)
    return -error * from_cubic(quantile, skew), -error * from_cubic(-quantile, skew)


def from_least(ends: Ends, least: float | None, value: float) -> Ends:
    """An interval without what is below the least possible value, 0 of a loss: it covers as often as before.

    Where the data are below that, too, the interval still holds their value.
    """
    return ends if least is None else (max(ends[0], min(least, value)), max(ends[1], least))


def from_cubic(quantile: float, skew: float) -> float:
    """The studentised mean that Hall's polynomial takes to a quantile: ((1 + s (q - s/6))**(1/3) - 1) 3/s."""
    moved = quantile - skew / 6
    root = cube_root(1 + skew * moved)
    # As (r - 1) (r**2 + r + 1) = r**3 - 1: nothing is subtracted, and the skewness may be 0.
    return 3 * moved / ((root + 1) * root + 1)


def bounded_interval(mean: Fraction, variance: Fraction, samples: int) -> Ends:
    """The 95 % interval of a mean of values of 0 to 1.

    Wilson's, with the number of samples that a proportion would need for this variance (E. Korn, B. Graubard,
    Survey Methodology 24, 1998, 193-201). Where values are nearly all 0 or 1, that number says little: the
    interval is at least as wide as what ``samples`` values without any other one leave open, and where few in
    effect are not, as far as the end of ``wilson_interval``.
    """
    z_squared = NORMAL_95 * NORMAL_95
    p, q = float(mean), float(1 - mean)
    low, high = p, p
    if variance > 0:
        alike = float(min(mean * (1 - mean) / variance, _MOST_ALIKE))
        centre = alike * p + z_squared / 2
        half_width = NORMAL_95 * math.sqrt(alike * p * q + z_squared / 4)
        low, high = (centre - half_width) / (alike + z_squared), (centre + half_width) / (alike + z_squared)
    share = samples / (samples + z_squared)
    few_above, few_below = (_end_of_few(part, variance, samples) for part in (mean, 1 - mean))
    return max(0.0, min(low, p * share, few_above)), min(1.0, max(high, 1 - q * share, 1 - few_below))


def _end_of_few(mean: Fraction, variance: Fraction, samples: int) -> float:
    """The end near 0 where few in effect are above it, by Kish's (sum of x)**2 / sum of x**2."""
    if mean == 0:
        return math.inf
    size = mean + variance * samples / mean
    return float(size / samples) * _few_of(samples * mean / size, samples)


def clustered_interval(
    mean: float, variance: float, *, samples: int, clusters: float, differing: float, degrees: float
) -> Ends:
    """The 95 % interval of a mean of values of 0 to 1 that come in clusters.

    Wilson's, with Student's quantile and an effective number of samples: those that a proportion would need
    for this variance (E. Korn, B. Graubard, Survey Methodology 24, 1998, 193-201), at most all. Clusters that
    do not differ show no variance: then the number of clusters is taken, as if the samples of each were all
    alike. Few clusters with a wrong answer show little of it: the harmonic mean of both numbers is taken,
    with the weights differing**2 and 3. benchmarks/coverage.py has shown that these weights cover.
    """
    square = student_95(degrees) ** 2
    alike = min(float(samples), mean * (1 - mean) / variance) if variance > 0 else clusters
    known = differing * differing
    alike = min(alike, (known + 3) / (known / alike + 3 / clusters))
    centre = alike * mean + square / 2
    half_width = math.sqrt(square * (alike * mean * (1 - mean) + square / 4))
    low, high = (centre - half_width) / (alike + square), (centre + half_width) / (alike + square)
    return max(0.0, min(low, mean)), min(1.0, max(high, mean))


def rounded(value: Fraction) -> float:
    """A rational number as the nearest float64; infinite where it is beyond the largest one."""
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)


def square_root(value: Fraction) -> float:
    """Of a rational number that may itself be beyond a float64; infinite where the root is, too."""
    if value == 0:
        return 0.0
    shift = (value.numerator.bit_length() - value.denominator.bit_length()) // 2
    try:
        return math.ldexp(math.sqrt(value / Fraction(4) ** shift), shift)
    except OverflowError:
        return math.inf


def cube_root(value: float) -> float:
    """Of a finite number; that of a C library has other last bits on other machines."""
    numerator, denominator = abs(value).as_integer_ratio()
    if numerator == 0:
        return 0.0
    # The root has about so many bits.
    shift = max(0, _ROOT_BITS - (numerator.bit_length() - denominator.bit_length()) // 3)
    number = (numerator << 3 * shift) // denominator
    root = 1 << -(-number.bit_length() // 3)
    while (nearer := (2 * root + number // (root * root)) // 3) < root:
        root = nearer
    return math.copysign(root / (1 << shift), value)


@dataclass(frozen=True, kw_only=True)
class Transform:
    """A function of a mean, which never falls."""

    # The function; NaN where it has no value.
    function: Callable[[Decimal], Decimal]
    # What the mean of any population is at least, for the function to have a value.
    least: float = -math.inf

    def __call__(self, mean: Fraction) -> float | None:
        """The value at a mean, rounded once; None where there is none that a float64 holds."""
        with decimal.localcontext(_CONTEXT):
            value = float(self.function(Decimal(mean.numerator) / Decimal(mean.denominator)))
        return value if math.isfinite(value) else None

    def of_ends(self, ends: Ends) -> Ends | None:
        """An interval of the mean as one of the function; None where an end has no value.

        As the function never falls, it holds the function's value where the mean's interval holds the mean.
        """
        low, high = (max(end, self.least) for end in ends)
        if not (math.isfinite(low) and math.isfinite(high)):
            return None
        first, last = self(Fraction(low)), self(Fraction(high))
        return None if first is None or last is None else (first, last)


TRANSFORMS = {
    "exp": Transform(function=lambda x: x.exp()),
    "sqrt": Transform(function=lambda x: x.sqrt(), least=0.0),
    "log": Transform(function=lambda x: x.ln() if x > 0 else Decimal("NaN")),
}
