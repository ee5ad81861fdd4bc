"""The labels of a table: names or indices of classes, and which class each is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dualeval.columns.of_data import KeptColumns
from dualeval.data.labels import (
    LARGEST_INDEX,
    ClassMap,
    KnownClasses,
    Labels,
    are_wnids,
    imagenet_wnids,
    indices_of_classes,
)
from dualeval.errors import UsageError
from dualeval.messages import first_of, is_unicode

LEFT_OUT = -1
_WHOLE = re.compile(r"0|[1-9][0-9]*", re.ASCII)
_WHOLE_FLOAT = re.compile(r"(0|[1-9][0-9]*)\.0", re.ASCII)
_BOOLS = {"false": "0", "true": "1"}
# Numbers that are no indices; a name such as these has to be asked for.
_OTHER_NUMBER = re.compile(
    r"-[0-9]+|[+-]?([0-9]+\.[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?(nan|inf)", re.ASCII | re.IGNORECASE
)
# What a program prints for an array, a list, a call or a text: [0. 1. 0.], tensor(3), "3"; several numbers;
# and what has several lines or cells. Likewise.
_PRINTED = re.compile(
    r"\[.*\]|\{.*\}|[\w.]*\(\s*[-+.\d'\"\[(].*\)|b?(['\"]).*\1|[-+.\d]+([,;\s]+[-+.\d]+)+|"
    r".*[\x00-\x1f\x7f-\x9f\u2028\u2029].*",
    re.DOTALL,
)
_listed = partial(first_of, most=20)
_SHOWN = 60  # letters of a label that is none
_KINDS = (str, int, bool, float, type(None))


class Labeler(Protocol):
    """What was asked for about labels, and the model's classes."""

    @property
    def known(self) -> KnownClasses | None:
        """The model's classes, where their names are known."""

    @property
    def class_map(self) -> ClassMap | None:
        """The class map that was asked for."""

    @property
    def order(self) -> str | None:
        """The order that was asked for."""

    def __call__(self, names: Sequence[str], noun: str, where: Callable[[str], str]) -> Labels:
        """As ``choose_labels``."""


class TableLabels:
    """The labels of a table, each once, in the order of their first rows.

    Messages say ``where`` a row is; ``class_names`` are those that the table has for its indices.
    """

    def __init__(self, where: Callable[[int], str], column: str, class_names: Sequence[str]) -> None:
        self._row, self._column, self._class_names = where, f"(column {column!r})", class_names
        # By kind and value, as True is 1 to a dict: the place, which is that of its first row's number, too.
        self._places: dict[tuple[type, Any], int] = {}
        self._numbers: list[int] = []

    def place(self, number: int, value: Any) -> int:
        """The place of a row's label among all."""
        if type(value) not in _KINDS and getattr(value, "ndim", 1) == 0:
            value = value.item()  # of NumPy or torch
        if (kind := type(value)) not in _KINDS:
            raise self._no_label(number, f"{value!r} ({kind.__name__})")
        place = self._places.setdefault((kind, value), len(self._numbers))
        if place == len(self._numbers):
            self._numbers.append(number)
        return place

    def decide(self, label: Labeler, *, of_model: bool = False) -> tuple[Labels, list[int]]:
        """The class of each label by its place, -1 for one that is left out.

        With ``of_model`` names are the model's, where nothing else was asked for; else any, in their order.
        """
        known, by_name = label.known, label.class_map is not None or label.order is not None
        names = label.class_map.classes if label.class_map else known.names if known else ()
        # Of indices whose names are wnids these say more: a part of ImageNet's classes has other indices.
        wnids = self._class_names if are_wnids(self._class_names, imagenet_wnids()) else ()
        values = [
            wnids[value] if kind is int and value in range(len(wnids)) else value
            for kind, value in self._places
        ]
        texts = [self._text(*each, names) for each in zip(self._numbers, values, strict=True)]
        if not ({*texts} & {*names} if label.class_map else not by_name and _named(texts, known)):
            texts = _as_whole(texts, bools=label.order != "name" if by_name else of_model)
        are_whole = all(map(_WHOLE.fullmatch, texts))
        if not by_name and (not _named(texts, known) or (are_whole and self._class_names)):
            if are_whole:
                return self._indices(texts, known, of_model=of_model)
            for number, text in sorted(zip(self._numbers, texts, strict=True), key=_is_whole):
                if _PRINTED.fullmatch(text):
                    raise self._no_label(number, repr(text[:_SHOWN]), _ONE_CLASS + _AS_NAMES)
                if _OTHER_NUMBER.fullmatch(text):
                    hint = _NONE * (text in _USUAL_NONE) + _AS_NAMES * (text not in _USUAL_NONE[1:])
                    raise self._no_label(number, text, hint)
                if of_model and not _WHOLE.fullmatch(text):
                    raise UsageError(
                        f"{self._at(number)} is {text!r}, which is not a class of the model. "
                        f"{_both_lists(known, texts)} Give names or indices of the model's classes, or "
                        "--label COLUMN; or say which class each is: --class-map FILE, or --class-order "
                        "name."
                    )
        first = dict(zip(reversed(texts), reversed(self._numbers), strict=True))
        # In the order of rows a model's own names have been since their identity was made.
        folders = list(dict.fromkeys(texts)) if of_model and not by_name else sorted({*first, *wnids})
        labels = label(folders, "label", lambda text: f"{self._row(first.get(text, self._numbers[0]))}: ")
        labels = replace(labels, of_indices=tuple(self._class_names))
        return labels, [labels.classes.get(text, LEFT_OUT) for text in texts]

    def _indices(
        self, texts: Sequence[str], known: KnownClasses | None, *, of_model: bool
    ) -> tuple[Labels, list[int]]:
        classes = [int(text[:18]) for text in texts]  # one with more digits is too large in any case
        low, high = min(classes), max(classes)
        largest = self._numbers[classes.index(high)]
        if high > LARGEST_INDEX:
            raise self._no_label(largest, f"{texts[classes.index(high)]}, beyond any index", _AS_NAMES)
        names = [name.casefold() for name in (known.names if known else ())]
        of_data = [name.casefold() for name in self._class_names]
        # Names in other words, as those of ImageNet's classes, may mean the same for pictures.
        if names and of_data and names != of_data and (of_model or sorted(names) == sorted(of_data)):
            raise UsageError(
                f"{self._row(self._numbers[0])}: the labels {self._column} are indices of other classes than "
                f"the model's, or in another order. {_both_lists(known, self._class_names)} Give the labels "
                "as the model's names; or, where the lists mean the same, as a plain column of integers."
            )
        by_name = [*map(int, sorted({*texts}))]
        differ = by_name != [*range(len(by_name))]
        labels = indices_of_classes((), known)
        if known is None and not of_model:
            # Names alone: a model may tell more classes apart.
            labels = replace(labels, names=dict(enumerate(self._class_names)))
        labels = replace(
            labels,
            indices=f"index {low}" if low == high else f"indices {low} to {high}",
            otherwise=_OTHERWISE + " or number" * (low > 0 and high - low < len(by_name)) if differ else "",
            largest_at=f"{self._at(largest)} is {high}",
        )
        return labels, classes

    def _at(self, number: int) -> str:
        return f"{self._row(number)}: the label {self._column}"

    def _text(self, number: int, value: Any, names: Iterable[str]) -> str:
        """A label as text; a bool is the name that it has, or 1 or 0, and a whole float is a whole number."""
        if isinstance(value, bool):
            same = (name for name in names if name.casefold() == str(value).casefold())
            return next(same, str(int(value)))
        if value is None or value != value:
            value = ""
        text = str(int(value) if isinstance(value, float) and value.is_integer() else value).strip()
        if not text or not is_unicode(text):
            fault = ("empty", _NONE) if not text else (f"{text!a} (half a surrogate pair)", "")
            raise self._no_label(number, *fault)
        return text

    def _no_label(self, number: int, fault: str, hint: str = "") -> UsageError:
        return UsageError(
            f"{self._at(number)} is {fault}, expected a whole number from 0 or a class's name.{hint}"
        )


