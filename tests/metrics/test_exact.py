"""The exact sums of float32 and float64, against math.fsum and rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dualeval.errors import UsageError
from dualeval.metrics import Mean, Measured
from dualeval.metrics.exact import (
    DOUBLE_CUBE_LIMBS,
    DOUBLE_PRODUCT_LIMBS,
    DOUBLE_SUM_LIMBS,
    ExactColumn,
    exact_sums,
    from_limbs,
    to_limbs,
)
from dualeval.metrics.intervals import student_95
from tests.vehicles.measuring import ledger_of, measure, same_bits

LARGEST_32, SMALLEST_32 = 3.4028234663852886e38, 2.0**-149
LARGEST = 1.7976931348623157e308
MEAN = Mean("x")
DTYPES = [torch.float32, torch.float64]
FINITE = {
    torch.float32: st.floats(width=32, allow_nan=False, allow_infinity=False),
    torch.float64: st.one_of(
        st.floats(-1.0, 1.0),
        st.floats(-(2.0**-1022), 2.0**-1022),
        st.sampled_from([5e-324, -5e-324, 2.0**-1022, 0.0, -0.0, 1e150, -1e150, 1 / 3]),
        st.floats(allow_nan=False, allow_infinity=False),
    ),
}


def column(values: list[float], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {"x": torch.tensor(values, dtype=dtype)}


def random_bits(count: int, seed: int) -> Tensor:
    """Finite float32 values of every exponent and both signs, subnormal ones among them."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64).to(torch.int32)
    values = bits.view(torch.float32)
    return values[values.isfinite()]


def limbs_of(ledger: Tensor) -> list[Tensor]:
    """Those of the sum, of the squares' and of the cubes'."""
    return list(torch.split(ledger[5:], [DOUBLE_SUM_LIMBS, DOUBLE_PRODUCT_LIMBS, DOUBLE_CUBE_LIMBS]))


def assert_holds_the_rational_sums(ledger: Tensor, values: list[float], times: int = 1) -> None:
    assert ledger[:5].tolist() == [times * len(values), 0, 0, 0, 0]
    for power, limbs in enumerate(limbs_of(ledger), 1):
        exact = sum((Fraction(value) ** power for value in values), Fraction())
        assert Fraction(from_limbs(limbs.tolist()), 2 ** (1074 * power)) == times * exact


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=100, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_ledgers_hold_the_rational_sums(dtype: torch.dtype, data: st.DataObject, seed: int) -> None:
    """However samples are split among updates and ranks; sums may exceed the largest float64."""
    values = data.draw(st.lists(FINITE[dtype], max_size=30))
    for random in (None, Random(seed)):
        assert_holds_the_rational_sums(ledger_of(MEAN, column(values, dtype), random), values)
    try:
        expected = math.fsum(values) / len(values) if values else None
    except OverflowError:  # no float64 is near enough
        return
    found = MEAN.compute(ledger_of(MEAN, column(values, dtype))).values["x"]
    assert found is None if expected is None else same_bits(found, expected)


def test_many_values_of_every_exponent_sum_exactly() -> None:
    values = random_bits(300_000, seed=1)  # more than the values summed at once
    found = MEAN.compute(ledger_of(MEAN, {"x": values})).values["x"]
    assert same_bits(found, math.fsum(values.tolist()) / len(values))


def test_full_pieces_of_the_largest_fractions_do_not_overflow() -> None:
    values = torch.full((2**17 + 5,), -LARGEST_32)
    sums = exact_sums(values)
    assert sums.sums == [int(-LARGEST_32) * len(values) * 2**149]
    assert sums.square_sums == [int(LARGEST_32) ** 2 * len(values) * 2**298]
    assert sums.cube_sums == [int(-LARGEST_32) ** 3 * len(values) * 2**447]
    doubles = ExactColumn(torch.full((2**20,), LARGEST, dtype=torch.float64))
    assert doubles.dot(doubles) == int(LARGEST) ** 2 * 2**20 * 2**2148
    for at, least in enumerate((LARGEST, -LARGEST)):
        same = ExactColumn(torch.full((2**15,), least, dtype=torch.float64))
        assert same.dots(same, same) == (-1) ** at * int(LARGEST) ** 3 * 2**15 * 2**3222


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
    without = exact_sums(values, groups, 8, powers=False)
    assert (without.sums, without.square_sums, without.cube_sums) == (together.sums, [0] * 8, [0] * 8)


