"""Metrics of segmentation, from each picture's counts of pixels by class.

The columns are ``intersection``, ``target_pixels`` and ``predicted_pixels``, (pictures, classes) each: pixels
of a class that are predicted as it, those that are of it, those that are predicted as it. Pixels without a
label are in none of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dualeval.messages import counted, listed
from dualeval.metrics.classification import NonfiniteLogits
from dualeval.metrics.confusion import of_classes
from dualeval.metrics.means import Mean, Ratio
from dualeval.metrics.metric import Measured, Metric
from dualeval.metrics.scores import FRACTION

# A part of the pixels that is predicted for a class without any.
_OFTEN = 0.2
COUNTS = ("intersection", "target_pixels", "predicted_pixels")


def counts_of(labels: Tensor, predicted: Tensor, classes: int) -> Tensor:
    """The columns' entries of a picture, int64 (3, classes); a label or prediction of -1 is none."""
    # Behind the classes stands what is not counted.
    labels = torch.where(labels < 0, classes, labels.to(torch.int64))
    predicted = torch.where((predicted < 0) | (labels == classes), classes, predicted)
    right = torch.where(predicted == labels, labels, classes)
    counts = torch.zeros(3, classes + 1, dtype=torch.int64, device=labels.device)
    for row, numbers in zip(counts, (right, labels, predicted), strict=True):
        flat = numbers.flatten()
        if flat.is_cuda:
            # A deterministic index_add_ adds one by one there: on an H100 512 x 512 pixels in 25 ms, not 0.8.
            ends = torch.arange(classes + 1, device=flat.device)
            row.copy_(torch.searchsorted(flat.sort().values, ends, right=True))
            row[1:] = row.diff()
        else:
            # Integers: the order of additions does not show.
            row.index_add_(0, flat, torch.ones_like(flat))
    return counts[:, :classes]


def picture_scores(intersection: Tensor, target: Tensor, predicted: Tensor) -> dict[str, Tensor]:
    """Of each picture its right and its labelled pixels, and its own mean IoU over the classes in it."""
    union = target + predicted - intersection
    each = intersection.double() / union.clamp(min=1)
    return {
        "right_pixels": intersection.sum(1),
        "labelled_pixels": target.sum(1),
        "is_labelled": target.sum(1) > 0,
        "picture_iou": each.sum(1) / (union > 0).sum(1).clamp(min=1),
    }


class Overlap:
    """times * intersection / divisor of each class, over all pictures, and the mean over classes with one.

    The divisor is a sum of the three counts, times ``of``. A class whose divisor is 0 has no value.

    Ledger: intersection, target and predicted pixels, num_classes slots each.
    """

    columns = COUNTS
    # For ``mistakes``: the ledger is as above.
    counts_overlap = True

    def __init__(
        self, num_classes: int, key: str, times: int, of: tuple[int, int, int], *, name: str | None = None
    ) -> None:
        self.name = name or key
        self.key = key
        self.times = times
        self.of = of
        self.size = 3 * num_classes

    def update(self, ledger: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Add the pictures' counts."""
        ledger += torch.cat([columns[name].to(torch.int64).sum(0) for name in COUNTS])

    def compute(self, ledger: Tensor) -> Measured:
        """The mean, and the list of all classes, with None for those that have no value."""
        each: list[float | None] = []
        for counts in ledger.view(3, -1).T.tolist():
            divisor = sum(count * factor for count, factor in zip(counts, self.of, strict=True))
            each.append(self.times * counts[0] / divisor if divisor else None)
        return of_classes(f"mean_{self.key}", f"{self.key}_per_class", each)


class PixelCheck:
    """No value, but warnings: most pixels are ignored, a class never occurs, EXIF turns pictures alone.

    Ledger: the three counts of each class, ignored pixels, turned pictures.
    """

    name = "pixel_check"
    columns = (*COUNTS, "ignored_pixels", "turned")
    # It speaks of one run's masks: of a class the rows have the counts.
    keeps_rows = False

    def __init__(self, num_classes: int) -> None:
        self.size = 3 * num_classes + 2

    def update(self, ledger: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Add the pictures' counts."""
        ledger += torch.cat([columns[name].sum(0).reshape(-1) for name in self.columns])

    def compute(self, ledger: Tensor) -> Measured:
        """No values; the warnings."""
        right, targets, predicted = ledger[:-2].view(3, -1).tolist()
        ignored, turned = ledger[-2:].tolist()
        absent = [str(number) for number, pixels in enumerate(targets) if not pixels]
        labelled = sum(targets)
        pixels = ignored + labelled
        warnings = []
        often = {
            name: share for name in absent if (share := predicted[int(name)] / max(labelled, 1)) > _OFTEN
        }
        # Worse than guessing besides: the model knows the classes, by other numbers.
        if often and len(targets) * sum(right) < labelled:
            first, share = next(iter(often.items()))
            mend = "are other classes, type --mask-values LABEL=CLASS,..."
            mend = "begin at 1, type --reduce-labels yes" if first == "0" else mend
            warnings.append(
                f"no mask has a pixel of class {first}, predicted for {100 * share:.1f} % of the pixels, and "
                f"pixel accuracy is below guessing. If labels {mend}"
            )
        if 2 * ignored >= pixels > 0:
            warnings.append(
                f"{100 * ignored / pixels:.1f} % of the pixels are ignored by all metrics: check first which "
                "labels the masks hold, --ignore-index and --reduce-labels"
            )
        if absent and ignored:
            warnings.append(
                f"no mask has a pixel of {listed(absent)} of {len(targets)} classes, and {ignored:,} of "
                f"{pixels:,} pixels were ignored. If they are among these, say with "
                "--mask-values or --ignore-index which labels count"
            )
        if turned:
            warnings.append(
                f"EXIF turns {counted(turned, 'picture')} and not the mask, or the other way round: compared "
                "as programs show them. If masks fit the pictures as stored, remove the tag Orientation"
            )
        return Measured(values={}, warnings=tuple(warnings))


def segmentation_metrics(num_classes: int) -> list[Metric]:
    """All metrics of segmentation; mean accuracy as in Long et al., CVPR 2015, section 5."""
    return [
        Overlap(num_classes, "iou", 1, (-1, 1, 1)),
        Ratio("right_pixels", "labelled_pixels", name="pixel_accuracy", unit=FRACTION, higher_is_better=True),
        Overlap(num_classes, "accuracy", 1, (0, 1, 0), name="mean_accuracy"),
        Overlap(num_classes, "dice", 2, (0, 1, 1)),
        Mean("picture_iou", weight="is_labelled", unit=FRACTION, higher_is_better=True),
        NonfiniteLogits(),
        PixelCheck(num_classes),
    ]
