"""Outcome: what a rank says and exits with as its run ends, by the verdict, its rank and its role."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dualeval.engine.control.verdict import Turn
from dualeval.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_USAGE, PeerError, Stopped, text_of
from dualeval.process.speech import how_to_resume, spoken
from dualeval.process.start import NOTHING_STARTED


@dataclass(frozen=True, kw_only=True)
class Role:
    """What a rank is to the run that ends, and what it knows of the end."""

    rank: int
    # Not a guest, which raises what an owner prints, for its process goes on.
    is_owner: bool = True
    # Whether the watch ends the run, because the main thread does not return.
    by_watch: bool = False
    # The error that this rank has met: its own, or the verdict on another's.
    met: BaseException | None = None
    # Of a stop: the output folder, and whether the last model's result is written there; what has begun: how
    # many of several models are done, None before a batch; and rank 0's exit code, where the others know it.
    folder: Path | None = None
    is_done: bool = False
    progress: str | None = ""
    end_code: int | None = None
    # Rank 0 knows the ranks that have not saved, and how one of them has ended.
    unsaved: Sequence[str] = ()
    lost: str | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a rank does as its run ends."""

    exit_code: int
    # Whether it writes the end into status.json.
    writes: bool
    # When it says why; None for never.
    turn: Turn | None
    # What it says then; "" for nothing.
    line: str = ""
    # What a stop has become that is a failure now, for status.json.
    failure: str = ""


def outcome_of(verdict: PeerError | Stopped, role: Role) -> Outcome:
    """What a rank does, of the first failure or of a stop."""
    if isinstance(verdict, Stopped):
        return _of_stop(verdict, role)
    rank = role.rank
    is_usage = verdict.exit_code == EXIT_USAGE
    line = spoken(verdict, rank)
    if is_usage and not role.by_watch:
        # One rank reports wrong usage, and names no rank if rank 0 met the same error.
        is_alike = verdict.rank == 0 or text_of(verdict) == text_of(role.met or verdict)
        line = f"dualeval: error: {text_of(verdict)}" if is_alike else spoken(verdict, 0)
    if (is_usage and rank == 0) or (not role.by_watch and (is_usage or rank == 0)):
        turn = Turn.IF_FIRST
    elif role.by_watch:
        turn = Turn.BEFORE_ALL_LEAVE
    else:
        # Rank 0 prints nothing any more if it is the rank that is lost.
        turn = Turn.AT_ONCE if verdict.rank == 0 and verdict.where is None else Turn.BEFORE_RANK_0
    return Outcome(
        exit_code=verdict.exit_code,
        # If rank 0 itself has failed, any other rank has to write it.
        writes=rank == 0 or (isinstance(role.met, PeerError) and verdict.rank == 0),
        turn=turn,
        line=line if role.is_owner or role.by_watch else "",
    )


def _of_stop(stop: Stopped, role: Role) -> Outcome:
    """Rank 0 says it and writes it down; the others exit as rank 0 does, where they know how."""
    code = EXIT_DONE if role.is_done else EXIT_STOPPED
    if role.rank != 0:
        return Outcome(exit_code=code if role.end_code is None else role.end_code, writes=False, turn=None)
    failure, path = "", role.folder
    if role.is_done:
        line = f"dualeval: {stop} came while the result was being written: {path}"
    elif role.unsaved:
        code = EXIT_FAILED
        silent = f"{', '.join(role.unsaved)} did not report that everything is saved: killed or hanging"
        failure = role.lost or f"after {stop}, {silent}"
        line = f"dualeval: error: {failure}"
    elif path is None and role.progress is None:
        line = f"dualeval: stopped by {stop}. {NOTHING_STARTED}"
    else:
        progress = "No batch was started." if role.progress is None else role.progress
        where = "Type" if path is None else f"What is finished is saved in {path}: type"
        text = f"{progress} {where}" if progress else where
        line = f"dualeval: stopped by {stop}. {text} {how_to_resume(path)}."
    return Outcome(
        exit_code=code,
        writes=code != EXIT_DONE,
        turn=Turn.AT_ONCE,
        line=line if role.is_owner else "",
        failure=failure,
    )


def note_of_loss(failure: BaseException | None, written: Path) -> str:
    """What is said of a rank that was lost, by no error of its own, behind the result; "" of another end."""
    if not isinstance(failure, PeerError) or failure.where is not None:
        return ""
    return f"dualeval: note: the result is complete: {written}; but {text_of(failure)}"
