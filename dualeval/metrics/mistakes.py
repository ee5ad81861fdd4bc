"""What common mistakes leave in a result: classes in another order, weights that were not loaded.

An honest model at chance is warned of in at most 1 % of runs (benchmarks/mistakes.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from dualeval.metrics.confusion import NO_CLASS, Confusion

# Columns of what is right, beside "prediction", and what their numbers are.
_NOUNS = {"target": "class", "answer": "choice"}
_ERRORS = ("error", "absolute_error", "squared_error")
_EVIDENCE = 6.0  # -ln of how often chance may give as much: once in 400 runs
# Of fewer samples, or where most targets are of one class, an honest model may predict one class alone.
_LEAST, _MOST = 100, 0.9
_LARGEST = 1 << 20  # larger numbers are no classes
_PREPARED = "check first that the trained weights were loaded, and that inputs are prepared as in training"
_COUNTED = (
    "check first whether labels and model both count from 0, and whether one of them has an extra class"
)
_SAME = "check first that a label is the same {} in data and model (names, order, and from where they count)"
_ORDERED = "check first in which order the model was trained (--class-order, --class-map)"


def pair_among(columns: Collection[str]) -> list[str]:
    """The columns of what is right and what is predicted; none where these are not both there."""
    return next(([name, "prediction"] for name in _NOUNS if {name, "prediction"} <= {*columns}), [])


def of_counts(ledgers: Iterable[tuple[Any, Any]], samples: int) -> list[str] | None:
    """What to check first, from the ledger's slots of metrics that count classes; None where none does."""
    for metric, slots in ledgers:
        if isinstance(metric, Confusion) and [*metric.columns] == pair_among(metric.columns):
            [places] = slots.numpy().nonzero()
            target, column = np.divmod(places, metric.num_classes + 1)
            return [*_of_classes(target, column + NO_CLASS, slots.numpy()[places], samples)]
        if hasattr(metric, "counts_overlap"):  # of what is wrong it has the sums alone
            right, targets, predictions = slots.view(3, -1).numpy()
            ids, none = np.arange(len(right)), np.full(len(right), NO_CLASS)
            count = np.concatenate([right, targets - right, predictions - right])
            target, predicted = np.concatenate([ids, ids, none]), np.concatenate([ids, none, ids])
            return [*_of_classes(target, predicted, count, samples, least=1)]
    return None


