"""Which class of a model, or which number, each folder or label is, and what the result says of it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dualeval.data.labels import (
    KnownClasses,
    Labels,
    are_wnids,
    check_indices,
    choose_labels,
    imagenet_wnids,
    read_class_map,
)
from dualeval.errors import UsageError
from dualeval.messages import first_of
from dualeval.options.choices import CLASS_ORDERS, check_choice

if TYPE_CHECKING:
    from dualeval.data.table import DataRows


class FolderLabels:
    """Decides which class each folder or label is, from what was asked for and from the weights' classes."""

    def __init__(
        self,
        *,
        class_map: Path | None,
        order: str | None,
        num_classes: int | None,
        of_weights: KnownClasses | None,
        weights: Path | None = None,
    ) -> None:
        if order is not None:
            check_choice("--class-order", order, CLASS_ORDERS)
            if class_map is not None:
                raise UsageError(
                    f"--class-map {class_map} and --class-order {order} both say which class a folder is. "
                    "Leave one out."
                )
        self.class_map = None if class_map is None else read_class_map(class_map)
        self.order = order
        self._num_classes = num_classes
        self.known = of_weights
        self._weights = weights

    def __call__(
        self, names: Sequence[str], noun: str = "class folder", where: Callable[[str], str] = lambda name: ""
    ) -> Labels:
        """Decide for the names of folders or labels."""
        choose = partial(
            choose_labels, names, class_map=self.class_map, order=self.order, noun=noun, where=where
        )
        known = self._classes_of(names)
        labels = choose(known=known)
        # Who says which class a folder is has no need of the checkpoint's names.
        if self.known is not None or self._weights is None or self.class_map or self.order:
            return labels
        from dualeval.models.checkpoints.checkpoint import read_class_names  # for a user's checkpoint alone

        key, of_file = read_class_names(self._weights)
        named = KnownClasses(of=f"{self._weights} ({key})", names=of_file)
        if named.are_named(names):
            by_checkpoint = choose(known=named)
            # Where both agree the job is what it was without the names.
            return by_checkpoint if by_checkpoint.classes != labels.classes else replace(labels, warnings=())
        if known is None and (len(of_file) == len(names) or {*of_file} & {*names}):
            return _with_other_names(labels, named)
        return labels

    def _classes_of(self, folders: Sequence[str]) -> KnownClasses | None:
        """The weights' classes, or ImageNet's where the folders are named by its wnids."""
        if self.known is not None:
            return self.known
        wnids = imagenet_wnids()
        if len(wnids) in (self._num_classes, len(folders)) and are_wnids(folders, wnids):
            from dualeval.models.published import imagenet_classes

            return imagenet_classes()
        return None


def agreed_classes(labels: Labels, asked: int | None, class_map: Path | None) -> int | None:
    """The number of classes by data and options; None where neither tells."""
    if labels.are_partial:
        if asked is not None:
            flag = f"--class-map {class_map}"
            check_indices(labels.classes, asked, flag, f"--num-classes is {asked}")
        return asked or labels.largest + 1
    if labels.num_classes is None or asked in (None, labels.num_classes):
        return labels.num_classes or asked
    if not labels.classes:
        raise UsageError(
            f"--num-classes {asked}, but the data has {labels.num_classes} classes. Leave --num-classes out."
        )
    number = len(labels.classes)
    count = f"the data has {number} {'class folders' if labels.noun == 'folder' else 'labels'}"
    if labels.num_classes != number:
        count += f" of {labels.num_classes} classes ({labels.rule})"
    each = "Give one folder per class, empty ones too, or say" if labels.noun == "folder" else "Say"
    raise UsageError(
        f"--num-classes {asked}, but {count}. {each} which classes the {labels.noun}s are with --class-map "
        f"FILE ({labels.noun} to index, JSON)."
    )


