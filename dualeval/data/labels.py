"""Which class each folder, or label of a table, is: by a class map, by names, by place, or by its number."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dualeval.errors import UsageError
from dualeval.messages import counted, first_of, is_unicode, nearest

if TYPE_CHECKING:  # neither is needed for a help
    import numpy as np
    import numpy.typing as npt

    from dualeval.columns.of_data import KeptColumns

_NUMBERED = re.compile(r"(\D*)([0-9]+)", re.ASCII)
_WNID = re.compile(r"n[0-9]{8}", re.ASCII)
# Of what a message names.
_listed = partial(first_of, most=5)
_listed_whole = partial(first_of, most=20)


@dataclass(frozen=True, kw_only=True)
class KnownClasses:
    """Classes whose names are known."""

    # Whose classes they are, for messages.
    of: str
    # By index.
    names: tuple[str, ...]
    # WordNet's ids by index; empty where they have none.
    wnids: tuple[str, ...] = ()
    # Whether a folder may have a class's name; else wnids alone are looked up.
    go_by_name: bool = True

    @cached_property
    def shown(self) -> dict[int, str]:
        """A name by index; where two classes have one name, with the wnid behind it."""
        count = Counter(self.names)
        return {
            index: f"{name} ({self.wnids[index]})" if count[name] > 1 and self.wnids else name
            for index, name in enumerate(self.names)
        }

    @cached_property
    def _exact(self) -> dict[str, list[int]]:
        return _places(self.names)

    @cached_property
    def _loose(self) -> dict[str, list[int]]:
        return _places(map(_simple, self.names))

    def find(self, folder: str, *, exactly: bool) -> list[int]:
        """Indices of the classes that a folder's name names."""
        wnid = folder.lower()
        if wnid in self.wnids:
            return [self.wnids.index(wnid)]
        if not self.go_by_name:
            return []
        return self._exact.get(folder, []) if exactly else self._loose.get(_simple(folder), [])

    def are_named(self, folders: Sequence[str]) -> bool:
        """Whether folders have these names, each once."""
        loose = [tuple(self.find(folder, exactly=False)) for folder in folders]
        return {*folders} == {*self.names} or sorted(loose) == [(index,) for index in range(len(self.names))]

    def nearest(self, folder: str) -> str:
        """The class names nearest to a folder's, as a sentence; "" where there is none."""
        return nearest(_simple(folder), self.names) if self.go_by_name else ""


@dataclass(frozen=True, kw_only=True)
class Labels:
    """Which class each folder or label is."""

    # How that was decided, in words for people.
    rule: str
    # Index of the class by folder or label, in the order of their names; empty where the data has indices of
    # classes already.
    classes: dict[str, int]
    # Names of classes by index, as far as they are known.
    names: Mapping[int, str]
    # The number of classes; None where a class map gives single ones alone, or the data has indices and says
    # no more.
    num_classes: int | None
    # Folders or labels that a class map leaves out.
    left_out: tuple[str, ...] = ()
    # Sentences for people.
    notes: tuple[str, ...] = ()
    # Sentences that belong beside the numbers.
    warnings: tuple[str, ...] = ()
    # What has a class, "folder" or "label".
    noun: str = "folder"
    # Of a table's indices, in words: which there are, what else they may be, and where the largest is.
    indices: str = ""
    otherwise: str = ""
    largest_at: str = ""

    def __str__(self) -> str:
        """Which names or indices there are, for people."""
        if self.classes:
            names = sorted(self.classes, key=self.classes.__getitem__)
            return f"{counted(len(names), 'name')}: {_listed(names)} ({self.rule})"
        return (self.indices or self.rule) + (f" ({self.otherwise})" if self.otherwise else "")

    @property
    def largest(self) -> int:
        """The largest index; -1 where there is none."""
        return max(self.classes.values(), default=-1)

    @property
    def are_partial(self) -> bool:
        """Whether a class map names single classes alone, so that there may be more."""
        return bool(self.classes) and self.num_classes is None

    def fingerprint(self) -> str | None:
        """sha256, in hex, over labels, their classes and the classes' names: all that the rule comes to."""
        if not self.classes and not self.names:
            return None
        content = [self.classes, sorted(self.names.items())]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def to_json(self, num_classes: int) -> dict[str, Any]:
        """Rule, folders or labels, and names of classes, as in result.json."""
        if not self.classes and not self.names:
            return {}
        of_labels = {f"{self.noun}s": dict(self.classes), "left_out": list(self.left_out)}
        return {
            "rule": self.rule,
            **(of_labels if self.classes else {}),
            "classes": [self.names.get(index) for index in range(num_classes)],
        }


