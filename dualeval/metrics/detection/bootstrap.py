"""Figures of weighted images, from matches that are sorted once; for images drawn again and again.

An image of weight 2 counts as two equal ones would; an image of weight 0 is not there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import sparse

from dualeval.metrics.detection.figures import Figure
from dualeval.metrics.intervals import SHOWN_FROM_RESAMPLED, few_decide, student_95

# Resamples at a time: their matrices stay in a processor's cache.
_AT_ONCE = 100
# Figures that differ by less differ by rounding alone.
_ROUNDING = 2.0**-40
# Decimals of the ends of an interval.
_DIGITS = 9

_Floats = npt.NDArray[np.float64]


class _Matches(NamedTuple):
    """Of one category and size, the detections that are right at some thresholds of overlap, best first.

    So are those that are ignored at some. All others are wrong at each threshold, and only their number
    before each of these counts, for what lies between two right ones decides no precision.
    """

    # Of each detection its image, and its place among those of the image.
    images: npt.NDArray[np.int64]
    ranks: npt.NDArray[np.int64]
    # By threshold, whether it is right, and whether it is not ignored; shape (thresholds, detections).
    right: npt.NDArray[np.bool_]
    counted: npt.NDArray[np.bool_]
    # How many that are always wrong come before it and after the one before, by image.
    wrong: sparse.csr_matrix
    # The annotations that count, of each image.
    annotations: _Floats


class WeightedFigures:
    """The figures of an evaluation, for any weights of its images.

    Args:
        evaluation: a COCOeval that has matched.
        figures: by key.
    """

    def __init__(self, evaluation: Any, figures: Mapping[str, Figure]) -> None:
        params = evaluation.params
        self._figures, self._limits = figures, params.maxDets
        self.images = images = len(params.imgIds)
        self._reached = _reached_from(params.recThrs)
        # By size, then category; None for categories without an annotation.
        sizes = len(params.areaRng)
        self._matches = [
            [
                _matches_of(evaluation.evalImgs[(category * sizes + size) * images :][:images])
                for category in range(len(params.catIds))
            ]
            for size in range(sizes)
        ]

    def of(self, weights: _Floats) -> dict[str, _Floats]:
        """By key the figure of each category and column of weights, shape (categories, columns).

        ``weights`` has shape (images, columns). NaN where a category has no annotation; the figure of all
        categories is the mean of the others.
        """
        found = {key: np.full((len(self._matches[0]), weights.shape[1]), np.nan) for key in self._figures}
        for size, of_size in enumerate(self._matches):
            wanted = {key: figure for key, figure in self._figures.items() if figure.size == size}
            for category, matches in enumerate(of_size):
                if matches is not None:
                    annotations = matches.annotations @ weights
                    tables = self._tables(matches, weights, np.maximum(annotations, 1.0), wanted)
                    for key, table in tables.items():
                        found[key][category, annotations > 0] = table[annotations > 0]
        return found

    def units(self, size: int, units: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Of each category, how many images, or units of them, have an annotation of a size."""
        counts = (
            0 if each is None else len(np.unique(units[each.annotations > 0])) for each in self._matches[size]
        )
        return np.fromiter(counts, np.int64)

    def _tables(
        self, matches: _Matches, weights: _Floats, annotations: _Floats, wanted: Mapping[str, Figure]
    ) -> dict[str, _Floats]:
        of_detections = weights[matches.images]
        precision = self._precision(matches, weights, of_detections, annotations)
        found = {}
        for key, figure in wanted.items():
            chosen = slice(None) if figure.threshold is None else [figure.threshold]
            if figure.table == "precision":
                found[key] = precision[chosen].mean(axis=0)
            else:
                among = matches.right[chosen] & (matches.ranks < self._limits[figure.limit])
                found[key] = (among.astype(np.float64) @ of_detections).mean(axis=0) / annotations
        return found

    def _precision(
        self, matches: _Matches, weights: _Floats, of_detections: _Floats, annotations: _Floats
    ) -> _Floats:
        """The average precision at each threshold, shape (thresholds, columns)."""
        always = np.asarray(matches.counted.all(axis=0))
        before = np.cumsum(matches.wrong @ weights + of_detections * always[:, None], axis=0)
        result = np.zeros((len(matches.right), weights.shape[1]))
        for place, right in enumerate(matches.right):
            counted = before
            if (other := matches.counted[place] & ~always).any():
                counted = before + np.cumsum(of_detections * other[:, None], axis=0)
            found = np.cumsum(of_detections[right], axis=0)
            precision = found / (counted[right] + np.spacing(1))
            precision = np.maximum.accumulate(precision[::-1], axis=0)[::-1]
            # How many of the 101 values of recall are reached, in whole numbers and so without rounding.
            recall = found * 100 / annotations
            reached = recall.astype(np.int64)
            reached += self._reached[reached] <= recall
            reached[1:] -= reached[:-1].copy()
            result[place] = (precision * reached).sum(axis=0) / len(self._reached)
        return result


