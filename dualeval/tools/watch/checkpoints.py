"""Which checkpoints a training has written so far, which of them are complete, and of which step they are.

No clock of the training's host is read: what counts is how long this process has seen no change.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from glob import escape
from pathlib import Path
from stat import S_ISDIR
from time import monotonic

from dualeval.options.several import expanded, is_pattern, names_of
from dualeval.result import sha256_of_json

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".tar")
# torch.distributed.checkpoint writes it last.
_DCP_METADATA = ".metadata"


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
    # When it was seen first as it is, on this process's clock.
    since: float = 0.0


@dataclass
class Checkpoints:
    """The checkpoints in a folder, or those that fit a pattern, as they come."""

    where: str
    _: KW_ONLY
    settle_s: float
    marker: str | None
    clock: Callable[[], float] = monotonic
    # Names in the last look: of those that are being written, and of those that lack their marker.
    unsettled: list[str] = field(default_factory=list)
    unmarked: list[str] = field(default_factory=list)
    # By path, as it was seen last.
    _seen: dict[str, Checkpoint] = field(default_factory=dict)

    def complete(self) -> list[Checkpoint]:
        """Look once; the complete ones in the order of their steps, those without one last."""
        found, self.unsettled, self.unmarked, now = [], [], [], self.clock()
        pattern, paths = self._paths()
        for path, name in zip(paths, names_of(pattern, paths), strict=True):
            stamp, seen = _stamp_of(Path(path)), self._seen.get(path)
            if stamp is None:
                continue  # nothing in it yet, or gone since
            if seen is None or seen.stamp != stamp:
                seen = Checkpoint(name=name, path=path, step=step_of(name), stamp=stamp, since=now)
                self._seen[path] = seen
            is_settled = now - seen.since >= self.settle_s
            if self._is_complete(Path(path), is_settled=is_settled):
                found.append(seen)
            else:
                (self.unmarked if is_settled else self.unsettled).append(seen.name)
        return sorted(found, key=lambda each: (each.step is None, each.step or 0))

    def _paths(self) -> tuple[str, list[str]]:
        """A pattern, and what fits it in natural order; without links: what they lead to is there."""
        is_folder = not is_pattern(self.where)
        pattern = f"{escape(self.where)}/*" if is_folder else self.where
        return pattern, [
            path
            for path in expanded(pattern, refuses=False)
            if not Path(path).is_symlink()
            and not (path.endswith(self.marker or ()) and Path(path).is_file())
            and (not is_folder or _looks_like_one(Path(path)))
        ]

    def _is_complete(self, path: Path, *, is_settled: bool) -> bool:
        if self.marker is not None:
            beside = Path(f"{path}.{self.marker.lstrip('.')}")
            return beside.exists() or (path / self.marker).exists()
        return is_settled or (path / _DCP_METADATA).exists()


def _looks_like_one(path: Path) -> bool:
    """Whether something in a folder may be a checkpoint: by its suffix, or by what is in it."""
    if path.is_file():
        return path.suffix in _SUFFIXES
    try:
        return any(each.suffix in _SUFFIXES or each.name == _DCP_METADATA for each in path.iterdir())
    except OSError:
        return False


def step_of(name: str) -> int | None:
    """The step that a name says, else the epoch, else the last number: ``epoch=3-step=1200`` is 1200."""
    for words in ("step|iter|iteration", "epoch|checkpoint|ckpt"):
        if found := re.search(rf"(?:{words})s?[=_.-]*([0-9]+)", name, re.IGNORECASE):
            return int(found[1])
    numbers = re.findall("[0-9]+", name)
    return int(numbers[-1]) if numbers else None


def _stamp_of(path: Path) -> str | None:
    """A hash of the names, sizes and times of a checkpoint's files; None where there is none."""
    try:
        found = [(str(each.relative_to(path)), each.stat()) for each in (path, *path.rglob("*"))]
    except OSError:  # one of them has gone meanwhile
        return None
    files = sorted((name, it.st_size, it.st_mtime_ns) for name, it in found if not S_ISDIR(it.st_mode))
    return sha256_of_json(files)[:16] if files else None
