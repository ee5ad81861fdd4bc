"""Mean, Ratio and Count, against rational arithmetic."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dualeval.errors import UsageError
from dualeval.metrics import Count, Mean, Measured, Ratio
from dualeval.metrics.clusters import cluster_intervals
from dualeval.metrics.intervals import student_95, wilson_interval
from tests.vehicles.measuring import ledger_of, measure, same_bits

moderate = st.one_of(st.floats(-1e6, 1e6), st.floats(-1.0, 1.0), st.sampled_from([5e-324, 1e-300, 1 / 3]))
weights = st.integers(0, 2**20)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FEW = "with fewer than 30 it may be too short: evaluate more samples"
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def doubles(values: Sequence[float] | npt.NDArray[np.float64]) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def total(values: Sequence[float | int | Fraction]) -> Fraction:
    return sum((Fraction(value) for value in values), Fraction())


@pytest.mark.parametrize("cluster", [False, True])
def test_the_interval_of_a_loss_does_not_begin_below_0(cluster: bool) -> None:
    """It ends where the other one does; of the mean's transform it begins at that of 0."""
    columns = {"x": torch.tensor([0.0] * 39 + [9.0]), "one": torch.ones(40), "group": torch.arange(40) % 8}
    kinds: tuple[Any, ...] = (Mean, Ratio)
    for kind, over in ((each, "one") for each in kinds):
        free, least = kind("x", over), kind("x", over, least=0)
        exp, below = kind("x", over, "exp", least=0), kind("-x", over, name="x", least=0)
        columns["-x"] = -columns["x"]
        ends = []
        for metric in (free, least, exp, below):
            measured = metric.compute(ledger_of(metric, columns))
            rows = {name: column.numpy() for name, column in columns.items()}
            robust = cluster_intervals(
                "group", rows, measured.values, {metric.name: metric.score}, measured.units
            ).intervals
            ends.append((robust if cluster else measured.intervals)[metric.name])
        (low, high), bounded, of_exp, negative = ends
        assert low < 0 < high and bounded == (0, high)
        assert of_exp[0] == 1 and of_exp[1] == pytest.approx(math.exp(high))
        assert negative[0] <= -9 / 40 <= negative[1], "the value is in it, whatever was said of the data"
        assert free.score == least.score and "least" not in least.score.to_json()


# -- values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_the_mean_of_any_dtype_is_fsum_over_n(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    values = (torch.rand(500, generator=generator) * 100).to(dtype)
    found = measure(Mean("x"), {"x": values})
    assert same_bits(found.values["x"], math.fsum(values.tolist()) / 500)
    assert found.units == {}
    # The ledger's size does not depend on the dtype: ranks and resumed runs have the same.
    assert Mean("x").size == 403


def test_the_mean_of_bools_is_a_fraction_with_wilsons_interval() -> None:
    found = measure(Mean("right"), {"right": torch.arange(20) < 18})
    assert found == Measured(
        values={"right": 0.9}, intervals={"right": wilson_interval(18, 20)}, units={"right": "fraction"}
    )
    given_unit = measure(Mean("right", unit="hits a shot"), {"right": torch.tensor([True])})
    assert given_unit.units == {"right": "hits a shot"}


def test_a_mean_whose_sum_is_beyond_a_double() -> None:
    largest = 1.7976931348623157e308
    found = measure(Mean("x"), {"x": doubles([largest, largest, 0.0])})
    assert same_bits(found.values["x"], float(Fraction(largest) * 2 / 3))
    # Its interval is beyond one, and is left out.
    beyond = measure(Mean("x"), {"x": doubles([largest, -largest])})
    assert (beyond.values, beyond.intervals, beyond.rough) == ({"x": 0.0}, {}, {})


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(moderate, weights), min_size=1, max_size=20), st.integers(0, 100))
def test_a_weighted_mean_is_the_rational_one_rounded_once(pairs: list[tuple[float, int]], seed: int) -> None:
    values, counts = ([pair[side] for pair in pairs] for side in (0, 1))
    assume(sum(counts))
    expected = total([Fraction(x) * w for x, w in pairs]) / sum(counts)
    columns = {"x": doubles(values), "w": torch.tensor(counts)}
    found = measure(Mean("x", weight="w"), columns, seed)
    assert same_bits(found.values["x"], float(expected))
    # As the ratio of two columns, one of which holds products; here these are rounded.
    check_interval(found, "x", [Fraction(x * float(w)) for x, w in pairs], counts, expected)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(moderate, moderate), min_size=1, max_size=20), st.integers(0, 100))
