"""Intervals, bounds and tests of paired differences, against published figures and by simulation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dualeval.comparison.statistics import (
    ClusteredProportionDifference,
    ProportionDifference,
    holm,
    mean_difference,
)
from tests.comparison.test_comparison import ROOT


def test_proportions_have_published_intervals_and_tests() -> None:
    """Airway hyper-responsiveness before and after (M. W. Fagerland, Statistics in Medicine 33, 2014)."""
    found = ProportionDifference(lost=7, gained=1, samples=21)
    assert found.p_exact() == pytest.approx(0.0703, abs=5e-5)
    assert found.p_value() == pytest.approx(0.0391, abs=5e-5)
    assert found.bounds(0.025) == pytest.approx((-0.517, -0.026), abs=5e-4)


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (3, 3), (9, 2), (2, 9), (20, 0), (0, 20), (0, 3)])
def test_intervals_of_proportions_hold_at_every_edge(lost: int, gained: int) -> None:
    found = ProportionDifference(lost=lost, gained=gained, samples=20, factor=100.0)
    mirrored = ProportionDifference(lost=gained, gained=lost, samples=20, factor=100.0)
    low, high = found.bounds(0.025)
    assert -100 <= low <= found.value <= high <= 100
    assert mirrored.bounds(0.025) == pytest.approx((-high, -low))
    assert 0 < found.p_value() <= found.p_exact() <= 1
    assert high - low > 10
    # The interval holds 0 where McNemar's asymptotic statistic is below its quantile.
    if lost + gained:
        assert (low < 0 < high) == (abs(lost - gained) / math.sqrt(lost + gained) < 1.96)


def test_flips_that_come_by_the_cluster_are_rough() -> None:
    """Ten losses of 100 clusters with ten samples each: of one patient, or each of another."""
    n = 1000
    clusters = np.arange(n) // 10
    for lost, is_rough in ((np.arange(10), True), (np.arange(0, n, 100), False)):
        d = np.zeros(n)
        d[lost] = -1
        by_cluster = mean_difference(d.mean(), (d - d.mean()) / n, clusters)
        pairs = ProportionDifference(lost=10, gained=0, samples=n)
        found = ClusteredProportionDifference(by_cluster=by_cluster, independent=pairs)
        assert (found.rough is not None) == is_rough


def test_few_pairs_with_nearly_all_the_weight_are_rough() -> None:
    drawn = np.random.default_rng(1)
    weights = np.where(np.arange(1000) < 5, 10_000.0, 10.0)
    d = drawn.normal(size=1000)
    assert mean_difference(d.mean(), (d - d.mean()) / 1000, None, np.ones(1000)).rough is None
    found = mean_difference(d.mean(), (d - d.mean()) / 1000, None, weights)
    assert found.rough is not None and "about 5 of 1000 samples" in found.rough


def test_means_without_skewness_are_student_s_t() -> None:
    a, b = np.random.default_rng(1).normal(size=(2, 50))
    d = b - a
    found = replace(mean_difference(d.mean(), (d - d.mean()) / 50), skewness=0.0)
    expected = stats.ttest_rel(b, a)
    assert found.p_value() == pytest.approx(expected.pvalue)
    assert found.bounds(0.025) == pytest.approx(tuple(expected.confidence_interval()))


def test_means_of_skewed_differences_have_both_intervals() -> None:
    """The ends and the p-value belong together, and Hall's is wider on the side of the long tail."""
    d = np.random.default_rng(2).exponential(size=40) - 0.6
    found = mean_difference(d.mean(), (d - d.mean()) / 40)
    symmetric = replace(found, skewness=0.0)
    assert found.skewness == pytest.approx(stats.skew(d))
    assert found.bounds(0.025)[1] > symmetric.bounds(0.025)[1]
    assert found.bounds(0.025)[0] == symmetric.bounds(0.025)[0]
    for tail in (0.4, 0.1, 0.01, 1e-3, 1e-5):
        low, high = found.bounds(tail)
        assert (low <= 0 <= high) == (found.p_value() >= 2 * tail)


def test_holms_correction_is_that_by_hand() -> None:
    found = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.9})
    assert found == pytest.approx({"a": 0.04, "c": 0.09, "b": 0.09, "d": 0.9})


