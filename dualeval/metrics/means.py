"""Means, ratios and counts of columns: exact, whatever their dtype."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dualeval.errors import UsageError
from dualeval.metrics import exact
from dualeval.metrics.intervals import (
    TRANSFORMS,
    Ends,
    PairSums,
    Spread,
    from_least,
    rounded,
    skewed_ends,
    spread_of_mean,
    spread_of_ratio,
    wilson_interval,
)
from dualeval.metrics.metric import Described, Measured
from dualeval.metrics.scores import FRACTION, Score
from dualeval.options.choices import check_choice

_COUNT_LIMBS = 3


class _Estimate(Described):
    """The value of a mean or ratio and its interval, transformed where that was asked for."""

    least: float | None = None

    def __init__(
        self,
        name: str,
        unit: str | None,
        higher_is_better: bool | None,
        transform: str | None,
        least: float | None,
    ) -> None:
        super().__init__(name, unit, higher_is_better)
        if transform is not None:
            check_choice("transform", transform, tuple(TRANSFORMS))
        self.transform = transform
        if least is not None:  # a metric without one is the same as before there was any
            self.least = least

    def _estimated(
        self, mean: Fraction, ends: Ends | None, *, value: float | None, rough: str | None
    ) -> Measured:
        """The measured value with its interval."""
        if self.transform is not None:
            function = TRANSFORMS[self.transform]
            value = function(mean)
            if value is None:
                of = rounded(mean)
                shown = f"{of:.6g}" if math.isfinite(of) else "a number beyond what a float64 holds"
                warning = f"metric {self.name!r} has no finite value: it is {self.transform} of {shown}"
                return self.measured(None, warnings=(warning,))
            ends = None if ends is None else function.of_ends(ends)
        elif value is None:
            value = rounded(mean)
            if math.isinf(value):
                return self.measured(None, warnings=(f"metric {self.name!r} is beyond what a float64 holds",))
        return self.measured(value, ends, rough=rough)

    def _of_spread(
        self, mean: Fraction, samples: int, spread: Spread | None, *, value: float | None = None
    ) -> Measured:
        """As ``_estimated``, with Hall's interval of a spread; None where the samples show none."""
        if spread is None:
            return self._without_interval(mean, _without_spread(samples), value=value)
        centre = value if value is not None else rounded(mean)
        low, high = skewed_ends(spread)
        ends = from_least((centre + low, centre + high), self.least, centre)
        return self._estimated(mean, ends, value=value, rough=spread.rough())

    def _without_interval(self, mean: Fraction, why: str, *, value: float | None = None) -> Measured:
        """As ``_estimated``, with a warning that says why there is no interval."""
        measured = self._estimated(mean, None, value=value, rough=None)
        if measured.values[self.name] is None:
            return measured
        return replace(measured, warnings=(f"{self.name} has no interval: {why}",))


def _without_spread(samples: int) -> str:
    if samples == 1:
        return "there is only one sample"
    return f"its {samples} samples are all equal, and do not show how far others may be"


def sums_of(values: Tensor) -> Sums:
    """The exact sums for a mean: counts of samples and of bools, the sum, those of squares and of cubes."""
    if values.dtype == torch.bool:
        true = int(torch.count_nonzero(values))
        return (len(values), len(values)), (0, 0, 0), [true << n * exact.DOUBLE_UNIT_BITS for n in (1, 2, 3)]
    if values.is_floating_point() and values.dtype != torch.float64:
        # Thirty times as fast as by float64; the two half floats are float32 numbers, too.
        added = exact.exact_sums(values.float())
        finer = exact.DOUBLE_UNIT_BITS - exact.SUM_UNIT_BITS
        [total], [squares], [cubes] = added.sums, added.square_sums, added.cube_sums
        return (len(values), 0), added.nonfinite, (total << finer, squares << 2 * finer, cubes << 3 * finer)
    [finite], nonfinite = finite_of([values])
    column = exact.ExactColumn(finite)
    sums = column.total(), column.dot(column), column.dots(column, column)
    return (len(values), 0), nonfinite, sums


def mean_of_sum(samples: int, total: int, factor: float = 1.0) -> float:
    """A mean, equal to ``factor * math.fsum(values) / N`` to the last bit."""
    try:
        # Python's int / int rounds correctly; the sum is rounded before the division, as fsum does it.
        return factor * (total / (1 << exact.DOUBLE_UNIT_BITS)) / samples
    except OverflowError:  # the sum alone is beyond a float64
        return float(Fraction(factor) * Fraction(total, samples << exact.DOUBLE_UNIT_BITS))


