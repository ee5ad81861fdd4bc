"""Which class of a model each label of a table is, or which number a label is."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dualeval.data.labels import KnownClasses, Labels, indices_of_classes
from dualeval.data.rows import Rows
from dualeval.errors import UsageError
from dualeval.wording import first_of

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