def test_a_ratio_is_the_rational_one_rounded_once(pairs: list[tuple[float, float]], seed: int) -> None:
    above, below = ([pair[side] for pair in pairs] for side in (0, 1))
    assume(total(below) and abs(total(above) / total(below)) < 1e200)
    expected = total(above) / total(below)
    found = measure(Ratio("y", "x"), {"y": doubles(above), "x": doubles(below)}, seed)
    assert same_bits(found.values["y_per_x"], float(expected))
    check_interval(found, "y_per_x", above, below, expected)


def check_interval(
    found: Measured,
    key: str,
    above: Sequence[float | Fraction],
    below: Sequence[float | int],
    ratio: Fraction | float,
) -> None:
    """Against the definition, sample by sample."""
    ratio = Fraction(ratio)
    residuals = [Fraction(y) - ratio * Fraction(x) for y, x in zip(above, below, strict=True)]
    if len(above) < 2 or not any(residuals):
        assert found.intervals == {}
        return
    assert found.rough == {key: f"it comes from {len(above)} samples, and {FEW}"}
    low, high = hall(ratio, residuals, total(below) / len(below))
    if math.isfinite(low) and math.isfinite(high):
        # Among the subnormal numbers a double has fewer digits than that.
        tolerance = max(1e-9 * max(abs(low), abs(high), high - low), 1e-321)
        assert found.intervals[key] == pytest.approx((low, high), rel=0, abs=tolerance)


def hall(centre: Fraction, residuals: Sequence[Fraction], divisor: Fraction) -> tuple[float, float]:
    """Hall's interval, as he writes its ends, in decimals: those of the residuals' mean, over the divisor."""
    count = len(residuals)
    with localcontext() as context:
        context.prec, context.Emax, context.Emin = 200, 10**6, -(10**6)
        second, third = (_decimal(total([r**power for r in residuals])) for power in (2, 3))
        error = (second / (count - 1) / count).sqrt() / _decimal(abs(divisor))
        skew = Decimal(count).sqrt() * third / second.sqrt() ** 3 * (1 if divisor > 0 else -1)
        ends = []
        for quantile in map(Decimal, (student_95(count - 1), -student_95(count - 1))):
            # n**(1/2) (a skew)**-1 [{1 + 3 a skew (n**(-1/2) x - n**-1 b skew)}**(1/3) - 1], a = 1/3, b = 1/6
            inside = 1 + skew * (quantile / Decimal(count).sqrt() - skew / 6 / count)
            root = (abs(inside) ** (Decimal(1) / 3)).copy_sign(inside)
            inverse = Decimal(count).sqrt() * 3 / skew * (root - 1) if abs(skew) > 1e-50 else quantile
            ends.append(float(_decimal(centre) - error * inverse))
    return min(ends), max(ends)


def _decimal(value: Fraction) -> Decimal:
    return Decimal(value.numerator) / Decimal(value.denominator)


def test_the_exponential_is_rounded_right() -> None:
    # 60 digits of exp(1/3), of mpmath; the mean of these three is no float64 number.
    exact = Decimal("1.39561242508608952862812531960258683759790651519940698261751671")
    found = measure(Mean("x", transform="exp"), {"x": torch.tensor([0, 0, 1])})
    assert same_bits(found.values["exp_x"], float(exact))


@pytest.mark.parametrize(
    ("transform", "values", "said"),
    [
        ("sqrt", [-1.0, -2.0], "it is sqrt of -1.5"),
        ("log", [0.0], "it is log of 0"),
        ("exp", [1e4], "it is exp of 10000"),
        ("exp", [1e308, 1.7e308], "it is exp of 1.35e+308"),
    ],
)
def test_a_transform_without_a_value_says_so(transform: str, values: list[float], said: str) -> None:
    found = measure(Mean("x", transform=transform), {"x": doubles(values)})
    assert found.values == {f"{transform}_x": None}
    assert found.intervals == {}
    assert said in found.warnings[0]


def test_the_ends_of_an_interval_stay_where_the_function_has_values() -> None:
    assert measure(Mean("x", transform="sqrt"), {"x": doubles([-1.0, 3.0])}).intervals["sqrt_x"][0] == 0.0
    assert measure(Mean("x", transform="log"), {"x": doubles([-1.0, 3.0])}).intervals == {}
    right = {"right": torch.arange(20) < 18}
    low, high = wilson_interval(18, 20)
    found = measure(Mean("right", transform="log"), right).intervals["log_right"]
    assert found == pytest.approx((math.log(low), math.log(high)))


