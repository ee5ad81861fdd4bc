"""Exact sums side by side: of every float32 and float64, against Python's rational numbers."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from dualeval.metrics.limbs import DOUBLE_SUMS, FLOAT_SUMS, SumKind, add_exactly, rounded_sums

KINDS = pytest.mark.parametrize("kind", [FLOAT_SUMS, DOUBLE_SUMS], ids=["float32", "float64"])


def summed(rows: list[Tensor], kind: SumKind) -> Tensor:
    slots = torch.zeros(len(rows[0]), kind.slots, dtype=torch.int64)
    for row in rows:
        add_exactly(slots, row.to(kind.dtype), kind)
    return slots


def drawn(kind: SumKind, count: int) -> list[Tensor]:
    """Values over all exponents, subnormal ones among them, of both signs."""
    draw = torch.Generator().manual_seed(3)
    low, high = (-150, 127) if kind is FLOAT_SUMS else (-1075, 1022)
    rows = []
    for _ in range(count):
        exponents = torch.randint(low, high, (4,), generator=draw).tolist()
        fractions = (torch.rand(4, generator=draw, dtype=torch.float64) - 0.5).tolist()
        values = [math.ldexp(part, power) for part, power in zip(fractions, exponents, strict=True)]
        rows.append(torch.tensor(values, dtype=torch.float64).to(kind.dtype))
    return rows


@KINDS
def test_sums_are_rounded_once(kind: SumKind) -> None:
    rows = drawn(kind, 60)
    slots = summed(rows, kind)
    for place, found in enumerate(rounded_sums(slots, kind).tolist()):
        assert found == float(sum((Fraction(float(row[place])) for row in rows), Fraction(0)))


@KINDS
def test_one_sum_has_one_pattern_of_bits(kind: SumKind) -> None:
    rows = drawn(kind, 40)
    slots = summed(rows, kind)
    assert torch.equal(slots, summed(rows[::-1], kind))
    limbs = slots[:, 3:-1]
    assert bool(((limbs >= 0) & (limbs < 2**32)).all())
    cancelled = summed([*rows, *(-row for row in rows)], kind)
    assert not cancelled.any()


@KINDS
def test_ledgers_add_up(kind: SumKind) -> None:
    rows = drawn(kind, 40)
    both = summed(rows[:13], kind) + summed(rows[13:], kind)
    assert torch.equal(rounded_sums(both, kind), rounded_sums(summed(rows, kind), kind))


@KINDS
def test_extremes(kind: SumKind) -> None:
    limits = torch.finfo(kind.dtype)
    tiny = 5e-324 if kind is DOUBLE_SUMS else 1e-45
    values = [limits.max, limits.smallest_normal, tiny, -0.0]
    rows = 3 * [torch.tensor(values, dtype=torch.float64).to(kind.dtype)]
    found = rounded_sums(summed(rows, kind), kind)
    wanted = [3 * Fraction(float(value)) for value in rows[0]]
    largest = math.inf if kind is DOUBLE_SUMS else float(wanted[0])
    assert found.tolist() == [largest, *(float(value) for value in wanted[1:])]


@KINDS
def test_what_is_not_finite_stays_so(kind: SumKind) -> None:
    rows = [
        torch.tensor([math.nan, math.inf, -math.inf, math.inf]),
        torch.tensor([1.0, 1.0, 1.0, -math.inf]),
    ]
    found = rounded_sums(summed(rows, kind), kind).tolist()
    assert math.isnan(found[0]) and math.isnan(found[3])
    assert found[1:3] == [math.inf, -math.inf]
    assert summed(rows, kind)[:, :3].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 1, 1]]
