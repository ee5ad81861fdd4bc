"""The checkpoints of a training: which are complete, and what has become of each, on the disk and as a table.

No clock of the training's host is read: what counts is how long this process has seen no change.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from glob import escape
from pathlib import Path
from stat import S_ISDIR
from time import monotonic
from typing import Any

from dualeval.atomic_files import write_text
from dualeval.engine.folder.lease import Lease
from dualeval.engine.values.differences import differences
from dualeval.errors import EXIT_DONE, DualevalError, UsageError, text_of
from dualeval.messages import did_you_mean, listed
from dualeval.options.job import is_pattern
from dualeval.options.several import expanded, names_of
from dualeval.report.models_table import DONE, FAILED, ModelRow, ModelsTable, number_of
from dualeval.result import RESULT, Result, read_job, read_result, read_status, sha256_of_json

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
        complete, self.unsettled, self.unmarked, now = [], [], [], self.clock()
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
                complete.append(seen)
            else:
                (self.unmarked if is_settled else self.unsettled).append(seen.name)
        return sorted(complete, key=lambda each: (each.step is None, each.step or 0))

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
        if match := re.search(rf"(?:{words})s?[=_.-]*([0-9]+)", name, re.IGNORECASE):
            return int(match[1])
    numbers = re.findall("[0-9]+", name)
    return int(numbers[-1]) if numbers else None


def _stamp_of(path: Path) -> str | None:
    """A hash of the names, sizes and times of a checkpoint's files; None where there is none."""
    try:
        entries = [(str(each.relative_to(path)), each.stat()) for each in (path, *path.rglob("*"))]
    except OSError:  # one of them has gone meanwhile
        return None
    files = sorted((name, it.st_size, it.st_mtime_ns) for name, it in entries if not S_ISDIR(it.st_mode))
    return sha256_of_json(files)[:16] if files else None


LEADERBOARD = "leaderboard.csv"
# A folder for each checkpoint: the lease of the watcher that evaluates it, and the stamp of its files.
_OF_WATCHERS = ".watchers"
_STAMP = "stamp"


@dataclass(frozen=True, kw_only=True)
class Outcome(ModelRow):
    """What has become of one checkpoint."""

    # Of the files that were evaluated; None where nobody knows it.
    stamp: str | None = None
    # Of one that is done, what decides its numbers beside the weights.
    job: Any = None