# Of rows without a label: GLUE's test sets have -1.
_USUAL_NONE = ("-1", "nan", "NaN", "NAN")
_ONE_CLASS = (
    " Write one number or one name for each sample: str(int(label)), or of an array with a 1 at the class "
    "str(int(label.argmax()))."
)
_NONE = " Leave rows out that have no label."
_AS_NAMES = " If the labels are names, give --class-order name or --class-map FILE."
_OTHERWISE = "as names of class folders they are other classes: --class-order name"


def _is_whole(label: tuple[int, str]) -> bool:
    return bool(_WHOLE_FLOAT.fullmatch(label[1]))


def _named(texts: Sequence[str], known: KnownClasses | None) -> bool:
    """Whether any label has the name of a known class."""
    return known is not None and any(known.find(text, exactly=False) for text in texts)


def _as_whole(texts: list[str], *, bools: bool) -> list[str]:
    """Whole floats, as pandas writes numbers where one is missing, as whole numbers; and bools."""
    if all(map(_WHOLE_FLOAT.fullmatch, texts)):
        return [text[:-2] for text in texts]
    numbers = [_BOOLS.get(text.casefold(), "") for text in texts]
    return numbers if bools and all(numbers) else texts


def _both_lists(known: KnownClasses | None, of_data: Sequence[str]) -> str:
    of_model = "without names (its id2label has placeholders)" if known is None else _listed(known.names)
    return f"The model's classes: {of_model}. The data's: {_listed(of_data)}."


def refuse_other_names(
    of: object, labels: Labels, known: KnownClasses | None, classes: npt.NDArray[np.int32], kept: KeptColumns
) -> None:
    """Refuse indices beside a column that names their classes, in another order than the model's."""
    if not labels.indices or known is None:
        return
    for column, row in kept.named_otherwise(classes, known.names):
        index, name = int(classes[row]), kept.of([row])[column][0]
        raise UsageError(
            f"{of}: the label {index} is {known.names[index]!r} of {known.of}, and the column {column!r} has "
            f"{name!r} beside it: the labels number the classes differently. Give the names as the labels: "
            f"--label {column}, of a manifest --label-column {column}"
        )
