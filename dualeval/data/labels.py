"""Which class each folder or label is by its name: by a class map, by known names, or by its order."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from dualeval.errors import UsageError
from dualeval.messages import counted, first_of, nearest

LARGEST_INDEX = 2**31 - 1  # targets, and the columns of classes, are int32
_NUMBERED = re.compile(r"(\D*)([0-9]+)(\D*)", re.ASCII)
_WNID = re.compile(r"n[0-9]{8}", re.ASCII)
# Of what a message names.
_listed = partial(first_of, most=5)


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
    # The names that a table has for its indices.
    of_indices: tuple[str, ...] = ()

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


# -- order -----------------------------------------------------------------------------------------------


def _numbers(folders: Sequence[str]) -> dict[str, int] | None:
    """The number of each folder, where all names are numbers or end with one behind the same text; or where
    each has one, and these count them from 0 or 1, as 1_cat and 2_dog."""
    matches = [match for folder in folders if (match := _NUMBERED.fullmatch(folder))]
    if not matches or len(matches) < len(folders):
        return None
    numbers = {match[0]: int(match[2]) for match in matches}
    alike = len({(match[1], match[3]) for match in matches}) == 1 and not matches[0][3]
    first = min(numbers.values())
    counts = first < 2 and sorted(numbers.values()) == [*range(first, first + len(folders))]
    return numbers if alike or counts else None


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
            f"0, 1, ..., 10 or class1, class2, or 1_cat, 2_dog from 0 or 1 on, found "
            f"{_listed(ordered or folders)}. Give --class-map FILE."
        )
    place = {folder: index for index, folder in enumerate(ordered)}
    return Labels(
        rule="order of numbers",
        classes={folder: place[folder] for folder in folders},
        names=dict(enumerate(ordered)),
        num_classes=len(folders),
    )


# -- known classes ---------------------------------------------------------------------------------------


# Facts, a line a class: those of ILSVRC-2012, in the order of their classes.
_WNIDS_FILE = Path(__file__).resolve().parent.parent / "assets" / "imagenet_wnids.txt"


@cache
def imagenet_wnids() -> tuple[str, ...]:
    """The wnid of each class of ILSVRC-2012, by its index: they are in the order of their names."""
    return tuple(_WNIDS_FILE.read_text("ascii").split())


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
        if index is not None and (type(index) is not int or not 0 <= index <= LARGEST_INDEX):
            turned = " A map of index to folder has to be inverted." * isinstance(index, str | list)
            raise UsageError(
                f"{folder!r} is mapped to {json.dumps(index, ensure_ascii=False)}: expected the class's "
                f"index, a whole number from 0 to {LARGEST_INDEX:,}, or null to leave the folder out.{turned}"
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
