"""How often a result is warned of that an honest model gives, and how often one with a common mistake.

Honest is a model at chance: its predictions do not depend on the targets. Classes are equally frequent among
targets and predictions, or some prevail, up to 95 % of all samples.

    python benchmarks/mistakes.py [--rounds N]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from common import machine, table, write_results

from dualeval.metrics import mistakes

Classes: TypeAlias = npt.NDArray[np.int64]
Shares: TypeAlias = npt.NDArray[np.float64]

COUNTS = (2, 3, 10, 100, 1_000)
SIZES = (1, 2, 5, 10, 20, 50, 100, 300, 1_000, 10_000, 100_000)
_DRAWN = 10_000_000  # samples of a cell, at most


def _falling(classes: int) -> Shares:
    shares: Shares = 1 / np.arange(1, classes + 1)
    total: float = shares.sum()
    return np.divide(shares, total)


def _prevailing(share: float) -> Callable[[int], Shares]:
    return lambda classes: np.r_[share, np.full(classes - 1, (1 - share) / (classes - 1))]


# How frequent each class is, and the same with the rare ones first.
FREQUENCIES: dict[str, Callable[[int], Shares]] = {
    "equal": lambda classes: np.full(classes, 1 / classes),
    "1 / rank": _falling,
    "one in 50 %": _prevailing(0.5),
    "one in 95 %": _prevailing(0.95),
}
# Of a model that is right: what is wrong, from targets, predictions and number of classes.
MISTAKES: dict[str, Callable[[Classes, Classes, int], Classes]] = {
    "labels from 1": lambda target, predicted, classes: predicted - 1,
    "a class more": lambda target, predicted, classes: predicted + 1,
    "sorted by name": lambda target, predicted, classes: np.array(sorted(range(classes), key=str))[predicted],
    "two exchanged": lambda target, predicted, classes: np.r_[1, 0, np.arange(2, classes)][predicted],
    "reversed": lambda target, predicted, classes: classes - 1 - predicted,
    "one class": lambda target, predicted, classes: 0 * predicted,
}


def sentences(target: Any, prediction: Any) -> list[str]:
    """What a run says of these rows."""
    return [*mistakes.of_rows({"target": target, "prediction": prediction}, len(target))]


def at_chance(generator: np.random.Generator, classes: int, size: int, rounds: int) -> dict[str, float]:
    """The part of rounds with a sentence, for each pair of frequencies."""
    found = {}
    for name, of_targets in FREQUENCIES.items():
        for other, of_predictions in FREQUENCIES.items():
            for order in (1, -1):
                shares = of_targets(classes), of_predictions(classes)[::order]
                drawn = ([generator.choice(classes, size, p=each) for each in shares] for _ in range(rounds))
                warned = sum(bool(sentences(*each)) for each in drawn)
                found[f"{name} / {other}{'' if order == 1 else ', reversed'}"] = warned / rounds
    return found


def wrong(
    generator: np.random.Generator, mistake: str, classes: int, size: int, right: float, rounds: int
) -> float:
    """The part of rounds in which a mistake is found, of a model that is right so often."""
    found = 0
    for _ in range(rounds):
        target = generator.integers(0, classes, size)
        guess = generator.integers(0, classes, size)
        predicted = np.where(generator.random(size) < right, target, guess)
        found += bool(sentences(target, MISTAKES[mistake](target, predicted, classes)))
    return found / rounds


def _honest(rounds: int) -> Iterator[list[str]]:
    generator = np.random.default_rng(1)
    for size in SIZES:
        line = [f"{size:,}"]
        for classes in COUNTS:
            of_cell = at_chance(generator, classes, size, min(rounds, max(20, _DRAWN // size // 32)))
            worst = max(of_cell, key=lambda name: of_cell[name])
            mean = float(np.mean([*of_cell.values()]))
            line.append(f"{100 * mean:.2f} / {100 * of_cell[worst]:.1f}")
            print(size, classes, line[-1], worst, file=sys.stderr, flush=True)
        yield line


def _mistaken(rounds: int) -> Iterator[list[str]]:
    generator = np.random.default_rng(2)
    for mistake in MISTAKES:
        for right in (0.95, 0.7):
            for classes in COUNTS:
                cells = (
                    wrong(generator, mistake, classes, size, right, rounds)
                    for size in (30, 100, 1_000, 10_000)
                )
                yield [mistake, f"{right:.0%}", f"{classes:,}", *(f"{100 * cell:.0f}" for cell in cells)]


def _seconds() -> float:
    generator = np.random.default_rng(3)
    target, prediction = generator.integers(0, 1_000, (2, 10_000_000), dtype=np.int32)
    start = perf_counter()
    sentences(target, prediction)
    return perf_counter() - start


def main() -> None:
    """Simulate, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=1_000, help="of each cell")
    rounds = parser.parse_args().rounds
    host, seconds = machine(), _seconds()
    honest, mistaken = [*_honest(rounds)], [*_mistaken(max(20, rounds // 20))]
    body = (
        f"Parts of up to {rounds:,} runs with a warning, in percent, by samples and classes. At chance: the "
        "mean over 32 pairs of frequencies of targets and predictions / the largest of these. Wanted: a mean "
        "of at most 1.\n\n"
        + table(["samples", *(f"{classes:,} classes" for classes in COUNTS)], honest)
        + "\nOf a model that is right so often, and guesses else: in how many percent of runs its mistake is "
        "found, by samples. Up to 10 classes have the same order by name.\n\n"
        + table(["mistake", "right", "classes", "30", "100", "1,000", "10,000"], mistaken)
        + f"\nThe look at 10,000,000 rows of 1,000 classes took {seconds:.1f} s.\n"
    )
    figures = {"rounds": rounds, "honest": honest, "mistaken": mistaken, "seconds": seconds}
    write_results("warnings", "How often a result is warned of", body, figures, host)


if __name__ == "__main__":
    main()