def indices_of_classes(names: Sequence[str] = (), known: KnownClasses | None = None) -> Labels:
    """The labels of data that has indices of classes."""
    of_model = {} if known is None else known.shown
    return Labels(
        rule="indices of classes",
        classes={},
        names=dict(enumerate(names)) or of_model,
        num_classes=len(names) or None,
        noun="label",
    )


def choose_labels(
    folders: Sequence[str],
    *,
    class_map: ClassMap | None = None,
    order: str | None = None,
    known: KnownClasses | None = None,
    noun: str = "class folder",
    where: Callable[[str], str] = lambda name: "",
) -> Labels:
    """Decide which class each folder or label is by its name; messages say ``where`` one is."""
    if class_map is not None:
        labels = _by_map(folders, class_map, known, noun)
    elif order == "number":
        labels = _by_number(folders, noun)
    elif order is None and known is not None and (chosen := _by_known(folders, known, noun, where)):
        labels = chosen
    else:
        labels = Labels(
            rule="order of names",
            classes={folder: index for index, folder in enumerate(folders)},
            names=dict(enumerate(folders)),
            num_classes=len(folders),
            warnings=_numeric_warning(folders, noun) if order is None else (),
        )
    return replace(labels, noun=_short(noun))


# -- labels of a table -----------------------------------------------------------------------------------