class Board:
    """The results of a folder with runs, one for each checkpoint."""

    def __init__(self, folder: Path, *, metric: str | None, link: Path | None) -> None:
        self.folder = folder
        self._metric = metric
        self._link = link
        # By name, those that are done, and that have failed in this process, in the order of their ends.
        self.rows: dict[str, Outcome] = {}
        self._is_written = True
        self._lease: Lease | None = None
        self._check_link()
        if link is not None and not link.parent.is_dir():
            raise UsageError(
                f"--best {link}: there is no folder {link.parent}. Make it, or give another name."
            )

    def _check_link(self) -> None:
        if self._link is not None and os.path.lexists(self._link) and not self._link.is_symlink():
            raise UsageError(
                f"--best {self._link}: this exists and is not a symbolic link. Give another name."
            )

    # -- one checkpoint ----------------------------------------------------------------------------

    def load(self) -> None:
        """Take the results of all runs that are done, also of checkpoints that are gone."""
        for path in self.folder.glob(f"*/{RESULT}"):
            self._take_result(path.parent.name)
        ends = {name: str(row.result.finished_at) for name, row in self.rows.items() if row.result}
        self.rows = {name: self.rows[name] for name in sorted(ends, key=ends.__getitem__)}

    def is_settled(self, checkpoint: Checkpoint) -> bool:
        """Whether it has a result, perhaps another watcher's, or has failed here as it lies there."""
        row = self.rows.get(checkpoint.name)
        # A failure may be no fault of the checkpoint, as of a full disk: each watcher tries it once.
        if row is not None and (row.status == DONE or row.stamp == checkpoint.stamp):
            return True
        return self._take_result(checkpoint.name)

    def _take_result(self, name: str) -> bool:
        """Take the result of a run that is done; a damaged one is the next run's to mend."""
        run = self.folder / name
        status = read_status(run)
        if status is None or status.state != "done":
            return False
        try:
            result = read_result(run / RESULT)
            job = read_job(run)["job"]
        except (DualevalError, OSError):
            return False
        self._check_metric(result)
        job.pop("weights", None)
        stamp = self._stamp(name)
        self._take(name, status=DONE, result=result, exit_code=EXIT_DONE, stamp=stamp, job=job)
        return True

    def fail(self, checkpoint: Checkpoint, error: DualevalError) -> None:
        """Take it as failed, until its files change."""
        failed = {"status": FAILED, "reason": text_of(error), "exit_code": error.exit_code}
        self._take(checkpoint.name, **failed, stamp=checkpoint.stamp)

    def _take(self, name: str, **known: Any) -> None:
        self.rows.pop(name, None)
        self.rows[name] = Outcome(name=name, folder=str(self.folder / name), step=step_of(name), **known)
        self._is_written = False

    def changed(self, checkpoint: Checkpoint) -> bool:
        """Whether its files are others than those that were evaluated, or begun with, under this name."""
        row = self.rows.get(checkpoint.name)
        stamp = self._stamp(checkpoint.name) if row is None else row.stamp
        return stamp not in (None, checkpoint.stamp)

    def set_aside(self, checkpoint: Checkpoint) -> None:
        """Rank a checkpoint no longer: its files are not those that were evaluated."""
        row = self.rows[checkpoint.name]
        if row.reason is None:
            self.rows[checkpoint.name] = replace(row, reason="its files have changed since it was evaluated")
            self._is_written = False

    def begin(self, checkpoint: Checkpoint, waiting: Callable[[], None]) -> bool | None:
        """Take a checkpoint in hand; returns whether what lies in its folder is of other files.

        None where another watcher has it in hand, or has evaluated it a moment ago. ``waiting`` is called
        until it is known whether that watcher lives.
        """
        folder = self.folder / _OF_WATCHERS / checkpoint.name
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lease = Lease.take(folder, secrets.token_hex(4), waiting=waiting)
        except UsageError:
            return None
        if self.is_settled(checkpoint):
            self.let_go()
            return None
        is_other = self.changed(checkpoint)
        write_text(folder / _STAMP, checkpoint.stamp)
        return is_other

    def let_go(self) -> None:
        """Let other watchers have what is in hand."""
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    def _stamp(self, name: str) -> str | None:
        try:
            stamp = (self.folder / _OF_WATCHERS / name / _STAMP).read_text("ascii", "replace")
        except OSError:
            return None
        # A damaged one says nothing: whether the files are the same the run's own identity shows.
        return stamp if re.fullmatch("[0-9a-f]{16}", stamp) else None

    def _check_metric(self, result: Result) -> None:
        """Check that results have the metric that was asked for, and that one of its ends is better."""
        ranking = [name for name in result.metrics if result.directions.get(name)]
        if self._metric not in (None, *ranking):
            raise UsageError(
                f"--best-by {self._metric}: the results have {', '.join(ranking) or 'nothing'} to rank by."
                f"{did_you_mean(self._metric, ranking)}"
            )

    # -- all of them -------------------------------------------------------------------------------

    def ranked(self) -> tuple[str | None, list[ModelRow]]:
        """The metric that ranks, and the rows of one job from the best on; then all others, with a reason."""
        rows = sorted(self.rows.values(), key=lambda row: (row.step is None, row.step or 0, row.name))
        # What was computed last is compared with: code or data may have changed since the others.
        newest = next((row for row in reversed(self.rows.values()) if row.result is not None), None)
        if newest is None or newest.result is None:
            return None, [*rows]
        rows = [_compared(row, newest) for row in rows]
        directions = newest.result.directions
        metric = self._metric or next((name for name in newest.result.metrics if directions.get(name)), None)
        sign = -1 if directions.get(metric or "") == "higher" else 1

        def place(row: ModelRow) -> tuple[bool, bool, float]:
            value = None if row.reason else number_of(row.result, metric or "")
            return row.reason is not None, value is None, sign * (value or 0)

        return metric, sorted(rows, key=place)

    def write(self, paths: dict[str, str]) -> None:
        """Where there is more than before, write the leaderboard, and have the link lead to the best.

        ``paths`` are those of the checkpoints that are there, by their names.
        """
        if self._is_written:
            return
        metric, rows = self.ranked()
        write_text(self.folder / LEADERBOARD, ModelsTable(rows).to_csv())
        there = (row for row in rows if row.name in paths and row.reason is None)
        best = next((row for row in there if number_of(row.result, metric or "") is not None), None)
        if self._link is not None and best is not None:
            # Something may have been put there since.
            self._check_link()
            # Never without one: made beside it and put in its place.
            beside = self._link.with_name(f"{self._link.name}.{secrets.token_hex(4)}")
            try:
                beside.symlink_to(Path(paths[best.name]).absolute())
                beside.replace(self._link)
            except OSError as error:
                raise OSError(error.errno, error.strerror, f"--best {self._link}") from error
        self._is_written = True


def _compared(row: Outcome, newest: Outcome) -> Outcome:
    """A row; where it cannot be compared with the newest, with the reason."""
    if row.result is None or row.job == newest.job:
        return row
    keys = dict.fromkeys(re.split(r"[.[]", name)[0] for name, _, _ in differences(row.job, newest.job))
    return replace(row, reason=f"not ranked: another {listed(keys)} than that of {newest.name}")
