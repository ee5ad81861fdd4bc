"""How often 95 % intervals hold the population's value.

Of each population samples are drawn again and again; the metric of the package counts them, and it is counted
how many of its intervals hold the value of the population. Beside it stands the usual interval of the same
samples, the value ± 1.96 standard errors as if they were independent. The losses are those of the embedded
job, which is evaluated first. Of means numpy adds the samples, for speed, and the package makes the interval;
of fractions all outcomes are counted with their probability.

    python benchmarks/coverage.py [--rounds N] [--only TABLE ...]
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pyarrow.parquet
import torch
from common import BIN, ONE_THREAD, end_on_sigterm, machine, run_process, table, write_results
from scipy import stats

from dualeval.engine.values.measured import with_clusters
from dualeval.metrics import Mean, Metric, Ratio
from dualeval.metrics.clusters import cluster_intervals
from dualeval.metrics.intervals import NORMAL_95, Spread, skewed_ends, wilson_interval
from dualeval.metrics.squad import F1

Columns: TypeAlias = dict[str, npt.NDArray[Any]]
Draw: TypeAlias = Callable[[np.random.Generator, int], Columns]
Floats: TypeAlias = npt.NDArray[np.float64]
# Rounds and samples, or samples.
Shape: TypeAlias = tuple[int, ...]
DrawMany: TypeAlias = Callable[[np.random.Generator, Shape], Floats]

FRACTIONS, MEANS, RARE = "fractions", "means", "rare large losses"
BOUNDED, FUNCTIONS, CLUSTERS = "values of 0 to 1", "functions and ratios", "clusters"
_LARGE_SIZES = (20, 50, 100, 200, 300, 1_000, 3_000, 10_000)
_SIZES = {
    FRACTIONS: _LARGE_SIZES,
    MEANS: _LARGE_SIZES,
    RARE: _LARGE_SIZES,
    BOUNDED: (20, 50, 100, 300, 1_000),
    FUNCTIONS: (30, 100, 300, 1_000),
    CLUSTERS: (10, 35, 100, 200),
}
_RIGHT = (0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999)
# What is wanted of all that the package does not call rough, but of RARE: docs/metrics.md has the exception.
LEAST = 0.92
# Numbers that are drawn at a time.
_PIECE = 4_000_000


@dataclass(frozen=True, kw_only=True)
class Population:
    """What is drawn from, and what the metric of all of it would be."""

    name: str  # of the population, for people
    group: str  # its table
    draw: Draw  # gives the columns of so many samples, or clusters
    metric: Metric  # of which there is an interval
    truth: float  # its value over the whole population
    draw_many: DrawMany = np.random.Generator.standard_normal  # of one column: of several rounds at once
    right: float = 0.0  # of losses the part of right answers; those of wrong ones are drawn negative


def populations(losses: Floats) -> Iterator[Population]:
    """All of the tables."""
    mean, f1 = Mean("x"), F1(parts=False)

    def of(group: str, name: str, draw: DrawMany, truth: float) -> Population:
        metric, column = (f1, "f1") if group == BOUNDED else (mean, "x")
        return Population(
            name=name,
            group=group,
            draw=lambda g, n: {column: draw(g, (n,))},
            draw_many=draw,
            metric=metric,
            truth=truth * (100 if group == BOUNDED else 1),
        )

    for right in _RIGHT:
        yield replace(
            of(FRACTIONS, f"{100 * right:g} % right", lambda g, n: np.zeros(n), right), metric=Mean("right")
        )
    yield of(MEANS, "losses of the embedded job", lambda g, n: g.choice(losses, n), float(losses.mean()))
    for right in _RIGHT:
        name = f"losses of a model that is {100 * right:g} % right"
        yield replace(of(MEANS, name, _losses(right), right * 0.02 + (1 - right) * 4), right=right)
    yield of(MEANS, "exponential", lambda g, n: g.exponential(1.0, n), 1.0)
    for sigma in (1.0, 1.5, 2.0):
        draw = _log_normal(sigma)
        yield of(MEANS, f"log-normal, σ = {sigma:g}", draw, math.exp(sigma * sigma / 2))
    yield of(MEANS, "normal", lambda g, n: g.standard_normal(n), 0.0)
    yield of(MEANS, "squares of normal errors", lambda g, n: g.standard_normal(n) ** 2, 1.0)
    for degrees in (3, 5):
        name = f"Student's, {degrees} degrees of freedom"
        yield of(MEANS, name, _student(degrees, 1), 0.0)
        yield of(MEANS, f"squares of {name}", _student(degrees, 2), degrees / (degrees - 2))
    for part in (0.01, 0.001):
        name = f"exponential, and 100 times that in {100 * part:g} %"
        yield of(RARE, name, _rare(part), 1 + 99 * part)

    for zeros, ones in ((0.1, 0.8), (0.01, 0.97), (0.001, 0.998), (0.9, 0.05), (0.3, 0.3)):
        name = f"F1: 0 in {100 * zeros:g}%, 1 in {100 * ones:g}%, else between"
        truth = ones + (1 - zeros - ones) * float(_BETWEEN.mean())
        yield of(BOUNDED, name, _mixture(zeros, ones), truth)
    yield of(BOUNDED, "right or wrong, 95 % right", lambda g, n: (g.random(n) < 0.95).astype(float), 0.95)

    a_token = 2.0 + 8.0 / 41
    functions: tuple[tuple[str, Metric, Draw, float], ...] = (
        ("Ratio: loss a token", Ratio("sum", "tokens"), _texts, a_token),
        ("its exp, the perplexity", Ratio("sum", "tokens", "exp"), _texts, math.exp(a_token)),
        ("its log", Ratio("sum", "tokens", "log"), _texts, math.log(a_token)),
        ("Ratio: 10 % of the texts are nine times as long", Ratio("sum", "tokens"), _few_long_texts, 2.0),
        ("Mean with weight: loss by tokens", Mean("loss", "tokens"), _texts, a_token),
        ("sqrt of squared normal errors", Mean("x", transform="sqrt"), _squares, 1.0),
        ("exp of exponential, mean 2", Mean("x", transform="exp"), _exponential, math.exp(2.0)),
    )
    for name, metric, of_columns, truth in functions:
        yield Population(name=name, group=FUNCTIONS, draw=of_columns, metric=metric, truth=truth)
    cases = [
        (right, within, size)
        for within in (0.05, 0.2, 0.5, 1.0)
        for right in (0.7, 0.9, 0.95, 0.97, 0.99)
        for size in (50, None)
    ]
    for right, within, size in (*cases, (0.99, 0.5, 20)):
        yield Population(
            name=f"{right:.0%} right, correlation {within:g}, clusters of {_sizes_said(size)}",
            group=CLUSTERS,
            draw=_answers(right, within, size),
            metric=Mean("right"),
            truth=right,
        )
    for size in (50, None):
        yield Population(
            name=f"skewed losses of skewed means, clusters of {_sizes_said(size)}",
            group=CLUSTERS,
            draw=_clustered_losses(size, 0.6),
            metric=Mean("x"),
            truth=math.exp(0.18),
        )
    yield Population(
        name="skewed losses of very skewed means, clusters of 50",
        group=CLUSTERS,
        draw=_clustered_losses(50, 1.5),
        metric=Mean("x"),
        truth=math.exp(1.125),
    )
    bad = 0.05
    yield Population(
        name=f"large losses in {bad:.0%} of all clusters of 4",
        group=CLUSTERS,
        draw=_bad_clusters(bad),
        metric=Mean("x"),
        truth=4 * bad + 0.01 * (1 - bad),
    )


_BETWEEN = np.array([2 / 9, 1 / 4, 1 / 3, 2 / 5, 1 / 2, 4 / 7, 2 / 3, 3 / 4, 4 / 5, 6 / 7, 10 / 11])


def _mixture(zeros: float, ones: float) -> DrawMany:
    def draw(generator: np.random.Generator, count: Shape) -> Floats:
        part = generator.random(count)
        return np.where(
            part < zeros, 0.0, np.where(part < zeros + ones, 1.0, generator.choice(_BETWEEN, count))
        )

    return draw


def _texts(generator: np.random.Generator, count: int) -> Columns:
    """Texts whose mean loss falls with their number of tokens."""
    tokens = 1 + generator.poisson(40, count)
    loss = 2.0 + 8.0 / tokens + 0.5 * generator.standard_normal(count)
    return {"loss": loss, "sum": loss * tokens, "tokens": tokens}


def _few_long_texts(generator: np.random.Generator, count: int) -> Columns:
    """Texts of about 20 tokens, and a tenth of about 180."""
    tokens = 1 + generator.poisson(20, count) * np.where(generator.random(count) < 0.1, 9, 1)
    return {"sum": tokens * (1.0 + generator.exponential(1.0, count)), "tokens": tokens}


def _losses(right: float) -> DrawMany:
    """Cross entropies: small where the answer is right, and large where it is wrong, then negative."""

    def draw(generator: np.random.Generator, count: Shape) -> Floats:
        wrong = generator.random(count) >= right
        return np.where(wrong, -generator.gamma(2.0, 2.0, count), generator.exponential(0.02, count))

    return draw


def _log_normal(sigma: float) -> DrawMany:
    return lambda generator, count: generator.lognormal(0.0, sigma, count)


def _student(degrees: int, power: int) -> DrawMany:
    return lambda generator, count: generator.standard_t(degrees, count) ** power


def _rare(part: float) -> DrawMany:
    def draw(generator: np.random.Generator, count: Shape) -> Floats:
        large = generator.random(count) < part
        return np.where(large, 100.0, 1.0) * generator.exponential(1.0, count)

    return draw


def _squares(generator: np.random.Generator, count: int) -> Columns:
    return {"x": generator.standard_normal(count) ** 2}


def _exponential(generator: np.random.Generator, count: int) -> Columns:
    return {"x": generator.exponential(2.0, count)}


def _sizes_said(size: int | None) -> str:
    return "very unequal size" if size is None else str(size)


def _members(generator: np.random.Generator, clusters: int, size: int | None) -> npt.NDArray[np.int64]:
    """The number of the cluster of each sample."""
    sizes = generator.lognormal(math.log(40), 0.7, clusters).astype(int)
    return np.repeat(np.arange(clusters), np.maximum(1, sizes) if size is None else np.full(clusters, size))


def _answers(right: float, within: float, size: int | None) -> Draw:
    """Right in a part of each cluster that has a beta distribution; all or nothing if ``within`` is 1."""
    both = 1 / within - 1

    def draw(generator: np.random.Generator, clusters: int) -> Columns:
        cluster = _members(generator, clusters, size)
        if both:
            chance = generator.beta(right * both, (1 - right) * both, clusters)
        else:
            chance = (generator.random(clusters) < right).astype(float)
        return {"cluster": cluster, "right": generator.random(len(cluster)) < chance[cluster]}

    return draw


def _bad_clusters(bad: float) -> Draw:
    def draw(generator: np.random.Generator, clusters: int) -> Columns:
        cluster = _members(generator, clusters, 4)
        is_bad = (generator.random(clusters) < bad)[cluster]
        return {"cluster": cluster, "x": generator.exponential(np.where(is_bad, 4.0, 0.01))}

    return draw


def _clustered_losses(size: int | None, spread: float) -> Draw:
    def draw(generator: np.random.Generator, clusters: int) -> Columns:
        cluster = _members(generator, clusters, size)
        means = generator.lognormal(0.0, spread, clusters)
        return {"cluster": cluster, "x": means[cluster] * generator.exponential(1.0, len(cluster))}

    return draw


@dataclass(frozen=True, kw_only=True)
class Cell:
    """How often intervals of one population, of samples of one size, hold its value."""

    population: str  # its name
    group: str  # its table
    size: int  # samples or clusters
    held: float  # part of the rounds in which the package's interval holds it
    usual: float  # likewise, the usual interval
    none: float  # part of the rounds without an interval, because all samples were equal; they hold nothing
    rough: float  # part of the rounds whose interval the package calls rough
    # Part of the rounds whose interval it does not call rough, and that does not hold the value.
    missed: float

    @property
    def covered(self) -> float:
        """Of the intervals that it does not call rough, the part that holds the value."""
        return 1 - self.missed / (1 - self.rough) if self.rough < 1 else 1.0


# The package's interval, the usual one, and whether the package calls its own rough.
Intervals: TypeAlias = tuple[tuple[float, float] | None, tuple[float, float], bool]


def measure(population: Population, size: int, rounds: int) -> Cell:
    """Draw samples of one size, and count."""
    if population.group == FRACTIONS:
        found = _of_fractions(population.truth, size)
    else:
        generator = np.random.default_rng(crc32(f"{population.name} {size}".encode()))
        many = _of_means if population.group in (MEANS, RARE) else _of_metrics
        found = ((each, 1 / rounds) for each in many(population, size, rounds, generator))
    held = usual = none = rough = missed = 0.0
    for (ends, normal, is_rough), weight in found:
        holds = ends is not None and ends[0] <= population.truth <= ends[1]
        none += weight * (ends is None)
        held += weight * holds
        rough += weight * is_rough
        missed += weight * (not (holds or is_rough))
        usual += weight * (normal[0] <= population.truth <= normal[1])
    return Cell(
        population=population.name,
        group=population.group,
        size=size,
        held=held,
        usual=usual,
        none=none,
        rough=rough,
        missed=missed,
    )


def _of_fractions(right: float, size: int) -> Iterator[tuple[Intervals, float]]:
    """Each number of right answers, with its probability."""
    counts = np.arange(size + 1)
    for count, chance in zip(counts.tolist(), stats.binom.pmf(counts, size, right).tolist(), strict=True):
        if chance > 1e-12:
            mean = count / size
            half_width = NORMAL_95 * math.sqrt(mean * (1 - mean) / size)
            yield (wilson_interval(count, size), (mean - half_width, mean + half_width), False), chance


def _of_means(
    population: Population, size: int, rounds: int, generator: np.random.Generator
) -> Iterator[Intervals]:
    """The mean, variance and skewness by numpy, as fast as it adds; their interval by the package."""
    for start in range(0, rounds, max(1, _PIECE // size)):
        drawn = population.draw_many(generator, (min(rounds - start, max(1, _PIECE // size)), size))
        all_right = (drawn >= 0).all(1) & (population.right > 0)
        values = np.abs(drawn) if population.right else drawn
        means = values.mean(1)
        values -= means[:, None]
        seconds, thirds = (values**2).sum(1), (values**3).sum(1)
        skews = thirds / size / (seconds / size) ** 1.5
        variances = seconds / (size * (size - 1))
        for mean, variance, skew, right in zip(
            *map(np.ndarray.tolist, (means, variances, skews, all_right)), strict=True
        ):
            spread = Spread(samples=size, variance=Fraction(variance), skewness=skew)
            low, high = skewed_ends(spread)
            half_width = NORMAL_95 * math.sqrt(variance)
            is_rough = spread.rough() is not None or (right and _rough_without_wrong())
            yield (mean + low, mean + high), (mean - half_width, mean + half_width), is_rough


@cache
def _rough_without_wrong() -> bool:
    """Whether a result calls the interval of a loss rough where all answers are right."""
    fields = {"metrics": {"loss": 0.1, "top1": 1.0}, "intervals": {"loss": (0.0, 0.2)}, "rough": {}}
    return "loss" in with_clusters(fields, None, None)[0]["rough"]


def _of_metrics(
    population: Population, size: int, rounds: int, generator: np.random.Generator
) -> Iterator[Intervals]:
    [key] = population.metric.compute(torch.zeros(population.metric.size, dtype=torch.int64)).values
    for _ in range(rounds):
        yield _intervals(population.metric, population.draw(generator, size), key)


def _intervals(metric: Metric, columns: Columns, key: str) -> Intervals:
    """Those of a metric's columns."""
    ledger = torch.zeros(metric.size, dtype=torch.int64)
    read = {name: torch.from_numpy(columns[name]) for name in metric.columns}
    metric.update(ledger, read)
    found = metric.compute(ledger)
    score, value = found.scores[key], found.values[key]
    assert isinstance(value, float)
    ends, rough = found.intervals.get(key), key in found.rough
    if "cluster" in columns:
        by_cluster = cluster_intervals("cluster", columns, found.values, found.scores, found.units)
        ends, rough = by_cluster.intervals.get(key), key in by_cluster.rough
    y, x, _ = score.terms(columns)
    ratio = y.sum() / x.sum()
    error = math.sqrt(len(y) / (len(y) - 1) * ((y - ratio * x) ** 2).sum()) / abs(x.sum())
    # By the delta method.
    slopes: dict[str | None, Callable[[float], float]] = {
        None: lambda x: 1.0,
        "exp": math.exp,
        "log": lambda x: 1 / x,
        "sqrt": lambda x: 0.5 / math.sqrt(x),
    }
    half_width = NORMAL_95 * score.factor * slopes[score.transform](ratio) * error
    return ends, (value - half_width, value + half_width), rough


