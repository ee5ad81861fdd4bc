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
    found: Sequence[Any]
    true: Sequence[Any]
    if "boxes" in row:
        found = [(left, top, right - left, bottom - top) for left, top, right, bottom in row["boxes"]]
        true = [tuple(box) for box in row["true_boxes"]]
    else:
        found, true = (runs_of(row[name]) for name in ("masks", "true_masks"))
    return match(found, row["scores"], row["labels"], true, row["true_labels"], row["true_crowds"])


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


def _overlaps(found: Sequence[Any], true: Sequence[Any], crowds: Sequence[bool]) -> npt.NDArray[np.float64]:
    """Intersection over union, of crowds over the detection: (found, true)."""
    from pycocotools import mask

    if not len(found) or not len(true):
        return np.zeros((len(found), len(true)))
    both = [each if isinstance(each[0], dict) else np.asarray(each, np.float64) for each in (found, true)]
    overlaps: npt.NDArray[np.float64] = np.asarray(mask.iou(*both, [*map(int, crowds)]))
    return overlaps
