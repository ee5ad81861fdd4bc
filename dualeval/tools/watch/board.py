"""What has become of the checkpoints: on the disk, for other watchers and later ones, and as a table."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dualeval.engine.differences import differences
from dualeval.engine.folder.lease import Lease
from dualeval.errors import EXIT_DONE, DualevalError, UsageError
from dualeval.report.models_table import DONE, FAILED, ModelRow, ModelsTable, number_of
from dualeval.result import JOB, RESULT, Result, json_text, read_result, read_status
from dualeval.tools.watch.checkpoints import Checkpoint, step_of
from dualeval.whole_files import write_text
from dualeval.wording import did_you_mean, listed

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
        # Of those that are done, what decides their numbers beside the weights.
        self._jobs: dict[str, Any] = {}
        # The one that was computed last: code or data may have changed since the others.
        self._newest = ""
        # Of those that are done, the stamp of the files that were evaluated; None where nobody knows it.
        self._stamps: dict[str, str | None] = {}
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

    def load(self) -> None:
        """Take the results of all runs that are done, also of checkpoints that are gone."""
        for path in self.folder.glob(f"*/{RESULT}"):
            self._take_result(path.parent.name)
        finished = {
            str(row.result.finished_at): row.name for row in self.rows.values() if row.result is not None
        }
        self._newest = finished[max(finished)] if finished else ""

    def is_settled(self, checkpoint: Checkpoint) -> bool:
        """Whether it has a result, or failed in this process as it lies there; the board takes it then."""
        name = checkpoint.name
        known = self.rows.get(name)
        if (known is not None and known.status == DONE) or self._take_result(name):
            return True
        outcome = self._outcome(name)
        # A failure may be no fault of the checkpoint, as of a full disk: each watcher tries it once.
        if outcome.get("stamp") != checkpoint.stamp or name not in self._tried:
            return False
        self._take(name, status=FAILED, reason=outcome["reason"], exit_code=outcome["exit_code"])
        return True

    def _take_result(self, name: str) -> bool:
        """Take the result of a run that is done; a damaged one is the next run's to mend."""
        run = self.folder / name
        status = read_status(run)
        if status is None or status.state != "done":
            return False
        try:
            result = read_result(run / RESULT)
            job = json.loads((run / JOB).read_text("utf-8"))["job"]
        except (DualevalError, OSError, ValueError, KeyError):
            return False
        self._jobs[name] = {part: value for part, value in job.items() if part != "weights"}
        self._stamps[name] = self._outcome(name).get("stamp")
        self._newest = name
        self._take(name, status=DONE, result=result, exit_code=EXIT_DONE)
        return True

    def changed(self, checkpoint: Checkpoint) -> bool:
        """Whether its files are others than those that were evaluated, or begun with, under this name."""
        name = checkpoint.name
        # Looked at again and again, and of what is done always the same.
        stamp = self._stamps[name] if name in self._stamps else self._outcome(name).get("stamp")
        return stamp not in (None, checkpoint.stamp)

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

    def _take(self, name: str, **known: Any) -> None:
        self.rows[name] = ModelRow(name=name, folder=str(self.folder / name), step=step_of(name), **known)

    # -- all of them -------------------------------------------------------------------------------

    def ranked(self) -> tuple[str | None, list[ModelRow]]:
        """The metric that ranks, and the rows of one job from the best on; then all others."""
        rows = sorted(self.rows.values(), key=lambda row: (row.step is None, row.step or 0, row.name))
        done = [row for row in rows if row.result is not None]
        if not done:
            return None, rows
        same = [row for row in done if self._jobs[row.name] == self._jobs[self._newest]]
        metric, sign = self._ranking([row.result for row in same if row.result is not None])
        values = {row.name: number_of(row.result, metric or "") for row in same}
        if metric is not None:
            same.sort(key=lambda row: ((value := values[row.name]) is None, sign * (value or 0)))
        return metric, [*same, *(self._apart(row) for row in rows if row not in same)]

    def _apart(self, row: ModelRow) -> ModelRow:
        """A row that cannot be compared with the newest; why is its reason."""
        if row.result is None:
            return row
        found = differences(self._jobs[row.name], self._jobs[self._newest])
        parts = dict.fromkeys(name.partition(".")[0].partition("[")[0] for name, _, _ in found)
        return replace(row, reason=f"not ranked: another {listed(parts)} than that of {self._newest}")

    def _ranking(self, results: Sequence[Result]) -> tuple[str | None, int]:
        """The metric that ranks, and -1 where a higher value is better."""
        names = (name for result in results for name in result.metrics if result.directions.get(name))
        metric = self._metric or next(names, None)
        is_higher = any(result.directions.get(metric or "") == "higher" for result in results)
        return metric, -1 if is_higher else 1

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

    def write(self, paths: dict[str, str]) -> tuple[str | None, list[ModelRow]]:
        """Write the leaderboard anew, and have the link lead to the best checkpoint, by their paths.

        Returns what ``ranked`` gives.
        """
        metric, rows = self.ranked()
        write_text(self.folder / LEADERBOARD, ModelsTable(rows).to_csv())
        best = next(
            (
                paths[row.name]
                for row in rows
                if row.reason is None
                and row.name in paths
                and number_of(row.result, metric or "") is not None
            ),
            None,
        )
        if self._link is not None and best is not None:
            # Never without one: made beside it and put in its place.
            beside = self._link.with_name(f"{self._link.name}.{secrets.token_hex(4)}")
            beside.symlink_to(Path(best).absolute())
            beside.replace(self._link)
        return metric, rows

    def best(self, count: int) -> Sequence[ModelRow]:
        """The first rows of the leaderboard, and all that failed."""
        _, rows = self.ranked()
        done = [row for row in rows if row.reason is None]
        return [*done[:count], *(row for row in rows if row.reason is not None)]