def _reached_from(recalls: _Floats) -> _Floats:
    """In hundredths, from where on pycocotools takes each value of recall for reached: 57 of 100 is not."""
    hundredths = np.arange(len(recalls), dtype=np.float64)
    return np.where(hundredths / 100 < recalls, np.nextafter(hundredths, np.inf), hundredths)


def _matches_of(of_images: list[Any]) -> _Matches | None:
    """Of pycocotools' matches of each image."""
    there = [(place, each) for place, each in enumerate(of_images) if each is not None]
    if not any(len(each["gtIgnore"]) for _, each in there):
        return None
    places = np.array([place for place, _ in there])
    asked = np.concatenate([each["gtIgnore"] for _, each in there]) == 0
    owners = np.repeat(places, [len(each["gtIgnore"]) for _, each in there])
    annotations = np.bincount(owners[asked], minlength=len(of_images)).astype(np.float64)
    if not asked.any():
        return None
    order = np.argsort(-np.concatenate([each["dtScores"] for _, each in there]), kind="mergesort")
    lengths = [len(each["dtScores"]) for _, each in there]
    images = np.repeat(places, lengths)[order]
    ranks = np.concatenate([np.arange(length) for length in lengths])[order]
    counted = np.concatenate([each["dtIgnore"] for _, each in there], axis=1)[:, order] == 0
    right = np.concatenate([each["dtMatches"] for _, each in there], axis=1)[:, order] > 0
    right &= counted
    wrong = counted.all(axis=0) & ~right.any(axis=0)
    kept = np.flatnonzero(counted.any(axis=0) & ~wrong)
    before = np.searchsorted(kept, np.flatnonzero(wrong))
    inside = before < len(kept)
    at = before[inside], images[wrong][inside]
    return _Matches(
        images=images[kept],
        ranks=ranks[kept],
        right=right[:, kept],
        counted=counted[:, kept],
        wrong=sparse.csr_matrix((np.ones(len(at[0])), at), shape=(len(kept), len(of_images))),
        annotations=annotations,
    )


class Spread(NamedTuple):
    """How far a figure, or a difference of two, may be from that of all images there could be."""

    # How much the figure of so few images is too high, as the mean of resamples is above the figure.
    bias: float
    # The standard deviation of the resamples.
    error: float
    # Of freedom: a category with few annotated images says little of how far others would be.
    degrees: float


