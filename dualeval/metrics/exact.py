"""Exact sums of numbers, their squares, cubes and products, held as integers and rounded once at the end.

Every finite float32 is an integer times 2**-149, its square an integer times 2**-298, its cube one times
2**-447; a float64 likewise, with 2**-1074, 2**-2148 and 2**-3222. A sum of such integers does not depend on
the order of its terms. In the ledger it lies as limbs: a fixed-point number with 32 bits to an int64 slot,
lowest first, so that ledgers can be added before any carry is propagated (Kulisch's long accumulator;
U. Kulisch, "Computer Arithmetic and Validity", 2013, chapter 8).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualeval.errors import UsageError

# The largest float32 is below 2**277 units: 9 limbs, and one above them for the sign and 2**43 terms.
SUM_LIMBS = 10
SUM_UNIT_BITS = 149
# The largest float64 is below 2**2098 units, its square below 2**4196, its cube below 2**6294; likewise.
DOUBLE_SUM_LIMBS = 67
DOUBLE_PRODUCT_LIMBS = 133
DOUBLE_CUBE_LIMBS = 198
DOUBLE_UNIT_BITS = 1074

NONFINITE_KINDS = ("nan", "pos_inf", "neg_inf")
# Of one sum of floats with its counts of what is not finite, as ``add_each`` takes it.
SUM_SLOTS = len(NONFINITE_KINDS) + DOUBLE_SUM_LIMBS

_LIMB_BITS = 32
_LIMB_MASK = (1 << _LIMB_BITS) - 1
_FRACTION_BITS = 23
_FRACTION_MASK = (1 << _FRACTION_BITS) - 1
_EXPONENT_MASK = 0xFF
_SIGN = 0x100
_PATTERNS = 0x200  # sign and exponent together
_PIECE = 1 << 17  # a squared fraction is below 2**46: so many of them stay below 2**63
# So many fractions add up to less than 2**40, and their number stands above that.
_COUNT_PLACE = 40

_DOUBLE_FRACTION_BITS = 52
_DOUBLE_EXPONENT_MASK = 0x7FF
# A fraction of 53 bits has three digits. Up to three products of two of them stay below 2**38, and a
# piece of these below 2**62.
_DIGIT_BITS = 18
_DIGIT_MASK = (1 << _DIGIT_BITS) - 1
_DOUBLE_PIECE = 1 << 24
_WHOLE_DOUBLES = 1 << 53  # integers up to here are float64 numbers


@dataclass(frozen=True, kw_only=True)
class ExactSums:
    """Exact sums of float32 values, by group."""

    # Per group, the sum of the finite values in units of 2**-149.
    sums: list[int]
    # Per group, the sum of their squares in units of 2**-298; 0 where only sums were made.
    square_sums: list[int]
    # Likewise, the sum of their cubes in units of 2**-447.
    cube_sums: list[int]
    # Over all groups, how many values were NaN, +inf and -inf; they are in no sum.
    nonfinite: tuple[int, int, int]


def exact_sums(
    values: Tensor, groups: Tensor | None = None, group_count: int = 1, *, powers: bool = True
) -> ExactSums:
    """Sum float32 values, their squares and cubes exactly.

    Values of equal sign and exponent share a unit, so their fractions are summed as int64 by indexed
    additions; only the up to 510 sums per group, not the values, become Python integers.
    """
    if values.dtype != torch.float32:
        raise UsageError(f"exact sums are made of float32 values, found {values.dtype}: cast with .float()")
    sums, square_sums, cube_sums = [[0] * group_count for _ in range(3)]
    has_nonfinite = False
    for start in range(0, len(values), _PIECE):
        piece = slice(start, start + _PIECE)
        tables = _fraction_sums(
            values[piece].view(torch.int32), None if groups is None else groups[piece], group_count, powers
        )
        for pattern, count, first, second, third in zip(*tables, strict=True):
            exponent = pattern & _EXPONENT_MASK
            if exponent == _EXPONENT_MASK:
                has_nonfinite = True
                continue
            shift = 0
            if exponent:
                # A normal value is (2**23 + fraction) units of its exponent; a subnormal one has no 2**23.
                shift = exponent - 1
                third += 3 * ((second << _FRACTION_BITS) + (first << 2 * _FRACTION_BITS))
                third += count << 3 * _FRACTION_BITS
                second += (first << (_FRACTION_BITS + 1)) + (count << (2 * _FRACTION_BITS))
                first += count << _FRACTION_BITS
            sign = -1 if pattern & _SIGN else 1
            group = pattern // _PATTERNS
            sums[group] += sign * first << shift
            square_sums[group] += second << (2 * shift)
            cube_sums[group] += sign * third << (3 * shift)
    return ExactSums(
        sums=sums,
        square_sums=square_sums if powers else [0] * group_count,
        cube_sums=cube_sums if powers else [0] * group_count,
        nonfinite=count_nonfinite(values) if has_nonfinite else (0, 0, 0),
    )


def _fraction_sums(
    bits: Tensor, groups: Tensor | None, group_count: int, powers: bool
) -> tuple[list[int], list[int], list[int], list[int], list[int]]:
    """Of at most 2**17 values: the patterns of group, sign and exponent that occur, how often each does, and
    the sums of their fractions, of the fractions' squares and of their cubes."""
    index = (bits >> _FRACTION_BITS).bitwise_and_(_PATTERNS - 1).to(torch.int64)
    if groups is not None:
        index.add_(groups, alpha=_PATTERNS)
    fraction = bits.bitwise_and(_FRACTION_MASK).to(torch.int64)
    table = torch.zeros((4 if powers else 1, _PATTERNS * group_count), dtype=torch.int64)
    table[0].index_add_(0, index, fraction | (1 << _COUNT_PLACE))
    if powers:
        square = fraction * fraction
        table[1].index_add_(0, index, square)
        # A cube has 69 bits: it is summed in two parts of 46.
        table[2].index_add_(0, index, square.bitwise_and(_FRACTION_MASK).mul_(fraction))
        table[3].index_add_(0, index, square.bitwise_right_shift_(_FRACTION_BITS).mul_(fraction))
    occupied = table[0].nonzero().squeeze(1)
    first, *rest = table.index_select(1, occupied).tolist()
    counts = [both >> _COUNT_PLACE for both in first]
    first = [both & ((1 << _COUNT_PLACE) - 1) for both in first]
    if not powers:
        return occupied.tolist(), counts, first, [0] * len(first), [0] * len(first)
    second, low, high = rest
    third = [below + (above << _FRACTION_BITS) for below, above in zip(low, high, strict=True)]
    return occupied.tolist(), counts, first, second, third


