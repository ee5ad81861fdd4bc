"""What has become of the checkpoints: on the disk, for other watchers and later ones, and as a table."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dualeval.engine.folder.lease import Lease
from dualeval.errors import EXIT_DONE, EXIT_USAGE, DualevalError, UsageError
from dualeval.report.models_table import DONE, FAILED, ModelRow, ModelsTable
from dualeval.result import RESULT, Result, json_text, read_result, read_status
from dualeval.tools.watch.checkpoints import Checkpoint
from dualeval.whole_files import write_text
from dualeval.wording import did_you_mean

LEADERBOARD = "leaderboard.csv"
# A folder for each checkpoint: the lease of the watcher that evaluates it, and what it has come to.
_OF_WATCHERS = ".watchers"
_OUTCOME = "outcome.json"


class Board:
    """The results of a folder with runs, one for each checkpoint."""

    def __init__(self, folder: Path, *, metric: str | None, link: Path | None) -> None:
        self.folder = folder
        self._metric = metric
        self._link = link
        # By name, what is known to be done or failed.
        self.rows: dict[str, ModelRow] = {}
        # Names of those that this process has tried.
        self._tried: set[str] = set()
        if link is not None and os.path.lexists(link) and not link.is_symlink():
            raise UsageError(f"--best {link}: there is something that is no link. Give a name that is free.")
        if link is not None and not link.parent.is_dir():
            raise UsageError(
                f"--best {link}: there is no folder {link.parent}. Make it, or give another name."
            )

    @contextmanager
    def writable(self) -> Iterator[None]:
        """Say what a full disk, or one that is gone, comes to."""
        try:
            yield
        except OSError as error:
            raise DualevalError(
                f"{error.filename or self.folder} cannot be written: {error.strerror or error}. Checkpoints "
                "that are evaluated have their results: make room, and type the same command again."
            ) from error

    # -- one checkpoint ----------------------------------------------------------------------------

    def is_settled(self, checkpoint: Checkpoint) -> bool:
        """Whether it has a result, or failed as it lies there now; the board takes it then."""
        name, run = checkpoint.name, self.folder / checkpoint.name
        known = self.rows.get(name)
        if known is not None and known.status == DONE:
            return True
        status = read_status(run)
        if status is not None and status.state == "done" and (run / RESULT).is_file():
            self._take(checkpoint, status=DONE, result=read_result(run / RESULT), exit_code=EXIT_DONE)
            return True
        outcome = self._outcome(name)
        if outcome.get("stamp") != checkpoint.stamp:
            return False
        # What was no fault of the checkpoint, as a full disk, is tried again by the next watcher.
        if outcome["exit_code"] != EXIT_USAGE and name not in self._tried:
            return False
        self._take(checkpoint, status=FAILED, reason=outcome["reason"], exit_code=outcome["exit_code"])
        return True

    def changed(self, checkpoint: Checkpoint) -> bool:
        """Whether its files are others than those that were evaluated, or begun with, under this name."""
        return bool(self._outcome(checkpoint.name).get("stamp", checkpoint.stamp) != checkpoint.stamp)

    def is_held(self, checkpoint: Checkpoint) -> bool:
        """Whether there is a lease: of another watcher, or of one that was killed."""
        return (self._of_watchers(checkpoint.name) / "lease.json").exists()

    def hold(self, checkpoint: Checkpoint) -> Lease | None:
        """Keep other watchers from evaluating it; None where one of them does."""
        own = self._of_watchers(checkpoint.name)
        own.mkdir(parents=True, exist_ok=True)
        try:
            return Lease.take(own, secrets.token_hex(4))
        except UsageError:
            return None

    def begin(self, checkpoint: Checkpoint) -> None:
        """Write down which files are evaluated."""
        self._tried.add(checkpoint.name)
        self._write_outcome(checkpoint, exit_code=None, reason=None)

    def fail(self, checkpoint: Checkpoint, error: DualevalError, reason: str) -> None:
        """Write down why it could not be evaluated."""
        self._write_outcome(checkpoint, exit_code=error.exit_code, reason=reason)

    def _write_outcome(self, checkpoint: Checkpoint, **outcome: Any) -> None:
        path = self._of_watchers(checkpoint.name) / _OUTCOME
        write_text(path, json_text({"stamp": checkpoint.stamp, **outcome}))

    def _outcome(self, name: str) -> dict[str, Any]:
        try:
            found = json.loads((self._of_watchers(name) / _OUTCOME).read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _of_watchers(self, name: str) -> Path:
        return self.folder / _OF_WATCHERS / name

    def _take(self, checkpoint: Checkpoint, **known: Any) -> None:
        name = checkpoint.name
        self.rows[name] = ModelRow(name=name, folder=str(self.folder / name), step=checkpoint.step, **known)

    # -- all of them -------------------------------------------------------------------------------

    def ranked(self) -> tuple[str | None, list[ModelRow]]:
        """The metric that ranks the checkpoints, and these from the best to the failed ones."""
        rows = sorted(self.rows.values(), key=lambda row: (row.step is None, row.step or 0, row.name))
        results = [row.result for row in rows if row.result is not None]
        metric = self._metric or next(
            (name for result in results for name in result.metrics if result.directions.get(name)), None
        )
        if metric is None:
            return None, rows
        sign = -1 if any(result.directions.get(metric) == "higher" for result in results) else 1
        values = {row.name: _value(row, metric) for row in rows}
        rows.sort(key=lambda row: ((value := values[row.name]) is None, sign * (value or 0)))
        return metric, rows

    def check_metric(self, result: Result) -> None:
        """Check that results have the metric that was asked for, and that one of its ends is better."""
        if self._metric is None:
            return
        if self._metric not in result.metrics:
            raise UsageError(
                f"--best-by {self._metric}: the results have {', '.join(result.metrics)}."
                f"{did_you_mean(self._metric, result.metrics)}"
            )
        if result.directions.get(self._metric) not in ("higher", "lower"):
            raise UsageError(
                f"--best-by {self._metric}: neither more nor less of it is better. Name another."
            )

    def write(self, paths: dict[str, str]) -> None:
        """Write the leaderboard anew, and have the link lead to the best checkpoint, by their paths."""
        metric, rows = self.ranked()
        write_text(self.folder / LEADERBOARD, ModelsTable(rows).to_csv())
        best = next(
            (paths[row.name] for row in rows if row.name in paths and _value(row, metric) is not None), None
        )
        if self._link is None or best is None:
            return
        # Never without one: made beside it and put in its place.
        beside = self._link.with_name(f"{self._link.name}.{secrets.token_hex(4)}")
        beside.symlink_to(Path(best).absolute())
        beside.replace(self._link)

    def best(self, count: int) -> Sequence[ModelRow]:
        """The first rows of the leaderboard, and all that failed."""
        _, rows = self.ranked()
        done = [row for row in rows if row.status == DONE]
        return [*done[:count], *(row for row in rows if row.status != DONE)]


def _value(row: ModelRow, metric: str | None) -> float | None:
    value = None if row.result is None or metric is None else row.result.metrics.get(metric)
    return value if isinstance(value, int | float) else None