@dataclass(frozen=True, kw_only=True)
class Resampled:
    """A figure, and what it is of each resample."""

    # None without annotations.
    value: float | None
    # Of each category and resample, NaN without annotations; shape (categories, resamples).
    of_draws: _Floats
    # How many images, or clusters, have an annotation of each category.
    units: npt.NDArray[np.int64]

    def minus(self, other: Resampled) -> Resampled:
        """The difference from another model's figure of the same images and resamples."""
        assert self.value is not None and other.value is not None
        draws = self.of_draws - other.of_draws
        return Resampled(value=self.value - other.value, of_draws=draws, units=self.units)

    def spread(self) -> Spread | None:
        """None where resamples do not differ, or have hardly an annotation.

        The degrees of freedom are those of F. Satterthwaite (Biometrics Bulletin 2, 1946) for a sum over
        categories, each with one less than its images: by what they vary, and at most as many as if the
        images of all varied alike, for the two images of a rare category may be both right by chance.
        """
        draws, units = self.of_draws[self.units > 0], self.units[self.units > 0]
        known = np.isfinite(draws)
        if self.value is None or known.any(axis=0).mean() < 0.5:
            return None
        counts = known.sum(axis=0)
        means = (np.where(known, draws, 0.0).sum(axis=0) / np.maximum(counts, 1))[counts > 0]
        spreads = (np.var(draw[here]) if here.any() else 0.0 for draw, here in zip(draws, known, strict=True))
        variances = np.fromiter(spreads, np.float64)
        error = float(np.std(means, ddof=1))
        if error <= _ROUNDING:
            return None
        degrees = min(
            parts.sum() ** 2 / (parts**2 / np.maximum(units - 1, 0.5)).sum()
            for parts in (variances, 1 / units)
            if parts.any()
        )
        return Spread(float(means.mean() - self.value), error, float(degrees))


def interval(figure: Resampled) -> tuple[tuple[float, float], str | None] | None:
    """The 95 % interval of a figure from 0 to 1, and why it may be too short; None where there is none.

    On the scale of the logit, with the bias taken off and Student's quantile:
    benchmarks/detection_intervals.py has how often it covers.
    """
    if figure.value is None or (spread := figure.spread()) is None or spread.error >= 0.5:
        return None
    centre = min(max(figure.value - spread.bias, spread.error), 1 - spread.error)
    half = student_95(max(1.0, spread.degrees)) * spread.error / (centre * (1 - centre))
    logit = math.log(centre / (1 - centre))
    # Rounded: exp and log have other last bits on other machines, where ``dualeval verify`` wants the same.
    low, high = (round(1 / (1 + math.exp(-at)), _DIGITS) for at in (logit - half, logit + half))
    effective = int(spread.degrees) + 1
    few = few_decide(int(figure.units.max()), 0.0, "images", most=effective, least=SHOWN_FROM_RESAMPLED)
    return (min(low, figure.value), max(high, figure.value)), few


def resampled_figures(
    evaluation: Any,
    figures: Mapping[str, Figure],
    number: int,
    seed: int,
    units: npt.NDArray[np.int64] | None = None,
) -> dict[str, Resampled]:
    """Figures of an evaluation, and of images (or units of them) that are drawn with replacement."""
    weighted = WeightedFigures(evaluation, figures)
    units = np.arange(weighted.images) if units is None else units
    pieces = [weighted.of(weights) for weights in resamples(number, seed, units)]
    return {
        key: Resampled(
            value=figure.of(evaluation),
            of_draws=np.concatenate([piece[key] for piece in pieces], axis=1),
            units=weighted.units(figure.size, units),
        )
        for key, figure in figures.items()
    }


def resamples(number: int, seed: int, units: npt.NDArray[np.int64]) -> Iterator[_Floats]:
    """Weights of images, of which units (themselves, or clusters) are drawn with replacement, piece by piece.

    Args:
        number: how many resamples.
        seed: of the draws: equal seeds and numbers of units have equal draws.
        units: the number of each image's unit, from 0 on.

    Returns:
        arrays of shape (images, some resamples).
    """
    count = int(units.max(initial=-1)) + 1
    draw = np.random.default_rng(seed)
    for start in range(0, number, _AT_ONCE):
        drawn = draw.integers(0, count, (min(_AT_ONCE, number - start), count))
        weights = np.stack([np.bincount(each, minlength=count) for each in drawn], axis=1)
        yield weights[units].astype(np.float64)
