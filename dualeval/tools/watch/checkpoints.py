"""Which checkpoints a training has written so far, which of them are complete, and of which step they are.

No clock of the training's host is read: what counts is how long this process has seen no change.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from time import monotonic

from dualeval.options.several import expanded, is_pattern, names_of
from dualeval.result import sha256_of_json

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".tar")
# torch.distributed.checkpoint writes it last.
_DCP_METADATA = ".metadata"
# The first of these that is in a name says its step; else its last number does.
_STEPS = [
    re.compile(rf"(?:{words})s?[=_.-]*([0-9]+)", re.IGNORECASE)
    for words in ("step|iter|iteration", "epoch|checkpoint|ckpt")
]
_NUMBER = re.compile("[0-9]+")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint."""

    # Of its folder and row: what is below the watched folder.
    name: str
    path: str
    # None where its name has no number.
    step: int | None
    # A hash of the sizes and times of its files: another one where it was written again.
    stamp: str


class Checkpoints:
    """The checkpoints in a folder, or those that fit a pattern, as they come."""

    def __init__(
        self, where: str, *, settle_s: float, marker: str | None, clock: Callable[[], float] = monotonic
    ) -> None:
        self.where = where
        self.settle_s = settle_s
        self._marker = marker
        self._clock = clock
        # By path, a stamp and since when it is that.
        self._seen: dict[str, tuple[str, float]] = {}
        # Those that the last look has found and that are being written; and those that are not, and lack
        # their marker.
        self.unsettled: list[str] = []
        self.unmarked: list[str] = []

    def is_there(self) -> bool:
        """Whether there is the folder, or anything that fits the pattern."""
        return Path(self.where).exists() or bool(self._seen)

    def complete(self) -> list[Checkpoint]:
        """Look once; the complete ones in the order of their steps, those without one last."""
        found, self.unsettled, self.unmarked, now = [], [], [], self._clock()
        pattern, paths = self._paths()
        for path, name in zip(paths, names_of(pattern, paths), strict=True):
            stamp = stamp_of(path)
            if stamp is None:
                continue  # nothing in it yet, or gone since
            if self._seen.get(path, ("", 0.0))[0] != stamp:
                self._seen[path] = stamp, now
            unchanged_s = now - self._seen[path][1]
            if self._is_complete(path, unchanged_s):
                found.append(Checkpoint(name=name, path=path, step=step_of(name), stamp=stamp))
            else:
                (self.unsettled if unchanged_s < self.settle_s else self.unmarked).append(name)
        return sorted(found, key=lambda each: (each.step is None, each.step or 0))

    def _paths(self) -> tuple[str, list[str]]:
        """A pattern, and what fits it in natural order; without links: what they lead to is there."""
        is_folder = not is_pattern(self.where)
        pattern = f"{escape(self.where)}/*" if is_folder else self.where
        paths = expanded(pattern, refuses=False)
        marks = () if self._marker is None else (f".{self._marker.lstrip('.')}",)
        return pattern, [
            path
            for path in paths
            if not Path(path).is_symlink()
            and not (path.endswith(marks) and Path(path).is_file())
            and (not is_folder or _looks_like_one(Path(path)))
        ]

    def _is_complete(self, path: str, unchanged_s: float) -> bool:
        if self._marker is not None:
            beside = Path(f"{path}.{self._marker.lstrip('.')}")
            return (Path(path) / self._marker).exists() or beside.exists()
        return (Path(path) / _DCP_METADATA).exists() or unchanged_s >= self.settle_s


def _looks_like_one(path: Path) -> bool:
    """Whether something in a folder may be a checkpoint: by its suffix, or by what is in it."""
    if path.is_file():
        return path.suffix in _SUFFIXES
    try:
        return any(each.suffix in _SUFFIXES or each.name == _DCP_METADATA for each in path.iterdir())
    except OSError:
        return False


def step_of(name: str) -> int | None:
    """The step, or epoch, that a name says: ``epoch=3-step=1200`` is 1200."""
    for pattern in _STEPS:
        if found := pattern.search(name):
            return int(found[1])
    numbers = _NUMBER.findall(name)
    return int(numbers[-1]) if numbers else None


def stamp_of(path: str) -> str | None:
    """A hash of the names, sizes and times of a checkpoint's files; None where there is none."""
    try:
        files = sorted(_files(path))
    except OSError:  # one of them has gone meanwhile
        return None
    return sha256_of_json(files)[:16] if files else None


def _files(path: str) -> Iterator[tuple[str, int, int]]:
    if not Path(path).is_dir():
        status = Path(path).stat()
        yield "", status.st_size, status.st_mtime_ns
    for folder, _, names in os.walk(path):
        for name in names:
            status = (Path(folder) / name).stat()
            yield str((Path(folder) / name).relative_to(path)), status.st_size, status.st_mtime_ns
