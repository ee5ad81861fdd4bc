"""Counts of targets and predictions by class: of one label a sample, or of many, such as one a pixel."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from dualeval.columns.ragged import Ragged, Text
from dualeval.errors import UsageError
from dualeval.metrics.metric import Measured, Value
from dualeval.metrics.scores import FRACTION
from dualeval.options.choices import check_kind

NO_CLASS = -1  # the predicted class of a sample with a NaN logit


class _OfClasses(ABC):
    """A metric of two columns of classes, whose elements are counted."""

    kind_name: ClassVar[str]

    def __init__(
        self,
        num_classes: int,
        prediction: str = "prediction",
        target: str = "target",
        *,
        name: str | None = None,
        ignore: int | None = None,
        keeps_rows: bool = True,
    ) -> None:
        name = self.kind_name if name is None else name
        check_kind("name", name, isinstance(name, str) and bool(name), "a text")
        check_kind("num_classes", num_classes, _is_whole(num_classes) and num_classes >= 1, "a whole number")
        check_kind("ignore", ignore, ignore is None or _is_whole(ignore), "a class, or None")
        self.name = name
        self.num_classes = num_classes
        self.prediction = prediction
        self.target = target
        self.ignore = ignore
        self.keeps_rows = keeps_rows
        self.columns = (target, prediction)
        self.size = self._slots()

    @abstractmethod
    def _slots(self) -> int:
        """How many slots of the ledger it owns."""

    def _classes_of(self, columns: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Target and prediction of every element that counts, int64 of shape (elements,)."""
        target, prediction = [_elements(self.name, name, columns[name]) for name in self.columns]
        lengths = [_lengths(columns[name]) for name in self.columns]
        if len(target) != len(prediction) or not torch.equal(*lengths):
            raise UsageError(
                f"metric {self.name!r}: the column {self.target!r} has {len(target):,} elements and "
                f"{self.prediction!r} has {len(prediction):,} in the same samples: give both the same shape"
            )
        if self.ignore is not None:
            counts = target != self.ignore
            target, prediction = target[counts], prediction[counts]
        self._check_classes(self.target, target, 0)
        self._check_classes(self.prediction, prediction, NO_CLASS)
        return target, prediction

    def _check_classes(self, column: str, classes: Tensor, least: int) -> None:
        if not len(classes):
            return
        ends = [*map(int, torch.aminmax(classes))]
        if ends[0] < least or ends[1] >= self.num_classes:
            raise UsageError(
                f"metric {self.name!r}: the column {column!r} has classes from {ends[0]} to {ends[1]}, "
                f"expected {least} to {self.num_classes - 1}: give the right num_classes"
                + (", or ignore=CLASS for targets that do not count" if least == 0 else "")
            )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _elements(metric: str, column: str, values: Any) -> Tensor:
    is_ragged = isinstance(values, Ragged) and not isinstance(values, Text)
    elements = values.values if is_ragged else values
    if not isinstance(elements, Tensor) or elements.is_floating_point() or elements.is_complex():
        kind = elements.dtype if isinstance(elements, Tensor) else type(values).__name__
        raise UsageError(
            f"metric {metric!r} reads the column {column!r}, which is {kind}: expected classes as integers, "
            "such as logits.argmax(dim=1)"
        )
    return elements.reshape(-1).to(torch.int64)


def _lengths(column: Any) -> Tensor:
    """How many elements each sample has."""
    if isinstance(column, Ragged):
        return column.lengths.cpu() * math.prod(column.values.shape[1:])
    return torch.full((len(column),), math.prod(column.shape[1:]))


