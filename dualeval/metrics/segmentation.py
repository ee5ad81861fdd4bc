"""Metrics of segmentation, from each picture's counts of pixels by class.

The columns are ``intersection``, ``target_pixels`` and ``predicted_pixels``, (pictures, classes) each: pixels
of a class that are predicted as it, those that are of it, those that are predicted as it. Pixels without a
label are in none of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from dualeval.metrics.classification import NonfiniteLogits
from dualeval.metrics.confusion import IoU
from dualeval.metrics.described import FRACTION, direction
from dualeval.metrics.means import Mean, Ratio
from dualeval.metrics.metric import Measured, Metric, Value

COUNTS = ("intersection", "target_pixels", "predicted_pixels")


def counts_of(labels: Tensor, predicted: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """The columns' entries of a picture, int64 (classes,) each; a label or prediction of -1 is none."""
    # Behind the classes stands what is not counted.
    labels = torch.where(labels < 0, classes, labels.to(torch.int64))
    predicted = torch.where((predicted < 0) | (labels == classes), classes, predicted)
    right = torch.where(predicted == labels, labels, classes)
    found = [_histogram(each, classes) for each in (right, labels, predicted)]
    return found[0], found[1], found[2]


def _histogram(numbers: Tensor, classes: int) -> Tensor:
    flat = numbers.flatten()
    counts = torch.zeros(classes + 1, dtype=torch.int64, device=flat.device)
    # Integers: the order of additions does not show. (bincount would wait for a device.)
    return counts.index_add_(0, flat, torch.ones_like(flat))[:classes]


def picture_scores(intersection: Tensor, target: Tensor, predicted: Tensor) -> dict[str, Tensor]:
    """Of each picture its right and its labelled pixels, and its own mean IoU over the classes in it."""
    union = target + predicted - intersection
    each = intersection.double() / union.clamp(min=1)
    labelled = target.sum(1)
    return {
        "right_pixels": intersection.sum(1),
        "labelled_pixels": labelled,
        "is_labelled": labelled > 0,
        "picture_iou": each.sum(1) / (union > 0).sum(1).clamp(min=1),
    }


class _OfClasses(IoU):
    """A value of each class, and its mean over the classes that have one.

    Ledger: intersection, target and predicted pixels, num_classes slots each.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.columns = COUNTS

    def update(self, ledger: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Add the pictures' counts."""
        ledger += torch.cat([columns[name].to(torch.int64).sum(0) for name in COUNTS])


class MeanIoU(_OfClasses):
    """intersection / (target + predicted - intersection), over the pixels of all pictures."""


class _Quotient(_OfClasses):
    """One whose value is not the intersection over union."""

    def _value(self, right: int, target: int, predicted: int) -> float | None:
        raise NotImplementedError

    def compute(self, ledger: Tensor) -> Measured:
        """The mean, and the list of all classes, with None for those that have no value."""
        each: list[Value] = [self._value(*counts) for counts in zip(*self._counts(ledger), strict=True)]
        present = [value for value in each if isinstance(value, float)]
        key = f"mean_{self.kind_name}"
        return Measured(
            values={
                key: math.fsum(present) / len(present) if present else None,
                f"{self.kind_name}_per_class": each,
            },
            units={key: FRACTION},
            directions={key: direction(higher_is_better=True)},
        )


class MeanDice(_Quotient):
    """2 intersection / (target + predicted), which is F1."""

    kind_name = "dice"

    def _value(self, right: int, target: int, predicted: int) -> float | None:
        return 2 * right / (target + predicted) if target + predicted else None


class MeanAccuracy(_Quotient):
    """intersection / target, over the classes that a mask has (Long et al., CVPR 2015, section 5)."""

    kind_name = "accuracy"

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.name = "mean_accuracy"

    def _value(self, right: int, target: int, predicted: int) -> float | None:
        return right / target if target else None


def segmentation_metrics(num_classes: int) -> list[Metric]:
    """All metrics of segmentation."""
    return [
        MeanIoU(num_classes),
        Ratio("right_pixels", "labelled_pixels", name="pixel_accuracy", unit=FRACTION, higher_is_better=True),
        MeanAccuracy(num_classes),
        MeanDice(num_classes),
        Mean("picture_iou", weight="is_labelled", unit=FRACTION, higher_is_better=True),
        NonfiniteLogits(),
    ]