def test_variance_survives_a_large_mean() -> None:
    # In float64, the mean of squares less the square of the mean is noise here.
    low, high = measure(MEAN, column([2.0**40, 2.0**40 + 1.0] * 50)).intervals["x"]
    # Of a mean without skewness it is Student's.
    assert high - low == pytest.approx(2 * student_95(99) * math.sqrt(0.25 / 99), abs=2.0**-11)
    low, high = measure(MEAN, column([1.0, 1.0 + 2.0**-52])).intervals["x"]
    assert low < 1.0 < high


def test_one_sample_has_no_interval() -> None:
    found = measure(MEAN, column([2.5]))
    assert (found.values, found.intervals) == ({"x": 2.5}, {})
    assert found.warnings == ("x has no interval: there is only one sample",)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_not_finite_are_counted_and_never_summed(dtype: torch.dtype) -> None:
    values = [1.0, math.nan, math.inf, -math.inf, math.inf, -math.nan, -2.5]
    nonfinite = {"x": {"nan": 2, "pos_inf": 2, "neg_inf": 1}}
    assert measure(MEAN, column(values, dtype)) == Measured(values={"x": None}, nonfinite=nonfinite)
    ledger = ledger_of(MEAN, column(values, dtype))
    assert ledger[:5].tolist() == [7, 0, 2, 2, 1]
    assert torch.equal(ledger[5:], ledger_of(MEAN, column([1.0, -2.5], dtype))[5:])
    one = measure(MEAN, column([1.0, math.inf], dtype))
    assert one == Measured(values={"x": None}, nonfinite={"x": {"nan": 0, "pos_inf": 1, "neg_inf": 0}})


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (torch.float32, [LARGEST_32] * 3000),
        (torch.float32, [-LARGEST_32] * 3000),
        (torch.float64, [LARGEST, -1.5, 5e-324, -LARGEST, 0.1, 1e-200, 3e200]),
    ],
)
def test_a_billion_ledgers_add_up(dtype: torch.dtype, values: list[float]) -> None:
    """And such a sum can be added to, which leaves limbs without carries."""
    merged = ledger_of(MEAN, column(values, dtype)) * 2**30
    MEAN.update(merged, column(values, dtype))
    assert_holds_the_rational_sums(merged, values, 2**30 + 1)
    for limbs in limbs_of(merged):
        assert bool(((limbs[:-1] >= 0) & (limbs[:-1] < 2**32)).all())
        assert -(2**31) <= int(limbs[-1]) < 2**31


@given(st.integers(-(2**600), 2**600))
def test_a_number_comes_back_from_its_limbs(value: int) -> None:
    assert from_limbs(to_limbs(value, DOUBLE_PRODUCT_LIMBS)) == value


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(UsageError, match=r"float32 values, found torch\.float64"):
        exact_sums(torch.zeros(3, dtype=torch.float64))


def test_strided_columns_are_read_right() -> None:
    values = random_bits(500, seed=5)
    table = torch.stack([values, values.flip(0)], dim=1)
    assert measure(MEAN, {"x": table[:, 0]}) == measure(MEAN, {"x": values})


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(FINITE[torch.float64], FINITE[torch.float64]), max_size=20))
def test_sums_of_products_are_the_rational_ones(pairs: list[tuple[float, float]]) -> None:
    one, two = (ExactColumn(torch.tensor([p[side] for p in pairs], dtype=torch.float64)) for side in (0, 1))
    expected = sum((Fraction(x) * Fraction(y) for x, y in pairs), Fraction())
    assert Fraction(one.dot(two), 2**2148) == Fraction(two.dot(one), 2**2148) == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20))
def test_sums_of_any_int64_are_the_whole_ones(values: list[int]) -> None:
    integers = ExactColumn(torch.tensor(values))
    assert Fraction(integers.total(), 2**1074) == sum(values)
    assert Fraction(integers.dot(integers), 2**2148) == sum(value * value for value in values)


def test_more_doubles_than_are_summed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.tensor([LARGEST, -0.1, 5e-324, 3.0, -LARGEST, 0.1, 7.0], dtype=torch.float64)
    whole = ExactColumn(values)
    expected = whole.total(), whole.dot(whole)
    monkeypatch.setattr("dualeval.metrics.exact._DOUBLE_PIECE", 3)
    assert (whole.total(), whole.dot(whole)) == expected


def test_cubes_do_not_depend_on_how_many_doubles_are_added_at_once() -> None:
    values = 1 + torch.rand(2**15, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole, parts = torch.zeros((2, MEAN.size), dtype=torch.int64)
    MEAN.update(whole, {"x": values})
    for part in torch.split(values, 512):
        MEAN.update(parts, {"x": part})
    assert MEAN.compute(whole) == MEAN.compute(parts)
