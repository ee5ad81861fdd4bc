"""What two runs' pairs say of each metric: its two values, their difference, and what cannot be compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dualeval.comparison.pairing import ComparedRun, Pairs
from dualeval.comparison.statistics import (
    ClusteredProportionDifference,
    Difference,
    MeanDifference,
    ProportionDifference,
    ResampledDifference,
    mean_difference,
)
from dualeval.engine.values.differences import differences
from dualeval.errors import UsageError
from dualeval.messages import counted, did_you_mean, listed
from dualeval.metrics.scores import FRACTION, Score

# Differences that vary by a smaller part of their size do so because float32 rounds.
_ROUNDING = 2.0**-20
# Why a metric has no difference with an interval.
NO_AVERAGE = "not an average of per-sample values"


@dataclass(frozen=True, kw_only=True)
class Flips:
    """Samples whose score of 0 or 1 changes from A to B."""

    # Ids of the samples that are 1 in A and 0 in B, in A's order.
    lost: Sequence[str]
    # Ids of the samples that are 0 in A and 1 in B.
    gained: Sequence[str]


def clusters_of(pairs: Pairs, name: str) -> npt.NDArray[np.int64]:
    """The number of each pair's cluster, from 0 on."""
    import pyarrow

    columns = pairs.columns(name)
    if columns is None:
        raise UsageError(_without_clusters(pairs, name))
    if pyarrow.types.is_nested(columns[0].type):
        raise UsageError(f"--cluster {name}: it has several values per sample; expected one")
    if not columns[0].equals(columns[1]):
        raise UsageError(f"--cluster {name}: it is not the same in both runs")
    numbers: npt.NDArray[np.int64] = (
        columns[0].dictionary_encode().indices.to_numpy(zero_copy_only=False).astype(np.int64)
    )
    return numbers


def _without_clusters(pairs: Pairs, name: str) -> str:
    """What is wrong where a run has not kept the column of clusters."""
    lacking = [run for run in (pairs.a, pairs.b) if name not in run.rows.kinds]
    folders = " and ".join(str(run.folder) for run in lacking)
    has = lacking[0].rows.names
    of_result = [run for run in (pairs.a, pairs.b) if run.result.clusters.get("column") == name]
    hint = f"; {of_result[0].folder} was evaluated with clusters by it" if of_result else ""
    return (
        f"--cluster {name}: the rows of {folders} have no such column{hint}. {lacking[0].rows.path} has "
        f"{', '.join(has)}. Name one that both have with --cluster COLUMN, or evaluate {folders} again with "
        f"--keep {name}.{did_you_mean(name, has)}"
    )


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A metric over the pairs."""

    # Its value in A.
    a: float
    b: float
    # B minus A.
    difference: Difference
    # Number of pairs that count for it.
    samples: int
    # Number of clusters of these; None where samples are independent.
    clusters: int | None
    # The samples that changed, where each sample's score is 0 or 1; else None.
    flips: Flips | None


class _NotCompared(Exception):
    """Why a metric cannot be compared."""


def differences_of(
    pairs: Pairs, clusters: npt.NDArray[np.int64] | None, chosen: Sequence[str] | None
) -> tuple[dict[str, Estimate], dict[str, str]]:
    """Estimate the difference of each metric that both runs have; for the others say why not."""
    estimates: dict[str, Estimate] = {}
    not_compared: dict[str, str] = {}
    a, b = pairs.a, pairs.b
    numbers = [
        {name for name, value in run.result.metrics.items() if isinstance(value, (int, float, type(None)))}
        for run in (a, b)
    ]
    names = (*a.result.metrics, *b.result.metrics, *a.compared, *b.compared) if chosen is None else chosen
    resampled: dict[str, tuple[Any, Any]] = {}
    for name in dict.fromkeys(names):
        if name not in (*a.compared, *b.compared):
            if chosen is not None or name in numbers[0] | numbers[1]:
                not_compared[name] = NO_AVERAGE
        elif name not in a.compared or name not in b.compared:
            not_compared[name] = f"only {'A' if name in a.compared else 'B'} has it"
        else:
            try:
                _check_definitions(a, b, name)
                if name in a.scores:
                    estimates[name] = _estimate(pairs, name, clusters)
                    continue
                if name not in resampled:
                    resampled |= _resampled(pairs, a.resampled[name], clusters)
                estimates[name] = _estimate_resampled(pairs, name, clusters, *resampled[name])
            except _NotCompared as reason:
                not_compared[name] = str(reason)
    return estimates, not_compared


def _check_definitions(a: ComparedRun, b: ComparedRun, name: str) -> None:
    one, other = (
        run.scores[name].to_json() if name in run.scores else run.resampled[name].definition for run in (a, b)
    )
    if one != other:
        apart = [f"{key} {mine} in A, {theirs} in B" for key, mine, theirs in differences(one, other)]
        raise _NotCompared(f"the runs define it differently: {listed(apart, 3)}")
    for what, one_has, other_has in (
        ("unit", a.result.units.get(name), b.result.units.get(name)),
        ("direction", a.result.directions.get(name), b.result.directions.get(name)),
    ):
        if one_has != other_has:
            raise _NotCompared(f"its {what} is {one_has} in A and {other_has} in B")


def _resampled(
    pairs: Pairs, metric: Any, clusters: npt.NDArray[np.int64] | None
) -> dict[str, tuple[Any, Any]]:
    """A metric's figures of both runs, of the same draws of samples."""
    columns = pairs.a.columns(metric.columns, pairs.rows_a), pairs.b.columns(metric.columns, pairs.rows_b)
    if differing := [
        name for name in metric.truth_columns if not _are_equal(*(each[name] for each in columns))
    ]:
        raise UsageError(
            f"{pairs.a.folder} and {pairs.b.folder} have different {', '.join(differing)}: they were not "
            "evaluated against the same annotations."
        )
    if clusters is not None:
        _, clusters = np.unique(clusters, return_inverse=True)
    one, other = (metric.resampled(each, clusters) for each in columns)
    return {name: (one[name], other[name]) for name in one}


