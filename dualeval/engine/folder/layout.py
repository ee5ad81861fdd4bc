"""The names of all files in an output folder, what is in job.json, and the folders of shares.

A share evaluates its own chunks of a job in its own folder, and needs no other rank. ``OUT/job.json`` is the
job of all shares; ``OUT/shares/3-of-100`` is the folder of one, like that of a run without a result. A run in
OUT itself continues from the work of the shares.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualeval.engine.folder.lease import LEASE, at_work
from dualeval.errors import UsageError
from dualeval.messages import counted, listed
from dualeval.result import (
    JOB,
    PREDICTIONS,
    REPORT,
    RESULT,
    SAMPLE_REPORT,
    STATUS,
    read_fields,
    read_job,
    read_status,
)

if TYPE_CHECKING:
    from dualeval.engine.values.plan import EvalPlan

_JOURNAL = "journal"
STACKS = "stacks"
SUFFIX = ".journal"
# A run's token, from ``secrets.token_hex(4)``; the names of partial files have one, too.
_TOKEN = "[0-9a-f]{8}"
# Allowed names of a task's own files.
_TASK_FILE = re.compile(r"[A-Za-z0-9_-]+\.jsonl?")
# Names of this program's files in a journal; any other file there is somebody else's.
_JOURNAL_FILE = re.compile(rf"{_TOKEN}(-[0-9]{{5}}-[0-9]{{6}}{re.escape(SUFFIX)}(\.partial)?|\.run)")
_SHARES = "shares"
# What a share reports for the result: warnings of its runs.
SAID = "said.json"
# Further keys in the job.json of shares: the number of shares, and the command that began them.
COUNT, COMMAND = "shares", "command"
# Those of them that are in job.json.
_IN_JOB = ("fingerprint", "job", "machine", "files", "task_class", "metrics", "options")


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """What the ranks have agreed on; made by ``agreement.agree``, the same on every rank."""

    # All that decides the numbers, and its sha256, in hex.
    job: Mapping[str, Any]
    fingerprint: str
    # sha256, in hex, over the samples' ids in order; None where there are none.
    samples_digest: str | None
    # The machine (`machines.machine_facts`) and the host of each rank.
    machines: Sequence[Mapping[str, Any]]
    hosts: Sequence[str]
    # The agents of torchrun that have started the ranks, in order.
    launches: Sequence[str]
    # Names of the task's files beside predictions.parquet.
    files: Sequence[str]
    task_class: str
    # Metrics as they are asked for by name.
    metrics: Sequence[str]
    # The options that people know a job by, for messages.
    options: Mapping[str, Any]
    # How to start over, for messages: a sentence without its full stop.
    start_over: str

    @property
    def machine(self) -> Mapping[str, Any]:
        """Rank 0's machine."""
        return self.machines[0]

    def to_json(self) -> dict[str, Any]:
        """What job.json says of a run."""
        return {name: getattr(self, name) for name in _IN_JOB}


def journal_of(path: Path) -> Path:
    """The journal of all ranks that see the folder."""
    return path / _JOURNAL


def probe_of(journal: Path, token: str) -> Path:
    """The file that shows other ranks that they see this journal."""
    return journal / f"{token}.run"


def file_name(prefix: str, number: int) -> str:
    """The name of a rank's file of that number."""
    return f"{prefix}-{number:06d}{SUFFIX}"


def check_file_names(names: Sequence[str]) -> None:
    """Check the names of a task's own files."""
    for name in names:
        if not _TASK_FILE.fullmatch(name) or name in (RESULT, STATUS, JOB, LEASE):
            raise UsageError(
                f"a task's exports has {name!r}: expected a name such as predictions.json, without a "
                f"folder, and none of {', '.join((RESULT, STATUS, JOB, LEASE))}"
            )


def files_of_a_run(path: Path) -> list[Path]:
    """The files that a run leaves in its folder, result and status first; nobody else's files."""
    names = _names(_files_of_its_task(path))
    stacks = sorted((path / STACKS).glob("rank-[0-9]*.txt"))
    files = [*(path / name for name in names), *partial_files(path)]
    return [file for file in [*files, *journal_files(journal_of(path)), *stacks] if file.is_file()]


def partial_files(path: Path) -> list[Path]:
    """The files that runs have begun to write, those of the lease included."""
    names = "|".join(map(re.escape, [*_names(_files_of_its_task(path)), SAID]))
    name = re.compile(rf"({names})\.{_TOKEN}\.partial|{re.escape(LEASE)}\.{_TOKEN}")
    files = [file for file in path.glob("*") if name.fullmatch(file.name) and file.is_file()]
    return sorted([*files, *(file for file in journal_files(journal_of(path)) if file.suffix == ".partial")])


def journal_files(journal: Path) -> list[Path]:
    """This program's files in a journal: complete files, partial files and probes."""
    return sorted(file for file in journal.glob("*") if _JOURNAL_FILE.fullmatch(file.name) and file.is_file())


