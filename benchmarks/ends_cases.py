"""The table of ends.py: which rows there are, and the code, state and messages that each is to end with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from ends_model import DISK, ERROR, INT, KILL, LAUNCHER, STEPS, TERM

LAUNCHERS = ("variables", "nproc", "torchrun", "horovodrun", "mpirun", "srun")
FAULTS = (TERM, INT, ERROR, KILL, DISK, LAUNCHER)
# From the entry of this step on the result is there, and status.json says so.
WRITTEN = [*STEPS][[*STEPS].index("lease") :]
# What fails in these is a note (docs/report.md, docs/loggers.md).
_NOTED = ("page", "loggers")
_STAYS_S = (0.0, 1.5)
# What a launcher makes of the ranks' codes (docs/launchers.md). A signal to it: beside these 0.
_OF_STOPPED = {"torchrun": {1}, "horovodrun": {1}}
_OF_LAUNCHER = {"nproc": {75}, "torchrun": {1}, "horovodrun": {1}, "mpirun": {1, 75, 143}, "srun": {137}}
_KILLING = ("mpirun", "srun")
_OF_KILLED = {"mpirun": {1, 137}, "srun": {1, 75, 137, 143}}
_OF_FAILED = {"srun": {1, 75, 143}}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a row plays."""

    launcher: str
    ranks: int
    step: str
    fault: str
    rank: int
    stays_s: float

    @property
    def key(self) -> str:
        return f"{self.launcher} {self.ranks} {self.step} {self.fault} {self.rank} {self.stays_s:g}"

    @classmethod
    def read(cls, key: str) -> Case:
        """The row of a key."""
        launcher, ranks, step, rest = key.split(" ", 3)
        fault, rank, stays_s = rest.rsplit(" ", 2)
        return cls(
            launcher=launcher,
            ranks=int(ranks),
            step=step,
            fault=fault,
            rank=int(rank),
            stays_s=float(stays_s),
        )

    @property
    def is_written(self) -> bool:
        """Whether the result is there when it happens."""
        return self.step in WRITTEN


# -- which rows --------------------------------------------------------------------------------------------


def cases(
    launchers: Sequence[str], ranks: Sequence[int], steps: Sequence[str], share: float, seed: int
) -> list[Case]:
    """All rows of these, or a drawn share of them."""
    found = []
    for launcher in launchers:
        for size in ranks:
            if launcher != "variables" and size == 1:
                continue  # as without: dualeval run
            for step in steps:
                for fault in FAULTS:
                    if fault == LAUNCHER and launcher == "variables":
                        continue
                    # The disk is everyone's, and the launcher too.
                    alone = size == 1 or fault in (DISK, LAUNCHER)
                    for rank in (0,) if alone else (0, size - 1):
                        case = Case(
                            launcher=launcher, ranks=size, step=step, fault=fault, rank=rank, stays_s=0.0
                        )
                        random = Random(f"{seed} {case.key}")
                        stays_s = 1.5 if fault == LAUNCHER else random.choice(_STAYS_S)
                        if random.random() < share:
                            found.append(replace(case, stays_s=stays_s))
    return found


# -- what is wanted ----------------------------------------------------------------------------------------


