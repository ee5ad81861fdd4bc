"""Shares: each evaluates its own chunks of a job, in a folder of its own, with no other rank needed.

``OUT/job.json`` is the job of all of them; ``OUT/shares/3-of-100`` is the folder of one, like that of a run
without a result. A run in OUT itself goes on from what they have left.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from dualeval.engine.folder.layout import (
    JOURNAL,
    LEASE,
    STACKS,
    files_of_a_run,
    job_there,
    remove_if_empty,
)
from dualeval.engine.folder.lease import at_work
from dualeval.engine.plan import EvalPlan
from dualeval.errors import UsageError
from dualeval.result import RESULT, read_status
from dualeval.wording import counted, listed

SHARES = "shares"
# What a share has to say in the result: warnings of its runs.
SAID = "said.json"
# In OUT's job.json, beside what a run writes there: the number of shares, and the command that began them.
COUNT, COMMAND = "shares", "command"


@dataclass(frozen=True, kw_only=True)
class Share:
    """One of several parts of a job."""

    # 1 to ``count``.
    number: int
    count: int

    @classmethod
    def of_text(cls, text: str) -> Share:
        """Read I/N."""
        number, _, count = str(text).partition("/")
        if number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count):
            return cls(number=int(number), count=int(count))
        raise UsageError(
            f"--share {text}: expected I/N, such as 3/100, with I from 1 to N"
            f"{'. Where an index begins with 0, add 1' if number == '0' else ''}."
        )

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def chunks(self, plan: EvalPlan) -> range:
        """Numbers of its chunks; none where there are more shares than chunks."""
        return plan.static_chunks(self.number - 1, self.count)

    def folder(self, out: Path) -> Path:
        """Its folder in the output folder of all."""
        return out / SHARES / f"{self.number}-of-{self.count}"


def job_of_shares(out: Path) -> dict[str, Any] | None:
    """What job.json says of the job of all shares; None where a folder holds none."""
    found = job_there(out)
    return found if isinstance(found.get(COUNT), int) else None


def folders_of(out: Path) -> list[Path]:
    """The folders of the shares that were begun, in order."""
    job = job_of_shares(out)
    found = [] if job is None else (out / SHARES).glob(f"*-of-{job[COUNT]}")
    return sorted(
        (folder for folder in found if _number_of(folder).isdecimal()),
        key=lambda folder: int(_number_of(folder)),
    )


def _number_of(folder: Path) -> str:
    return folder.name.partition("-")[0]


def unfinished(out: Path) -> str | None:
    """How many shares are done, in words; None where a folder holds none, or the result of all."""
    job = job_of_shares(out)
    if job is None or (out / RESULT).is_file():
        return None
    states = [read_status(folder) for folder in folders_of(out)]
    done = sum(status is not None and status.state == "done" for status in states)
    return f"{out} is not finished: {done:,} of {counted(job[COUNT], 'share')}"


def refuse_unfinished(out: Path) -> None:
    """Check, for who reads a result, that a folder does not hold shares that were not joined yet."""
    if said := unfinished(out):
        raise UsageError(f"{said}. Type 'dualeval finish {out}' when all are done.")


def check_idle(out: Path, step: Callable[[], None]) -> None:
    """Check, for who holds ``out``, that no share is at work: what it has would be evaluated twice."""
    if working := at_work(folders_of(out), step):
        raise UsageError(
            f"{unfinished(out)}; at work: {listed(map(_number_of, working))}. Wait for their end."
        )


def check_joined_by_none(folder: Path, step: Callable[[], None]) -> None:
    """Check, for who holds the folder of a share, that nobody joins the shares meanwhile."""
    out = folder.parents[1]
    if at_work([out], step):
        raise UsageError(f"{out} is being finished. Wait for it to end.")


def missing(out: Path, remaining: Sequence[int], why: Sequence[str]) -> str:
    """Which shares lack which chunks, for which reasons as far as they are known, and what to type."""
    chunks = f"{counted(len(remaining), 'chunk')} ({'; '.join([listed(map(str, remaining)), *why])})"
    itself = f"type 'dualeval finish {out} --evaluate-missing'"
    job, state = job_of_shares(out), unfinished(out)
    if job is None or state is None:
        # A result is there, but damaged: for a share that is started again nothing is left to do.
        return f"{out} has no whole result: {chunks} are missing. To evaluate them, {itself}."
    shares = sorted({chunk % job[COUNT] + 1 for chunk in remaining})
    return (
        f"{state}. Missing: {chunks} of {'share' if len(shares) == 1 else 'shares'} {_ranges(shares)}. Start "
        f"what is missing with --share I/{job[COUNT]} (Slurm: --array={_ranges(shares)}), or {itself}."
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers as Slurm writes them: "3,7-9"."""
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def what_they_said(out: Path) -> list[dict[str, Any]]:
    """What the shares that are done have to say in the result."""
    said = []
    for file in [folder / SAID for folder in folders_of(out) if (folder / SAID).is_file()]:
        try:
            said.append(json.loads(file.read_text("utf-8")))
        except ValueError as error:
            raise UsageError(
                f"{file} is damaged ({error}). Remove it: its share's warnings are then not in the result."
            ) from error
    return said


def files_of_share(folder: Path) -> list[Path]:
    """The files that a share leaves in its folder."""
    return [*files_of_a_run(folder), *folder.glob(f"{SAID}*")]


def remove_shares(out: Path) -> None:
    """Remove the files of all shares, and their folders where nothing else lies in them."""
    folders = folders_of(out)
    for folder in folders:
        for file in [*files_of_share(folder), folder / LEASE]:
            file.unlink(missing_ok=True)
        for empty in (folder / JOURNAL, folder / STACKS, folder):
            remove_if_empty(empty)
    if job_of_shares(out) is not None:
        remove_if_empty(out / SHARES)
