"""Which of the annotations' categories each label of a model is: by name, never by place."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualeval.errors import UsageError, text_of
from dualeval.messages import did_you_mean, listed

_SHOWN = 12
# What stands for no category in lists of names.
_NONE = {"n/a", "none", "__background__", "background", "no-object", ""}


@dataclass(frozen=True, kw_only=True)
class CategoryMap:
    """What labels stand for."""

    # The id of each label's category; None: labels are the ids.
    ids: Mapping[int, int] | None
    # The labels that have a name.
    named: Collection[int] = ()
    # Names of the model's that no category has: their detections do not count.
    uncounted: Sequence[str] = ()
    # Categories that the model does not know.
    unknown: Sequence[str] = ()

    def of_label(self, label: int) -> int | None:
        """A label's category; None for one that does not count."""
        return label if self.ids is None else self.ids.get(label)

    def without_name(self, labels: Sequence[int]) -> list[int]:
        """Those labels that are beyond the names."""
        return [] if self.ids is None else [label for label in labels if label not in self.named]

    def to_json(self) -> Any:
        return None if self.ids is None else {str(label): number for label, number in self.ids.items()}

    def warnings(self) -> list[str]:
        if not self.unknown:
            return []
        many = f"{len(self.unknown)} annotated categories are none of the model's"
        return [f"{many}: {listed(self.unknown)}. Their objects count as missed; see --category-map."]

    def notes(self) -> list[str]:
        if not self.uncounted:
            return []
        return [f"not counted, since not annotated: detections of {listed(self.uncounted)}."]


def category_map(
    names: Mapping[int, str] | None,
    categories: Mapping[int, str],
    annotated: set[int],
    renamed: Mapping[str, str],
    *,
    model: str,
    path: Path,
) -> CategoryMap:
    """Map labels to categories.

    Args:
        names: what the model, or ``--category-names``, calls each label; None: labels are ids.
        categories: those of the annotations, by id.
        annotated: ids of those that have objects.
        renamed: the category of some of the model's names, as ``--category-map`` has it.
        model: for messages.
        path: of the annotations, likewise.
    """
    if names is None:
        if renamed:
            raise UsageError(
                f"--category-map renames the model's names, and nothing names those of {model}: give "
                "--category-names too, the name of each label in order."
            )
        return CategoryMap(ids=None)
    if all(re.fullmatch(r"LABEL_\d+", name) for name in names.values()):
        raise UsageError(
            f"{model} calls its labels {listed(names.values(), 3)}, which says nothing. Give "
            "--category-names, the name of each label in order; the annotations have "
            f"{listed(categories.values(), _SHOWN)}."
        )
    # Names that differ by case alone are told apart by it.
    plain = [_plain(name) for name in categories.values()]
    known = {_plain(name): number for number, name in categories.items() if plain.count(_plain(name)) == 1}
    exact = {name: number for number, name in categories.items()}
    own = {_plain(name): name for name in names.values()}
    for name, category in renamed.items():
        if _plain(name) not in own or _plain(category) not in known:
            fault = name if _plain(name) not in own else category
            of = [*(own if fault == name else categories).values()]
            whose = "the model" if fault == name else "the annotations"
            raise UsageError(
                f"--category-map: {fault!r} is no name of {whose}.{did_you_mean(fault, of)} It maps names "
                f"of the model to names of the annotations: {listed(of, _SHOWN)}."
            )
    to = {_plain(name): _plain(category) for name, category in renamed.items()}
    ids: dict[int, int] = {}
    for label, name in names.items():
        plain_name = _plain(name)
        # What was typed comes before the same name.
        number = known[to[plain_name]] if plain_name in to else exact.get(name, known.get(plain_name))
        if number is not None:
            ids[label] = number
    if not ids:
        own_names = [name for name in names.values() if _plain(name) not in _NONE]
        raise UsageError(
            f"none of the names of {model} is a category of {path}: the model has "
            f"{listed(own_names, _SHOWN)}; the annotations have {listed(categories.values(), _SHOWN)}. Say "
            "which is which, as in --category-map person=pedestrian,car=vehicle, or in a JSON file."
        )
    met = set(ids.values())
    return CategoryMap(
        ids=ids,
        named={*names},
        uncounted=[name for label, name in names.items() if label not in ids and _plain(name) not in _NONE],
        unknown=[categories[number] for number in sorted(annotated - met)],
    )


def _plain(name: str) -> str:
    return name.strip().casefold().replace("_", " ")


def names_from(value: str | Path | Sequence[str] | Mapping[Any, str] | None) -> dict[int, str] | None:
    """What ``--category-names`` gives: the name of each label, in order, or by number."""
    flag = f"--category-names {value}"
    if value is None:
        return None
    names: Any = value
    if isinstance(value, (str, Path)):
        names = _read(str(value), flag, [name.strip() for name in str(value).split(",")])
    try:
        pairs = names.items() if isinstance(names, Mapping) else enumerate(names)
        return {int(label): str(name) for label, name in pairs}
    except ValueError as error:
        raise UsageError(f"{flag}: its keys are no labels ({error}), expected numbers") from error


def renamed_from(value: str | Path | Mapping[str, str] | None) -> dict[str, str]:
    """What ``--category-map`` gives: names of the model's, and what the annotations call them."""
    flag = f"--category-map {value}"
    if isinstance(value, (str, Path)):
        pairs = [each.split("=") for each in str(value).split(",")]
        if not Path(value).suffix and any(len(pair) != 2 for pair in pairs):
            raise UsageError(f"{flag}: expected NAME=CATEGORY with commas between, or a JSON file")
        value = _read(str(value), flag, {pair[0].strip(): pair[-1].strip() for pair in pairs})
    if not isinstance(value, (Mapping, type(None))) or not all(
        isinstance(each, str) for each in (value or {}).values()
    ):
        raise UsageError(f"{flag}: expected a JSON object of the model's names and the annotations' names")
    return {str(name): category for name, category in (value or {}).items()}


def _read(text: str, flag: str, typed: Any) -> Any:
    """The content of a file, or what was typed."""
    path = Path(text)
    if "," in text or "=" in text:
        return typed
    try:
        content = path.read_text("utf-8")
        return json.loads(content) if path.suffix == ".json" else content.rstrip().splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{flag} cannot be read: {text_of(error)}. Expected a file, or names with commas."
        ) from error