class Mean(_Estimate):
    """The mean of a column with one number a sample: exact, rounded once.

    Equal to ``math.fsum(values) / N`` to the last bit. Its interval is Hall's, which allows for skewed
    populations, from the exact sums of values, squares and cubes; that of a bool column, which is the
    fraction of true values, is Wilson's. Of values that are all equal there is none. With any NaN or infinity
    in the column the value is None and the three counts are given.

    With a weight: sum(weight * value) / sum(weight), with the interval of a ratio. Perplexity, where a column
    has each sample's mean negative log-likelihood of its tokens: ``Mean("loss", weight="tokens",
    transform="exp")``. Where it has the sum: ``Ratio("loss", "tokens", transform="exp")``.

    Ledger: the number of samples; that of bools among them or, with a weight, of products that no float64
    holds; the counts of NaN, +inf and -inf; then the limbs of the sums.

    Args:
        column: bool, integers, or floats of at most 64 bits.
        weight: likewise; without one each sample counts alike.
        transform: "exp", "sqrt" or "log" of the mean; its interval is that of the ends of the mean's.
        name: of metric and value; without one the column's, behind the transform's: ``sqrt_error``.
        unit: as in ``Measured``; without one "fraction" for the mean of bools, none otherwise.
        higher_is_better: None where neither is better.
        least: what a mean of this kind cannot be below, as 0 of a loss or an error; its interval is not.

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
        least: float | None = None,
    ) -> None:
        default = column if transform is None else f"{transform}_{column}"
        super().__init__(default if name is None else name, unit, higher_is_better, transform, least)
        self.column = column
        self.weight = weight
        self.columns = (column,) if weight is None else (column, weight)
        self._moments = (
            Moments(counts=2, sums=1, products=1, cubes=1)
            if weight is None
            else Moments(counts=2, sums=1, products=4, cubes=4)
        )
        self.size = self._moments.size

    @property
    def score(self) -> Score:
        """The column's entry, and its weight."""
        return Score(column=self.column, weight=self.weight, transform=self.transform, least=self.least)

    def update(self, ledger: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Add the samples of the column; a UsageError where it is not one number a sample."""
        values = numbers_of(self.name, self.column, columns[self.column])
        if self.weight is None:
            self._moments.add(ledger, sums_of(values))
        else:
            weights = numbers_of(self.name, self.weight, columns[self.weight])
            self._moments.add(ledger, _weighted_sums(values, weights))

    def compute(self, ledger: Tensor) -> Measured:
        """The mean under the metric's name, and its interval; None without samples, or of no weight."""
        (samples, special), nonfinite, (total, *others) = self._moments.read(ledger)
        if any(nonfinite):
            return self.measured(None, nonfinite=exact.nonfinite_counts(nonfinite))
        if samples == 0:
            return self.measured(None)
        if self.weight is not None:
            return self._weighted(samples, total, others, known=not special)
        squares, cubes = others
        mean = Fraction(total, samples << exact.DOUBLE_UNIT_BITS)
        value = mean_of_sum(samples, total)
        if special == samples:
            ends = wilson_interval(total >> exact.DOUBLE_UNIT_BITS, samples)
            of_bools = self._estimated(mean, ends, value=value, rough=None)
            return of_bools if self.transform is not None else self.measured(value, ends, unit=FRACTION)
        return self._of_spread(
            mean, samples, spread_of_mean(samples, total, squares, cubes, exact.DOUBLE_UNIT_BITS), value=value
        )

    def _weighted(self, samples: int, weights: int, others: Sequence[int], *, known: bool) -> Measured:
        if weights == 0:
            return self.measured(None, warnings=(f"metric {self.name!r}: its weights add up to 0",))
        product, *others = others
        mean = Fraction(product, weights << exact.DOUBLE_UNIT_BITS)
        if not known:
            why = "a product of value and weight is beyond what a float64 holds"
            return self._without_interval(mean, why)
        sums = PairSums(samples=samples, x=weights, products=others[:3], cubes=others[3:])
        return self._of_spread(mean, samples, spread_of_ratio(mean, sums))


def _weighted_sums(values: Tensor, weights: Tensor) -> Sums:
    """The exact sums for a weighted mean; those for its interval are of products that are rounded once."""
    (value, weight), nonfinite = finite_of([values, weights])
    products = value.to(torch.float64) * weight.to(torch.float64)
    held = products.isfinite()
    x, w = exact.ExactColumn(value), exact.ExactColumn(weight)
    u = exact.ExactColumn(products.where(held, products.new_zeros(())))
    counts = len(values), int(held.logical_not().sum())
    return counts, nonfinite, (w.total(), x.dot(w), *_products(u, w))


def _products(y: exact.ExactColumn, x: exact.ExactColumn) -> tuple[int, ...]:
    """The sums of yy, xx and xy; those of yyy, yyx, yxx and xxx."""
    return y.dot(y), x.dot(x), y.dot(x), y.dots(y, y), y.dots(y, x), x.dots(x, y), x.dots(x, x)


class Ratio(_Estimate):
    """The sum of one column over the sum of another, exact and rounded once.

    Such as negative log-likelihoods over tokens; with ``transform="exp"`` that is perplexity. The samples are
    what was drawn: the interval is Hall's, of the linearised ratio, from the exact sums of products of two
    and three factors. With any NaN or infinity in a column the value is None and the three counts are
    given, over both columns.

    Ledger: the number of samples, the counts of NaN, +inf and -inf, then the limbs of two sums, three sums of
    products of two and four of products of three.

    Args:
        numerator: a column with one number a sample: bool, integers, or floats of at most 64 bits.
        denominator: likewise.
        transform: "exp", "sqrt" or "log" of the ratio; its interval is that of the ends of the ratio's.
        name: of metric and value; without one as ``loss_per_tokens``, behind the transform's name.
        unit: as in ``Measured``.
        higher_is_better: None where neither is better.
        least: what a mean of this kind cannot be below, as 0 of a loss or an error; its interval is not.

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
        least: float | None = None,
    ) -> None:
        default = f"{numerator}_per_{denominator}"
        default = default if transform is None else f"{transform}_{default}"
        super().__init__(default if name is None else name, unit, higher_is_better, transform, least)
        self.numerator = numerator
        self.denominator = denominator
        self.columns = (numerator, denominator)
        self._moments = Moments(counts=1, sums=2, products=3, cubes=4)
        self.size = self._moments.size

    @property
    def score(self) -> Score:
        """The numerator's entry over the denominator's."""
        return Score(column=self.numerator, over=self.denominator, transform=self.transform, least=self.least)

    def update(self, ledger: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Add the samples of the two columns; a UsageError where a column is not one number a sample."""
        numbers = [numbers_of(self.name, name, columns[name]) for name in self.columns]
        finite, nonfinite = finite_of(numbers)
        y, x = map(exact.ExactColumn, finite)
        self._moments.add(ledger, ([len(numbers[0])], nonfinite, (y.total(), x.total(), *_products(y, x))))

    def compute(self, ledger: Tensor) -> Measured:
        """The ratio under the metric's name, and its interval; None without samples, or over 0."""
        [samples], nonfinite, (above, below, *others) = self._moments.read(ledger)
        if any(nonfinite):
            return self.measured(None, nonfinite=exact.nonfinite_counts(nonfinite))
        if samples == 0:
            return self.measured(None)
        if below == 0:
            warning = f"metric {self.name!r}: the column {self.denominator!r} adds up to 0"
            return self.measured(None, warnings=(warning,))
        ratio = Fraction(above, below)
        sums = PairSums(samples=samples, x=below, products=others[:3], cubes=others[3:])
        return self._of_spread(ratio, samples, spread_of_ratio(ratio, sums))


class BitsPerByte(Ratio):
    """Negative log-likelihoods, in nats, over bytes, divided by log 2.

    As ``bits_per_byte`` of lm-evaluation-harness (``lm_eval/api/metrics.py``). The ledger is that of Ratio.
    """

    def __init__(self, nats: str, size: str) -> None:
        super().__init__(nats, size, name="bits_per_byte", higher_is_better=False, least=0)

    @property
    def score(self) -> Score:
        """That of the ratio, in bits."""
        return replace(super().score, factor=1 / math.log(2))

    def compute(self, ledger: Tensor) -> Measured:
        """The ratio and its interval, in bits."""
        nats = super().compute(ledger)
        value, ends = nats.values[self.name], nats.intervals.get(self.name)
        interval = None if ends is None else (ends[0] / math.log(2), ends[1] / math.log(2))
        bits = value / math.log(2) if isinstance(value, float) else None
        intervals = {} if interval is None else {self.name: interval}
        return replace(nats, values={self.name: bits}, intervals=intervals)


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
        """Add the samples of the column; a UsageError where it is neither bool nor of integers."""
        values = numbers_of(self.name, self.column, columns[self.column])
        if values.is_floating_point():
            raise UsageError(
                f"metric {self.name!r} counts the column {self.column!r}, which is {values.dtype}: expected "
                "bool or integers. The sum of floats over the number of samples is Mean"
            )
        added = exact.ExactColumn(values).total() >> exact.DOUBLE_UNIT_BITS
        slots = ledger.numpy()
        slots[:] = exact.to_limbs(exact.from_limbs(slots) + added, _COUNT_LIMBS)

    def compute(self, ledger: Tensor) -> Measured:
        """The count under the metric's name; 0 without samples."""
        return self.measured(exact.from_limbs(ledger.tolist()))


# -- exact sums of columns and of their products, as slots of a ledger ---------------------------------

_KINDS = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
# What ``Moments`` hold: counts of samples and of the metric's own; how many values were NaN, +inf and -inf,
# whose samples are in no sum; sums in units of 2**-1074, then those of products of two columns in units of
# 2**-2148, then of three in units of 2**-3222.
Sums: TypeAlias = tuple[Sequence[int], Sequence[int], Sequence[int]]


class Moments:
    """A number of counts, and of sums of one, two and three factors, which merge by adding their ledgers.

    Wide enough for any float64, so that the ledger's size does not depend on what a column holds: 67 slots a
    sum, 133 a sum of products of two, 198 one of three.
    """

    def __init__(self, *, counts: int, sums: int, products: int, cubes: int) -> None:
        # The attributes stand in the job's identity: other ones make other jobs.
        self._counts = counts
        self._limbs = (
            sums * [exact.DOUBLE_SUM_LIMBS]
            + products * [exact.DOUBLE_PRODUCT_LIMBS]
            + cubes * [exact.DOUBLE_CUBE_LIMBS]
        )
        self._kinds = (sums, sums + products)
        self._lengths = [counts, len(exact.NONFINITE_KINDS), *self._limbs]
        self.size = sum(self._lengths)

    def add(self, ledger: Tensor, added: Sums) -> None:
        """Add to the ledger, in place."""
        counts, nonfinite, *before = torch.split(ledger, self._lengths)
        counts += torch.tensor(added[0], dtype=torch.int64)
        nonfinite += torch.tensor(added[1], dtype=torch.int64)
        for limbs, number in zip(before, added[2], strict=True):
            slots = limbs.numpy()
            slots[:] = exact.to_limbs(exact.from_limbs(slots) + number, len(slots))

    def read(self, ledger: Tensor) -> Sums:
        """What is in the ledger."""
        counts, nonfinite, *limbs = torch.split(ledger, self._lengths)
        return counts.tolist(), nonfinite.tolist(), [exact.from_limbs(slots.numpy()) for slots in limbs]


def numbers_of(metric: str, column: str, values: Any) -> Tensor:
    """A column as one number a sample, shape (samples,)."""
    whose = f"metric {metric!r} reads the column {column!r}, which"
    if not isinstance(values, Tensor) or values.numel() != len(values):
        is_tensor = isinstance(values, Tensor)
        has = f"has shape {tuple(values.shape)}" if is_tensor else f"is {type(values).__name__}"
        rows = len(values)
        if is_tensor and tuple(values.shape) == (rows, rows):
            raise UsageError(
                f"{whose} {has}, for {rows} samples: torch broadcasts outputs ({rows}, 1) and a target "
                f"({rows},) to one number for each pair of samples. In observe write outputs[:, 0]"
            )
        raise UsageError(
            f"{whose} {has}: it takes one number per sample. Make one in observe, such as by .mean(1), or a "
            "sum and a count, whose Ratio is the mean over all values"
        )
    if values.dtype not in _KINDS:
        raise UsageError(
            f"{whose} is {values.dtype}: expected bool, a float type, uint8, or an integer type with a sign. "
            "Cast it, as with .float()"
        )
    return values.reshape(-1)


def finite_of(columns: Sequence[Tensor]) -> tuple[list[Tensor], tuple[int, int, int]]:
    """The samples at which all columns are finite, and how many values are NaN, +inf and -inf."""
    counts = [exact.count_nonfinite(column) for column in columns if column.is_floating_point()]
    nan, pos_inf, neg_inf = (sum(count) for count in zip((0, 0, 0), *counts, strict=True))
    nonfinite = (nan, pos_inf, neg_inf)
    if not any(nonfinite):
        return list(columns), nonfinite
    finite = torch.stack([column.isfinite() for column in columns]).all(dim=0)
    return [column[finite] for column in columns], nonfinite