def _are_equal(one: Any, other: Any) -> bool:
    return all(map(np.array_equal, _arrays(one), _arrays(other)))


def _arrays(rows: Any) -> tuple[Any, ...]:
    return (rows,) if isinstance(rows, np.ndarray) else (rows.offsets, rows.values)


def _estimate_resampled(
    pairs: Pairs, name: str, clusters: npt.NDArray[np.int64] | None, one: Any, other: Any
) -> Estimate:
    if one.value is None or other.value is None:
        raise _NotCompared("no picture has an annotation of its size or class")
    spread = (difference := other.minus(one)).spread()
    if spread is None and difference.value:
        raise _NotCompared("drawing the samples again does not change the difference")
    units = max(2, 0 if spread is None else int(spread.degrees) + 1)
    independent = None if clusters is None else len(np.unique(clusters))
    return Estimate(
        a=one.value,
        b=other.value,
        difference=ResampledDifference(
            value=difference.value,
            error=0.0 if spread is None else spread.error,
            bias=0.0 if spread is None else spread.bias,
            units=units,
            clustered=clusters is not None,
            drawn=len(pairs) if independent is None else independent,
        ),
        samples=len(pairs),
        clusters=independent,
        flips=None,
    )


class _Terms(NamedTuple):
    """One run's y and x of each pair, as ``Score.terms`` gives them."""

    y: npt.NDArray[np.float64]
    x: npt.NDArray[np.float64]
    counts: npt.NDArray[np.bool_]


def _terms(pairs: Pairs, score: Score) -> tuple[_Terms, _Terms]:
    import pyarrow

    columns: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for name in score.columns:
        both = pairs.columns(name)
        if both is None:
            raise _NotCompared(f"the rows of one run have no column {name!r}")
        for values, column in zip(columns, both, strict=True):
            is_text = pyarrow.types.is_large_string(column.type) and name != score.where
            if pyarrow.types.is_nested(column.type) or is_text:
                raise _NotCompared(f"the column {name!r} does not have one number per sample")
            values[name] = column.to_numpy(zero_copy_only=False)
    one, other = (_Terms(*score.terms(values)) for values in columns)
    return one, other


