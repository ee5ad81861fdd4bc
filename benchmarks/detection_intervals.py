"""How often intervals of average precision hold, and how often tests and gates of two models err.

Images are drawn again and again from a population with few categories, of which one is rare, and with
detections that depend on their image: in some all are found, in others few. Matches are drawn in place of
boxes, and everything after them is the package's own.

    python benchmarks/detection_intervals.py [--rounds N]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from common import end_on_sigterm, machine, table, write_results

from dualeval.comparison.statistics import LEVEL, ResampledDifference, largest_loss
from dualeval.metrics.detection.bootstrap import Resampled, WeightedFigures, interval, resamples
from dualeval.metrics.detection.figures import Figure

THRESHOLDS = np.linspace(0.5, 0.95, 10)
FIGURES = {
    "ap": Figure("precision", None, 0, 1),
    "ap50": Figure("precision", 0, 0, 1),
    "ap_small": Figure("precision", None, 1, 1),
    "ar100": Figure("recall", None, 0, 1),
}
# Annotations of each category in an image, on average; and the part of them that is small.
RATES, SMALL = (2.0, 0.6, 0.2), 0.2


@dataclass(frozen=True, kw_only=True)
class Model:
    """How well a model finds objects, ranks what it found, and how much is wrong."""

    finds: float
    ranks: float
    wrong: float


GOOD, FAIR, POOR = (
    Model(finds=2.5, ranks=2.0, wrong=1.0),
    Model(finds=1.0, ranks=1.2, wrong=3.0),
    Model(finds=-0.5, ranks=0.7, wrong=6.0),
)
BETTER = Model(finds=2.8, ranks=2.0, wrong=0.8)
# Two models of the same images: equally good ones, slightly different ones, very different ones.
PAIRS = {"fair and fair": (FAIR, FAIR), "good and better": (GOOD, BETTER), "fair and poor": (FAIR, POOR)}
SIZES, RESAMPLES = (50, 200, 1_000), 200
# How much images differ, and how much of what makes an object hard is the same for two models.
EFFECT, SAME = 0.7, 0.5


def drawn(draw: np.random.Generator, images: int, models: Sequence[Model]) -> list[WeightedFigures]:
    """What models say of the same images."""
    of_images = draw.normal(0, EFFECT, images)
    evaluations: list[list[Any]] = [[] for _ in models]
    for rate in RATES:
        counts = draw.poisson(rate, images)
        owner = np.repeat(np.arange(images), counts)
        small = draw.random(len(owner)) < SMALL
        shared = draw.normal(size=len(owner))
        for evaluation, model in zip(evaluations, models, strict=True):
            ease = (
                model.finds
                + of_images[owner]
                - 1.0 * small
                + 1.5 * (np.sqrt(SAME) * shared + np.sqrt(1 - SAME) * draw.normal(size=len(owner)))
            )
            overlap = 1 / (1 + np.exp(-ease - draw.normal(0, 0.5, len(owner))))
            false = draw.poisson(model.wrong * rate / 2 * np.exp(-0.5 * of_images))
            wrong_owner = np.repeat(np.arange(images), false)
            scores = np.concatenate(
                [
                    model.ranks + 0.5 * ease + draw.normal(0, 0.7, len(owner)),
                    draw.normal(-0.5, 1, len(wrong_owner)),
                ]
            )
            owners = np.concatenate([owner, wrong_owner])
            overlaps = np.concatenate([overlap, np.zeros(len(wrong_owner))])
            is_small = np.concatenate([small, draw.random(len(wrong_owner)) < SMALL])
            order = np.lexsort((-scores, owners))
            ends = np.cumsum(np.bincount(owners, minlength=images))[:-1]
            of_scores = np.split(scores[order], ends)
            matched = np.split(overlaps[order][None] >= THRESHOLDS[:, None], ends, axis=1)
            truth_ends = np.cumsum(counts)[:-1]
            for wanted in (None, True):
                outside = np.zeros(len(order), bool) if wanted is None else ~is_small[order]
                not_asked = np.zeros(len(owner)) if wanted is None else ~small
                ignored = np.split(np.tile(outside, (len(THRESHOLDS), 1)), ends, axis=1)
                truths = np.split(not_asked.astype(int), truth_ends)
                evaluation += [
                    {"dtScores": s, "dtMatches": m, "dtIgnore": i, "gtIgnore": t}
                    for s, m, i, t in zip(of_scores, matched, ignored, truths, strict=True)
                ]
    params = SimpleNamespace(
        imgIds=range(images),
        catIds=range(len(RATES)),
        areaRng=range(2),
        maxDets=[10, 100],
        recThrs=np.linspace(0, 1, 101),
    )
    return [WeightedFigures(SimpleNamespace(params=params, evalImgs=each), FIGURES) for each in evaluations]


def means(weighted: WeightedFigures, images: int) -> dict[str, float]:
    """The figures of all images alike."""
    return {key: float(np.nanmean(of)) for key, of in weighted.of(np.ones((images, 1))).items()}


def resampled(weighted: WeightedFigures, images: int) -> dict[str, Resampled]:
    """As the metric's own, which has an evaluation."""
    units, values = np.arange(images), means(weighted, images)
    pieces = [weighted.of(weights) for weights in resamples(RESAMPLES, 0, units)]
    return {
        key: Resampled(
            value=values[key],
            of_draws=np.concatenate([piece[key] for piece in pieces], axis=1),
            units=weighted.units(figure.size, units),
        )
        for key, figure in FIGURES.items()
    }


