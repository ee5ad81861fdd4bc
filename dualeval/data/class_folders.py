"""Class folders below a data folder, the images in them, and what is passed over; and those of ImageNet."""

from __future__ import annotations

import functools
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dualeval.data.labels import are_wnids
from dualeval.errors import UsageError
from dualeval.messages import counted, first_of

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
# Pictures that are not read: a data set may have lost samples by them.
_OTHER_PICTURES = frozenset(
    (".gif", ".heic", ".heif", ".avif", ".jxl", ".jp2", ".jpe", ".jfif", ".tga", ".ico", ".psd", ".svg")
)
_HIDDEN = "hidden"
# What systems make beside the user's folders: previews of a NAS, a Mac's forks, what was deleted.
_OF_SYSTEMS = frozenset(
    ("@eadir", "__macosx", "#recycle", "@recycle", "$recycle.bin", "lost+found", "system volume information")
)
_NO_EXTENSION = "without extension"
_NAMED_AT_MOST = 8


@dataclass(kw_only=True)
class PassedOver:
    """What is in a data folder and is no sample."""

    # How many, by extension in small letters; hidden ones under "hidden".
    files: Counter[str] = field(default_factory=Counter)
    # How many folders have a name that begins with a dot, or one that systems give.
    hidden_folders: int = 0
    # How many links lead to a folder that was read already.
    repeated_folders: int = 0
    # How many of the files are images beside the class folders.
    beside: int = 0

    def add(self, name: str) -> None:
        """Count a file."""
        hidden = name.startswith(".")
        self.files[_HIDDEN if hidden else Path(name).suffix.lower() or _NO_EXTENSION] += 1

    @property
    def holds_pictures(self) -> bool:
        """Whether some may have been meant as samples."""
        return bool(self.beside or _OTHER_PICTURES & self.files.keys())

    def to_json(self) -> dict[str, Any]:
        """Counts by kind, as in result.json."""
        return {
            "files": dict(sorted(self.files.items())),
            "hidden_folders": self.hidden_folders,
            "repeated_folders": self.repeated_folders,
        }

    def __str__(self) -> str:
        """In words for people; empty where nothing was passed over."""
        named = first_of(sorted(self.files), _NAMED_AT_MOST)
        beside = f", {self.beside:,} of them images beside the class folders" if self.beside else ""
        counts = {
            f"{counted(self.files.total(), 'file')} ({named}){beside}": self.files.total(),
            counted(self.hidden_folders, "hidden folder"): self.hidden_folders,
            counted(self.repeated_folders, "link") + " to a folder that was read already": (
                self.repeated_folders
            ),
        }
        text = "; ".join(part for part, count in counts.items() if count)
        return f"passed over: {text}" if text else ""


_FLAT = (
    "There is no class folder in {0}: expected {0}/CLASS/IMAGE, or the list of pictures and labels: --data "
    "FILE.csv"
)
# Folders of these names alone are no classes.
_PARTS = ("train", "training", "val", "valid", "validation", "test", "testing")


def check_folder(root: Path) -> None:
    """Check that a data folder is there."""
    if not root.is_dir():
        fault = "is a file" if root.exists() else "does not exist"
        raise UsageError(
            f"data folder {root} {fault}. Give --data a folder with one sub-folder per class, a "
            "manifest (.csv, .tsv, .jsonl, .parquet) or a data set by name (CIFAR10:DIR)."
        )


def class_folders(root: Path, passed_over: PassedOver) -> list[str]:
    """The names of the class folders, by code point; hidden ones and files are counted as passed over."""
    check_folder(root)
    try:
        entries = list(os.scandir(root))
    except OSError as error:
        _refuse(error)
    folders = []
    for entry in entries:
        if not entry.is_dir():
            passed_over.add(entry.name)
            passed_over.beside += is_image(entry.name)
        elif _is_hidden(entry.name):
            passed_over.hidden_folders += 1
        else:
            folders.append(entry.name)
    if (splits := [name for name in sorted(folders) if name.lower() in _PARTS]) == sorted(folders) and splits:
        filled = [name for name in splits if any(path.is_dir() for path in (root / name).glob("*"))]
        raise UsageError(
            f"data folder {root} holds {' and '.join(splits)}, which are parts of a data set, not classes. "
            + (f"Give one of them: --data {root / filled[-1]}" if filled else _FLAT.format(root / splits[-1]))
        )
    return sorted(folders)


