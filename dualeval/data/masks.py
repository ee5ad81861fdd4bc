"""Pictures with masks: each pixel of a mask is the number of its picture's class there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib import import_module
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from dualeval.columns.of_data import NO_COLUMNS, KeptColumns, WithColumns
from dualeval.data.cache import DataCache
from dualeval.data.image_files import PATH_COLUMNS, FileNames, ImageFiles
from dualeval.data.image_paths import EXTENSIONS, PassedOver, images_in
from dualeval.data.labels import indices_of_classes
from dualeval.data.masked_shards import find_masked
from dualeval.data.packed import PackedImages
from dualeval.data.pictures import StoredPicture, prepare, read_picture, size_of
from dualeval.data.preprocessing import Normalisation
from dualeval.data.set_names import is_table, is_tar, module_of_masks
from dualeval.data.table import AS_USUAL, TableOptions, column_of, open_table
from dualeval.errors import UsageError, text_of
from dualeval.messages import counted, first_of
from dualeval.urls import url_of

NO_LABEL, _NO_CLASS = -1, -2
MASK_COLUMNS = ("mask", "mask_path", "annotation", "segmentation", "label", "target")
_SUFFIXES = (".png", ".tif", ".tiff", ".bmp")
_listed = partial(first_of, most=3)
_LOOKED_FOR = 1000
_LOOKED_INTO = 64
_LARGEST = 2**15 - 1  # classes are int16
_TABLE = 2**16
_MOST_TYPED = 40
_Colour: TypeAlias = tuple[int, int, int]


@dataclass(kw_only=True)
class LabelRule:
    """What the numbers in masks stand for."""

    # The labels of pixels that do not count.
    ignore: tuple[int, ...]
    # Label 0 does not count, and label 1 is class 0.
    reduce: bool
    # The class of each label, NO_LABEL for one that does not count; empty where labels are classes.
    values: Mapping[int, int] = field(default_factory=dict)
    # How many there are; known once the model is made, before anything is read.
    classes: int = _LARGEST

    @property
    def values_text(self) -> str:
        """The class of each label, as it is typed."""
        return _pairs_text(self.values)

    def to_json(self) -> dict[str, Any]:
        """All that decides the class of a pixel."""
        reduced = "yes" if self.reduce else "no"
        of_labels = {"ignore_index": [*self.ignore], "mask_values": self.values_text}
        return {"num_classes": self.classes, **of_labels, "reduce_labels": reduced}

    def without_label(self) -> list[int]:
        """The classes that no label stands for, once their number is known: no pixel is of them."""
        stored = self.values or range(self.classes + self.reduce)
        return sorted({*range(self.classes % _LARGEST)} - {*map(self.class_of, stored)})

    def class_of(self, label: int) -> int:
        """``NO_LABEL`` for one that does not count, ``_NO_CLASS`` for one that is no class."""
        # A stored -1 is a label like others: it counts unless it is named.
        if label in self.ignore or (self.reduce and label == 0):
            return NO_LABEL
        if self.values:
            return self.values.get(label, _NO_CLASS)
        number = label - self.reduce
        return number if 0 <= number < self.classes else _NO_CLASS

    def of(self, labels: npt.NDArray[Any], others: Callable[[], Iterable[int]] = list) -> Tensor:
        """The class of each pixel, int16; ``others`` are labels of other masks, for what an error advises."""
        first, last = min(0, int(labels.min())), int(labels.max())
        places = labels.astype(np.int64)
        if last - first < _TABLE:
            stored, places = np.arange(first, last + 1), places - first if first else places
        else:
            stored, places = np.unique(places, return_inverse=True)
        table = np.array([*map(self.class_of, stored.tolist())], np.int16)
        classes = table.take(places.reshape(labels.shape), mode="clip")  # "raise" takes longer
        if classes.min() == _NO_CLASS:
            raise ValueError(
                self._without_class(labels[classes == _NO_CLASS], [*np.unique(labels).tolist(), *others()])
            )
        return torch.from_numpy(classes)

    def _without_class(self, pixels: npt.NDArray[Any], others: Iterable[int]) -> str:
        """What is said of labels that are no class, and what to type: also for those of other masks."""
        numbers = np.unique(pixels).tolist()
        every = {label: self.class_of(label) for label in sorted({*numbers, *others})}
        beyond = [label for label, number in every.items() if number == _NO_CLASS]
        begin = f"{counted(len(pixels), 'pixel')} with the label {_listed(numbers)}, expected "
        if self.values:
            added = _pairs_text({**self.values, **dict.fromkeys(beyond, NO_LABEL)})
            return f"{begin}those of --mask-values. Name all, none for what does not count: {added}"
        if len(beyond) > _MOST_TYPED:
            labels = f"{begin}{self.classes} classes. It has {len(beyond)} such labels, as blurred masks have"
            return f"{labels}: write masks anew without resizing or loss, or give --mask-values FILE.json"
        counting = [label for label, number in every.items() if number != NO_LABEL]
        pairs = {label: place if place < self.classes else NO_LABEL for place, label in enumerate(counting)}
        # Not offered if no label would be left.
        ignored = f"--ignore-index {','.join(map(str, [*self.ignore, *beyond]))}"
        or_ignored = f", or, if these pixels do not count, {ignored}" if beyond != counting else ""
        return (
            f"{begin}{int(self.reduce)} to {self.classes - 1 + self.reduce}. Give a model of more classes, "
            f"or say which class each label is, as in --mask-values {_pairs_text(pairs)}{or_ignored}"
        )


def _pairs_text(values: Mapping[int, int]) -> str:
    return ",".join(f"{label}={'none' if to == NO_LABEL else to}" for label, to in sorted(values.items()))


def read_mask_values(value: str | Path | Mapping[Any, Any]) -> dict[int, int]:
    """What ``--mask-values`` gives: the class of each label, ``NO_LABEL`` for one that does not count."""
    try:
        if isinstance(value, Mapping):
            pairs: Any = value.items()
        elif "=" in str(value):
            pairs = [part.split("=") for part in str(value).split(",")]
        else:
            pairs = json.loads(Path(value).read_text("utf-8-sig"), object_pairs_hook=list)
        # By their texts: int() would take 1.5 and true, too.
        texts = [(str(label), str(to).strip()) for label, to in pairs]
        classes = {int(label): NO_LABEL if to.lower() == "none" else int(to) for label, to in texts}
        if not 0 < len(classes) == len(texts) or any(to.startswith("-") for _, to in texts):
            raise ValueError("a label is there twice, or a class is below 0")
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"--mask-values {value}: {text_of(error)}. Expected the class of each label, as 0=0,255=1,7=none "
            '(none: it does not count), or a JSON file: {"0": 0, "255": 1, "7": null}'
        ) from error
    return classes


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskedPictures(WithColumns):
    """Pictures and their masks, in a fixed order; a sample's id is its picture's path."""

    pictures: ImageFiles
    masks: ImageFiles
    rule: LabelRule
    # What comes before a row's number, and these numbers; "" if there are none.
    table: str
    numbers: npt.NDArray[np.int64]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    # The manifest's other columns.
    kept: KeptColumns = NO_COLUMNS

    in_memory = False
    unique_ids = True

    def __len__(self) -> int:
        return len(self.pictures)

    def id(self, index: int) -> str:
        """The picture's path, below its folder or as it stands in the manifest."""
        return self.pictures.id(index)

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor, bool]]:
        """The picture (channels, height, width), the classes of its own pixels, int16 (height, width), and
        whether EXIF has turned one of them alone."""
        return [self._read(index) for index in indices]

    def _read(self, index: int) -> tuple[Tensor, Tensor, bool]:
        with self.pictures.opened(index) as file:
            picture = read_picture(file)
        try:
            mask = self._mask(index)
            picture, mask, turned = _as_shown(picture, mask)
            labels = mask.numbers()
            if mask.image.size != picture.image.size:
                size, its = ("{} x {}".format(*each.image.size) for each in (mask, picture))
                raise ValueError(f"it has {size} pixels, and its picture {its}")
            classes = self.rule.of(labels, lambda: self.first_labels)
        except (OSError, ValueError) as error:
            row = f" ({self.table} {self.numbers[index]})" if self.table else ""
            reason = "there is no such file" if isinstance(error, FileNotFoundError) else text_of(error)
            raise ValueError(f"its mask {self.masks.path(index)}{row}: {reason}") from error
        return prepare(picture.eight_bits(), self.pictures.preprocessing), classes, turned

    def _mask(self, index: int) -> StoredPicture:
        with self.masks.opened(index) as file:
            return read_picture(file)

    @cached_property
    def first_labels(self) -> set[int]:
        """The labels in the first masks that can be read."""
        return {*chain.from_iterable(self.labels_of_first())}

    def labels_of_first(self) -> Iterator[list[int]]:
        """Of each of the first masks that can be read its labels."""
        for index in range(min(_LOOKED_INTO, len(self))):
            labels: list[int] = []
            with suppress(OSError, ValueError):  # the loop names it
                labels = np.unique(self._mask(index).numbers()).tolist()
            yield labels

    def check_palettes(self) -> None:
        """Refuse first masks whose palettes say that colours are the classes, and not the numbers in them."""
        seen: dict[_Colour, tuple[int, list[_Colour], int]] = {}
        longest: list[_Colour] = []
        for place in range(0 if self.rule.values else min(_LOOKED_INTO, len(self))):
            palette: list[_Colour] = []
            used: list[int] = []
            with suppress(OSError, ValueError):  # the loop names it
                image = self._mask(place).image
                if image.mode != "P":
                    return
                flat = image.getpalette() or []
                palette = [*zip(flat[::3], flat[1::3], flat[2::3], strict=True)]
                used = [index for index in np.unique(np.asarray(image)).tolist() if index < len(palette)]
            longest = max(longest, palette, key=len)
            for index in used:
                before, its, other = seen.setdefault(palette[index], (index, palette, place))
                # A palette may have a colour twice, as black at the end.
                if palette[index] not in (*palette[before : before + 1], *its[index : index + 1]):
                    raise UsageError(
                        f"the mask {self.masks.path(other)} has the colour {palette[index]} at the number "
                        f"{before}, and {self.masks.path(place)} at {index}: so colours are the classes. "
                        "Write the masks anew with one class number per pixel: "
                        "PIL.Image.fromarray(numbers.astype('uint8')).save('mask.png'). Where the numbers "
                        f"are the classes, type --mask-values {self._typed_values({})}"
                    )
        numbers = [index for index, *_ in seen.values() if index not in self.rule.ignore]
        palette = longest[: max(numbers, default=-1) + 1]
        usual = [_usual_colour(index) for index in range(len(palette))]
        if palette != usual and sorted(palette) == sorted(usual):
            to = {index: usual.index(colour) for index, colour in enumerate(palette)}
            same = self._typed_values({index: index for index in to})
            raise UsageError(
                f"the palette of the masks, as {self.masks.path(0)}, has PASCAL VOC's colours in another "
                f"order. If these are the classes, type --mask-values {self._typed_values(to)}; if the "
                f"numbers are, --mask-values {same}"
            )

    def check_rule(self) -> None:
        """Refuse what was made by another rule; called when the number of classes is known."""

    def _typed_values(self, to: Mapping[int, int]) -> str:
        """What is typed for the labels of the first masks, and for those that are others' classes."""
        labels = {*self.first_labels, *to, *self.rule.ignore}
        return _pairs_text({label: self.rule.class_of(to.get(label, label)) for label in labels})

    def picture(self, index: int) -> tuple[Image.Image, npt.NDArray[np.int16]]:
        """The picture for people, and the classes of its pixels."""
        with self.pictures.opened(index) as file:
            picture, mask, _ = _as_shown(read_picture(file), self._mask(index))
        return picture.eight_bits().convert("RGB"), self.rule.of(mask.numbers()).numpy()

    def placeholder(self, index: int) -> tuple[Tensor, Tensor, bool]:
        """A black picture of the size that the one at ``index`` has, of which no pixel counts.

        Where the size is not known the picture is empty: none of its batch is computed with it.
        """
        try:
            with self.pictures.as_it_is(index) as file:
                width, height = size_of(file)
            picture = prepare(Image.new("RGB", (width, height)), self.pictures.preprocessing)
        except (OSError, ValueError):
            return torch.zeros(0, 0, 0, dtype=torch.uint8), torch.zeros(0, 0, dtype=torch.int16), False
        return picture, torch.full((height, width), NO_LABEL, dtype=torch.int16), False

    def select(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> MaskedPictures:
        """Some of the samples, in this order."""
        chosen = np.asarray(indices, np.int64)
        return replace(
            self,
            pictures=self.pictures.select(chosen),
            masks=self.masks.select(chosen),
            numbers=self.numbers[chosen] if self.table else self.numbers,
            notes=(),
            warnings=(),
            kept=self.kept.select(chosen),
        )

    def fingerprint(self, count: int) -> str:
        """sha256, in hex, over ids and sizes in bytes of the first ``count`` pictures and their masks."""
        return _joined(self.pictures.fingerprint(count), self.masks.fingerprint(count))

    def content_fingerprint(self, samples: range) -> str:
        """sha256, in hex, over what is in these pictures and masks."""
        return _joined(self.pictures.content_fingerprint(samples), self.masks.content_fingerprint(samples))


def _usual_colour(index: int) -> _Colour:
    """A class's colour in PASCAL VOC's palette, which most data sets have taken over."""
    red, green, blue = (
        sum((index >> (3 * bit + channel) & 1) << (7 - bit) for bit in range(8)) for channel in range(3)
    )
    return red, green, blue


def _as_shown(picture: StoredPicture, mask: StoredPicture) -> tuple[StoredPicture, StoredPicture, bool]:
    """Both as programs show them, where EXIF turns one alone; as they are stored where only that fits."""
    if picture.orientation != mask.orientation:
        shown = picture.upright(), mask.upright()
        if shown[0].image.size == shown[1].image.size:
            return *shown, True
    return picture, mask, False


def _joined(*hashes: str) -> str:
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class _Pairs:
    """Paths of pictures and masks below their folders, and what is to be said of them."""

    pictures: list[str]
    masks: list[str]
    table: str = ""
    numbers: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    kept: KeptColumns = NO_COLUMNS


def open_masked(
    data: Path,
    masks: Path | None,
    rule: LabelRule,
    preprocessing: Normalisation,
    *,
    columns: tuple[str | None, str | None],
    whole_files: bool,
    options: TableOptions = AS_USUAL,
    cache: DataCache,
) -> MaskedPictures:
    """The pictures of a folder with the masks of another one, those that a manifest lists, or a pack's."""
    targets: npt.NDArray[np.int32]
    common: dict[str, Any] = {"labels": indices_of_classes(), "preprocessing": preprocessing, "cache": cache}
    if (module := module_of_masks(data)) or is_tar(data):
        if masks is not None or any(columns):
            raise UsageError(
                f"--masks, --path-column and --mask-column do not apply to --data {data}: in it a mask lies "
                "beside its picture (in tar shards as a.png beside a.jpg). Leave them out."
            )
        options.refuse_quoting(data)
        if module:
            packed: Any = import_module(f"dualeval.data.image_sets.{module}")
            return packed.open_masks(data, rule, whole_files=whole_files, **common)  # type: ignore[no-any-return]
        index = cache.once(("masked shards", data.absolute()), lambda: find_masked(data))
        targets = np.zeros(len(index.names), np.int32)
        pictures, of_masks = (
            PackedImages(pieces, data, index.names, targets, whole_files=whole, **common)
            # All bytes of masks, as below.
            for pieces, whole in zip((index.pieces, *index.others), (whole_files, True), strict=True)
        )
        none = np.empty(0, np.int64)
        return MaskedPictures(
            pictures=pictures, masks=of_masks, rule=rule, table="", numbers=none, notes=tuple(index.notes)
        )
    if url_of(data):
        raise UsageError(
            f"--data {data}: pictures with masks are read from tar shards there, a.png beside a.jpg. Pack "
            "them, or copy them to a disk."
        )
    if is_table(data):
        roots = data.parent, masks or data.parent
        of_manifest = ("pictures and masks", data.absolute(), *columns, options)
        pairs = cache.once(of_manifest, lambda: _of_manifest(data, *columns, options))
    elif any(columns):
        raise UsageError(
            f"--path-column and --mask-column are for a manifest (.csv, .jsonl, .parquet), and --data {data} "
            "is not one. Leave them out."
        )
    else:
        options.refuse_quoting(data)
        roots = _folder("--data", data), _folder("--masks", masks)
        of_folders = ("pictures and masks", *(root.absolute() for root in roots))
        pairs = cache.once(of_folders, lambda: _of_folders(*roots))
    targets = np.zeros(len(pairs.pictures), np.int32)
    masked = MaskedPictures(
        pictures=ImageFiles(roots[0], FileNames(pairs.pictures), targets, whole_files=whole_files, **common),
        # All bytes: other pixels change neither the size nor the ends of a BMP or a TIFF.
        masks=ImageFiles(roots[1], FileNames(pairs.masks), targets, whole_files=True, **common),
        rule=rule,
        table=pairs.table,
        numbers=np.array(pairs.numbers, np.int64),
        notes=pairs.notes,
        warnings=pairs.warnings,
        kept=pairs.kept,
    )
    for what, root, names in (("picture", roots[0], pairs.pictures), ("mask", roots[1], pairs.masks)):
        if not any((root / name).exists() for name in names[:_LOOKED_FOR]):
            raise UsageError(
                f"--data {data}: none of its {what}s exists; the first was looked for at {root / names[0]}. "
                "Paths are relative to the manifest's folder; those of masks to --masks, if it is given."
            )
    return masked


def _folder(flag: str, folder: Path | None) -> Path:
    if folder is None or not folder.is_dir():
        there = "is not a folder" if folder is not None and folder.exists() else "does not exist"
        fault = "is not given" if folder is None else f"{folder} {there}"
        raise UsageError(
            f"{flag} {fault}. Give --data the folder of the pictures and --masks the folder of their masks, "
            "which have the same names (a.jpg and a.png); or --data a manifest with both (.csv, .jsonl, "
            ".parquet)."
        )
    return folder


def _of_folders(root: Path, masks: Path) -> _Pairs:
    """Pictures and masks whose paths are the same but for the suffix."""
    pictures = _by_stem(root, EXTENSIONS)
    mask_files = _by_stem(masks, _SUFFIXES)
    if not pictures.keys() & mask_files.keys():
        one, other = (_some(files.values()) for files in (pictures, mask_files))
        raise UsageError(
            f"no mask in --masks {masks} has the name of a picture in --data {root}: found pictures {one}, "
            f"masks {other}; expected a.jpg ({' '.join(EXTENSIONS)}) and a.png ({' '.join(_SUFFIXES)}). "
            "Names that differ need a manifest: --data FILE.csv with the columns image and mask."
        )
    without = [name for stem, name in pictures.items() if stem not in mask_files]
    alone = [name for stem, name in mask_files.items() if stem not in pictures]
    stems = sorted(pictures, key=lambda stem: pictures[stem])
    return _Pairs(
        pictures=[pictures[stem] for stem in stems],
        # One that is missing is a sample that cannot be read, as --on-error has it.
        masks=[mask_files.get(stem, f"{stem}.png") for stem in stems],
        notes=(f"no picture for {_some(alone)}: left out.",) if alone else (),
        warnings=(f"no mask for {_some(without)}.",) if without else (),
    )


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return counted(len(ordered), "file") + (f" ({_listed(ordered)})" if ordered else "")


def _by_stem(root: Path, suffixes: Sequence[str]) -> dict[str, str]:
    files: dict[str, str] = {}
    for path in images_in(root, ".", PassedOver()):
        name = PurePosixPath(path)
        stem = str(name.with_suffix(""))
        if name.suffix.lower() not in suffixes:
            continue
        if stem in files:
            raise UsageError(
                f"{root} has {files[stem]} and {name}, and each may be meant. Remove one of them."
            )
        files[stem] = str(name)
    return files


def _of_manifest(
    path: Path, path_column: str | None, mask_column: str | None, options: TableOptions
) -> _Pairs:
    if not path.is_file():
        raise UsageError(f"--data {path} does not exist: expected a manifest, or a folder of pictures.")

    def choose(columns: Sequence[str]) -> tuple[str, str]:
        return (
            column_of(path, columns, path_column, PATH_COLUMNS, "--path-column", "the pictures' paths"),
            column_of(path, columns, mask_column, MASK_COLUMNS, "--mask-column", "their masks' paths"),
        )

    example = {"image": "a.jpg", "mask": "a.png"}
    table = open_table(path, choose, example, ", the paths of picture files", options=options)
    seen: dict[str, int] = {}
    masks = []
    for number, picture, mask in table.rows:
        for name, column in zip((picture, mask), table.columns, strict=True):
            if type(name) is not str or not name or "\0" in name:
                raise UsageError(
                    f"{table.where(number)} has {name!r} in the column {column!r}, expected a path"
                )
        if picture in seen:
            raise UsageError(
                f"{table.where(number)} has the picture of {table.unit} {seen[picture]}, {picture}"
            )
        seen[picture] = number
        masks.append(mask)
    if not seen:
        raise UsageError(f"{path} has no rows")
    return _Pairs(
        pictures=[*seen],
        masks=masks,
        table=f"{path}, {table.unit}",
        numbers=tuple(seen.values()),
        kept=table.further.kept(),
    )