def truth_of(model: Model, pieces: int = 3, images: int = 20_000) -> dict[str, float]:
    """Of very many images."""
    of_pieces = [
        means(drawn(np.random.default_rng([99, piece]), images, [model])[0], images)
        for piece in range(pieces)
    ]
    return {key: float(np.mean([each[key] for each in of_pieces])) for key in FIGURES}


def judged(one: Resampled, other: Resampled, truth: float, of_both: float, images: int) -> dict[str, float]:
    """Of one draw of images what is wrong of the interval of a model, and of the comparison of both."""
    difference, ends = other.minus(one), interval(one)
    low, high = np.nanquantile(np.nanmean(one.of_draws, axis=0), [LEVEL / 2, 1 - LEVEL / 2])
    found = {"none": float(ends is None), "percentile": float(not low <= truth <= high)}
    if ends is not None:
        found |= {
            "interval": float(not ends[0][0] <= truth <= ends[0][1]),
            "rough": float(ends[1] is not None),
        }
        found["missed"] = found["interval"] * (1 - found["rough"])
    if (spread := difference.spread()) is not None and difference.value is not None:
        paired = ResampledDifference(
            value=difference.value,
            error=spread.error,
            bias=spread.bias,
            units=max(2, int(spread.degrees) + 1),
            drawn=images,
        )
        bounds = paired.bounds(LEVEL / 2)
        found["difference"] = float(not bounds[0] <= of_both <= bounds[1])
        found["test"] = float(paired.p_value() < LEVEL)
        # The margin is the true loss, which a gate should allow in 5 % alone.
        found["gate"] = float(largest_loss(paired, LEVEL, "higher") < -of_both)
        found["difference rough"] = float(paired.rough is not None)
        found["gate missed"] = found["gate"] * (1 - found["difference rough"])
    return found


def measure(pair: str, images: int, rounds: int, truths: dict[Model, dict[str, float]]) -> dict[str, Any]:
    """How often each of these errs, by figure."""
    models, every = PAIRS[pair], dict[str, list[dict[str, float]]]()
    for number in range(rounds):
        both = drawn(np.random.default_rng([images, number]), images, models)
        one, other = (resampled(each, images) for each in both)
        for key in FIGURES:
            truth, of_other = (truths[model][key] for model in models)
            every.setdefault(key, []).append(judged(one[key], other[key], truth, of_other - truth, images))
    return {
        key: {
            what: float(np.mean([each[what] for each in draws if what in each]))
            for what in dict.fromkeys(name for each in draws for name in each)
        }
        for key, draws in every.items()
    }


def main() -> None:
    """Simulate, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=300, help="draws of each pair of models and size")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="images")
    arguments = parser.parse_args()
    end_on_sigterm()
    host = machine()
    truths = {model: truth_of(model) for model in {each for pair in PAIRS.values() for each in pair}}
    figures: dict[str, Any] = {}
    for images in arguments.sizes:
        for pair in PAIRS:
            figures[f"{pair}, {images}"] = measure(pair, images, arguments.rounds, truths)
            print(pair, images, figures[f"{pair}, {images}"], file=sys.stderr, flush=True)
    write_results(
        "detection-intervals",
        "How often intervals of average precision hold",
        report(figures, arguments.rounds),
        {"rounds": arguments.rounds, **figures},
        host,
    )


def report(figures: dict[str, Any], rounds: int) -> str:
    """The tables."""
    rates = ", ".join(map(str, RATES))
    body = f"{rounds} draws of each; percent. Annotations of each category in an image: {rates}.\n"
    for title, columns in {
        "Intervals of the first model": {
            "covers": "interval",
            "percentiles would": "percentile",
            "rough": "rough",
            "wrong without being rough": "missed",
        },
        "Differences": {
            "covers": "difference",
            "p < 0.05": "test",
            "gates that pass wrongly": "gate",
            "rough": "difference rough",
            "pass wrongly without being rough": "gate missed",
        },
    }.items():
        rows = [
            [
                name,
                key,
                *(
                    _percent(each.get(what), kept="covers" in head or "would" in head)
                    for head, what in columns.items()
                ),
            ]
            for name, of in figures.items()
            for key, each in of.items()
        ]
        body += f"\n## {title}\n\n{table(['models, images', 'figure', *columns], rows)}"
    return body


def _percent(wrong: float | None, *, kept: bool) -> str:
    return "-" if wrong is None else f"{100 * (1 - wrong if kept else wrong):.1f}"


if __name__ == "__main__":
    main()
