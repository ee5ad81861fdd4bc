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
    stats = pytest.importorskip("scipy.stats")
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