def count_nonfinite(values: Tensor) -> tuple[int, int, int]:
    """How many of some floats are NaN, +inf and -inf."""
    return (int(values.isnan().sum()), int((values == math.inf).sum()), int((values == -math.inf).sum()))


def nonfinite_counts(slots: Sequence[int]) -> dict[str, int]:
    """The three non-finite counters by name, or an empty dict where all are zero."""
    return dict(zip(NONFINITE_KINDS, slots, strict=True)) if any(slots) else {}


def from_limbs(limbs: Sequence[int] | npt.NDArray[np.int64]) -> int:
    """The integer that limbs stand for, whether or not their carries were propagated."""
    slots = np.asarray(limbs, np.int64)
    value = int.from_bytes((slots & _LIMB_MASK).astype("<u4").tobytes(), "little")
    carries = slots >> _LIMB_BITS
    for place in np.flatnonzero(carries).tolist():
        value += int(carries[place]) << (_LIMB_BITS * (place + 1))
    return value


def to_limbs(value: int, count: int) -> npt.NDArray[np.int64]:
    """An integer as ``count`` limbs, lowest first: each in [0, 2**32), the top one signed.

    2**30 such limbs add up to less than 2**62, so ledgers are merged by plain int64 addition.
    """
    below = _LIMB_BITS * (count - 1)
    top = value >> below
    limbs = np.empty(count, np.int64)
    limbs[:-1] = np.frombuffer((value - (top << below)).to_bytes(below // 8, "little"), "<u4")
    limbs[-1] = top
    return limbs


def units_of_double(value: float) -> int:
    """A finite float64 as an integer times 2**-1074."""
    numerator, denominator = value.as_integer_ratio()
    # A power of two, 2**1074 at most.
    return numerator << (DOUBLE_UNIT_BITS + 1 - denominator.bit_length())


def add_each(slots: Tensor, values: Tensor) -> None:
    """Add a float to each of several sums, in place: rows of counts of NaN, +inf and -inf, and of limbs."""
    for row, value in zip(slots.numpy(), values.tolist(), strict=True):
        if math.isfinite(value):
            limbs = row[len(NONFINITE_KINDS) :]
            limbs[:] = to_limbs(from_limbs(limbs) + units_of_double(value), DOUBLE_SUM_LIMBS)
        else:
            row[0 if math.isnan(value) else 1 if value > 0 else 2] += 1


def each_rounded(slots: Tensor) -> Tensor:
    """Such sums as float64, each rounded once; NaN and infinities as IEEE arithmetic has them."""
    return torch.tensor([_rounded(row) for row in slots.tolist()], dtype=torch.float64)


def _rounded(row: list[int]) -> float:
    nan, positive, negative, *limbs = row
    if nan or (positive and negative):
        return math.nan
    if positive or negative:
        return math.inf if positive else -math.inf
    total = from_limbs(limbs)
    try:
        return total / (1 << DOUBLE_UNIT_BITS)  # Python's int / int rounds correctly
    except OverflowError:
        return math.inf if total > 0 else -math.inf


@dataclass(frozen=True, kw_only=True)
class _Doubles:
    """Finite float64 values as fractions of 53 bits, times 2**(shift - 1074)."""

    # Int64 of shape (values,), 0 to 2045.
    shift: Tensor
    # The fractions' 18 bits from below, the next 18 and the rest, with the fraction's sign.
    digits: tuple[Tensor, Tensor, Tensor]


class ExactColumn:
    """Finite numbers, one a sample, whose sums and sums of products are exact."""

    def __init__(self, values: Tensor) -> None:
        # Integers that are no float64 number are the sum of two that are.
        terms = [values]
        if values.dtype == torch.int64 and len(values) and _largest(values) > _WHOLE_DOUBLES:
            terms = [values >> _LIMB_BITS << _LIMB_BITS, values & _LIMB_MASK]
        self._terms = [_split(term.to(torch.float64)) for term in terms]

    def total(self) -> int:
        """The sum, in units of 2**-1074."""
        return sum(_collect(term.shift, term.digits) for term in self._terms)

    def dot(self, other: ExactColumn) -> int:
        """The sum of the products with another column of the same samples, in units of 2**-2148."""
        return sum(
            _collect(one.shift + two.shift, _products(one.digits, two.digits))
            for one in self._terms
            for two in other._terms
        )

    def dots(self, other: ExactColumn, third: ExactColumn) -> int:
        """The sum of the products with two other columns of the same samples, in units of 2**-3222."""
        return sum(
            _collect(
                one.shift + two.shift + three.shift,
                _products(_carried(_products(one.digits, two.digits)), three.digits),
            )
            for one in self._terms
            for two in other._terms
            for three in third._terms
        )


def _largest(values: Tensor) -> int:
    # The absolute value of -2**63 does not fit int64.
    least, most = torch.aminmax(values)
    return max(-int(least), int(most))


def _split(values: Tensor) -> _Doubles:
    bits = values.view(torch.int64)
    exponent = (bits >> _DOUBLE_FRACTION_BITS).bitwise_and_(_DOUBLE_EXPONENT_MASK)
    fraction = bits & ((1 << _DOUBLE_FRACTION_BITS) - 1)
    # A subnormal value has no 2**52, and the unit of the smallest normal ones.
    fraction += (exponent > 0).to(torch.int64) << _DOUBLE_FRACTION_BITS
    fraction = torch.where(bits < 0, -fraction, fraction)
    return _Doubles(
        shift=exponent.sub_(1).clamp_(min=0),
        digits=(fraction & _DIGIT_MASK, (fraction >> _DIGIT_BITS) & _DIGIT_MASK, fraction >> 2 * _DIGIT_BITS),
    )


def _products(one: Sequence[Tensor], two: Sequence[Tensor]) -> list[Tensor]:
    """The products of numbers that are given in digits of 18 bits, in such digits before their carries."""
    products: list[Tensor] = []
    for place in range(len(one) + len(two) - 1):
        pairs = [(a, place - a) for a in range(len(one)) if 0 <= place - a < len(two)]
        [(a, b), *others] = pairs
        digit = one[a] * two[b]
        for a, b in others:
            digit.addcmul_(one[a], two[b])
        products.append(digit)
    return products


def _carried(digits: Sequence[Tensor]) -> list[Tensor]:
    """The same numbers with digits of 18 bits, and one digit more, which has the sign.

    Of a product of two fractions this last one has at most 16 bits: no digit of a product of three is larger
    than one of two.
    """
    carried = []
    carry: Tensor | int = 0
    for digit in digits:
        digit = digit + carry
        carried.append(digit & _DIGIT_MASK)
        carry = digit >> _DIGIT_BITS
    assert isinstance(carry, Tensor)
    return [*carried, carry]


def _collect(shifts: Tensor, digits: Sequence[Tensor]) -> int:
    """The sum of the numbers whose bits from 18 * place on are in ``digits[place]``, times 2**shift.

    Digits of equal shift are summed as int64 by one indexed addition; only these sums become Python integers.
    """
    total = 0
    for start in range(0, len(shifts), _DOUBLE_PIECE):
        piece = slice(start, start + _DOUBLE_PIECE)
        least, most = map(int, torch.aminmax(shifts[piece]))
        index = shifts[piece] - least
        table = torch.zeros((len(digits), most - least + 1), dtype=torch.int64)
        for row, digit in zip(table, digits, strict=True):
            row.index_add_(0, index, digit[piece])
        occupied = table.any(dim=0).nonzero().squeeze(1)
        for place, sums in zip(occupied.tolist(), table[:, occupied].t().tolist(), strict=True):
            number = sum(digit << (_DIGIT_BITS * at) for at, digit in enumerate(sums))
            total += number << (least + place)
    return total
