"""Outcome: what a rank says and exits with as its run ends, by the verdict, its rank and its role."""

from __future__ import annotations

from dataclasses import dataclass

from dualeval.engine.control.verdict import Turn
from dualeval.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_USAGE, PeerError, Stopped, text_of
from dualeval.process.speech import spoken


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
    # Of a stop: whether the last model's result is written; rank 0's exit code, where the others know it; and
    # whether all ranks have saved, which rank 0 knows.
    is_done: bool = False
    end_code: int | None = None
    all_saved: bool = True


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a rank does as its run ends."""

    exit_code: int
    # Whether it writes the end into status.json.
    writes: bool
    # When it says why; None for never.
    turn: Turn | None
    # What it says then of a failure; "" for nothing.
    line: str = ""


def outcome_of(verdict: PeerError | Stopped, role: Role) -> Outcome:
    """What a rank does, of the first failure or of a stop."""
    rank = role.rank
    if isinstance(verdict, Stopped):
        code = EXIT_DONE if role.is_done else EXIT_STOPPED
        if rank != 0:
            return Outcome(
                exit_code=code if role.end_code is None else role.end_code, writes=False, turn=None
            )
        code = code if role.is_done or role.all_saved else EXIT_FAILED
        return Outcome(exit_code=code, writes=code != EXIT_DONE, turn=Turn.AT_ONCE)
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