class Confusion(_OfClasses):
    """How often each target was predicted as each class, as the non-zero entries of the matrix.

    Ledger: a row per target; in it a column for prediction -1, then one per class.

    Args:
        num_classes: the classes are 0 to num_classes - 1.
        prediction: the column of predicted classes; -1 for none.
        target: the column of true classes, with as many elements: one label a sample, ``(samples, k)``, or
            ragged.
        name: the metric's; its value is called ``NAME_matrix``.
        ignore: a target whose elements are left out.
        keeps_rows: whether the run keeps the two columns, in predictions.parquet.

    Raises:
        UsageError: an argument is of another kind.
    """

    kind_name = "confusion"

    def _slots(self) -> int:
        return self.num_classes * (self.num_classes + 1)

    def update(self, ledger: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Add the elements of the two columns; a UsageError where they are no classes or not as many."""
        target, prediction = self._classes_of(columns)
        index = target * (self.num_classes + 1) + (prediction - NO_CLASS)
        if len(index) > self.size:
            ledger += torch.bincount(index, minlength=self.size)
        else:
            ledger.index_add_(0, index, torch.ones(len(index), dtype=torch.int64))

    def compute(self, ledger: Tensor) -> Measured:
        """The matrix: classes, and entries [target, prediction, count] in ascending order."""
        places = ledger.nonzero().squeeze(1)
        entries: list[Value] = []
        for place, count in zip(places.tolist(), ledger[places].tolist(), strict=True):
            target, column = divmod(place, self.num_classes + 1)
            entries.append([target, column + NO_CLASS, count])
        return Measured(values={f"{self.name}_matrix": {"classes": self.num_classes, "entries": entries}})


class _ClassCounts(_OfClasses):
    """Ledger: of each class the elements that are rightly predicted as it, its targets, its predictions."""

    def _slots(self) -> int:
        return 3 * self.num_classes

    def update(self, ledger: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Add the elements of the two columns; a UsageError where they are no classes or not as many."""
        target, prediction = self._classes_of(columns)
        counts = ledger.view(3, self.num_classes)
        counts[0] += torch.bincount(target[target == prediction], minlength=self.num_classes)
        counts[1] += torch.bincount(target, minlength=self.num_classes)
        counts[2] += torch.bincount(prediction - NO_CLASS, minlength=self.num_classes + 1)[1:]

    def _counts(self, ledger: Tensor) -> tuple[list[int], list[int], list[int]]:
        right, support, predicted = ledger.view(3, self.num_classes).tolist()
        return right, support, predicted


class PrecisionRecall(_ClassCounts):
    """Precision, recall and F1: of each class, over all samples (micro), and averaged over classes (macro).

    With t the samples of a class that are predicted as it: precision is t / predicted, recall t / support,
    F1 2 t / (predicted + support), and 0 where the divisor is 0. Micro uses the sums of the counts over all
    classes; macro is the plain mean over the classes that occur as target or prediction, without ``ignore``.

    Ledger: t, support and predicted, num_classes slots each. A prediction of -1 is predicted as no class.

    Args:
        num_classes: the classes are 0 to num_classes - 1.
        prediction: as for ``Confusion``; likewise ``target``, ``ignore`` and ``keeps_rows``.
        target: the column of true classes.
        name: the metric's.
        ignore: a target whose elements are left out.
        keeps_rows: whether the run keeps the two columns.

    Raises:
        UsageError: an argument is of another kind.
    """

    kind_name = "precision_recall"

    def compute(self, ledger: Tensor) -> Measured:
        """Keys micro_*, macro_* (None without samples) and per_class, for precision, recall and f1."""
        right, support, predicted = self._counts(ledger)
        counted = [bool(s or p) for s, p in zip(support, predicted, strict=True)]
        occurs = [occurs and number != self.ignore for number, occurs in enumerate(counted)]
        micro = _precision_recall_f1(sum(right), sum(support), sum(predicted))
        each = [_precision_recall_f1(*counts) for counts in zip(right, support, predicted, strict=True)]
        values: dict[str, Value] = {}
        per_class: dict[str, Value] = {}
        for place, key in enumerate(("precision", "recall", "f1")):
            of_class = [scores[place] for scores in each]
            present = [score for score, seen in zip(of_class, occurs, strict=True) if seen]
            values[f"micro_{key}"] = micro[place] if present else None
            values[f"macro_{key}"] = math.fsum(present) / len(present) if present else None
            per_class[key] = [None if c == self.ignore else score for c, score in enumerate(of_class)]
        units = dict.fromkeys(values, FRACTION)
        directions = dict.fromkeys(values, "higher")
        per_class["support"] = list(support)
        per_class["predicted"] = list(predicted)
        values["per_class"] = per_class
        return Measured(values=values, units=units, directions=directions)


def _precision_recall_f1(right: int, support: int, predicted: int) -> tuple[float, float, float]:
    return (
        right / predicted if predicted else 0.0,
        right / support if support else 0.0,
        2 * right / (predicted + support) if predicted + support else 0.0,
    )


class Matthews(_ClassCounts):
    """Matthews' correlation coefficient, of any number of classes, from the integers; -1 to 1.

    With s samples of which c are right, t of each class and p predicted as it: (c s - sum p t) / sqrt((s^2 -
    sum p^2) (s^2 - sum t^2)), and 0 where the divisor is 0 (J. Gorodkin, "Comparing two K-category
    assignments by a K-category correlation coefficient", Comput. Biol. Chem. 28, 2004). A prediction of -1
    is a class of its own.

    Ledger: as for ``PrecisionRecall``.
    """

    kind_name = "mcc"

    def compute(self, ledger: Tensor) -> Measured:
        """Under the metric's name; None without samples."""
        right, support, predicted = self._counts(ledger)
        samples = sum(support)
        products = sum(s * p for s, p in zip(support, predicted, strict=True))
        squares = [
            samples**2 - sum(count**2 for count in counts)
            for counts in (support, [*predicted, samples - sum(predicted)])
        ]
        dividend = sum(right) * samples - products
        divisor = math.sqrt(squares[0] * squares[1])
        value = None if not samples else dividend / divisor if divisor else 0.0
        return Measured(values={self.name: value}, directions={self.name: "higher"})


class IoU(_ClassCounts):
    """Intersection over union of each class, and the mean over the classes that occur: mIoU.

    With t the elements of a class that are predicted as it: t / (support + predicted - t), over all elements
    of all samples. A class that is neither a target nor predicted has none, and is not in the mean; nor is
    ``ignore``, which may be a class of the model that is predicted elsewhere.

    Ledger: t, support and predicted, num_classes slots each. A prediction of -1 is predicted as no class.

    Args:
        num_classes: the classes are 0 to num_classes - 1.
        prediction: the column of predicted classes, one a sample, ``(samples, pixels)``, or ragged.
        target: the column of true classes, with as many elements.
        name: the metric's; its values are called ``mean_NAME`` and ``NAME_per_class``.
        ignore: a target whose elements are left out, such as 255.
        keeps_rows: whether the run keeps the two columns, in predictions.parquet.

    Raises:
        UsageError: an argument is of another kind.
    """

    kind_name = "iou"

    def compute(self, ledger: Tensor) -> Measured:
        """The mean, and the list of all classes, with None for those that do not occur."""
        of_class = [
            right / union if (union := support + predicted - right) and number != self.ignore else None
            for number, (right, support, predicted) in enumerate(zip(*self._counts(ledger), strict=True))
        ]
        return of_classes(f"mean_{self.name}", f"{self.name}_per_class", of_class)


def of_classes(mean: str, per_class: str, each: Sequence[float | None]) -> Measured:
    """A fraction of each class, None where it has none, and the mean over the classes that have one."""
    present = [value for value in each if value is not None]
    values: dict[str, Value] = {mean: math.fsum(present) / len(present) if present else None}
    values[per_class] = [*each]
    return Measured(values=values, units={mean: FRACTION}, directions={mean: "higher"})