@pytest.mark.parametrize("kind", ["proportions", "means"])
def test_the_detectable_difference_is_found_four_times_in_five(simulation: Any, kind: str) -> None:
    rounds = 2000
    if kind == "proportions":
        worse = ProportionDifference(lost=250, gained=250, samples=10_000).detectable()
        drawn = simulation.proportions(10_000, 0.05, worse, rounds, 1)
    else:
        population = np.random.default_rng(5).normal(size=10_000)
        worse = mean_difference(0.0, population[:300] / 300).detectable()
        drawn = list(simulation.means(population, 300, worse, rounds, 1))
    assert worse is not None
    assert simulation.rate(simulation.rejects, drawn) == pytest.approx(0.8, abs=0.04)


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/comparison.py, to whose tables docs/compare.md links."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import comparison

    return comparison


def test_tests_of_proportions_keep_their_error_rate(simulation: Any) -> None:
    """Of 2,000 rounds 4 to 6 % reject by mid-p; the exact test never more than 5 % but for chance."""
    [few] = simulation.of_proportions(500, [(1000, 0.01)])
    [many] = simulation.of_proportions(2000, [(10_000, 0.2)])
    assert few.rates["mid-p"] < 0.06 and few.rates["exact"] < 0.04 and few.rates["gate"] < 0.06
    for name in ("mid-p", "exact", "interval", "gate"):
        assert 0.04 <= many.rates[name] <= 0.06, name


def test_gates_of_few_flips_err_in_5_percent(simulation: Any) -> None:
    """Of all outcomes. By Tango's score alone 6.4 % of gates of 0.275 % pass where 2.75 of 1,000 are lost."""
    for found in simulation.of_few_flips((20, 1000), (2.75, 3.08, 4.5, 4.8)):
        assert max(found.rates.values()) <= 0.055, found
    assert any(max(each.rates.values()) > 0.04 for each in simulation.of_few_flips((1000,), (3.08,)))


def test_gates_of_means_that_err_more_often_are_rough(simulation: Any) -> None:
    populations = simulation.drawn_populations()
    skewed, heavy, symmetric = (
        "log-normal, σ = 1",
        "squares of Student's, 3 degrees of freedom",
        "Student's, 3 degrees of freedom",
    )
    chosen = {name: populations[name] for name in (skewed, heavy, symmetric)}
    found = {each.case[0]: each.rates for each in simulation.of_gates(2000, chosen, (100,))}
    for name, least in ((skewed, 0.055), (heavy, 0.15)):
        assert found[name]["lower is better"] > least and found[name]["rough"] > 0.9
    assert found[symmetric]["rough"] < 0.35
    for rates in found.values():
        assert max(rates["lower, not rough"], rates["higher, not rough"]) < 0.055


def test_tests_of_means_and_clusters_keep_their_error_rate(simulation: Any) -> None:
    # Symmetric with heavy tails, and skewed: what the one method cannot do the other can.
    drawn = np.random.default_rng(6)
    population = {"heavy": drawn.standard_t(2.5, 10_000), "skewed": drawn.gamma(0.1, size=10_000)}
    heavy, skewed = simulation.of_means(2000, population, (200,))
    assert heavy.rates["Hall"] > 0.06 < skewed.rates["t"]
    for found in (heavy, skewed):
        assert 0.02 <= found.rates["both"] <= 0.06
        assert found.rates["gate (higher is better)"] <= 0.07
        assert found.rates["gate (lower is better)"] <= 0.07
    [clusters] = simulation.of_clusters(2000, [48])
    assert 0.03 <= clusters.rates["by cluster"] <= 0.06
    assert clusters.rates["gate"] <= 0.065
    assert clusters.rates["McNemar mid-p"] > 0.1


@pytest.mark.long
def test_error_rates_are_kept_in_all_published_tables(simulation: Any) -> None:
    cases = [(n, share) for n in (1000, 10_000) for share in (0.05, 0.2)]
    assert all(one.rates["mid-p"] <= 0.063 for one in simulation.of_proportions(2000, cases))
    for one in simulation.of_means(2000, simulation.populations(), (100, 300, 1000)):
        assert one.rates["both"] <= 0.063, one.case
    for one in simulation.of_clusters(2000, (20, 48, 100)):
        assert one.rates["by cluster"] <= 0.068, one.case
