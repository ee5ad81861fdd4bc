"""Who says why a run ends, and with which exit code: by verdict, rank and role."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dualeval.engine.control.verdict import Turn
from dualeval.engine.end.outcome import Outcome, Role, note_of_loss, outcome_of
from dualeval.errors import BackendError, PeerError, PeerUsageError, Stopped, UsageError

# Reported by rank 1 itself, noticed by others, and of rank 0 likewise; the last two are wrong usage.
FAILED = PeerError("broken", rank=1, exit_code=1, where="rank 1 on n (pid 7)")
LOST = PeerError("rank 1 on n (pid 7) exited", rank=1, exit_code=1)
FAILED_0 = PeerError("broken", rank=0, exit_code=1, where="rank 0 on n (pid 6)")
LOST_0 = PeerError("rank 0 on n (pid 6) exited", rank=0, exit_code=1)
WRONG = PeerUsageError("no such file", rank=1, exit_code=2, where="rank 1 on n (pid 7)")
WRONG_0 = PeerUsageError("no such file", rank=0, exit_code=2, where="rank 0 on n (pid 6)")
OWN = BackendError("broken")
MISSING = UsageError("no such file")
OTHER = UsageError("no such folder")
STOP = Stopped("SIGTERM")

E, R = "dualeval: error: ", "dualeval: rank 2 ends: "
BY_1, BY_0 = "rank 1 on n (pid 7): ", "rank 0 on n (pid 6): "


def failed(turn: Turn, line: str, *, code: int = 1, writes: bool = False) -> Outcome:
    return Outcome(exit_code=code, writes=writes, turn=turn, line=line)


@pytest.mark.parametrize(
    ("verdict", "role", "wanted"),
    [
        # Rank 0 says it for all, and writes it; the others add a line and wait until it has.
        (FAILED_0, {"rank": 0, "met": OWN}, failed(Turn.IF_FIRST, f"{E}{BY_0}broken", writes=True)),
        (FAILED, {"rank": 0}, failed(Turn.IF_FIRST, f"{E}{BY_1}broken", writes=True)),
        (LOST, {"rank": 0}, failed(Turn.IF_FIRST, f"{E}{LOST}", writes=True)),
        (FAILED, {"rank": 2}, failed(Turn.BEFORE_RANK_0, f"{R}{BY_1}broken")),
        (FAILED, {"rank": 2, "met": OWN}, failed(Turn.BEFORE_RANK_0, f"{R}{BY_1}broken")),
        (LOST, {"rank": 2}, failed(Turn.BEFORE_RANK_0, f"{R}{LOST}")),
        # Where rank 0 has failed, each of the others writes it; where it is lost, they ask it nothing.
        (FAILED_0, {"rank": 2}, failed(Turn.BEFORE_RANK_0, f"{R}{BY_0}broken", writes=True)),
        (FAILED_0, {"rank": 2, "met": OWN}, failed(Turn.BEFORE_RANK_0, f"{R}{BY_0}broken")),
        (LOST_0, {"rank": 2}, failed(Turn.AT_ONCE, f"{R}{LOST_0}", writes=True)),
        # Wrong usage is said by one rank, which names none where rank 0 has met it as well.
        (WRONG_0, {"rank": 0, "met": MISSING}, failed(Turn.IF_FIRST, f"{E}{MISSING}", code=2, writes=True)),
        (WRONG_0, {"rank": 2, "met": MISSING}, failed(Turn.IF_FIRST, f"{E}{MISSING}", code=2)),
        (WRONG, {"rank": 2, "met": MISSING}, failed(Turn.IF_FIRST, f"{E}{MISSING}", code=2)),
        (WRONG, {"rank": 2, "met": OTHER}, failed(Turn.IF_FIRST, f"{E}{BY_1}{MISSING}", code=2)),
        (WRONG, {"rank": 2}, failed(Turn.IF_FIRST, f"{E}{MISSING}", code=2)),
        # The watch, whose main thread does not return, waits for nobody.
        (
            FAILED,
            {"rank": 0, "by_watch": True},
            failed(Turn.BEFORE_ALL_LEAVE, f"{E}{BY_1}broken", writes=True),
        ),
        (FAILED, {"rank": 2, "by_watch": True}, failed(Turn.BEFORE_ALL_LEAVE, f"{R}{BY_1}broken")),
        (LOST_0, {"rank": 2, "by_watch": True}, failed(Turn.BEFORE_ALL_LEAVE, f"{R}{LOST_0}", writes=True)),
        (
            WRONG,
            {"rank": 0, "by_watch": True},
            failed(Turn.IF_FIRST, f"{E}{BY_1}{MISSING}", code=2, writes=True),
        ),
        (WRONG, {"rank": 2, "by_watch": True}, failed(Turn.BEFORE_ALL_LEAVE, f"{R}{BY_1}{MISSING}", code=2)),
        # A guest raises it; the others wait for its turn all the same.
        (FAILED, {"rank": 0, "is_owner": False}, failed(Turn.IF_FIRST, "", writes=True)),
        (FAILED, {"rank": 2, "is_owner": False}, failed(Turn.BEFORE_RANK_0, "")),
        (WRONG, {"rank": 2, "is_owner": False}, failed(Turn.IF_FIRST, "", code=2)),
        (
            FAILED,
            {"rank": 2, "is_owner": False, "by_watch": True},
            failed(Turn.BEFORE_ALL_LEAVE, f"{R}{BY_1}broken"),
        ),
    ],
)
def test_each_rank_says_its_part_of_a_failure(
    verdict: PeerError, role: dict[str, Any], wanted: Outcome
) -> None:
    assert outcome_of(verdict, Role(**{"met": verdict, **role})) == wanted


OUT = Path("runs/a")
# Behind the name of the signal.
RESUME, SAVED = "ype the same command again to resume.", f"What is finished is saved in {OUT}: t"
SILENT = "after SIGTERM, rank 1, rank 2 did not report that everything is saved: killed or hanging"


@pytest.mark.parametrize(
    ("role", "code", "line"),
    [
        ({}, 75, f"stopped by SIGTERM. T{RESUME}"),
        ({"folder": OUT}, 75, f"stopped by SIGTERM. {SAVED}{RESUME}"),
        ({"folder": OUT, "progress": "1 of 2."}, 75, f"stopped by SIGTERM. 1 of 2. {SAVED}{RESUME}"),
        ({"folder": OUT, "progress": None}, 75, f"stopped by SIGTERM. No batch was started. {SAVED}{RESUME}"),
        ({"progress": None}, 75, "stopped by SIGTERM. Nothing was started."),
        ({"unsaved": ["rank 1", "rank 2"]}, 1, f"error: {SILENT}"),
        ({"unsaved": ["rank 1"], "lost": "rank 1 exited"}, 1, "error: rank 1 exited"),
        ({"folder": OUT, "is_done": True}, 0, f"SIGTERM came while the result was being written: {OUT}"),
        ({"folder": OUT, "is_done": True, "unsaved": ["rank 1"]}, 0, f"{OUT}"),
    ],
)
def test_rank_0_says_and_writes_a_stop(role: dict[str, Any], code: int, line: str) -> None:
    outcome = outcome_of(STOP, Role(rank=0, **role))
    assert (outcome.exit_code, outcome.writes, outcome.turn) == (code, code != 0, Turn.AT_ONCE)
    assert outcome.line.startswith("dualeval: ") and outcome.line.endswith(line)
    assert outcome.failure == (line.removeprefix("error: ") if code == 1 else "")
    guest = outcome_of(STOP, Role(rank=0, is_owner=False, **role))
    assert guest == replace(outcome, line="")  # which raises it


@pytest.mark.parametrize(
    ("role", "code"),
    [
        ({}, 75),
        # Only rank 0 knows who has saved.
        ({"unsaved": ["rank 1"]}, 75),
        ({"is_done": True}, 0),
        ({"end_code": 1}, 1),
        ({"is_done": True, "end_code": 75}, 75),
    ],
)
def test_the_others_exit_as_rank_0_does(role: dict[str, Any], code: int) -> None:
    assert outcome_of(STOP, Role(rank=2, **role)) == Outcome(exit_code=code, writes=False, turn=None)


def test_a_rank_that_is_lost_behind_the_result_is_a_note() -> None:
    note = f"dualeval: note: the result is complete: {OUT}; but {LOST}"
    assert [note_of_loss(error, OUT) for error in (LOST, FAILED, OWN, None)] == [note, "", "", ""]
