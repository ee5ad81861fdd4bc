"""Which files below a folder are pictures, and what is passed over."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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


def is_hidden(folder: str) -> bool:
    """Whether a folder's name says that it is not the user's data."""
    return folder.startswith(".") or folder.lower() in _OF_SYSTEMS


def is_image(name: str) -> bool:
    """Whether a file's name is that of an image that is read."""
    return name.lower().endswith(EXTENSIONS) and not name.startswith(".")


def images_in(root: Path, class_name: str, passed_over: PassedOver) -> list[str]:
    """Paths below the root of the images of a class, sorted; counts what is passed over."""
    paths = []
    seen: set[tuple[int, int]] = set()
    for folder, inner, names in os.walk(root / class_name, onerror=refuse_listing, followlinks=True):
        status = Path(folder).stat()
        if (status.st_dev, status.st_ino) in seen:
            inner.clear()  # a link back to where the walk has been
            passed_over.repeated_folders += 1
            continue
        seen.add((status.st_dev, status.st_ino))
        # In name order: of two links to one folder the first is read, whatever order the disk has.
        shown = sorted(name for name in inner if not is_hidden(name))
        passed_over.hidden_folders += len(inner) - len(shown)
        inner[:] = shown
        inside = Path(folder).relative_to(root).as_posix()
        for name in names:
            if is_image(name):
                paths.append(f"{inside}/{name}")
            else:
                passed_over.add(name)
    return sorted(paths)


def refuse_listing(error: OSError) -> None:
    """Refuse a folder that cannot be listed."""
    # Passed over, its images would be missing without a word.
    raise UsageError(f"data folder {error.filename} cannot be listed: {error.strerror}") from error


def shown_name(name: str) -> str:
    """A file's name for text files: bytes that are no UTF-8 as ``\\xNN``."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
