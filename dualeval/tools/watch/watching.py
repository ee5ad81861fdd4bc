"""The loop of ``dualeval watch``: which checkpoint comes next, and when there is none any more."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from time import monotonic
from typing import TYPE_CHECKING, Any

from dualeval.engine.differences import differences, listing
from dualeval.engine.end.process import say
from dualeval.errors import DualevalError, UsageError, text_of
from dualeval.report.models_table import DONE, ModelRow, ModelsTable, number_of
from dualeval.result import json_text
from dualeval.tools.watch.board import Board
from dualeval.tools.watch.checkpoints import Checkpoint, Checkpoints, step_of
from dualeval.whole_files import write_text
from dualeval.wording import counted, listed, printable

if TYPE_CHECKING:
    from dualeval.engine.folder.lease import Lease
    from dualeval.engine.session import Session
    from dualeval.report.loggers.targets import Target
    from dualeval.result import Result

# What the runs of a folder have in common; a watcher with other options is refused there.
WATCH = "watch.json"
# Another watcher's checkpoint is not asked for again before.
_HELD_FOR_S = 5.0
_LOOKS_A_SETTLE = 5
_LONGEST_PAUSE_S = 2.0
# Checkpoints that wait where it is said that the training is faster, and twice as many each time after that.
_WAITING = 3
# Without anything to do, until it is said what is waited for.
_SILENT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which checkpoints are to be evaluated, and until when."""

    newest_first: bool = False
    every: int | None = None
    until_step: int | None = None
    stop_file: Path | None = None

    def fits(self, step: int | None) -> bool:
        """Whether the checkpoint of a step is to be evaluated."""
        if step is None:
            return self.every is None and self.until_step is None
        return step % (self.every or 1) == 0 and (self.until_step is None or step <= self.until_step)

    def has_ended(self, steps: Sequence[int | None]) -> bool:
        """Whether no further checkpoint is waited for, where those of these steps have come."""
        until = self.until_step
        reached = until is not None and any(step is not None and step >= until for step in steps)
        return reached or (self.stop_file is not None and self.stop_file.exists())