def problems_of(case: Case, row: Mapping[str, Any]) -> list[str]:
    """What is not as it should be in a row."""
    fault, codes, state = case.fault, row["codes"], row["state"]
    if not row["hit"]:
        return ["the step was not reached"]
    if None in codes:
        return ["hangs"]
    done = state == "done"
    is_noted = fault == ERROR and case.step in _NOTED and case.rank == 0
    found = []
    # The harm itself.
    if row["traceback"] and not (fault == ERROR and not is_noted):
        found.append("traceback")
    if row["processes_left"]:
        found.append("processes left")
    if row["result"] == "damaged":
        found.append("damaged result")
    if done and row["result"] != "whole":
        found.append("done without a whole result")
    if not done and 0 in codes:
        found.append("exit code 0 without a result")
    if case.is_written and not done:
        found.append(f"was done, is {state}")
    if not codes_wanted(case, codes, done=done):
        found.append(f"exit code {shown(codes)}")
    states = {
        **{name: {"stopped", "done"} for name in (TERM, INT, LAUNCHER)},
        # Where another rank is lost while rank 0 writes, the result need not suffer.
        **({name: {"failed", "done"} for name in (KILL, ERROR)} if case.rank else {}),
        # A full disk has no room for status.json either: the running state of a run that has ended.
        DISK: {"failed", "running", "done"},
    }.get(fault, {"failed"})
    # No other rank knows the folder yet.
    states = states | ({"running"} if (fault, case.step, case.rank) == (KILL, "opening", 0) else set())
    # Open MPI kills its ranks a second after its SIGTERM (docs/launchers.md), srun at once.
    are_killed = fault == LAUNCHER and case.launcher in _KILLING
    states = states | ({"running"} if are_killed else set())
    if not case.is_written and state not in states:
        found.append(f"state {state}")
    found += _unsaid(case, row, done=done)
    left = [name for name in row["left"] if name.endswith(".partial")]
    # The disk, or a rank's end, may keep it from going.
    kept = fault == KILL or are_killed or (fault == DISK and not case.is_written) or state == "running"
    if not kept and (left or "lease.json" in row["left"]):
        found.append("left " + ", ".join([*left, *(["lease.json"] if "lease.json" in row["left"] else [])]))
    # The same command again.
    again = row.get("again")
    if again is None:
        return found
    if {*again["codes"]} != {0} or (again["state"], again["result"]) != ("done", "whole"):
        found.append(f"again: {shown(again['codes'])} {again['state']}, result {again['result']}")
    if again["left"]:
        found.append(f"again: left {', '.join(again['left'])}")
    return found


def codes_wanted(case: Case, codes: Sequence[int], *, done: bool) -> bool:
    """Whether the exit codes are as documented: of each rank, or of the launcher."""
    fault, launcher = case.fault, case.launcher
    is_noted = fault == ERROR and case.step in _NOTED and case.rank == 0
    of_ranks = launcher == "variables"
    # status.json may find the room of a file that was removed.
    if is_noted or (fault == DISK and done):
        return {*codes} == {0}
    if fault in (TERM, INT):
        # Either all ranks stop, or the signal comes too late for all.
        return {*codes} <= ({0} if done else _OF_STOPPED.get(launcher, {75}))
    if fault == LAUNCHER:
        # A launcher that was told to end may say so of ranks that are done.
        return {*codes} <= _OF_LAUNCHER[launcher] | {0}
    if fault == KILL:
        if not of_ranks:
            return {*codes} <= _OF_KILLED.get(launcher, {1})
        others = [code for rank, code in enumerate(codes) if rank != case.rank]
        return codes[case.rank] == -9 and {*others} <= {0 if done else 1}
    if not of_ranks:
        return {*codes} <= _OF_FAILED.get(launcher, {1})
    # Of an error behind the result the other ranks may know nothing.
    return codes[case.rank] == 1 and {*codes} <= ({0, 1} if done else {1})


def _unsaid(case: Case, row: Mapping[str, Any], *, done: bool) -> list[str]:
    """What nobody was told."""
    kinds, fault = {*row["kinds"]}, case.fault
    if fault == LAUNCHER or (fault == KILL and case.rank == 0):
        return []
    if not done:
        wanted = {
            **{name: {"stopped by"} for name in (TERM, INT)},
            ERROR: {"the error"},
            KILL: {"lost rank"},
            DISK: {"cannot be written"},
        }[fault]
        return [] if wanted & kinds else ["nothing is said"]
    if fault == ERROR and not (case.rank == 0 and case.step in _NOTED):
        return [] if kinds & {"the error", "complete, but"} else ["nothing is said of the error"]
    # A launcher ends the others behind a rank that was killed.
    if "complete, but" in kinds or (fault == KILL and case.launcher != "variables"):
        return []
    found = [] if row["shown"] else ["no table"]
    # On a full disk none of them is there.
    found += [] if kinds & {"page", "no page"} else ["nothing of the page"]
    found += [] if kinds & {"logged", "not logged"} else ["nothing of the tracker"]
    return found


def shown(codes: Sequence[int | None]) -> str:
    return "/".join("-" if code is None else str(code) for code in codes)