LEFT_OUT = -1
_LARGEST_INDEX = 2**31 - 1  # the columns of classes are int32
_WHOLE = re.compile(r"0|[1-9][0-9]*", re.ASCII)
_WHOLE_FLOAT = re.compile(r"(0|[1-9][0-9]*)\.0", re.ASCII)
_BOOLS = {"false": "0", "true": "1"}
# Numbers that are no indices; a name such as these has to be asked for.
_OTHER_NUMBER = re.compile(
    r"-[0-9]+|[+-]?([0-9]+\.[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?(nan|inf)", re.ASCII | re.IGNORECASE
)
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
        values = [value for _, value in self._places]
        texts = [self._text(*each, names) for each in zip(self._numbers, values, strict=True)]
        if not ({*texts} & {*names} if label.class_map else not by_name and _named(texts, known)):
            texts = _as_whole(texts, bools=label.order != "name" if by_name else of_model)
        are_whole = all(map(_WHOLE.fullmatch, texts))
        if not by_name and (not _named(texts, known) or (are_whole and self._class_names)):
            if are_whole:
                return self._indices(texts, known, of_model=of_model)
            for number, text in sorted(zip(self._numbers, texts, strict=True), key=_is_whole):
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
        folders = list(dict.fromkeys(texts)) if of_model and not by_name else sorted(first)
        labels = label(folders, "label", lambda text: f"{self._row(first[text])}: ")
        return labels, [labels.classes.get(text, LEFT_OUT) for text in texts]

    def _indices(
        self, texts: Sequence[str], known: KnownClasses | None, *, of_model: bool
    ) -> tuple[Labels, list[int]]:
        classes = [int(text[:18]) for text in texts]  # one with more digits is too large in any case
        low, high = min(classes), max(classes)
        largest = self._numbers[classes.index(high)]
        if high > _LARGEST_INDEX:
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
        labels = replace(
            indices_of_classes((), known),
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
    of_model = (
        "without names (its id2label has placeholders)" if known is None else _listed_whole(known.names)
    )
    return f"The model's classes: {of_model}. The data's: {_listed_whole(of_data)}."


# -- order -----------------------------------------------------------------------------------------------


def _numbers(folders: Sequence[str]) -> dict[str, int] | None:
    """The number of each folder, where all names are numbers or end with one behind the same text."""
    matches = [_NUMBERED.fullmatch(folder) for folder in folders]
    if not all(matches) or len({match[1] for match in matches if match}) != 1:
        return None
    return {folder: int(match[2]) for folder, match in zip(folders, matches, strict=True) if match}


def _numeric_warning(folders: Sequence[str], noun: str) -> tuple[str, ...]:
    numbers = _numbers(folders) or {}
    by_number = sorted(numbers, key=lambda name: (numbers[name], name))
    place = next((i for i, name in enumerate(by_number) if name != folders[i]), None)
    if place is None:
        return ()
    return (
        f"the {noun}s are numbered, but are in the order of their names: {folders[place]!r} is class "
        f"{place}. If the model was trained in numeric order, give --class-order number or --class-map FILE; "
        "if it was trained in this order, give --class-order name.",
    )


def _by_number(folders: Sequence[str], noun: str) -> Labels:
    numbers = _numbers(folders) or {}
    ordered = sorted(numbers, key=lambda name: numbers[name])
    # One that is missing, or there twice, would shift all behind it.
    expected = [*range(numbers[ordered[0]], numbers[ordered[0]] + len(ordered))] if ordered else [0]
    if [numbers[folder] for folder in ordered] != expected:
        raise UsageError(
            f"--class-order number: expected {noun}s with each number once and one text before it, such as "
            f"0, 1, ..., 10 or class1, class2, found {_listed(ordered or folders)}. Give --class-map FILE."
        )
    place = {folder: index for index, folder in enumerate(ordered)}
    return Labels(
        rule="order of numbers",
        classes={folder: place[folder] for folder in folders},
        names=dict(enumerate(ordered)),
        num_classes=len(folders),
    )


# -- known classes ---------------------------------------------------------------------------------------


def are_wnids(folders: Iterable[str], wnids: Sequence[str]) -> bool:
    """Whether all folders have WordNet's ids for names, and these are among ``wnids``."""
    known = set(wnids)
    names = [folder.lower() for folder in folders]
    return bool(names) and all(_WNID.fullmatch(name) and name in known for name in names)


def _by_known(
    folders: Sequence[str], known: KnownClasses, noun: str, where: Callable[[str], str]
) -> Labels | None:
    """By the names of known classes; None where no folder has one."""
    exact = {folder: known.find(folder, exactly=True) for folder in folders}
    matches = {folder: places or known.find(folder, exactly=False) for folder, places in exact.items()}
    if not any(matches.values()):
        return None
    if any(places and not exact[folder] for folder, places in matches.items()):
        # Who writes names in other letters may have done so with those that seem to be exact.
        matches = {folder: known.find(folder, exactly=False) for folder in folders}
    unknown = [folder for folder, places in matches.items() if not places]
    if unknown:
        raise UsageError(
            f"{where(unknown[0])}{len(unknown)} of {len(folders)} {noun}s are not classes of {known.of}, "
            f"while the others are: {_listed(unknown)}.{known.nearest(unknown[0])} Rename them, or give "
            "--class-map FILE."
        )
    for folder, places in matches.items():
        if len(places) > 1:
            alike, wnids = (
                _listed([names[place] for place in places if names]) for names in (known.names, known.wnids)
            )
            raise UsageError(
                f"{where(folder)}the {noun} {folder!r} may be any of the classes {_listed(places)} of "
                f"{known.of}: {alike}. {f'Name it by its wnid ({wnids}), or give' if wnids else 'Give'} "
                "--class-map FILE."
            )
    classes = {folder: places[0] for folder, places in matches.items()}
    for index, count in Counter(classes.values()).items():
        if count > 1 and noun != "label":
            same = [folder for folder in classes if classes[folder] == index]
            raise UsageError(
                f"the {noun}s {_listed(same)} are all class {index} of {known.of}, {known.names[index]!r}. "
                f"Merge them, or give --class-map FILE, where several {_short(noun)}s may be one class."
            )
    by_wnid = sum(folder.lower() in known.wnids for folder in folders)
    kind = "wnids" if by_wnid == len(folders) else "wnids and names" if by_wnid else "names"
    return Labels(
        rule=f"{kind} of the classes of {known.of}",
        classes=classes,
        names=known.shown,
        num_classes=len(known.names),
        notes=(
            f"classes: {len(folders):,} {_short(noun)}s by {kind} of the {len(known.names):,} classes of "
            f"{known.of}",
        ),
    )


# -- class map -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ClassMap:
    """Which class each folder is."""

    path: Path
    # Index of the class by name of the folder; None for a folder that is left out.
    classes: dict[str, int | None]


def read_class_map(path: Path) -> ClassMap:
    """Read a class map: one JSON object, folder to index; null leaves a folder out."""
    where, expected = f"--class-map {path}", 'expected a JSON file, {"FOLDER": INDEX, ...}'
    try:
        content = json.loads(path.read_text("utf-8-sig"), object_pairs_hook=_checked_map)
    except OSError as error:
        raise UsageError(f"{where} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}; {expected}") from error
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
    if not isinstance(content, dict) or not content:
        raise UsageError(f"{where} holds {content!r}: {expected}")
    return ClassMap(path=path, classes=content)


def _checked_map(pairs: list[tuple[str, Any]]) -> dict[str, int | None]:
    classes = dict(pairs)
    if len(classes) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise UsageError(f"{twice!r} is there twice. Leave one out.")
    for folder, index in pairs:
        if index is not None and (type(index) is not int or index < 0):
            turned = " A map of index to folder has to be inverted." * isinstance(index, str | list)
            raise UsageError(
                f"{folder!r} is mapped to {json.dumps(index, ensure_ascii=False)}: expected the class's "
                f"index, a whole number from 0, or null to leave the folder out.{turned}"
            )
    return classes


def _by_map(folders: Sequence[str], class_map: ClassMap, known: KnownClasses | None, noun: str) -> Labels:
    option = f"--class-map {class_map.path}"
    unknown = [folder for folder in folders if folder not in class_map.classes]
    if unknown:
        raise UsageError(
            f"{option} does not name {len(unknown)} of {len(folders)} {noun}s: {_listed(unknown)}. Add "
            f"them; null leaves a {_short(noun)} out."
        )
    indices = {folder: class_map.classes[folder] for folder in folders}
    classes = {folder: index for folder, index in indices.items() if index is not None}
    left_out = tuple(folder for folder, index in indices.items() if index is None)
    if not classes:
        raise UsageError(f"{option} leaves every {noun} out: there is nothing to evaluate.")
    short = _short(noun)
    notes = [f"classes: {counted(len(classes), short)} by {class_map.path}"]
    if left_out:
        notes.append(f"class map: {counted(len(left_out), short)} left out: {_listed(left_out)}")
    names: dict[int, str] = {}
    for folder, index in classes.items():
        names[index] = f"{names[index]}, {folder}" if index in names else folder
    if known is not None:
        check_indices(classes, len(known.names), option, f"{known.of} has {len(known.names)} classes")
    return Labels(
        rule="class map",
        classes=classes,
        names=names if known is None else known.shown,
        num_classes=None if known is None else len(known.names),
        left_out=left_out,
        notes=tuple(notes),
    )


def check_indices(classes: Mapping[str, int], count: int, option: str, because: str) -> None:
    """Check that each folder's class is one of ``count`` classes."""
    for folder, index in classes.items():
        if index >= count:
            shifted = (min(classes.values()), max(classes.values())) == (1, count)
            hint = " Its indices begin at 1, those of a model at 0: write each one less." * shifted
            raise UsageError(
                f"{option} makes {folder!r} class {index}, but {because} (0 to {count - 1}).{hint}"
            )


# -- words -----------------------------------------------------------------------------------------------


def _places(names: Iterable[str]) -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        places.setdefault(name, []).append(index)
    return places


def _simple(name: str) -> str:
    return " ".join(name.casefold().replace("_", " ").split())


def _short(noun: str) -> str:
    return noun.removeprefix("class ")


def refuse_other_names(
    of: object, labels: Labels, known: KnownClasses | None, classes: npt.NDArray[np.int64], kept: KeptColumns
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