@dataclass(kw_only=True)
class Watching:
    """One watcher, on every rank; what it knows of checkpoints is rank 0's."""

    session: Session
    checkpoints: Checkpoints
    wanted: Wanted
    board: Board
    targets: Sequence[Target]
    # The options that all runs of the folder have.
    job: dict[str, Any]
    # Evaluates a checkpoint, by its path, into a folder, whose earlier files may be removed first.
    evaluate: Callable[[str, Path, bool], Result]
    _lease: Lease | None = None
    # By name, until when another watcher's is not asked for again.
    _held: dict[str, float] = field(default_factory=dict)
    _looked_at: float = float("-inf")
    _came: list[float] = field(default_factory=list)
    _known: set[str] = field(default_factory=set)
    _took: list[float] = field(default_factory=list)
    _said_at: int = _WAITING
    _paths: dict[str, str] = field(default_factory=dict)
    _waiting: set[str] = field(default_factory=set)
    _began: float = 0.0
    # When an evaluation has ended, or the watcher begun.
    _busy_at: float = 0.0

    def run(self) -> list[ModelRow]:
        """Evaluate what comes, until there is an end; a collective. Returns a row for each on rank 0."""
        self._began = self._busy_at = monotonic()
        if self.session.world.is_main:
            self._open()
        self.session.control.meet()
        try:
            with self.board.writable():
                self._evaluate_all()
        finally:
            self._let_go()
        return [*self.board.rows.values()]

    def _evaluate_all(self) -> None:
        session = self.session
        while found := session.idle_until(self._next, progress=self._progress()):
            checkpoint = Checkpoint(**found["checkpoint"])
            start = monotonic()
            folder = self.board.folder / checkpoint.name
            work = partial(self.evaluate, checkpoint.path, folder, found["fresh"])
            result, failure = session.attempt(work, progress=self._progress())
            if session.world.is_main:
                self._took.append(monotonic() - start)
                self._finish(checkpoint, result, failure)

    def _progress(self) -> str:
        done = sum(row.status == DONE for row in self.board.rows.values())
        return f"{counted(done, 'checkpoint')} evaluated so far."

    def _let_go(self) -> None:
        """Let other watchers have what is in hand."""
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    def _open(self) -> None:
        path, job = self.board.folder / WATCH, json.loads(json.dumps(self.job))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # An empty one was left by a crash at the first write.
            if not path.exists() or not path.stat().st_size:
                write_text(path, json_text(job))
            there = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{path} cannot be written or read: {error}. Remove it if it is damaged, or give another "
                "--out."
            ) from error
        if found := differences(there, job):
            raise UsageError(
                f"{path.parent} is the folder of a watcher with other options "
                f"({listing(found, 'there', 'here')}): its results could not be compared with these. Give "
                "another --out."
            )
        self.board.load()
        for row in self.board.rows.values():
            if row.result is not None:
                self.board.check_metric(row.result)

    # -- on rank 0 ---------------------------------------------------------------------------------

    def _next(self) -> dict[str, Any] | None:
        """The checkpoint to evaluate; None where there is none yet, nothing at the end."""
        now = monotonic()
        if now - self._looked_at < min(_LONGEST_PAUSE_S, self.checkpoints.settle_s / _LOOKS_A_SETTLE):
            return None
        complete = self.checkpoints.complete()
        self._looked_at = monotonic()
        self._paths = {each.name: each.path for each in complete}
        wanted = [each for each in complete if self.wanted.fits(each.step)]
        known = len(self.board.rows)
        open_ = [each for each in wanted if not self._is_settled(each)]
        if len(self.board.rows) > known:
            self.board.write(self._paths)
        self._note_gone(open_)
        self._note_pace(open_)
        for checkpoint in self._in_turn(open_):
            if (lease := self.board.hold(checkpoint)) is None:
                self._held[checkpoint.name] = monotonic() + _HELD_FOR_S
            elif self.board.is_settled(checkpoint):  # by another watcher, a moment ago
                lease.close()
                self.board.write(self._paths)
            else:
                self._lease, fresh = lease, self.board.changed(checkpoint)
                self.board.begin(checkpoint)
                return {"checkpoint": vars(checkpoint), "fresh": fresh}
        unsettled = self._fitting(self.checkpoints.unsettled)
        steps = [*(each.step for each in complete), *(row.step for row in self.board.rows.values())]
        if not open_ and not unsettled and self.wanted.has_ended(steps):
            self._note_unmarked()
            return {}
        if monotonic() - self._busy_at > _SILENT_S:
            self._note_waiting([*(each.name for each in open_), *unsettled])
        return None

    def _note_gone(self, open_: Sequence[Checkpoint]) -> None:
        """Say which checkpoints have gone before their turn."""
        there = {*self._paths, *self.checkpoints.unsettled, *self.checkpoints.unmarked}
        for name in sorted(self._waiting - there - self.board.rows.keys()):
            self.session.note(f"{printable(name)} is gone, and was not evaluated")
        self._waiting = {each.name for each in open_}

    def _fitting(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if self.wanted.fits(step_of(name))]

    def _note_unmarked(self) -> None:
        if names := self._fitting(self.checkpoints.unmarked):
            self.session.note(f"not evaluated, as their marker is missing: {listed(map(printable, names))}")

    def _note_waiting(self, names: Sequence[str]) -> None:
        """Say what is waited for, once for each number of checkpoints that are done."""
        where = self.checkpoints.where
        there = "" if self.checkpoints.is_there() else ", which is not there yet"
        hands = (
            f" Being written, or evaluated by another watcher: {listed(map(printable, names))}"
            if names
            else ""
        )
        self.session.note(f"waits for checkpoints in {where}{there}. {self._progress()}{hands}")
        self._note_unmarked()

    def _is_settled(self, checkpoint: Checkpoint) -> bool:
        if not self.board.is_settled(checkpoint):
            return False
        if self.board.changed(checkpoint):
            self.session.note(
                f"{printable(checkpoint.name)} has changed since it was evaluated, and is not evaluated "
                "again: save each checkpoint under a name of its own"
            )
        return True

    def _in_turn(self, open_: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Those that may be begun, in order; without those that another watcher has in hand."""
        ordered = open_[::-1] if self.wanted.newest_first else open_
        return [each for each in ordered if self._held.get(each.name, 0.0) <= monotonic()]

    def _finish(self, checkpoint: Checkpoint, result: Result | None, failure: DualevalError | None) -> None:
        """Write and say what a checkpoint has come to, and let others have it."""
        self.session.control.progress.step("idle")
        self._busy_at = monotonic()
        name = printable(checkpoint.name)
        if failure is not None:
            reason = text_of(failure)
            self.board.fail(checkpoint, failure, reason)
            say(f"dualeval: error: {name}: {reason}")
        self.board.is_settled(checkpoint)
        metric, rows = self.board.write(self._paths)
        self._let_go()
        if result is None:
            return
        self.board.check_metric(result)
        if apart := [row for row in rows if row.result is not None and row.reason is not None]:
            self.session.note(f"{listed(printable(row.name) for row in apart)}: {apart[0].reason}")
        if metric is not None and number_of(result, metric) is not None:
            number, ends = ModelsTable(rows).cell(self.board.rows[checkpoint.name], metric)
            done = [row.name for row in rows if row.reason is None]
            place = done.index(checkpoint.name) + 1
            interval = f" ({ends})" if ends else ""
            say(f"dualeval: {name}: {metric} {number}{interval}, place {place} of {len(done)}")
        if self.targets:
            from dualeval.report.loggers.log import log_result

            log_result(result, self.targets, checkpoint.step, self.session.note)

    def _note_pace(self, open_: Sequence[Checkpoint]) -> None:
        """Say where checkpoints come faster than they are evaluated, and by how much."""
        new = {each.name for each in open_} - self._known
        self._known |= {*new, *self.board.rows}
        # What was there before the watcher is complete at once, or when it has been looked at for a while.
        if monotonic() - self._began > 2 * self.checkpoints.settle_s + _LONGEST_PAUSE_S:
            self._came += [monotonic()] * len(new)
        if len(open_) < self._said_at or len(self._came) < _WAITING or not self._took:
            return
        every = (self._came[-1] - self._came[0]) / (len(self._came) - 1)
        takes = median(self._took)
        if takes > every:
            self._said_at = 2 * len(open_)
            self.session.note(
                f"the training is faster than its evaluation: a checkpoint comes every {every:.1f} s, an "
                f"evaluation takes {takes:.1f} s, and {len(open_)} wait. --every K evaluates fewer, --newest "
                "the newest first; a second watcher on the same folders, or more ranks, share the work"
            )