def hint_for(labels: Labels, classes: int) -> str:
    """What to type where a model tells more classes apart than there are folders; "" for nothing to say."""
    if not labels.classes:
        return ""
    wnids = imagenet_wnids()
    if labels.rule != "class map" and classes == len(wnids) and are_wnids(labels.classes, wnids):
        return (
            f" The {labels.noun}s are {len(labels.classes):,} of ImageNet's {classes:,} wnids: add "
            f"--num-classes {classes}."
        )
    if classes > len(labels.classes):
        return (
            f" Where the {labels.noun}s are some of the model's classes, say which with --class-map FILE "
            f"({labels.noun} to index, JSON)."
        )
    return ""


def names_of(labels: Labels, rows: Mapping[str, Any]) -> dict[str, list[str | None]]:
    """Columns of text: the names of each sample's class and of the predicted one; None where not known."""
    if not labels.names:
        return {}
    return {
        f"{column}_name": [labels.names.get(index) for index in rows[column].tolist()]
        for column in ("target", "prediction")
    }


def check_classes(
    labels: Labels, model: str, classes: int, *, expected: int | None, largest: int, class_map: Path | None
) -> None:
    """Check that a model has as many classes as are expected, by data or --num-classes, and labels need."""
    if expected is not None and classes != expected:
        source, give = "the data", "data and model of the same classes"
        if labels.num_classes is None:
            source, give = "--num-classes", f"--num-classes {classes}, or a model of {expected} classes"
        raise UsageError(
            f"{model} has {classes} classes, but {expected} were expected (from {source}). Give "
            f"{give}.{hint_for(labels, classes)}"
        )
    if largest >= classes:
        if class_map is not None:
            check_indices(
                labels.classes, classes, f"--class-map {class_map}", f"{model} has {classes} classes"
            )
        label = labels.largest_at or f"the data has a label {largest}"
        names = f" Its classes: {first_of([*labels.names.values()], _NAMED_AT_MOST)}." if labels.names else ""
        otherwise = f" {labels.otherwise.capitalize()}." if labels.otherwise else ""
        raise UsageError(
            f"{label}, but {model} has {classes} classes (labels "
            f"0 to {classes - 1}). Give data and model of the same classes.{names}{otherwise}"
        )


def _with_other_names(labels: Labels, named: KnownClasses) -> Labels:
    """Labels by names that a checkpoint has not, with a warning; numbers that are the indices need none."""
    if all(name == str(index) for name, index in labels.classes.items()):
        return labels
    warning = (
        f"{named.of} names the classes {first_of(named.names, _NAMED_AT_MOST)}, and the {labels.noun}s are "
        f"taken in the order {first_of([*labels.classes], _NAMED_AT_MOST)}. If the model was trained in this "
        f"order, give --class-order name; if not, --class-map FILE ({labels.noun} to index, JSON)"
    )
    return replace(labels, warnings=(*labels.warnings, warning))


_NAMED_AT_MOST = 20
_PLACEHOLDER = re.compile(r"LABEL_[0-9]+")


def names_of_classes(model: nn.Module, count: int) -> tuple[str, ...]:
    """The names of a model's classes in its ``id2label``; none where these are placeholders."""
    id2label = getattr(getattr(model, "config", None), "id2label", None) or {}
    names = tuple(str(id2label.get(index, "LABEL_0")) for index in range(count))
    unknown = all(map(_PLACEHOLDER.fullmatch, names)) or len({*names}) < count
    return () if unknown else names


def number_targets(rows: DataRows, column: str) -> Tensor:
    """The number of each row, float64 (rows,)."""
    numbers = []
    for place, value in enumerate(rows.column(column)):
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise UsageError(
                f"{rows.where(place)}: the label (column {column!r}) is {value!r}, expected a finite number: "
                "the model has one output (num_labels 1), so it is evaluated as a regression."
            )
        numbers.append(number)
    return torch.tensor(numbers, dtype=torch.float64)
