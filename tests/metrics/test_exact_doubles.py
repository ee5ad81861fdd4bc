"""The exact mean of float64, against math.fsum and rational arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from random import Random

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

from dualeval.metrics import Mean, Measured
from dualeval.metrics.exact import ExactColumn, from_limbs
from dualeval.metrics.intervals import student_95
from tests.measuring import ledger_of, measure, same_bits

finite = st.one_of(
    st.floats(-1.0, 1.0),
    st.floats(-(2.0**-1022), 2.0**-1022),
    st.sampled_from([5e-324, -5e-324, 2.0**-1022, 0.0, -0.0, 1e150, -1e150, 1 / 3]),
    st.floats(allow_nan=False, allow_infinity=False),
)
LARGEST = 1.7976931348623157e308


def doubles(values: Sequence[float]) -> dict[str, Tensor]:
    return {"value": torch.tensor(values, dtype=torch.float64)}


def mean_of() -> Mean:
    return Mean("value", name="mean")


@settings(max_examples=100, deadline=None)
@given(st.lists(finite, max_size=30), st.integers(0, 1000))
def test_ledgers_of_doubles_hold_the_rational_sums(values: list[float], seed: int) -> None:
    # All that are finite: sums here may exceed the largest float64.
    for random in (None, Random(seed)):
        ledger = ledger_of(mean_of(), doubles(values), random).tolist()
        assert ledger[:5] == [len(values), 0, 0, 0, 0]
        exact = [Fraction(value) for value in values]
        assert Fraction(from_limbs(ledger[5:72]), 2**1074) == sum(exact, Fraction())
        squares = sum((value * value for value in exact), Fraction())
        assert Fraction(from_limbs(ledger[72:205]), 2**2148) == squares
        cubes = sum((value**3 for value in exact), Fraction())
        assert Fraction(from_limbs(ledger[205:]), 2**3222) == cubes


@pytest.mark.parametrize(
    "values",
    [
        [1e150, 1.0, -1e150],
        [1e150, 5e-324, -1e150],
        [-5e-324, 5e-324, 5e-324, 5e-324],
        [1.0, 2.0**-53, 2.0**-106],
        [1.0, 2.0**-53],
        [0.1] * 10,
        [-0.0],
        [5e-324],
        [LARGEST],
        [-LARGEST],
    ],
)
def test_hard_sums_of_doubles(values: list[float]) -> None:
    measured = measure(mean_of(), doubles(values))
    assert same_bits(measured.values["mean"], math.fsum(values) / len(values))


@settings(max_examples=50, deadline=None)
@given(st.lists(finite, min_size=1, max_size=10), st.integers(0, 1000))
def test_mean_of_any_doubles(values: list[float], seed: int) -> None:
    try:
        expected = math.fsum(values) / len(values)
    except OverflowError:  # no float64 is near enough
        reject()
    assert same_bits(measure(mean_of(), doubles(values), seed).values["mean"], expected)


def test_variance_of_doubles_survives_a_large_mean() -> None:
    # In float64, the mean of squares less the square of the mean is noise here.
    low, high = measure(mean_of(), doubles([2.0**40, 2.0**40 + 1.0] * 50)).intervals["mean"]
    # Of a mean without skewness it is Student's.
    assert high - low == pytest.approx(2 * student_95(99) * math.sqrt(0.25 / 99), abs=2.0**-11)
    low, high = measure(mean_of(), doubles([1.0, 1.0 + 2.0**-52])).intervals["mean"]
    assert low < 1.0 < high


def test_nonfinite_doubles_are_counted() -> None:
    values = [1.0, math.nan, math.inf, -math.inf, math.inf, -math.nan, -2.5]
    assert measure(mean_of(), doubles(values)) == Measured(
        values={"mean": None}, nonfinite={"mean": {"nan": 2, "pos_inf": 2, "neg_inf": 1}}
    )
    ledger = ledger_of(mean_of(), doubles(values))
    assert ledger[0] == 7
    assert torch.equal(ledger[5:], ledger_of(mean_of(), doubles([1.0, -2.5]))[5:])
    for value, kind in ((math.nan, "nan"), (math.inf, "pos_inf"), (-math.inf, "neg_inf")):
        measured = measure(mean_of(), doubles([1.0, value]))
        counts = dict.fromkeys(("nan", "pos_inf", "neg_inf"), 0) | {kind: 1}
        assert measured == Measured(values={"mean": None}, nonfinite={"mean": counts})


def test_a_billion_ledgers_of_doubles_add_up() -> None:
    values = [LARGEST, -1.5, 5e-324, -LARGEST, 0.1, 1e-200, 3e200]
    ledger = ledger_of(mean_of(), doubles(values))
    merged = ledger * 2**30
    mean_of().update(merged, doubles(values))
    found = merged.tolist()
    exact = [Fraction(value) for value in values]
    assert found[0] == 7 * (2**30 + 1)
    assert Fraction(from_limbs(found[5:72]), 2**1074) == sum(exact, Fraction()) * (2**30 + 1)
    assert Fraction(from_limbs(found[72:205]), 2**2148) == (2**30 + 1) * sum(one * one for one in exact)
    assert Fraction(from_limbs(found[205:]), 2**3222) == (2**30 + 1) * sum(one**3 for one in exact)
    for limbs in (found[5:72], found[72:205], found[205:]):
        assert all(0 <= limb < 2**32 for limb in limbs[:-1])
        assert -(2**31) <= limbs[-1] < 2**31


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(finite, finite), max_size=20))
def test_sums_of_products_are_the_rational_ones(pairs: list[tuple[float, float]]) -> None:
    one, two = (
        ExactColumn(torch.tensor(side, dtype=torch.float64))
        for side in (zip(*pairs, strict=True) if pairs else ([], []))
    )
    expected = sum((Fraction(x) * Fraction(y) for x, y in pairs), Fraction())
    assert Fraction(one.dot(two), 2**2148) == Fraction(two.dot(one), 2**2148) == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20))
def test_sums_of_any_int64_are_the_whole_ones(values: list[int]) -> None:
    column = ExactColumn(torch.tensor(values))
    assert Fraction(column.total(), 2**1074) == sum(values)
    assert Fraction(column.dot(column), 2**2148) == sum(value * value for value in values)


def test_more_doubles_than_are_summed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.tensor([LARGEST, -0.1, 5e-324, 3.0, -LARGEST, 0.1, 7.0], dtype=torch.float64)
    whole = ExactColumn(values)
    expected = whole.total(), whole.dot(whole)
    monkeypatch.setattr("dualeval.metrics.exact._DOUBLE_PIECE", 3)
    assert (whole.total(), whole.dot(whole)) == expected


def test_a_full_piece_of_the_largest_fractions_does_not_overflow() -> None:
    values = torch.full((2**20,), LARGEST, dtype=torch.float64)
    column = ExactColumn(values)
    assert column.dot(column) == int(LARGEST) ** 2 * 2**20 * 2**2148
    for at, least in enumerate((LARGEST, -LARGEST)):
        same = ExactColumn(torch.full((2**15,), least, dtype=torch.float64))
        assert same.dots(same, same) == (-1) ** at * int(LARGEST) ** 3 * 2**15 * 2**3222


def test_cubes_do_not_depend_on_how_many_doubles_are_added_at_once() -> None:
    values = 1 + torch.rand(2**15, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole, parts = torch.zeros((2, mean_of().size), dtype=torch.int64)
    mean_of().update(whole, {"value": values})
    for part in torch.split(values, 512):
        mean_of().update(parts, {"value": part})
    assert mean_of().compute(whole) == mean_of().compute(parts)