def _estimate(pairs: Pairs, name: str, clusters: npt.NDArray[np.int64] | None) -> Estimate:
    """Estimate the difference of one metric."""
    score = pairs.a.scores[name]
    one, other = _terms(pairs, score)
    _check_terms(one, other)
    chosen = one.counts
    samples = int(chosen.sum())
    if clusters is not None:
        _, clusters = np.unique(clusters[chosen], return_inverse=True)
    independent = samples if clusters is None else int(clusters.max(initial=-1)) + 1
    units = counted(independent, "sample" if clusters is None else "cluster")
    if independent < 2:
        raise _NotCompared(f"it has {units}: at least 2 are needed")
    values = _value(one, score), _value(other, score)
    flips: Flips | None = None
    of_samples: ProportionDifference | None = None
    difference: Difference
    if _is_proportion(pairs, name, one.y[chosen], other.y[chosen]):
        lost, gained = chosen & (one.y > other.y), chosen & (one.y < other.y)
        flips = Flips(lost=pairs.ids_of(lost), gained=pairs.ids_of(gained))
        of_samples = ProportionDifference(
            lost=len(flips.lost), gained=len(flips.gained), samples=samples, factor=score.factor
        )
    if of_samples is not None and clusters is None:
        difference = of_samples
    else:
        influences, difference = _difference(one, other, score, clusters)
        if score.transform is not None:
            _, of_means = _difference(one, other, replace(score, transform=None), clusters)
            difference = replace(difference, of_means=of_means)
        if not math.isfinite(difference.error):
            raise _NotCompared(f"the {score.transform} of its mean has no finite standard error")
        same = all(np.array_equal(*both) for both in ((one.y, other.y), (one.x, other.x)))
        size = abs(difference.value) + float(np.abs(influences).sum())
        if not same and difference.error * math.sqrt(independent) <= _ROUNDING * size:
            raise _NotCompared(
                f"the differences of its {units} are all equal ({difference.value:g}), and do not show how "
                "far others may be"
            )
        if of_samples is not None:
            difference = ClusteredProportionDifference(by_cluster=difference, independent=of_samples)
    return Estimate(
        a=values[0],
        b=values[1],
        difference=difference,
        samples=samples,
        clusters=None if clusters is None else independent,
        flips=flips,
    )


def _difference(
    one: _Terms, other: _Terms, score: Score, clusters: npt.NDArray[np.int64] | None
) -> tuple[npt.NDArray[np.float64], MeanDifference]:
    """What each sample that counts contributes to the difference, and the difference."""
    influences = _influences(other, score)
    influences -= _influences(one, score)
    influences = influences[one.counts]
    weights = np.maximum(np.abs(one.x), np.abs(other.x))[one.counts]
    value = _value(other, score) - _value(one, score)
    return influences, mean_difference(value, influences, clusters, weights)


def _check_terms(one: _Terms, other: _Terms) -> None:
    differing = int((one.counts != other.counts).sum())
    if differing:
        raise _NotCompared(f"{differing:,} samples belong to it in one run only")
    for run, terms in (("A", one), ("B", other)):
        bad = int((~(np.isfinite(terms.y) & np.isfinite(terms.x))).sum())
        if bad:
            raise _NotCompared(f"{bad:,} samples are NaN or infinite in {run}")
        if terms.counts.any() and math.fsum(terms.x) == 0:
            raise _NotCompared(f"its denominator is 0 in {run}")


def _is_proportion(
    pairs: Pairs, name: str, one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]
) -> bool:
    """Whether each sample is right or wrong: a loss that is 0 everywhere is no proportion.

    Of a fraction, 0 everywhere is one: no numbers of 0 to 1 spread further than those of 0 or 1.
    """
    import pyarrow

    score = pairs.a.scores[name]
    if not score.transform is score.weight is score.over is None:
        return False
    if not all(bool(((y == 0) | (y == 1)).all()) for y in (one, other)):
        return False
    if score.below is not None or bool((one == 1).any() or (other == 1).any()):
        return True
    if pairs.a.result.units.get(name) == FRACTION:
        return True
    columns = pairs.columns(score.column)
    return columns is not None and all(pyarrow.types.is_boolean(column.type) for column in columns)


def _mean(terms: _Terms) -> float:
    return math.fsum(terms.y) / math.fsum(terms.x)


def _value(terms: _Terms, score: Score) -> float:
    return score.factor * _transformed(_mean(terms), score.transform)[0]


def _influences(terms: _Terms, score: Score) -> npt.NDArray[np.float64]:
    """What each sample contributes to the value's deviation, to first order (the delta method)."""
    mean = _mean(terms)
    slope = _transformed(mean, score.transform)[1] * score.factor / math.fsum(terms.x)
    influences: npt.NDArray[np.float64] = (terms.y - mean * terms.x) * slope
    return influences


def _transformed(mean: float, transform: str | None) -> tuple[float, float]:
    """A function of a mean, and its derivative there."""
    try:
        if transform is None:
            return mean, 1.0
        if transform == "exp":
            return math.exp(mean), math.exp(mean)
        if transform == "log":
            return math.log(mean), 1 / mean
        if transform == "sqrt":
            return math.sqrt(mean), 0.5 / math.sqrt(mean)
    except (ValueError, OverflowError, ZeroDivisionError) as error:
        raise _NotCompared(f"the {transform} of {mean:g} has no finite value or slope") from error
    raise _NotCompared(f"the transform {transform!r} is not known")
