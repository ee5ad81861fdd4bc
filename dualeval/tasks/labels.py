"""Which class of a model, or which number, each folder or label is, and what the result says of it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dualeval.data.class_folders import imagenet_wnids
from dualeval.data.labels import (
    KnownClasses,
    Labels,
    are_wnids,
    check_indices,
    choose_labels,
    indices_of_classes,
    read_class_map,
)
from dualeval.data.table import Rows
from dualeval.errors import UsageError
from dualeval.models import published
from dualeval.options.choices import CLASS_ORDERS, check_choice
from dualeval.wording import first_of


class FolderLabels:
    """Decides which class each folder or label is, from what was asked for and from the weights' classes."""

    def __init__(
        self,
        *,
        class_map: Path | None,
        order: str | None,
        num_classes: int | None,
        of_weights: KnownClasses | None,
    ) -> None:
        if order is not None:
            check_choice("--class-order", order, CLASS_ORDERS)
            if class_map is not None:
                raise UsageError(
                    f"--class-map {class_map} and --class-order {order} both say which class a folder is. "
                    "Leave one out."
                )
        self._map = None if class_map is None else read_class_map(class_map)
        self._order = order
        self._num_classes = num_classes
        self.known = of_weights

    @property
    def takes_names(self) -> bool:
        """Whether a class map or an order says what labels are: names, also those that look like numbers."""
        return self._map is not None or self._order is not None

    def __call__(self, names: Sequence[str], noun: str = "class folder") -> Labels:
        """Decide for folders or labels."""
        known = self._classes_of(names)
        return choose_labels(names, class_map=self._map, order=self._order, known=known, noun=noun)

    def _classes_of(self, folders: Sequence[str]) -> KnownClasses | None:
        """The weights' classes, or ImageNet's where the folders are named by its wnids."""
        if self.known is not None:
            return self.known
        wnids = imagenet_wnids()
        if len(wnids) in (self._num_classes, len(folders)) and are_wnids(folders, wnids):
            return published.imagenet_classes()
        return None


def agreed_classes(labels: Labels, asked: int | None, class_map: Path | None) -> int | None:
    """The number of classes by data and options; None where neither tells."""
    if labels.are_partial:
        if asked is not None:
            said = f"--class-map {class_map}"
            check_indices(labels.classes, asked, said, f"--num-classes is {asked}")
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
    each = "Give one folder a class, empty ones too, or say" if labels.noun == "folder" else "Say"
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


_PLACEHOLDER = re.compile(r"LABEL_[0-9]+")
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)
_NAMED_AT_MOST = 20


def names_of_classes(model: nn.Module, count: int) -> tuple[str, ...]:
    """The names of a model's classes in its ``id2label``; none where these are placeholders."""
    found = getattr(getattr(model, "config", None), "id2label", None) or {}
    names = tuple(str(found.get(index, "LABEL_0")) for index in range(count))
    unknown = all(map(_PLACEHOLDER.fullmatch, names)) or len({*names}) < count
    return () if unknown else names


def class_targets(rows: Rows, column: str, names: Sequence[str], count: int) -> tuple[Labels, Tensor]:
    """The class of each row, int64 (rows,): labels are names of the model's classes, or their indices."""
    first: dict[str, int] = {}
    labels = [_text_of(value) for value in rows.column(column)]
    for place, label in enumerate(labels):
        first.setdefault(label, place)
    said = rows.class_names.get(column, ())
    both = _both_lists(names, count, said or list(first))
    of_model = KnownClasses(of="the model", names=tuple(names))
    # Where the data names the classes, a number is an index, also where a name is a number ("1" star).
    known = {label: -1 if said and _WHOLE.fullmatch(label) else _index(of_model, label) for label in first}
    if min(known.values()) >= 0:
        rule = "names of the model's classes"
        by_index = dict(enumerate(names))
        named = Labels(rule=rule, classes=known, names=by_index, num_classes=count, noun="label")
        return named, torch.tensor([known[label] for label in labels])
    are_names = max(known.values()) >= 0
    for label, place in first.items():
        if known[label] < 0 if are_names else not _WHOLE.fullmatch(label):
            what = f"{label!r}" if label else "empty"
            raise UsageError(
                f"{rows.where(place)}: the label (column {column!r}) is {what}. {both} Give "
                f"{'names or ' if names else ''}indices of the model's classes, or --label NAME."
            )
    for label, place in first.items():
        if not 0 <= int(label) < count:
            hint = " GLUE's test sets have -1 for every label: theirs are not published." * (label == "-1")
            raise UsageError(
                f"{rows.where(place)}: the label (column {column!r}) is {label}, beyond the model's classes, "
                f"0 to {count - 1}. {both}{hint}"
            )
    if names and said and list(map(str.casefold, said)) != list(map(str.casefold, names)):
        raise UsageError(
            f"{rows.of}: the labels (column {column!r}) are indices of other classes than the model's, or in "
            f"another order. {both} Give the labels as the model's names; or, where the lists mean the "
            "same, as a plain column of integers."
        )
    return indices_of_classes(names), torch.tensor([int(label) for label in labels])


def number_targets(rows: Rows, column: str) -> Tensor:
    """The number of each row, float64 (rows,)."""
    found = []
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
        found.append(number)
    return torch.tensor(found, dtype=torch.float64)


def _index(of_model: KnownClasses, label: str) -> int:
    """The class of this name, in large or small letters where it is the only one; -1 for none."""
    found = of_model.find(label, exactly=True) or of_model.find(label, exactly=False)
    return found[0] if len(found) == 1 else -1


def _text_of(value: object) -> str:
    """A label as text: yes and no of Python are 1 and 0."""
    if value is None:
        return ""
    return str(int(value)) if isinstance(value, bool) else str(value).strip()


def _both_lists(names: Sequence[str], count: int, found: Sequence[str]) -> str:
    unnamed = f"{count}, without names (its id2label has placeholders): 0 to {count - 1}"
    of_model, of_data = (first_of(each, _NAMED_AT_MOST) for each in (names, found))
    return f"The model's classes: {of_model or unnamed}. The data's: {of_data}."