def losses_of_the_embedded_job() -> Floats:
    """The loss of each of its 10,000 samples; ``dualeval run`` evaluates it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(BIN / "dualeval"), "run", "--out", folder, "--metric", "loss", "--no-progress"]
        run_process(command, timeout_s=600, environ=ONE_THREAD)
        rows = pyarrow.parquet.read_table(Path(folder) / "predictions.parquet", columns=["loss"])
        losses: Floats = rows["loss"].to_numpy().astype(np.float64)
        return losses


def report(cells: Sequence[Cell], rounds: int) -> str:
    """The tables, as Markdown."""
    parts = []
    for group in dict.fromkeys(cell.group for cell in cells):
        own = [cell for cell in cells if cell.group == group]
        sizes = list(dict.fromkeys(cell.size for cell in own))
        head = [group, *(f"{size:,} clusters" if group == CLUSTERS else f"N = {size:,}" for size in sizes)]
        rows = [
            [name, *(_shown(cell) for cell in own if cell.population == name)]
            for name in dict.fromkeys(cell.population for cell in own)
        ]
        parts.append(table(head, rows))
    return (
        f"Parts of {rounds:,} rounds in percent: the interval here / the usual one. In brackets: more than "
        "half of the intervals are `rough`. Where some are, their part is given; missed: in that part of all "
        "rounds the interval is not `rough` and misses the value.\n\n" + "\n".join(parts)
    )


def _shown(cell: Cell) -> str:
    text = f"{100 * cell.held:.1f} / {100 * cell.usual:.1f}"
    if cell.none > 0.001:
        text += f", none in {100 * cell.none:.1f}"
    if cell.rough >= 0.005:
        text += f", rough {100 * cell.rough:.0f}, missed {100 * cell.missed:.1f}"
    return f"({text})" if cell.rough > 0.5 else text


def short(cells: Sequence[Cell]) -> list[str]:
    """A sentence for each cell whose intervals are not rough, and hold the value too seldom."""
    return [
        f"{cell.population}, {cell.size}: {cell.covered:.3f} of those that are not rough, wanted at least "
        f"{LEAST}; {cell.missed:.3f} of all are not rough and miss it"
        for cell in cells
        if cell.group != RARE and ((cell.rough <= 0.5 and cell.covered < LEAST) or cell.missed > 1 - LEAST)
    ]


def main() -> None:
    """Simulate, print and write the results; ends with 1 where intervals cover too seldom."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2_000, help="samples of each population and size")
    parser.add_argument("--only", choices=_SIZES, nargs="+", default=[*_SIZES], help="tables")
    parser.add_argument("--only-check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    end_on_sigterm()
    torch.set_num_threads(1)
    host = machine()
    cells = []
    for population in populations(losses_of_the_embedded_job()):
        if population.group not in arguments.only:
            continue
        for size in _SIZES[population.group]:
            cells.append(measure(population, size, arguments.rounds))
            print(f"{cells[-1].population}, {size}: {_shown(cells[-1])}", file=sys.stderr, flush=True)
    body = report(cells, arguments.rounds)
    found = short(cells)
    if arguments.only_check:
        print(body)
    else:
        _write(cells, body, arguments.rounds, host)
    if found:
        sys.exit("\n".join(found))


def _write(cells: Sequence[Cell], body: str, rounds: int, host: dict[str, Any]) -> None:
    figures = {"rounds": rounds, "cells": [vars(cell) for cell in cells]}
    write_results("coverage", "How often 95 % intervals hold the value", body, figures, host)


if __name__ == "__main__":
    main()
