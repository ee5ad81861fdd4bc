"""Means, ratios and counts of columns: exact, whatever their dtype."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import torch
from torch import Tensor

from dualeval.choices import check_choice
from dualeval.errors import UsageError
from dualeval.metrics import Measured
from dualeval.metrics.described import FRACTION, Described
from dualeval.metrics.exact import (
    DOUBLE_UNIT_BITS,
    SUM_UNIT_BITS,
    ExactColumn,
    exact_sums,
    from_limbs,
    nonfinite_counts,
    to_limbs,
)
from dualeval.metrics.intervals import NORMAL_95, TRANSFORMS, square_root, wilson_interval
from dualeval.metrics.moments import Moments, Sums, finite_of, numbers_of
from dualeval.metrics.scores import Score

_COUNT_LIMBS = 3


class _Estimate(Described):
    """The value of a mean or ratio and its interval, transformed where that was asked for."""

    def __init__(
        self, name: str, unit: str | None, higher_is_better: bool | None, transform: str | None
    ) -> None:
        super().__init__(name, unit, higher_is_better)
        if transform is not None:
            check_choice("transform", transform, tuple(TRANSFORMS))
        self.transform = transform

    def _estimated(self, mean: Fraction, variance: Fraction | None) -> Measured:
        """The measured value, rounded once.

        Args:
            mean: exact.
            variance: of the mean; None where it is unknown.
        """
        if self.transform is not None:
            value, interval = TRANSFORMS[self.transform](mean, variance)
            said = f"metric {self.name!r} has no finite value: it is {self.transform} of {_shown(mean)}"
            return self.measured(value, interval, warnings=() if value is not None else (said,))
        try:
            value = float(mean)
        except OverflowError:
            return self.measured(None, warnings=(f"metric {self.name!r} is beyond what a float64 holds",))
        return self.measured(value, _normal(value, variance))


def _shown(mean: Fraction) -> str:
    try:
        return f"{float(mean):.6g}"
    except OverflowError:
        return "a number beyond what a float64 holds"


def _normal(value: float, variance: Fraction | None) -> tuple[float, float] | None:
    if variance is None:
        return None
    half_width = NORMAL_95 * square_root(variance)
    return value - half_width, value + half_width


def sums_of(values: Tensor) -> Sums:
    """The exact sums for a mean: counts of samples and of bools, the sum, the sum of squares.

    Args:
        values: as ``numbers_of`` gave them.
    """
    if values.dtype == torch.bool:
        true = int(torch.count_nonzero(values))
        sums, squares = true << DOUBLE_UNIT_BITS, true << 2 * DOUBLE_UNIT_BITS
        return Sums(counts=(len(values), len(values)), nonfinite=(0, 0, 0), sums=(sums,), products=(squares,))
    counts = (len(values), 0)
    if values.is_floating_point() and values.dtype != torch.float64:
        # Three times as fast as by float64; the two half floats are float32 numbers, too.
        added = exact_sums(values.float())
        finer = DOUBLE_UNIT_BITS - SUM_UNIT_BITS
        [total], [squares] = added.sums, added.square_sums
        return Sums(
            counts=counts,
            nonfinite=added.nonfinite,
            sums=(total << finer,),
            products=(squares << 2 * finer,),
        )
    [finite], nonfinite = finite_of([values])
    column = ExactColumn(finite)
    return Sums(counts=counts, nonfinite=nonfinite, sums=(column.total(),), products=(column.dot(column),))


def mean_of_sums(
    samples: int, total: int, squares: int, factor: float = 1.0
) -> tuple[float, tuple[float, float] | None]:
    """A mean, equal to ``factor * math.fsum(values) / N`` to the last bit, and its normal interval.

    Args:
        samples: at least 1; a single one has no interval.
        total: the sum in units of 2**-1074.
        squares: the sum of squares in units of 2**-2148.
        factor: 100 for percent.
    """
    try:
        # Python's int / int rounds correctly; the sum is rounded before the division, as fsum does it.
        mean = factor * (total / (1 << DOUBLE_UNIT_BITS)) / samples
    except OverflowError:  # the sum alone is beyond a float64
        mean = float(Fraction(factor) * Fraction(total, samples << DOUBLE_UNIT_BITS))
    variance = _variance(samples, total, squares)
    if variance is None:
        return mean, None
    half_width = factor * (NORMAL_95 * square_root(variance))
    return mean, (mean - half_width, mean + half_width)


def _variance(samples: int, total: int, squares: int) -> Fraction | None:
    """Of the mean: the sample variance over the number of samples."""
    if samples < 2:
        return None
    divisor = samples * samples * (samples - 1) << (2 * DOUBLE_UNIT_BITS)
    return Fraction(samples * squares - total * total, divisor)


def _variance_of_ratio(
    samples: int, ratio: Fraction, total: int, products: tuple[int, int, int]
) -> Fraction | None:
    """The variance of a ratio of sums of y and x, by the delta method.

    With z = y - ratio * x of each sample: N / (N - 1) * sum of z**2 / (sum of x)**2 (W. G. Cochran, "Sampling
    Techniques", 1977, section 6.4, for an infinite population).

    Args:
        samples: their number N.
        ratio: of the sums.
        total: the sum of x, in units of 2**-1074; not 0.
        products: sums of y * y, x * x and x * y, in units of 2**-2148.
    """
    if samples < 2:
        return None
    yy, xx, xy = products
    residuals = yy - 2 * ratio * xy + ratio * ratio * xx
    # Products that were rounded may leave a sum of squares below 0.
    return Fraction(samples, samples - 1) * max(residuals, Fraction()) / (total * total)


class Mean(_Estimate):
    """The mean of a column with one number a sample: exact, rounded once.

    Equal to ``math.fsum(values) / N`` to the last bit. Its interval is mean ± 1.959963984540054 *
    sqrt(s**2 / N), the normal approximation, with s**2 the sample variance (divisor N - 1) from exact
    integers; that of a bool column, which is the fraction of true values, is Wilson's. With any NaN or
    infinity in the column the value is None and the three counts are given.

    With a weight: sum(weight * value) / sum(weight), with the interval of a ratio. Perplexity, where a column
    has each sample's mean negative log-likelihood of its tokens: ``Mean("loss", weight="tokens",
    transform="exp")``. Where it has the sum: ``Ratio("loss", "tokens", transform="exp")``.

    Ledger: the number of samples; that of bools among them or, with a weight, of products that no float64
    holds; the counts of NaN, +inf and -inf; then the limbs of the sums.

    Args:
        column: bool, integers, or floats of at most 64 bits.
        weight: likewise; without one each sample counts alike.
        transform: "exp", "sqrt" or "log" of the mean, with its interval by the delta method.
        name: of metric and value; without one the column's, behind the transform's: ``sqrt_error``.
        unit: as in ``Measured``; without one "fraction" for the mean of bools, none otherwise.
        higher_is_better: None where neither is better.

    Raises:
        UsageError: there is no such transform, or an argument is of another kind.
    """

    def __init__(
        self,
        column: str,
        weight: str | None = None,
        transform: str | None = None,
        *,
        name: str | None = None,
        unit: str | None = None,
        higher_is_better: bool | None = None,
    ) -> None:
        own = column if transform is None else f"{transform}_{column}"
        super().__init__(own if name is None else name, unit, higher_is_better, transform)
        self.column = column
        self.weight = weight
        self.columns = (column,) if weight is None else (column, weight)
        self._moments = Moments(counts=2, sums=1, products=1 if weight is None else 4)
        self.size = self._moments.size

    @property
    def score(self) -> Score:
        """The column's entry, and its weight."""
        return Score(column=self.column, weight=self.weight, transform=self.transform)

    def update(self, ledger: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Add the samples of the column.

        Raises:
            UsageError: the column is not one number a sample.
        """
        values = numbers_of(self.name, self.column, columns[self.column])
        if self.weight is None:
            self._moments.add(ledger, sums_of(values))
        else:
            weights = numbers_of(self.name, self.weight, columns[self.weight])
            self._moments.add(ledger, _weighted_sums(values, weights))

    def compute(self, ledger: Tensor) -> Measured:
        """The mean under the metric's name, and its interval; None without samples, or of no weight."""
        found = self._moments.read(ledger)
        samples, special = found.counts
        if any(found.nonfinite):
            return self.measured(None, nonfinite=nonfinite_counts(found.nonfinite))
        if samples == 0:
            return self.measured(None)
        [total] = found.sums
        if self.weight is not None:
            return self._weighted(samples, total, found.products, known=not special)
        [squares] = found.products
        if self.transform is not None:
            mean = Fraction(total, samples << DOUBLE_UNIT_BITS)
            return self._estimated(mean, _variance(samples, total, squares))
        value, interval = mean_of_sums(samples, total, squares)
        if special == samples:
            interval = wilson_interval(total >> DOUBLE_UNIT_BITS, samples)
            return self.measured(value, interval, unit=FRACTION)
        return self.measured(value, interval)

    def _weighted(self, samples: int, weights: int, products: tuple[int, ...], *, known: bool) -> Measured:
        if weights == 0:
            return self.measured(None, warnings=(f"metric {self.name!r}: its weights add up to 0",))
        total, *rounded = products
        mean = Fraction(total, weights << DOUBLE_UNIT_BITS)
        uu, ww, uw = rounded
        variance = _variance_of_ratio(samples, mean, weights, (uu, ww, uw)) if known else None
        return self._estimated(mean, variance)


def _weighted_sums(values: Tensor, weights: Tensor) -> Sums:
    """The exact sums for a weighted mean; those for its interval are of products that are rounded once."""
    (own, weight), nonfinite = finite_of([values, weights])
    products = own.to(torch.float64) * weight.to(torch.float64)
    held = products.isfinite()
    x, w = ExactColumn(own), ExactColumn(weight)
    u = ExactColumn(products.where(held, products.new_zeros(())))
    return Sums(
        counts=(len(values), int(held.logical_not().sum())),
        nonfinite=nonfinite,
        sums=(w.total(),),
        products=(x.dot(w), u.dot(u), w.dot(w), u.dot(w)),
    )


class Ratio(_Estimate):
    """The sum of one column over the sum of another, exact and rounded once.

    Such as negative log-likelihoods over tokens; with ``transform="exp"`` that is perplexity. The samples are
    what was drawn: the interval is that of a ratio of two means by the delta method, from the exact sums of
    squares and products. With any NaN or infinity in a column the value is None and the three counts are
    given, over both columns.

    Ledger: the number of samples, the counts of NaN, +inf and -inf, then the limbs of two sums and three sums
    of products.

    Args:
        numerator: a column with one number a sample: bool, integers, or floats of at most 64 bits.
        denominator: likewise.
        transform: "exp", "sqrt" or "log" of the ratio, with its interval by the delta method.
        name: of metric and value; without one as ``loss_per_tokens``, behind the transform's name.
        unit: as in ``Measured``.
        higher_is_better: None where neither is better.

    Raises:
        UsageError: there is no such transform, or an argument is of another kind.
    """

    def __init__(
        self,
        numerator: str,
        denominator: str,
        transform: str | None = None,
        *,
        name: str | None = None,
        unit: str | None = None,
        higher_is_better: bool | None = None,
    ) -> None:
        own = f"{numerator}_per_{denominator}"
        own = own if transform is None else f"{transform}_{own}"
        super().__init__(own if name is None else name, unit, higher_is_better, transform)
        self.numerator = numerator
        self.denominator = denominator
        self.columns = (numerator, denominator)
        self._moments = Moments(counts=1, sums=2, products=3)
        self.size = self._moments.size

    @property
    def score(self) -> Score:
        """The numerator's entry over the denominator's."""
        return Score(column=self.numerator, over=self.denominator, transform=self.transform)

    def update(self, ledger: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Add the samples of the two columns.

        Raises:
            UsageError: a column is not one number a sample.
        """
        own = [numbers_of(self.name, name, columns[name]) for name in self.columns]
        finite, nonfinite = finite_of(own)
        y, x = map(ExactColumn, finite)
        added = Sums(
            counts=(len(own[0]),),
            nonfinite=nonfinite,
            sums=(y.total(), x.total()),
            products=(y.dot(y), x.dot(x), x.dot(y)),
        )
        self._moments.add(ledger, added)

    def compute(self, ledger: Tensor) -> Measured:
        """The ratio under the metric's name, and its interval; None without samples, or over 0."""
        found = self._moments.read(ledger)
        [samples] = found.counts
        if any(found.nonfinite):
            return self.measured(None, nonfinite=nonfinite_counts(found.nonfinite))
        if samples == 0:
            return self.measured(None)
        above, below = found.sums
        if below == 0:
            said = f"metric {self.name!r}: the column {self.denominator!r} adds up to 0"
            return self.measured(None, warnings=(said,))
        ratio = Fraction(above, below)
        yy, xx, xy = found.products
        return self._estimated(ratio, _variance_of_ratio(samples, ratio, below, (yy, xx, xy)))


class Count(Described):
    """How many values of a bool column are true, or the sum of an integer column, such as one of tokens.

    Ledger: the sum, as three limbs.

    Args:
        column: bool, or integers; one number a sample.
        name: of metric and value; without one as ``tokens_count``.
        unit: as in ``Measured``.
        higher_is_better: None where neither is better.
    """

    size = _COUNT_LIMBS

    def __init__(
        self,
        column: str,
        *,
        name: str | None = None,
        unit: str | None = None,
        higher_is_better: bool | None = None,
    ) -> None:
        super().__init__(f"{column}_count" if name is None else name, unit, higher_is_better)
        self.column = column
        self.columns = (column,)

    def update(self, ledger: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Add the samples of the column.

        Raises:
            UsageError: the column is neither bool nor of integers.
        """
        values = numbers_of(self.name, self.column, columns[self.column])
        if values.is_floating_point():
            raise UsageError(
                f"metric {self.name!r} counts the column {self.column!r}, which is of {values.dtype}: "
                "expected bool or integers. The sum of floats over the number of samples is Mean"
            )
        added = ExactColumn(values).total() >> DOUBLE_UNIT_BITS
        slots = to_limbs(from_limbs(ledger.tolist()) + added, _COUNT_LIMBS)
        ledger.copy_(torch.tensor(slots, dtype=torch.int64))

    def compute(self, ledger: Tensor) -> Measured:
        """The count under the metric's name; 0 without samples."""
        return self.measured(from_limbs(ledger.tolist()))
