"""95 % intervals of means and of what is computed from them."""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

NORMAL_95 = 1.959963984540054  # the 0.975 quantile of the standard normal distribution

# Decimal's exp, ln and sqrt are rounded correctly, the same on every machine; those of a C library are not.
_CONTEXT = decimal.Context(prec=60, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN, traps=[])


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """The 95 % score interval of a proportion, for trials >= 1.

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927), with
    numerator and denominator multiplied by the number of trials.
    """
    z_squared = NORMAL_95 * NORMAL_95
    centre = successes + z_squared / 2
    half_width = NORMAL_95 * math.sqrt(successes * (trials - successes) / trials + z_squared / 4)
    # The ends are exactly 0 and 1 there; the subtraction would leave a rounding error.
    low = 0.0 if successes == 0 else (centre - half_width) / (trials + z_squared)
    high = 1.0 if successes == trials else (centre + half_width) / (trials + z_squared)
    return low, high


def square_root(value: Fraction) -> float:
    """Of a rational number that may itself be beyond a float64; infinite where the root is, too."""
    if value == 0:
        return 0.0
    shift = (value.numerator.bit_length() - value.denominator.bit_length()) // 2
    try:
        return math.ldexp(math.sqrt(value / Fraction(4) ** shift), shift)
    except OverflowError:
        return math.inf


@dataclass(frozen=True, kw_only=True)
class Transform:
    """A function of a mean.

    Attributes:
        value: the function; NaN where it has no value.
        slope: its derivative, of the argument and the value.
        least: the smallest value that it can have.
    """

    value: Callable[[Decimal], Decimal]
    slope: Callable[[Decimal, Decimal], Decimal]
    least: float = -math.inf

    def __call__(
        self, mean: Fraction, variance: Fraction | None
    ) -> tuple[float | None, tuple[float, float] | None]:
        """The value at a mean, and its interval by the delta method.

        Its standard error is that of the mean times the slope there (A. W. van der Vaart, "Asymptotic
        Statistics", 1998, theorem 3.1); the normal interval is cut where the function has no values.

        Args:
            mean: exact; the value is rounded once.
            variance: of the mean, its standard error squared; None where it is unknown.

        Returns:
            Value and interval; None where there is none, or none that a float64 can hold.
        """
        with decimal.localcontext(_CONTEXT):
            argument = Decimal(mean.numerator) / Decimal(mean.denominator)
            exact = self.value(argument)
            value = float(exact)
            if not math.isfinite(value):
                return None, None
            slope = float(self.slope(argument, exact))
        if variance is None:
            return value, None
        half_width = NORMAL_95 * square_root(variance) * abs(slope)
        if not math.isfinite(half_width):
            return value, None
        return value, (max(self.least, value - half_width), value + half_width)


TRANSFORMS = {
    "exp": Transform(value=lambda x: x.exp(), slope=lambda x, value: value, least=0.0),
    # Of an argument of 0 the slope is infinite: there is no interval.
    "sqrt": Transform(value=lambda x: x.sqrt(), slope=lambda x, value: 1 / (2 * value), least=0.0),
    "log": Transform(value=lambda x: x.ln() if x > 0 else Decimal("NaN"), slope=lambda x, value: 1 / x),
}
