"""How often 'dualeval compare' is wrong: its tests where there is no difference, its gates at the margin.

Prints the tables, and writes them to a page in results/, to which docs/compare.md links. Each line is 2,000
simulated comparisons; but of gates of few right and wrong answers all outcomes are counted, with their
probability.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet
from common import machine, table, write_results
from scipy import optimize, stats

import dualeval
from dualeval.comparison.statistics import (
    LEVEL,
    ClusteredProportionDifference,
    Difference,
    MeanDifference,
    ProportionDifference,
    mean_difference,
)
from dualeval.result import PREDICTIONS
from dualeval.tasks.image_classification import ImageClassification

ROUNDS = 2000
GATES = 10_000
_SPREAD = 1.0  # standard deviation of a cluster's logit

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Rate:
    """How often something happened in simulated comparisons."""

    case: tuple[str, ...]  # what was simulated
    rates: Mapping[str, float]  # by method, the fraction of rounds


def proportions(
    samples: int, differing: float, worse: float, rounds: int, seed: int
) -> list[ProportionDifference]:
    """Draw comparisons of right and wrong answers."""
    drawn = np.random.default_rng(seed)
    chances = [(differing + worse) / 2, (differing - worse) / 2, 1 - differing]
    return [
        ProportionDifference(lost=int(lost), gained=int(gained), samples=samples)
        for lost, gained, _ in drawn.multinomial(samples, chances, size=rounds)
    ]


def of_few_flips(sizes: Sequence[int], differing: Sequence[float]) -> Iterator[Rate]:
    """How often gates pass at the margin, by samples and the expected number that differ: of all outcomes."""
    for samples in sizes:
        # Margins of at most 20 percentage points.
        for expected in (each for each in differing if each <= samples / 5):
            rates = {}
            for name, part in (("half of them more are lost", 0.75), ("all are lost", 1.0)):
                lost, gained = part * expected / samples, (1 - part) * expected / samples
                passed = 0.0
                for count in range(min(samples, int(4 * expected + 20)) + 1):
                    chance = float(stats.binom.pmf(count, samples, lost + gained))
                    for wrong in range(count + 1):
                        outcome = chance * float(stats.binom.pmf(wrong, count, part))
                        if outcome > 1e-9:
                            found = ProportionDifference(lost=wrong, gained=count - wrong, samples=samples)
                            passed += outcome * passes((lost - gained) * (1 - 1e-9))(found)
                rates[name] = passed
            yield Rate(case=(f"{samples:,}", f"{expected:g}"), rates=rates)


def means(
    differences: Floats, samples: int, worse: float, rounds: int, seed: int
) -> Iterator[MeanDifference]:
    """Draw comparisons of a mean."""
    drawn = np.random.default_rng(seed)
    centred = differences - differences.mean() - worse
    for _ in range(rounds):
        found = drawn.choice(centred, samples)
        mean = float(found.mean())
        yield mean_difference(mean, (found - mean) / samples)


def clustered(
    clusters: int, differing: float, worse: float, rounds: int, seed: int
) -> Iterator[tuple[ClusteredProportionDifference, ProportionDifference]]:
    """Draw comparisons of right and wrong answers to questions that come in clusters, as those of an article.

    Which run is the better one depends on the cluster; of 12 to 190 questions in each, 43 in the middle.
    """
    drawn = np.random.default_rng(seed)
    shift = _shift(worse / differing)
    for _ in range(rounds):
        sizes = np.clip(np.exp(drawn.normal(math.log(43), 0.5, clusters)), 12, 190).astype(np.int64)
        better = 1 / (1 + np.exp(-drawn.normal(shift, _SPREAD, clusters)))
        chances = np.stack(
            [differing * (1 - better), differing * better, np.full(clusters, 1 - differing)], 1
        )
        counts = drawn.multinomial(sizes, chances)
        lost, gained, samples = int(counts[:, 0].sum()), int(counts[:, 1].sum()), int(sizes.sum())
        value = (gained - lost) / samples
        # The sum of a cluster's influences, as mean_difference makes it of the single ones.
        influences = (counts[:, 1] - counts[:, 0] - value * sizes) / samples
        by_cluster = mean_difference(value, influences, np.arange(clusters))
        independent = ProportionDifference(lost=lost, gained=gained, samples=samples)
        yield ClusteredProportionDifference(by_cluster=by_cluster, independent=independent), independent


@lru_cache
def _shift(worse: float) -> float:
    """The mean logit at which B loses that fraction of the samples that differ."""
    at, weights = np.polynomial.hermite_e.hermegauss(60)

    def excess(shift: float) -> float:
        better = 1 / (1 + np.exp(-(shift + _SPREAD * at)))
        return float((weights * (2 * better - 1)).sum() / weights.sum() + worse)

    return float(optimize.brentq(excess, -10, 10))


def rate(happened: Callable[[Any], bool], comparisons: Sequence[Any]) -> float:
    """The fraction of comparisons for which something holds."""
    return sum(map(happened, comparisons)) / len(comparisons)


def rejects(difference: Difference) -> bool:
    """Whether the test says that there is a difference."""
    return difference.p_value() < LEVEL


def passes(margin: float) -> Callable[[Difference], bool]:
    """Whether a gate with this margin passes, where higher is better."""
    return lambda difference: -difference.bounds(LEVEL)[0] <= margin


def of_proportions(rounds: int, cases: Sequence[tuple[int, float]]) -> Iterator[Rate]:
    """Tests and gates of right and wrong answers, by samples and fraction that differs."""
    for number, (samples, differing) in enumerate(cases):
        same = proportions(samples, differing, 0.0, rounds, seed=number)
        worse = differing / 4
        at_margin = proportions(samples, differing, worse, rounds, seed=1000 + number)
        yield Rate(
            case=(f"{samples:,}", f"{differing:.0%}"),
            rates={
                "mid-p": rate(rejects, same),
                "exact": rate(lambda one: one.p_exact() < LEVEL, same),
                "interval": rate(_excludes_zero, same),
                "gate": rate(passes(worse), at_margin),
            },
        )


def _excludes_zero(difference: Difference) -> bool:
    low, high = difference.bounds(LEVEL / 2)
    return low > 0 or high < 0


def of_means(rounds: int, populations: Mapping[str, Floats], sizes: Sequence[int]) -> Iterator[Rate]:
    """Tests and gates of means, by population and samples."""
    for name, population in populations.items():
        for samples in sizes:
            same = list(means(population, samples, 0.0, rounds, seed=samples))
            worse = float(population.std()) / 10
            at_margin = list(means(population, samples, worse, rounds, seed=samples + 1))
            yield Rate(
                case=(name, f"{samples:,}"),
                rates={
                    "both": rate(rejects, same),
                    "t": rate(lambda one: rejects(replace(one, skewness=0.0)), same),
                    "Hall": rate(_hall_rejects, same),
                    "gate (higher is better)": rate(passes(worse), at_margin),
                    "gate (lower is better)": rate(lambda one: one.bounds(LEVEL)[1] < 0, same),
                },
            )


def of_gates(rounds: int, populations: Mapping[str, Floats], sizes: Sequence[int]) -> Iterator[Rate]:
    """Gates of means at the margin, and those that a result does not call rough."""
    for name, population in populations.items():
        for samples in sizes:
            found = [
                (one.bounds(LEVEL), one.rough is not None)
                for one in means(population, samples, 0.0, rounds, seed=samples + 2)
            ]
            yield Rate(
                case=(name, f"{samples:,}"),
                rates={
                    "higher is better": rate(lambda one: one[0][0] >= 0, found),
                    "lower is better": rate(lambda one: one[0][1] <= 0, found),
                    "rough": rate(lambda one: one[1], found),
                    "higher, not rough": rate(lambda one: one[0][0] >= 0 and not one[1], found),
                    "lower, not rough": rate(lambda one: one[0][1] <= 0 and not one[1], found),
                },
            )


def _hall_rejects(difference: MeanDifference) -> bool:
    t, a = difference.value / difference.error, difference.skewness / math.sqrt(difference.units)
    hall = t + a * t**2 / 3 + a**2 * t**3 / 27 + a / 6
    return bool(2 * stats.t.sf(abs(hall), difference.units - 1) < LEVEL)


def of_clusters(rounds: int, cases: Sequence[int]) -> Iterator[Rate]:
    """Tests and gates of right and wrong answers in clusters, by their number."""
    for clusters in cases:
        same = list(clustered(clusters, 0.1, 0.0, rounds, seed=clusters))
        at_margin = list(clustered(clusters, 0.1, 0.02, rounds, seed=clusters + 1))
        yield Rate(
            case=(f"{clusters:,}",),
            rates={
                "by cluster": rate(lambda both: rejects(both[0]), same),
                "McNemar mid-p": rate(lambda both: rejects(both[1]), same),
                "gate": rate(lambda both: passes(0.02)(both[0]), at_margin),
                "gate, naive": rate(lambda both: passes(0.02)(both[1]), at_margin),
            },
        )


def of_whole_clusters(rounds: int, cases: Sequence[tuple[int, float, float]]) -> Iterator[Rate]:
    """Gates where all ten answers of a cluster become wrong, or right, together, in a part of them."""
    size = 10
    for clusters, lost, gained in cases:
        drawn = np.random.default_rng(clusters)
        found = list[ClusteredProportionDifference]()
        for _ in range(rounds):
            part = drawn.random(clusters)
            change = np.where(part < lost, -1.0, np.where(part < lost + gained, 1.0, 0.0))
            value = float(change.mean())
            found.append(
                ClusteredProportionDifference(
                    by_cluster=mean_difference(value, (change - value) / clusters, np.arange(clusters)),
                    independent=ProportionDifference(
                        lost=size * int((change < 0).sum()),
                        gained=size * int((change > 0).sum()),
                        samples=size * clusters,
                    ),
                )
            )
        passed = [passes(lost - gained)(one) for one in found]
        rough = [one.rough is not None for one in found]
        yield Rate(
            case=(f"{clusters:,}", f"{lost:.1%}", f"{gained:.1%}"),
            rates={
                "gate": rate(bool, passed),
                "rough": rate(bool, rough),
                "gate, not rough": rate(
                    lambda both: both[0] and not both[1], list(zip(passed, rough, strict=True))
                ),
                "none lost was drawn": (1 - lost) ** clusters,
            },
        )


def populations() -> dict[str, Floats]:
    """Differences of losses: the embedded job against itself in bfloat16, and others that are harder."""
    with tempfile.TemporaryDirectory() as folder:

        def losses(name: str, weights: str | None = None, **options: Any) -> Floats:
            task = ImageClassification(model="fashion-cnn", weights=weights)
            dualeval.evaluate(task, out=f"{folder}/{name}", **options)
            return np.asarray(
                pyarrow.parquet.read_table(f"{folder}/{name}/{PREDICTIONS}")["loss"], np.float64
            )

        own = losses("own")
        rounded = losses("bf16", precision="amp-bf16")
        untrained, other = losses("one", "random:1"), losses("two", "random:2")
    return {
        "normal": np.random.default_rng(0).normal(size=10_000),
        "bf16 and fp32": rounded - own,
        "two untrained networks": other - untrained,
        "untrained and trained": untrained - own,
    }


def drawn_populations() -> dict[str, Floats]:
    """Skewed differences, and such with heavy tails; of the last one 36.6 % of 100 have no large one."""
    drawn = np.random.default_rng(1)
    size = 2_000_000
    large = drawn.random(size) < 0.01
    return {
        "exponential": drawn.exponential(1.0, size),
        "log-normal, σ = 1": drawn.lognormal(0.0, 1.0, size),
        "log-normal, σ = 2": drawn.lognormal(0.0, 2.0, size),
        "Student's, 3 degrees of freedom": drawn.standard_t(3, size),
        "squares of Student's, 3 degrees of freedom": drawn.standard_t(3, size) ** 2,
        "losses that change in 5 %": np.where(drawn.random(size) < 0.05, drawn.gamma(2.0, 1.0, size), 0.0)
        + drawn.normal(0.0, 0.01, size),
        "exponential, and 100 times that in 1 %": drawn.exponential(1.0, size) * np.where(large, 100.0, 1.0),
    }


def as_table(names: Sequence[str], rates: Sequence[Rate]) -> str:
    """A Markdown table of rates in percent."""
    head = [*names, *rates[0].rates]
    return table(head, [[*one.case, *(f"{100 * x:.1f} %" for x in one.rates.values())] for one in rates])


_WHOLE = (
    *((30, 0.2, 0.0), (30, 0.2, 0.1), (50, 0.1, 0.05), (50, 0.1, 0.1), (100, 0.05, 0.0), (100, 0.05, 0.02)),
    *((100, 0.1, 0.05), (300, 0.01, 0.0), (300, 0.1, 0.03), (1000, 0.005, 0.0), (1000, 0.01, 0.002)),
    (1000, 0.03, 0.01),
)


def main() -> None:
    """Simulate, print the tables, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="comparisons a line")
    parser.add_argument("--gates", type=int, default=GATES, help="of gates of means")
    arguments = parser.parse_args()
    rounds, gates = arguments.rounds, arguments.gates
    host = machine()
    cases = [(n, share) for n in (100, 1000, 10_000, 50_000) for share in (0.01, 0.05, 0.2)]
    of_job = populations()
    found = {
        "Right and wrong answers": (("samples", "differ"), list(of_proportions(rounds, cases))),
        "Gates of few that differ, of all outcomes": (
            ("samples", "differ"),
            list(of_few_flips((20, 100, 1000, 10_000), (1.0, 3.08, 4.8, 6.35, 20.0))),
        ),
        "Means": (("differences", "samples"), list(of_means(rounds, of_job, (30, 100, 300, 1000)))),
        f"Gates of means, {gates:,} a line": (
            ("differences", "samples"),
            list(of_gates(gates, of_job | drawn_populations(), (30, 100, 300, 500, 1000, 3000, 10_000))),
        ),
        "Clusters": (("clusters",), list(of_clusters(rounds, (5, 10, 20, 48, 100)))),
        "Clusters that change as a whole": (
            ("clusters", "lost", "gained"),
            list(of_whole_clusters(rounds, _WHOLE)),
        ),
    }
    body = "\n".join(f"## {title}\n\n{as_table(names, rates)}" for title, (names, rates) in found.items())
    figures = {
        title: [{"case": list(one.case), **one.rates} for one in rates] for title, (_, rates) in found.items()
    }
    title = f"How often 'dualeval compare' is wrong, of {rounds:,} comparisons a line"
    write_results("comparison", title, body, figures, host)


if __name__ == "__main__":
    main()
