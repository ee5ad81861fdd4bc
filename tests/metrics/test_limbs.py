"""Exact sums side by side: of every float64, against Python's rational numbers."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from dualeval.metrics.limbs import SUM_SLOTS, add_exactly, rounded_sums


def summed(rows: list[Tensor]) -> Tensor:
    slots = torch.zeros(len(rows[0]), SUM_SLOTS, dtype=torch.int64)
    for row in rows:
        add_exactly(slots, row)
    return slots


def drawn(count: int) -> list[Tensor]:
    """Values over all exponents, subnormal ones among them, of both signs."""
    draw = torch.Generator().manual_seed(3)
    rows = []
    for _ in range(count):
        exponents = torch.randint(-1075, 1022, (4,), generator=draw).tolist()
        fractions = (torch.rand(4, generator=draw, dtype=torch.float64) - 0.5).tolist()
        values = [math.ldexp(part, power) for part, power in zip(fractions, exponents, strict=True)]
        rows.append(torch.tensor(values, dtype=torch.float64))
    return rows


def test_sums_are_rounded_once() -> None:
    rows = drawn(60)
    slots = summed(rows)
    for place, found in enumerate(rounded_sums(slots).tolist()):
        assert found == float(sum((Fraction(float(row[place])) for row in rows), Fraction(0)))


def test_one_sum_has_one_pattern_of_bits() -> None:
    rows = drawn(40)
    slots = summed(rows)
    assert torch.equal(slots, summed(rows[::-1]))
    limbs = slots[:, 3:-1]
    assert bool(((limbs >= 0) & (limbs < 2**32)).all())
    cancelled = summed([*rows, *(-row for row in rows)])
    assert not cancelled.any()


def test_ledgers_add_up() -> None:
    rows = drawn(40)
    both = summed(rows[:13]) + summed(rows[13:])
    assert torch.equal(rounded_sums(both), rounded_sums(summed(rows)))


def test_extremes() -> None:
    limits = torch.finfo(torch.float64)
    values = [limits.max, limits.smallest_normal, 5e-324, -0.0]
    rows = 3 * [torch.tensor(values, dtype=torch.float64)]
    found = rounded_sums(summed(rows))
    wanted = [3 * Fraction(float(value)) for value in rows[0]]
    assert found.tolist() == [math.inf, *(float(value) for value in wanted[1:])]


def test_what_is_not_finite_stays_so() -> None:
    rows = [
        torch.tensor([math.nan, math.inf, -math.inf, math.inf]),
        torch.tensor([1.0, 1.0, 1.0, -math.inf]),
    ]
    found = rounded_sums(summed(rows)).tolist()
    assert math.isnan(found[0]) and math.isnan(found[3])
    assert found[1:3] == [math.inf, -math.inf]
    assert summed(rows)[:, :3].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 1, 1]]