@pytest.mark.parametrize(
    ("metric", "columns"),
    [
        (Mean("y"), {"y": doubles([0.1] * 40)}),
        (Mean("y", transform="sqrt"), {"y": doubles([0.0] * 40)}),
        (Ratio("y", "x"), {"y": doubles([2.0, 3.0]), "x": doubles([4.0, 6.0])}),
        (Mean("y", weight="x"), {"y": doubles([2.0, 2.0]), "x": doubles([4.0, 6.0])}),
    ],
)
def test_equal_values_have_no_interval(metric: Mean | Ratio, columns: dict[str, Tensor]) -> None:
    found = measure(metric, columns)
    assert found.values[metric.name] is not None
    assert (found.intervals, found.rough) == ({}, {})
    assert (
        f"{metric.name} has no interval: its {len(columns['y'])} samples are all equal" in found.warnings[0]
    )


def test_an_interval_of_few_samples_is_rough() -> None:
    values = torch.arange(30.0)
    assert measure(Mean("x"), {"x": values}).rough == {}
    assert measure(Mean("x"), {"x": values[1:]}).rough == {"x": f"it comes from 29 samples, and {FEW}"}


@pytest.mark.parametrize(
    "of", [lambda x: (Mean("x"), {"x": x}), lambda x: (Ratio("x", "n", name="x"), {"x": x, "n": x * 0 + 2})]
)
def test_an_interval_that_few_of_many_samples_decide_is_rough(
    of: Callable[[Tensor], tuple[Mean | Ratio, dict[str, Tensor]]],
) -> None:
    """As (sum of d**2)**2 / sum of d**4 says it of values that are 0 but for k: about k."""
    values = torch.zeros(10_000, dtype=torch.float64)
    values[:30] = 5.0
    assert measure(*of(values)).rough == {}
    values[29] = 0.0
    deviations = values - values.mean()
    effective = (deviations**2).sum() ** 2 / (deviations**4).sum()
    assert math.floor(effective) == 29
    said = f"the value depends on about 29 of 10000 samples, and {FEW}"
    assert measure(*of(values)).rough == {"x": said}
    # What is mirrored is as rough; heavy tails that are symmetric are not.
    assert measure(*of(-values)).rough == {"x": said}
    both = torch.cat([values, -values])
    assert measure(*of(both)).rough == {}


def test_the_loss_of_a_model_that_is_hardly_ever_wrong_is_rough() -> None:
    """As the losses of 1,000 right answers, with 5 wrong ones among them."""
    drawn = np.random.default_rng(5)
    losses = drawn.exponential(0.02, 1_000)
    assert measure(Mean("x"), {"x": torch.tensor(losses)}).rough == {}
    losses[:5] = drawn.gamma(2.0, 2.0, 5)
    [said] = measure(Mean("x"), {"x": torch.tensor(losses)}).rough.values()
    assert re.fullmatch("the value depends on about [2-5] of 1000 samples, .*", said)


@pytest.mark.parametrize("metric", [Ratio("y", "x", name="m"), Mean("y", "x", name="m")])
def test_samples_of_unequal_weight_count_for_fewer(metric: Mean | Ratio) -> None:
    """One of 10 is nine times as heavy: (90 + 81 * 10)**3 / (90 + 729 * 10)**2 = 13 of 100 samples."""
    weights = torch.ones(300, dtype=torch.int64)
    weights[::10] = 9
    columns = {"y": torch.arange(300.0), "x": weights}
    assert measure(metric, columns).rough == {}
    assert measure(metric, {name: column[:100] for name, column in columns.items()}).rough == {
        "m": f"the value depends on about 13 of 100 samples, and {FEW}"
    }
    # Weights that cancel in their cubes: (10 - 9)**2 / 19 samples by Kish.
    columns = {"y": torch.arange(19.0), "x": torch.tensor([1] * 10 + [-1] * 9)}
    assert "depends" not in measure(metric, columns).rough["m"]