def of_rows(columns: Mapping[str, Any], samples: int, *, reads: Collection[str] = _ERRORS) -> Iterator[str]:
    """What to check first, from the two columns, one number a sample; nothing where all may be right.

    ``reads`` are all columns of the metrics: those of errors make a regression of targets of 0 and 1.
    """
    [(name, target), (_, prediction)] = columns.items()
    if "f" in (target.dtype.kind, prediction.dtype.kind):
        return _of_numbers(target, prediction, is_regression=not {*_ERRORS}.isdisjoint(reads))
    targets, predictions = (each[target >= 0].astype(np.int64) for each in (target, prediction))
    predictions = np.maximum(predictions, NO_CLASS) - NO_CLASS
    width = 1 + int(predictions.max(initial=0))
    keys, count = np.unique(targets * width + predictions, return_counts=True)
    return _of_classes(keys // width, keys % width + NO_CLASS, count, samples, _NOUNS[name])


def _of_classes(
    target: Any, predicted: Any, count: Any, samples: int, noun: str = "class", *, least: int = _LEAST
) -> Iterator[str]:
    """From pairs of classes, -1 for one that is not known, of so many independent samples."""
    size, total = 1 + int(max(target.max(initial=0), predicted.max(initial=0))), int(count[target >= 0].sum())
    if not total or size > _LARGEST:
        return
    of_target, of_prediction = (
        np.bincount(each[each >= 0], count[each >= 0], size) / total for each in (target, predicted)
    )
    right = int(count[(target == predicted) & (target >= 0)].sum()) / total
    guessed, only = float(of_target @ of_prediction), np.flatnonzero(of_prediction)
    if len(only) == 1 and samples >= least and of_target[only[0]] < _MOST:
        yield f"every prediction is {noun} {only[0]}, the target of {of_target[only[0]]:.1%}: {_PREPARED}"
        return
    known, numbers, fits = (target >= 0) & (predicted >= 0), np.arange(size), []
    for order, relation, check in (
        (numbers + 1, "the target plus 1", _COUNTED),
        (numbers - 1, "the target minus 1", _COUNTED),
        (_best_order(target[known], predicted[known], count[known], size), "", _ORDERED),
    ):
        inside = np.flatnonzero((order >= 0) & (order < size) & (of_target > 0))
        part = int(count[(target >= 0) & (order[target] == predicted)].sum()) / total
        by_chance = float(of_target[inside] @ of_prediction[order[inside]])
        # ln of how many such orders there are.
        seen, targets = np.count_nonzero(of_target + of_prediction), np.count_nonzero(of_target)
        orders = 1.0 if relation else math.lgamma(seen + 1) - math.lgamma(seen - targets + 1)
        most = part >= max(0.5, 2 * right) and _evidence(part, by_chance, samples) > _EVIDENCE + orders
        if most or (not relation and _exchanges(order, target, predicted, count, samples / total)):
            named = ", ".join(f"{each} as {order[each]}" for each in inside[order[inside] != inside][:3])
            fits.append((part, relation or f"the target in another order of classes ({named})", check))
    if fits:
        part, relation, check = max(fits, key=lambda each: each[0])
        yield f"{part:.1%} of the predictions are {relation}, {right:.1%} are right: {check}"
    elif not guessed and len(only) and samples >= least:
        yield f"no prediction is a {noun} that any sample has: {_SAME.format(noun)}"
    elif right < 0.9 * guessed and _evidence(right, guessed, samples) > _EVIDENCE:
        yield f"{right:.1%} are right, fewer than the {guessed:.1%} of guessing: {_SAME.format(noun)}"


def _exchanges(order: Any, target: Any, predicted: Any, count: Any, weight: float) -> bool:
    """Whether an order exchanges some classes alone, each of which is mostly predicted as the other one.

    A model that guesses, whatever classes it prefers, predicts one of such a circle at least no less often as
    itself than as the next: the weakest is the evidence.
    """
    moved = {each for each in np.flatnonzero(order != np.arange(len(order))) if order[each] < len(order)}
    while moved != (kept := {each for each in moved if order[each] in moved}):
        moved = kept
    targets = np.unique(target[target >= 0]).size
    chosen = _EVIDENCE + math.lgamma(targets + 1) - math.lgamma(targets - len(moved) + 1)
    for each in moved:
        other, same = (
            int(count[(target == each) & (predicted == named)].sum()) for named in (order[each], each)
        )
        if other <= 2 * same or _evidence(other / (same + other), 0.5, weight * (same + other)) <= chosen:
            return False
    return bool(moved)


def _evidence(share: float, by_chance: float, samples: float) -> float:
    """-ln of a bound of how often chance is so far off (H. Chernoff, Ann. Math. Stat. 23, 1952)."""
    terms = ((share, by_chance), (1 - share, 1 - by_chance))
    return samples * sum(part * math.log(part / chance) for part, chance in terms if part > 0 < chance)


def _best_order(target: Any, predicted: Any, count: Any, size: int) -> Any:
    """The class that is predicted most often for each target; none twice, and ``size`` for none."""
    top, order = np.zeros(size, np.int64), np.full(size, size)
    np.maximum.at(top, target, count)
    if 2 * top.sum() >= count.sum():  # else none is right for most
        most = np.flatnonzero(count == top[target])
        most = most[np.argsort(-count[most], kind="stable")]
        firsts = [np.unique(each[most], return_index=True)[1] for each in (target, predicted)]
        both = most[np.intersect1d(firsts[0], firsts[1])]
        order[target[both]] = predicted[both]
    return order


def _of_numbers(target: Any, prediction: Any, *, is_regression: bool) -> Iterator[str]:
    known = np.isfinite(target) & np.isfinite(prediction)
    wanted, outputs = (each[known].astype(np.float64) for each in (target, prediction))
    if len(wanted) < _LEAST or not np.ptp(wanted):
        return
    if np.isin(wanted, (0, 1)).all():
        if not is_regression:
            return  # a metric of scores
        yield (
            "every target is 0 or 1, and the model gives one number a sample, so it is evaluated as a "
            "regression. If the number is the logit of class 1, make two: "
            "torch.nn.functional.pad(outputs.reshape(-1, 1), (1, 0)); of a probability take torch.logit first"
        )
        return
    with np.errstate(all="ignore"):
        share = float(np.corrcoef(wanted, outputs)[0, 1]) ** 2
        error = float(np.square(wanted - outputs).mean() / wanted.var())
    if not np.ptp(outputs):
        yield f"every prediction is {outputs[0]:.6g}, and the targets differ: {_PREPARED}"
    elif share >= 0.5 and error > 2 - share:  # R2 is less than -1 + what a line through the pairs gives
        yield (
            f"the predictions explain {share:.1%} of the targets' variance, on another scale (mean "
            f"{outputs.mean():.4g} for {wanted.mean():.4g}): check first whether training normalised targets"
        )
