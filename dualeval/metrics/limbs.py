"""Exact sums of many floats side by side: what ``exact`` does for one column, for every element of a tensor.

A sum is a fixed-point integer of 32-bit limbs, lowest first, as in ``exact``: float64 values, and float32
ones too, count units of 2**-1074 in 67 limbs. Before them stand the counts of NaN, +inf and -inf.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dualeval.metrics.exact import DOUBLE_SUM_LIMBS, DOUBLE_UNIT_BITS, NONFINITE_KINDS, from_limbs

_LIMB_BITS = 32
_LIMB_MASK = (1 << _LIMB_BITS) - 1
# A piece of a fraction, shifted by less than a limb, has less than 63 bits.
_PIECE_BITS = 24
_PIECE_MASK = (1 << _PIECE_BITS) - 1
_COUNTS = len(NONFINITE_KINDS)
# Slots of the ledger for one sum.
SUM_SLOTS = _COUNTS + DOUBLE_SUM_LIMBS
# Of a float64, without the leading one.
_FRACTION_BITS = 52
_EXPONENT_MASK = 0x7FF


def add_exactly(slots: Tensor, values: Tensor) -> None:
    """Add one value to each of several sums, in place."""
    slots[:, 0] += values.isnan()
    slots[:, 1] += values == math.inf
    slots[:, 2] += values == -math.inf
    values = values.to(torch.float64).masked_fill(~values.isfinite(), 0.0)
    pattern = values.view(torch.int64)
    exponent = (pattern >> _FRACTION_BITS) & _EXPONENT_MASK
    fraction = pattern & ((1 << _FRACTION_BITS) - 1)
    # A normal value has a leading one; a subnormal one the unit of the smallest exponent.
    fraction = torch.where(exponent > 0, fraction | (1 << _FRACTION_BITS), fraction)
    fraction = torch.where(pattern < 0, -fraction, fraction)
    unit = (exponent - 1).clamp_(min=0)
    limbs = slots[:, _COUNTS:]
    sign, fraction = fraction.sign(), fraction.abs()
    for offset in range(0, _FRACTION_BITS + 1, _PIECE_BITS):
        piece = (fraction >> offset) & _PIECE_MASK
        place, shift = (unit + offset) // _LIMB_BITS, (unit + offset) % _LIMB_BITS
        piece = piece << shift
        # The top limb is far above any value's: its place holds the sign and the carries alone.
        limbs.scatter_add_(1, place[:, None], (sign * (piece & _LIMB_MASK))[:, None])
        limbs.scatter_add_(1, place[:, None] + 1, (sign * (piece >> _LIMB_BITS))[:, None])
    _carry(limbs)


def _carry(limbs: Tensor) -> None:
    """Bring every limb but the last one into [0, 2**32): one sum, one pattern of bits."""
    while True:
        carries = limbs[:, :-1] >> _LIMB_BITS  # floors, and so borrows for a negative limb
        if not carries.any():
            return
        limbs[:, :-1] &= _LIMB_MASK
        limbs[:, 1:] += carries


def rounded_sums(slots: Tensor) -> Tensor:
    """The sums as float64, each rounded once, of shape (sums,): also NaN and infinities, as IEEE arithmetic
    has them.
    """
    return torch.tensor([_rounded(row) for row in slots.tolist()], dtype=torch.float64)


def _rounded(row: list[int]) -> float:
    nan, positive, negative = row[:_COUNTS]
    if nan or (positive and negative):
        return math.nan
    if positive or negative:
        return math.inf if positive else -math.inf
    total = from_limbs(row[_COUNTS:])
    try:
        return total / (1 << DOUBLE_UNIT_BITS)  # Python's int / int rounds correctly
    except OverflowError:
        return math.inf if total > 0 else -math.inf