@pytest.mark.parametrize("column", ["y", "x"])
@pytest.mark.parametrize("metric", [Ratio("y", "x", name="m"), Mean("y", "x", name="m")])
def test_values_that_are_not_finite_in_either_column_are_counted(metric: Mean | Ratio, column: str) -> None:
    columns = {"y": doubles([1.0, 2.0, 3.0, 4.0]), "x": doubles([1.0, 1.0, 1.0, 1.0])}
    columns[column] = doubles([1.0, math.nan, math.inf, -math.inf])
    assert measure(metric, columns) == Measured(
        values={"m": None}, nonfinite={"m": {"nan": 1, "pos_inf": 1, "neg_inf": 1}}
    )
    # Their samples are in no sum.
    first = {name: values[:1] for name, values in columns.items()}
    assert torch.equal(ledger_of(metric, columns)[5:], ledger_of(metric, first)[5:])


def test_no_samples_and_no_weight_give_none_and_a_warning() -> None:
    nothing = {"y": doubles([]), "x": doubles([])}
    for metric in (Mean("y"), Mean("y", "x"), Ratio("y", "x"), Mean("y", transform="exp")):
        assert measure(metric, nothing) == Measured(values={metric.name: None})
    zeros = {"y": doubles([1.0]), "x": doubles([0.0])}
    assert measure(Mean("y", "x"), zeros).warnings == ("metric 'y': its weights add up to 0",)
    assert measure(Ratio("y", "x"), zeros).warnings == ("metric 'y_per_x': the column 'x' adds up to 0",)
    assert measure(Ratio("y", "x"), zeros).values == {"y_per_x": None}


def test_products_beyond_a_double_leave_the_value_and_no_interval() -> None:
    columns = {"y": doubles([1e200, 2e200]), "x": doubles([1e200, 1e200])}
    assert measure(Mean("y", "x"), columns) == Measured(
        values={"y": 1.5e200},
        warnings=("y has no interval: a product of value and weight is beyond what a float64 holds",),
    )


def test_a_count_is_the_exact_sum_of_integers() -> None:
    assert measure(Count("right"), {"right": torch.tensor([True, False, True])}).values == {"right_count": 2}
    large = torch.tensor([2**63 - 1] * 5 + [-7])
    assert measure(Count("tokens", unit="tokens"), {"tokens": large}) == Measured(
        values={"tokens_count": 5 * (2**63 - 1) - 7}, units={"tokens_count": "tokens"}
    )
    assert measure(Count("right"), {"right": torch.tensor([], dtype=torch.bool)}).values == {"right_count": 0}
    with pytest.raises(UsageError, match=r"is torch\.float32: expected bool or integers"):
        measure(Count("x"), {"x": torch.zeros(2)})


def test_units_directions_and_names_are_in_the_measured_values() -> None:
    metric = Mean("x", name="rmse", transform="sqrt", unit="m", higher_is_better=False)
    found = measure(metric, {"x": doubles([4.0])})
    assert found.values == {"rmse": 2.0}
    assert (found.units, found.directions) == ({"rmse": "m"}, {"rmse": "lower"})
    assert Ratio("y", "x", "exp").name == "exp_y_per_x"
    assert measure(Count("n", higher_is_better=True), {"n": torch.tensor([1])}).directions == {
        "n_count": "higher"
    }


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (torch.zeros(3, 3), r"has shape \(3, 3\), .* \(3, 1\) and a target \(3,\).*write outputs\[:, 0\]"),
        (torch.zeros(3, 2), r"has shape \(3, 2\): it takes one number per sample"),
        (torch.zeros(3, dtype=torch.complex64), r"is torch\.complex64: expected bool"),
        (["a", "b", "c"], r"is list: it takes one number per sample"),
    ],
)
def test_a_column_without_a_mean_is_refused(column: Any, said: str) -> None:
    metric = Mean("x")
    with pytest.raises(UsageError, match=said):
        metric.update(torch.zeros(metric.size, dtype=torch.int64), {"x": column})


def test_one_number_a_sample_may_have_a_dimension_of_its_own() -> None:
    assert measure(Mean("x"), {"x": doubles([1.0, 2.0]).unsqueeze(1)}).values == {"x": 1.5}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Mean("x", transform="cos"), "transform 'cos': expected one of exp, sqrt, log"),
        (lambda: Mean("x", name=""), "name '': expected a text"),
        (lambda: Mean("x", unit=3), "unit 3: expected a text, or None"),  # type: ignore[arg-type]
        (lambda: Mean("x", higher_is_better="yes"), "higher_is_better 'yes'"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_refused(make: Callable[[], object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make()