def job_there(path: Path) -> dict[str, Any]:
    """The content of a folder's job.json; empty if it is missing or damaged."""
    try:
        return read_job(path)
    except (OSError, UsageError):
        return {}


def to_mend_job(path: Path, start_over: str) -> str:
    """What to do about a damaged job.json. No work is lost: journal files name their job themselves."""
    if (path / _SHARES).is_dir():
        return "Remove it and start a share again, which rewrites it: what was evaluated stays."
    if (path / RESULT).exists():
        return f"{start_over}."
    return (
        "Give another --out; or, if it is a run's, remove it and type the same command again: what was "
        "evaluated stays."
    )


def remove_if_empty(folder: Path) -> None:
    """Remove a folder if it is empty."""
    try:
        folder.rmdir()
    except OSError as error:
        # Somebody else's file, or one that NFS keeps for a file still open; the run itself is complete.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise


def _names(files: Sequence[str]) -> tuple[str, ...]:
    return (RESULT, STATUS, PREDICTIONS, REPORT, SAMPLE_REPORT, *files, JOB)


def _files_of_its_task(path: Path) -> list[str]:
    """Names of the files that a folder's job writes for its task, from its job.json."""
    names = job_there(path).get("files")
    # This job.json may be anybody's file: accept only names inside its own folder.
    return [name for name in map(str, names) if _TASK_FILE.fullmatch(name)] if isinstance(names, list) else []


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
        """Numbers of its chunks; there may be none if there are more shares than chunks."""
        return plan.static_chunks(self.number - 1, self.count)

    def folder(self, out: Path) -> Path:
        """This share's folder in the output folder of all shares."""
        return out / _SHARES / f"{self.number}-of-{self.count}"


def job_of_shares(out: Path) -> dict[str, Any] | None:
    """The job.json of all shares; None if a folder holds no shares."""
    job = job_there(out)
    return job if isinstance(job.get(COUNT), int) else None


def folders_of(out: Path) -> list[Path]:
    """The folders of the shares that were begun, in order."""
    job = job_of_shares(out)
    folders = [] if job is None else (out / _SHARES).glob(f"*-of-{job[COUNT]}")
    return sorted(
        (folder for folder in folders if _number_of(folder).isdecimal()),
        key=lambda folder: int(_number_of(folder)),
    )


def _number_of(folder: Path) -> str:
    return folder.name.partition("-")[0]


def unfinished(out: Path) -> str | None:
    """A sentence that counts the finished shares; None if a folder holds no shares, or their result."""
    job = job_of_shares(out)
    if job is None or (out / RESULT).is_file():
        return None
    states = [read_status(folder) for folder in folders_of(out)]
    done = sum(status is not None and status.state == "done" for status in states)
    return f"{out} is not finished: {done:,} of {counted(job[COUNT], 'share')}"


def refuse_unfinished(out: Path) -> None:
    """Refuse to read a result in a folder whose shares are not joined yet."""
    if sentence := unfinished(out):
        raise UsageError(f"{sentence}. Type 'dualeval finish {out}' when all are done.")


def check_idle(out: Path, step: Callable[[], None]) -> None:
    """Check, while holding ``out``, that no share is at work: its chunks would be evaluated twice."""
    if working := at_work(folders_of(out), step):
        raise UsageError(
            f"{unfinished(out)}; at work: {listed(map(_number_of, working))}. Wait for them to end."
        )


def check_joined_by_none(folder: Path, step: Callable[[], None]) -> None:
    """Check, while holding a share's folder, that nobody joins the shares."""
    out = folder.parents[1]
    if at_work([out], step):
        raise UsageError(f"{out} is being finished. Wait for it to end.")


def missing(out: Path, remaining: Sequence[int], why: Sequence[str]) -> str:
    """Which shares lack which chunks, why, as far as that is known, and what to type."""
    chunks = f"{counted(len(remaining), 'chunk')} ({'; '.join([listed(map(str, remaining)), *why])})"
    itself = f"type 'dualeval finish {out} --evaluate-missing'"
    job, state = job_of_shares(out), unfinished(out)
    if job is None or state is None:
        # A result is there, but damaged: a share that is started again would find nothing to do.
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
    """What the finished shares report for the result."""
    kinds = {"warnings": list[str], "unlike": list[list[str]]}
    remedy = "Remove it: its share's warnings are then not in the result."
    files = [folder / SAID for folder in folders_of(out)]
    return [read_fields(file, kinds, remedy) for file in files if file.exists()]


def files_of_share(folder: Path) -> list[Path]:
    """The files that a share leaves in its folder."""
    return [*files_of_a_run(folder), *folder.glob(f"{SAID}*")]


def remove_shares(out: Path) -> None:
    """Remove the files of all shares, and their folders if nothing else lies in them."""
    folders = folders_of(out)
    for folder in folders:
        for file in [*files_of_share(folder), folder / LEASE]:
            file.unlink(missing_ok=True)
        for empty in (folder / _JOURNAL, folder / STACKS, folder):
            remove_if_empty(empty)
    if job_of_shares(out) is not None:
        remove_if_empty(out / _SHARES)
