"""The exact sums, against math.fsum and rational arithmetic."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dualeval.errors import UsageError
from dualeval.metrics import Mean, Measured, Metric
from dualeval.metrics.exact import (
    DOUBLE_CUBE_LIMBS,
    DOUBLE_PRODUCT_LIMBS,
    DOUBLE_SUM_LIMBS,
    exact_sums,
    from_limbs,
    to_limbs,
)

LARGEST = 3.4028234663852886e38  # of the float32 numbers
SMALLEST = 2.0**-149

finite_float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def float32(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def random_bits(count: int, seed: int) -> Tensor:
    """Finite float32 values of every exponent and both signs, subnormal ones among them."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64).to(torch.int32)
    values = bits.view(torch.float32)
    return values[values.isfinite()]


def ledger_of(metric: Metric, *parts: Tensor) -> Tensor:
    ledger = torch.zeros(metric.size, dtype=torch.int64)
    for part in parts:
        metric.update(ledger, {"loss": part})
    return ledger


def measure(*parts: Tensor) -> Measured:
    metric = Mean("loss")
    return metric.compute(ledger_of(metric, *parts))


def assert_same_bits(found: object, expected: float) -> None:
    assert isinstance(found, float)
    assert struct.pack("<d", found) == struct.pack("<d", expected), (found, expected)


@settings(max_examples=200, deadline=None)
@given(st.lists(finite_float32, max_size=40))
def test_sums_are_the_rational_sums(values: list[float]) -> None:
    sums = exact_sums(float32(values))
    assert Fraction(sums.sums[0], 2**149) == sum((Fraction(value) for value in values), Fraction())
    assert Fraction(sums.square_sums[0], 2**298) == sum(
        (Fraction(value) ** 2 for value in values), Fraction()
    )
    assert Fraction(sums.cube_sums[0], 2**447) == sum((Fraction(value) ** 3 for value in values), Fraction())
    assert sums.nonfinite == (0, 0, 0)
    alone = exact_sums(float32(values), powers=False)
    assert (alone.sums, alone.square_sums, alone.cube_sums) == (sums.sums, [0], [0])


@pytest.mark.parametrize(
    "values",
    [
        [LARGEST, 1.0, -LARGEST],
        [LARGEST, SMALLEST, -LARGEST],
        [-LARGEST, -LARGEST, SMALLEST],
        [SMALLEST, SMALLEST, -SMALLEST, 2.0**-126, -(2.0**-126 - SMALLEST)],
        [0.0, -0.0],
        [-0.0],
        [1.0, 2.0**-24, 2.0**-53, 2.0**-77],
        [-1.0],
    ],
)
def test_hard_sums(values: list[float]) -> None:
    assert_same_bits(measure(float32(values)).values["loss"], math.fsum(values) / len(values))


def test_many_values_of_every_exponent() -> None:
    values = random_bits(300_000, seed=1)  # more than the values summed at once
    as_list = values.tolist()
    assert_same_bits(measure(values).values["loss"], math.fsum(as_list) / len(as_list))


def test_full_pieces_of_the_largest_fraction_do_not_overflow() -> None:
    values = torch.full((2**17 + 5,), -LARGEST)
    sums = exact_sums(values)
    assert sums.sums == [int(-LARGEST) * len(values) * 2**149]
    assert sums.square_sums == [int(LARGEST) ** 2 * len(values) * 2**298]
    assert sums.cube_sums == [int(-LARGEST) ** 3 * len(values) * 2**447]


def test_groups_are_summed_apart() -> None:
    values = random_bits(2_000, seed=2)
    groups = torch.arange(len(values)) % 7
    together = exact_sums(values, groups, 8)
    for group in range(7):
        alone = exact_sums(values[groups == group])
        assert together.sums[group] == alone.sums[0]
        assert together.square_sums[group] == alone.square_sums[0]
        assert together.cube_sums[group] == alone.cube_sums[0]
    assert together.sums[7] == 0


def test_no_samples_and_one_sample() -> None:
    for nothing in (measure(), measure(float32([]))):
        assert (nothing.values, nothing.intervals) == ({"loss": None}, {})
    alone = measure(float32([2.5]))
    assert alone.values == {"loss": 2.5}
    assert alone.warnings == ("loss has no interval: it is of one sample",)


def test_nonfinite_values_are_counted_and_never_summed() -> None:
    values = float32([1.0, math.nan, math.inf, -math.inf, math.inf, -math.nan])
    metric = Mean("loss")
    ledger = ledger_of(metric, values)
    assert replace(metric.compute(ledger), scores={}) == Measured(
        values={"loss": None}, nonfinite={"loss": {"nan": 2, "pos_inf": 2, "neg_inf": 1}}
    )
    assert ledger[:5].tolist() == [6, 0, 2, 2, 1]
    assert torch.equal(ledger[5:], ledger_of(metric, float32([1.0]))[5:])


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(width=32), min_size=1, max_size=40),
    st.lists(st.integers(0, 3), min_size=40, max_size=40),
    st.randoms(use_true_random=False),
)
def test_any_partition_and_order_give_the_same_result(
    values: list[float], owners: list[int], random: Random
) -> None:
    metric = Mean("loss")
    whole = metric.compute(ledger_of(metric, float32(values)))
    shuffled = list(zip(values, owners, strict=False))
    random.shuffle(shuffled)
    merged = torch.zeros(metric.size, dtype=torch.int64)
    for rank in range(4):
        shard = [value for value, owner in shuffled if owner == rank]
        merged += ledger_of(metric, float32(shard[::2]), float32(shard[1::2]))
    assert metric.compute(merged) == whole


def test_limbs_after_an_update_are_normalised() -> None:
    metric = Mean("loss")
    for sign in (1.0, -1.0):
        ledger = ledger_of(metric, *[torch.full((1_000,), sign * LARGEST) for _ in range(3)])
        limbs = torch.split(ledger[5:], [DOUBLE_SUM_LIMBS, DOUBLE_PRODUCT_LIMBS, DOUBLE_CUBE_LIMBS])
        for part in limbs:
            assert bool(((part[:-1] >= 0) & (part[:-1] < 2**32)).all())
            assert -(2**31) <= int(part[-1]) < 2**31


def test_a_billion_ledgers_add_up_without_overflow() -> None:
    metric = Mean("loss")
    values = random_bits(1_000, seed=4)
    ledger = ledger_of(metric, values)
    merged = ledger * 2**30
    assert_same_bits(metric.compute(merged).values["loss"], math.fsum(values.tolist()) / len(values))
    metric.update(merged, {"loss": values})  # and such a sum can be added to
    assert_same_bits(metric.compute(merged).values["loss"], math.fsum(values.tolist()) / len(values))


@given(st.integers(-(2**600), 2**600))
def test_limbs_round_trip(value: int) -> None:
    assert from_limbs(to_limbs(value, DOUBLE_PRODUCT_LIMBS)) == value


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(UsageError, match=r"float32 values, found torch\.float64"):
        exact_sums(torch.zeros(3, dtype=torch.float64))


def test_strided_columns_are_read_right() -> None:
    values = random_bits(500, seed=5)
    table = torch.stack([values, values.flip(0)], dim=1)
    assert measure(table[:, 0]) == measure(values)
