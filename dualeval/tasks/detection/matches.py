"""Which detections of a picture lie on which of its objects, at one overlap: for cards, F1 and confusions.

Average precision does not come from here: pycocotools matches for it, at ten overlaps and all scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dualeval.tasks.detection.masks import runs_of

# What is compared with what: usual values, which nobody needs to agree with.
OVERLAP, SCORE = 0.5, 0.5
# Of overlaps and scores, by which one looks for pictures.
_BINS = {0.9: "0.90 to 1.00", 0.75: "0.75 to 0.90", 0.5: "0.50 to 0.75"}


class Matches(NamedTuple):
    """Of one picture the detections with a score of ``SCORE`` or more, by their places."""

    # (object, detection), also of another category.
    pairs: list[tuple[int, int]]
    # Objects on which none lies, without crowds.
    missed: list[int]
    # Detections that lie on none, nor on a crowd.
    false: list[int]


def matches_of(row: Mapping[str, Any]) -> Matches:
    """Which of a picture's detections lie on which of its objects, from its row."""
    found, true = _compared(row)
    return match(found, row["scores"], row["labels"], true, row["true_labels"], row["true_crowds"])


def _compared(row: Mapping[str, Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """The detections and the objects of a row, as ``match`` takes them."""
    if "boxes" not in row:
        return runs_of(row["masks"]), runs_of(row["true_masks"])
    found = [(left, top, right - left, bottom - top) for left, top, right, bottom in row["boxes"]]
    return found, [tuple(box) for box in row["true_boxes"]]


def match(
    found: Sequence[Any],
    scores: Sequence[float],
    labels: Sequence[int],
    true: Sequence[Any],
    true_labels: Sequence[int],
    crowds: Sequence[bool],
) -> Matches:
    """Match by the highest score first: to the object of the same category that it covers most, else another.

    Args:
        found: boxes as left, top, width and height, or run lengths as pycocotools takes them.
        scores: one each.
        labels: categories, one each.
        true: as ``found``.
        true_labels: one each.
        crowds: whether an object is a crowd, which is not asked for; any number of detections may lie in it.
    """
    order = [
        place for place in np.argsort(-np.asarray(scores), kind="stable").tolist() if scores[place] >= SCORE
    ]
    overlaps = _overlaps([found[place] for place in order], true, crowds)
    free = {place for place, crowd in enumerate(crowds) if not crowd}
    pairs, false = [], []
    for row, place in zip(overlaps, order, strict=True):
        fitting = [each for each in free if row[each] >= OVERLAP]
        if fitting:
            best = max(fitting, key=lambda each: (true_labels[each] == labels[place], row[each], -each))
            free.remove(best)
            pairs.append((best, place))
        elif not any(crowd and row[each] >= OVERLAP for each, crowd in enumerate(crowds)):
            false.append(place)
    return Matches(pairs, sorted(free), false)


def facets_of(row: Mapping[str, Any], categories: Mapping[int, str]) -> dict[str, list[str]]:
    """By what one looks for a picture: an object that is taken for another is missed, the other not there."""
    matches = matches_of(row)
    overlaps = _overlaps(*_compared(row), row["true_crowds"])
    true, labels = ([categories[each] for each in row[name]] for name in ("true_labels", "labels"))
    wrong = [(one, other) for one, other in matches.pairs if true[one] != labels[other]]
    false = [*matches.false, *(other for _, other in wrong)]
    return {
        "found": [true[one] for one, other in matches.pairs if true[one] == labels[other]],
        "missed": [true[each] for each in [*matches.missed, *(one for one, _ in wrong)]],
        "not there": [labels[each] for each in false],
        "overlap (IoU)": [_bin(overlaps[other, one]) for one, other in matches.pairs],
        "score, not there": [_bin(row["scores"][each]) for each in false],
    }


def _bin(value: float) -> str:
    return next(named for low, named in _BINS.items() if value >= low)


def _overlaps(found: Sequence[Any], true: Sequence[Any], crowds: Sequence[bool]) -> npt.NDArray[np.float64]:
    """Intersection over union, of crowds over the detection: (found, true)."""
    from pycocotools import mask

    if not len(found) or not len(true):
        return np.zeros((len(found), len(true)))
    both = [each if isinstance(each[0], dict) else np.asarray(each, np.float64) for each in (found, true)]
    overlaps: npt.NDArray[np.float64] = np.asarray(mask.iou(*both, [*map(int, crowds)]))
    return overlaps
