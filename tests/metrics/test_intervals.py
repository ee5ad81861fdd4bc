"""The parts of 95 % intervals, and scores; whether intervals cover is tested in docs/test_benchmarks.py."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dualeval.errors import UsageError
from dualeval.metrics import Mean, Metric, Ratio, TopK
from dualeval.metrics.intervals import (
    TRANSFORMS,
    Spread,
    bounded_interval,
    cube_root,
    skewed_ends,
    student_95,
    wilson_interval,
)
from dualeval.metrics.scores import Score, score_from
from dualeval.metrics.squad import F1, ExactMatch


def test_students_quantiles_are_those_of_scipy() -> None:
    for degrees in (*range(1, 40), 1_000, 10**6):
        assert student_95(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=2e-8)
    for degrees in (1.1, 1.9, 2.5, 28.7):
        exact = stats.t.ppf(0.975, degrees)
        assert exact <= student_95(degrees) < 1.2 * exact


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_cube_roots_are_right_to_their_last_bits(value: float) -> None:
    root = Fraction(cube_root(value))
    nearest = Fraction(2) ** -50
    assert abs(root * (1 - nearest)) ** 3 <= abs(Fraction(value)) <= abs(root * (1 + nearest)) ** 3
    assert (root > 0, root < 0) == (value > 0, value < 0)


def test_without_skewness_an_interval_is_students() -> None:
    low, high = skewed_ends(Spread(samples=5, variance=Fraction(9, 4), skewness=0.0))
    assert (low, high) == pytest.approx((-1.5 * student_95(4), 1.5 * student_95(4)), rel=1e-15)


def test_the_ends_of_a_mirrored_population_are_mirrored() -> None:
    low, high = skewed_ends(Spread(samples=50, variance=Fraction(1), skewness=2.5))
    assert high > -low > 0
    assert skewed_ends(Spread(samples=50, variance=Fraction(1), skewness=-2.5)) == (-high, -low)


@given(st.integers(1, 400), st.data())
def test_of_zeros_and_ones_a_bounded_interval_is_wilsons(samples: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, samples))
    mean = Fraction(right, samples)
    found = bounded_interval(mean, mean * (1 - mean) / samples, samples)
    assert found == pytest.approx(wilson_interval(right, samples), abs=1e-14)


def test_a_bounded_interval_is_never_as_narrow_as_the_values() -> None:
    # 29 of 30 are 1, one is 0.95: what 30 ones leave open at the lower end is left open here.
    mean = Fraction(2995, 3000)
    squares = (29 + Fraction(95, 100) ** 2) / 30
    low, high = bounded_interval(mean, (squares - mean * mean) / 30, 30)
    assert low <= wilson_interval(30, 30)[0] <= float(mean) < high <= 1
    assert bounded_interval(Fraction(1, 2), Fraction(), 10) == pytest.approx((0.3612, 0.6388), abs=1e-4)
    assert bounded_interval(Fraction(1, 2), Fraction(1, 10**400), 10**6)[1] > 0.5


def test_transforms_of_interval_ends_are_none_beyond_their_domain() -> None:
    assert TRANSFORMS["sqrt"].of_ends((-1.0, 4.0)) == (0.0, 2.0)
    assert TRANSFORMS["log"].of_ends((0.0, 4.0)) is None
    assert TRANSFORMS["exp"].of_ends((0.0, 1e4)) is None
    assert TRANSFORMS["exp"].of_ends((-math.inf, 1.0)) is None


# -- a metric's score gives its value again, from the columns alone --------------------------------------


DRAWN = torch.Generator().manual_seed(3)
COLUMNS = {
    "loss": torch.rand(200, generator=DRAWN),
    "tokens": torch.randint(1, 9, (200,), generator=DRAWN),
    "rank": torch.randint(0, 7, (200,), generator=DRAWN),
    "exact_match": torch.rand(200, generator=DRAWN) < 0.6,
    "f1": torch.rand(200, generator=DRAWN, dtype=torch.float64),
    "has_answer": torch.rand(200, generator=DRAWN) < 0.5,
}
FUNCTIONS = {None: float, "exp": math.exp, "sqrt": math.sqrt, "log": math.log}


@pytest.mark.parametrize(
    "metric",
    [
        Mean("loss"),
        Mean("exact_match"),
        Mean("loss", weight="tokens", transform="exp"),
        Mean("loss", transform="sqrt"),
        Ratio("loss", "tokens", transform="log"),
        TopK(3),
        ExactMatch(parts=True),
        F1(parts=True),
        F1(parts=False),
    ],
    ids=lambda metric: str(metric.name),
)
def test_a_score_gives_the_value(metric: Metric) -> None:
    ledger = torch.zeros(metric.size, dtype=torch.int64)
    metric.update(ledger, COLUMNS)
    measured = metric.compute(ledger)
    assert set(measured.scores) == set(measured.values)
    rows: dict[str, Any] = {name: column.numpy() for name, column in COLUMNS.items()}
    for key, score in measured.scores.items():
        again = score_from(json.loads(json.dumps(score.to_json())))
        assert again == score
        assert set(score.columns) <= set(metric.columns)
        y, x, counts = again.terms(rows)
        assert not y[~counts].any() and not x[~counts].any()
        value = score.factor * FUNCTIONS[score.transform](math.fsum(y) / math.fsum(x))
        assert value == pytest.approx(measured.values[key], rel=1e-12)


def test_only_what_a_score_says_is_written() -> None:
    assert Score(column="rank", below=5).to_json() == {"column": "rank", "below": 5}


def test_wrong_fields_of_a_score_are_refused() -> None:
    with pytest.raises(UsageError, match="expected the fields of a Score"):
        score_from({"colum": "rank"})


def test_a_score_takes_bools_and_integers() -> None:
    rows = {"right": np.array([True, False]), "weight": np.array([3, 1], np.uint8)}
    y, x, _ = Score(column="right", weight="weight").terms(rows)
    assert (y.tolist(), x.tolist()) == ([3.0, 0.0], [3.0, 1.0])


@pytest.mark.parametrize(
    ("successes", "trials"), [(0, 1), (1, 1), (3, 3), (16, 20), (0, 50), (50, 50), (9_214, 10_000)]
)
def test_wilson_interval_is_the_printed_formula(successes: int, trials: int) -> None:
    z, p, n = 1.959963984540054, successes / trials, trials
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half_width = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = wilson_interval(successes, trials)
    assert low == pytest.approx(centre - half_width, abs=1e-14)
    assert high == pytest.approx(centre + half_width, abs=1e-14)
    assert 0 <= low <= p <= high <= 1


@pytest.mark.parametrize("few", [1, 2, 3])
def test_the_end_near_few_is_that_of_a_poisson_variable(few: int) -> None:
    """The mean that is at least so large in 5 % of all cases: half the 0.05 quantile of chi-squared."""
    least = stats.chi2.ppf(0.05, 2 * few) / 2
    low, high = wilson_interval(few, 200)
    assert low == pytest.approx(least / 200, rel=1e-12)
    assert wilson_interval(200 - few, 200) == pytest.approx((1 - high, 1 - low), rel=1e-12)
    # By Wilson's formula, the other end too.
    z_squared = 1.959963984540054**2
    root = math.sqrt(z_squared * (few * (200 - few) / 200 + z_squared / 4))
    assert high == pytest.approx((few + z_squared / 2 + root) / (200 + z_squared))
    assert low < (few + z_squared / 2 - root) / (200 + z_squared)


@pytest.mark.parametrize("samples", [20, 100, 176, 300, 1_000])
def test_intervals_of_fractions_cover_wherever_the_fraction_is(samples: int) -> None:
    """Of all outcomes; by Wilson's formula alone 84 % hold 1 - 0.18 / N."""
    ends = np.array([wilson_interval(count, samples) for count in range(samples + 1)])
    # Also beside each end, where one outcome fewer holds it.
    right = np.concatenate([np.linspace(0.5, 0.9999, 500), ends[:, 0] - 1e-9, ends[:, 1] + 1e-9])
    right = right[(right > 0.5) & (right < 1)][:, None]
    chances = stats.binom.pmf(np.arange(samples + 1), samples, right)
    holds = (ends[:, 0] <= right) & (right <= ends[:, 1])
    assert (chances * holds).sum(1).min() > 0.92


def test_wilson_intervals_are_those_published() -> None:
    # R. G. Newcombe, Statistics in Medicine 17 (1998), table I, method 3: 81 of 263 and 0 of 20.
    assert [round(end, 4) for end in wilson_interval(81, 263)] == [0.2553, 0.3662]
    assert [round(end, 4) for end in wilson_interval(0, 20)] == [0.0, 0.1611]
