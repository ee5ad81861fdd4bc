"""Exact sums of floats and of their squares, held as integers and rounded once at the end.

Every finite float32 is an integer times 2**-149, and its square an integer times 2**-298; a float64 likewise,
with 2**-1074 and 2**-2148. A sum of such integers does not depend on the order of its terms. In the ledger it
lies as limbs: a fixed-point number with 32 bits to an int64 slot, lowest first, so that ledgers can be added
before any carry is propagated (Kulisch's long accumulator; U. Kulisch, "Computer Arithmetic and Validity",
2013, chapter 8).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from dualeval.errors import UsageError
from dualeval.metrics import Measured

# The largest float32 is below 2**277 units: 9 limbs, and one above them for the sign and 2**43 terms.
SUM_LIMBS = 10
# Its square is below 2**554 units: 18 limbs, and likewise.
SQUARE_LIMBS = 20
SUM_UNIT_BITS = 149
# The largest float64 is below 2**2098 units, its square below 2**4196.
DOUBLE_UNIT_BITS = 1074
DOUBLE_SUM_LIMBS = 67
_DOUBLE_SQUARE_LIMBS = 133

NONFINITE_KINDS = ("nan", "pos_inf", "neg_inf")
NORMAL_95 = 1.959963984540054  # the 0.975 quantile of the standard normal distribution

_LIMB_BITS = 32
_LIMB_MASK = (1 << _LIMB_BITS) - 1
_FRACTION_BITS = 23
_FRACTION_MASK = (1 << _FRACTION_BITS) - 1
_EXPONENT_MASK = 0xFF
_SIGN = 0x100
_PATTERNS = 0x200  # sign and exponent together
_PIECE = 1 << 17  # a squared fraction is below 2**46: so many of them stay below 2**63


@dataclass(frozen=True, kw_only=True)
class ExactSums:
    """Exact sums of float values, by group.

    Attributes:
        sums: per group, the sum of the finite values in units of 2**-149 (of float64: 2**-1074).
        square_sums: per group, the sum of their squares in units of 2**-298 (2**-2148).
        nonfinite: over all groups, how many values were NaN, +inf and -inf; they are in no sum.
    """

    sums: list[int]
    square_sums: list[int]
    nonfinite: tuple[int, int, int]


def exact_sums(values: Tensor, groups: Tensor | None = None, group_count: int = 1) -> ExactSums:
    """Sum float32 values and their squares exactly.

    Values of equal sign and exponent share a unit, so their fractions are summed as int64 by one indexed
    addition; only the up to 510 sums per group, not the values, become Python integers.

    Args:
        values: float32 of shape (samples,), on the CPU.
        groups: int64 of the same shape, each 0 <= group < group_count; None puts all values into group 0.
        group_count: how many sums to make.

    Raises:
        UsageError: the values are not float32.
    """
    if values.dtype != torch.float32:
        raise UsageError(f"exact sums are made of float32 values, found {values.dtype}: cast with .float()")
    sums = [0] * group_count
    square_sums = [0] * group_count
    has_nonfinite = False
    bins = _PATTERNS * group_count
    for start in range(0, len(values), _PIECE):
        bits = values[start : start + _PIECE].view(torch.int32)
        index = (bits >> _FRACTION_BITS).bitwise_and_(_PATTERNS - 1).to(torch.int64)
        if groups is not None:
            index.add_(groups[start : start + _PIECE], alpha=_PATTERNS)
        fraction = bits.bitwise_and(_FRACTION_MASK).to(torch.int64)
        table = torch.zeros((3, bins), dtype=torch.int64)
        table[0] = torch.bincount(index, minlength=bins)
        table[1].index_add_(0, index, fraction)
        table[2].index_add_(0, index, fraction.mul_(fraction))
        occupied = table[0].nonzero().squeeze(1)
        rows = table.index_select(1, occupied).tolist()
        for pattern, count, first, second in zip(occupied.tolist(), *rows, strict=True):
            exponent = pattern & _EXPONENT_MASK
            if exponent == _EXPONENT_MASK:
                has_nonfinite = True
                continue
            shift = 0
            if exponent:
                # A normal value is (2**23 + fraction) units of its exponent; a subnormal one has no 2**23.
                shift = exponent - 1
                second += (first << (_FRACTION_BITS + 1)) + (count << (2 * _FRACTION_BITS))
                first += count << _FRACTION_BITS
            group = pattern // _PATTERNS
            sums[group] += (-first if pattern & _SIGN else first) << shift
            square_sums[group] += second << (2 * shift)
    return ExactSums(
        sums=sums,
        square_sums=square_sums,
        nonfinite=_count_nonfinite(values) if has_nonfinite else (0, 0, 0),
    )


def _count_nonfinite(values: Tensor) -> tuple[int, int, int]:
    return (
        int(values.isnan().sum()),
        int((values == math.inf).sum()),
        int((values == -math.inf).sum()),
    )


def nonfinite_counts(slots: Sequence[int]) -> dict[str, int]:
    """The three non-finite counters by name, or an empty dict where all are zero."""
    return dict(zip(NONFINITE_KINDS, slots, strict=True)) if any(slots) else {}


def from_limbs(limbs: Sequence[int]) -> int:
    """The integer that limbs stand for, whether or not their carries were propagated."""
    return sum(limb << (_LIMB_BITS * place) for place, limb in enumerate(limbs))


def to_limbs(value: int, count: int) -> list[int]:
    """An integer as ``count`` limbs, lowest first: each in [0, 2**32), the top one signed.

    2**30 such limbs add up to less than 2**62, so ledgers are merged by plain int64 addition.
    """
    limbs = [(value >> (_LIMB_BITS * place)) & _LIMB_MASK for place in range(count - 1)]
    return [*limbs, value >> (_LIMB_BITS * (count - 1))]


def units_of_double(value: float) -> int:
    """A finite float64 as an integer times 2**-1074."""
    numerator, denominator = value.as_integer_ratio()
    # A power of two, 2**1074 at most.
    return numerator << (DOUBLE_UNIT_BITS + 1 - denominator.bit_length())


def _exact_sums_of_doubles(values: Tensor) -> ExactSums:
    if values.dtype != torch.float64:
        raise UsageError(f"these exact sums are made of float64 values, found {values.dtype}: use .double()")
    finite = values.isfinite()
    terms = [units_of_double(value) for value in values[finite].tolist()]
    return ExactSums(
        sums=[sum(terms)],
        square_sums=[sum(term * term for term in terms)],
        nonfinite=(0, 0, 0) if finite.all() else _count_nonfinite(values),
    )


def _square_root(value: Fraction) -> float:
    """Of a rational number that may itself be beyond a float64."""
    if value == 0:
        return 0.0
    shift = (value.numerator.bit_length() - value.denominator.bit_length()) // 2
    return math.ldexp(math.sqrt(value / Fraction(4) ** shift), shift)


class ExactMean:
    """The mean of a float column, equal to ``factor * math.fsum(values) / N`` to the last bit.

    Its 95 % interval is mean ± 1.959963984540054 * sqrt(s**2 / N), the normal approximation, with s**2 the
    sample variance (divisor N - 1) from the exact integers: s**2 / N is rounded once. N < 2 has none.
    With any NaN or infinity in the column the value is None and the three counts are given.

    Ledger: the number of samples, the counts of NaN, +inf and -inf, the limbs of the sum, of the squares: 10
    and 20 for float32; 67 and 133 for float64, whose sums are made in Python, about 1 us a value.

    Args:
        name: the key of the value.
        column: the column's name.
        dtype: the column's, float32 or float64.
        factor: of value and interval: 100 for percent.
    """

    def __init__(
        self, name: str, column: str, dtype: torch.dtype = torch.float32, factor: float = 1.0
    ) -> None:
        self.name = name
        self.column = column
        self.columns = (column,)
        self._factor = factor
        self._sum: Callable[[Tensor], ExactSums] = exact_sums
        self._unit_bits, self._limbs = SUM_UNIT_BITS, (SUM_LIMBS, SQUARE_LIMBS)
        if dtype == torch.float64:
            self._sum = _exact_sums_of_doubles
            self._unit_bits, self._limbs = DOUBLE_UNIT_BITS, (DOUBLE_SUM_LIMBS, _DOUBLE_SQUARE_LIMBS)
        self.size = 1 + len(NONFINITE_KINDS) + sum(self._limbs)

    def update(self, ledger: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Add the samples of the column.

        Raises:
            UsageError: the column is not of the metric's dtype.
        """
        values = columns[self.column]
        added = self._sum(values)
        count, nonfinite, total, squares = self._read(ledger)
        slots = [
            count + len(values),
            *(before + new for before, new in zip(nonfinite, added.nonfinite, strict=True)),
            *to_limbs(total + added.sums[0], self._limbs[0]),
            *to_limbs(squares + added.square_sums[0], self._limbs[1]),
        ]
        ledger.copy_(torch.tensor(slots, dtype=torch.int64))

    def compute(self, ledger: Tensor) -> Measured:
        """The mean under the metric's name, and its interval."""
        count, nonfinite, total, squares = self._read(ledger)
        if any(nonfinite):
            return Measured(values={self.name: None}, nonfinite={self.name: nonfinite_counts(nonfinite)})
        if count == 0:
            return Measured(values={self.name: None})
        # Python's int / int rounds correctly; the sum is rounded before the division, as fsum does it.
        mean = self._factor * (total / (1 << self._unit_bits)) / count
        if count < 2:
            return Measured(values={self.name: mean})
        spread = Fraction(
            count * squares - total * total, count * count * (count - 1) << (2 * self._unit_bits)
        )
        half_width = self._factor * (NORMAL_95 * _square_root(spread))
        return Measured(
            values={self.name: mean}, intervals={self.name: (mean - half_width, mean + half_width)}
        )

    def _read(self, ledger: Tensor) -> tuple[int, list[int], int, int]:
        """Sample count, non-finite counts, sum in its units, sum of squares in theirs."""
        slots: list[int] = ledger.tolist()
        limbs = 1 + len(NONFINITE_KINDS)
        return (
            slots[0],
            slots[1:limbs],
            from_limbs(slots[limbs : limbs + self._limbs[0]]),
            from_limbs(slots[limbs + self._limbs[0] :]),
        )