def _is_hidden(folder: str) -> bool:
    return folder.startswith(".") or folder.lower() in _OF_SYSTEMS


def is_image(name: str) -> bool:
    """Whether a file's name is that of an image that is read."""
    return name.lower().endswith(EXTENSIONS) and not name.startswith(".")


def images_in(root: Path, class_name: str, passed_over: PassedOver) -> list[str]:
    """Paths below the root of the images of a class, sorted; counts what is passed over."""
    paths = []
    seen: set[tuple[int, int]] = set()
    for folder, inner, names in os.walk(root / class_name, onerror=_refuse, followlinks=True):
        status = Path(folder).stat()
        if (status.st_dev, status.st_ino) in seen:
            inner.clear()  # a link back to where the walk has been
            passed_over.repeated_folders += 1
            continue
        seen.add((status.st_dev, status.st_ino))
        # In name order: of two links to one folder the first is read, whatever order the disk has.
        shown = sorted(name for name in inner if not _is_hidden(name))
        passed_over.hidden_folders += len(inner) - len(shown)
        inner[:] = shown
        inside = Path(folder).relative_to(root).as_posix()
        for name in names:
            if is_image(name):
                paths.append(f"{inside}/{name}")
            else:
                passed_over.add(name)
    return sorted(paths)


def _refuse(error: OSError) -> None:
    # Passed over, its images would be missing without a word.
    raise UsageError(f"data folder {error.filename} cannot be listed: {error.strerror}") from error


def shown_name(name: str) -> str:
    """A file's name for text files: bytes that are no UTF-8 as ``\\xNN``."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


# torchvision's, then Kaggle's archive, then others' names.
_PLACES = ("{}", "ILSVRC/Data/CLS-LOC/{}", "Data/CLS-LOC/{}", "ILSVRC2012/{}", "ILSVRC2012_img_{}")
_NAMES = {"val": ("val", "validation"), "train": ("train",)}
_TAR = "ILSVRC2012_img_{}.tar"
# Facts, a line a class: those of ILSVRC-2012, in the order of their classes.
_WNIDS_FILE = Path(__file__).resolve().parent.parent / "assets" / "imagenet_wnids.txt"


@functools.cache
def imagenet_wnids() -> tuple[str, ...]:
    """The wnid of each class of ILSVRC-2012, by its index: they are in the order of their names."""
    return tuple(_WNIDS_FILE.read_text("ascii").split())


def imagenet_folder(root: Path, split: str) -> Path:
    """The folder of ImageNet's class folders, named by wnid."""
    places = [root / place.format(name) for place in _PLACES for name in _NAMES[split]]
    folder = next((place for place in places if place.is_dir()), None)
    if folder is None:
        tar = root / _TAR.format(split)
        hint = f" {tar} is an archive: unpack it into {places[0]}/WNID/." if tar.is_file() else ""
        raise UsageError(
            f"{places[0]} is missing: --data ImageNet:DIR takes DIR/{split}/WNID/IMAGE, as torchvision keeps "
            f"it, and nothing is downloaded.{hint}"
        )
    folders = class_folders(folder, PassedOver())
    if not folders and any(is_image(path.name) for path in folder.iterdir()):
        raise UsageError(
            f"the pictures lie in {folder} itself, expected one folder per class, {folder}/n01440764/IMAGE. "
            "Sort them into folders by wnid, as torchvision.datasets.ImageNet does, or list them with their "
            "classes in a manifest: --data FILE.csv --image-root DIR."
        )
    if not are_wnids(folders, imagenet_wnids()):
        odd = next((name for name in folders if not are_wnids([name], imagenet_wnids())), "no folder")
        raise UsageError(
            f"{folder}: found {odd}, expected folders that are named by the wnids of ILSVRC-2012, such as "
            f"n01440764. For other folders give --data {folder}."
        )
    return folder
