"""The names of all files in an output folder, and the folders of shares in it.

A share evaluates its own chunks of a job, in a folder of its own, with no other rank needed. ``OUT/job.json``
is the job of all of them; ``OUT/shares/3-of-100`` is the folder of one, like that of a run without a result.
A run in OUT itself goes on from what they have left.
"""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualeval.engine.folder.lease import LEASE, at_work
from dualeval.errors import UsageError
from dualeval.result import JOB, PREDICTIONS, REPORT, RESULT, STATUS, read_fields, read_job, read_status
from dualeval.wording import counted, listed

if TYPE_CHECKING:
    from dualeval.engine.plan import EvalPlan

_JOURNAL = "journal"
STACKS = "stacks"
SUFFIX = ".journal"
# A run's token, as ``secrets.token_hex(4)`` makes it; and what makes the name of a partial file unique.
_TOKEN = "[0-9a-f]{8}"
# What a task may call a file of its own.
_TASK_FILE = re.compile(r"[A-Za-z0-9_-]+\.json")
# What this program calls the files in its journal; any other file there is somebody else's.
_JOURNAL_FILE = re.compile(rf"{_TOKEN}(-[0-9]{{5}}-[0-9]{{6}}{re.escape(SUFFIX)}(\.partial)?|\.run)")
_SHARES = "shares"
# What a share has to say in the result: warnings of its runs.
SAID = "said.json"
# In OUT's job.json, beside what a run writes there: the number of shares, and the command that began them.
COUNT, COMMAND = "shares", "command"


def journal_of(path: Path) -> Path:
    """The journal of all ranks that see the folder."""
    return path / _JOURNAL


def probe_of(journal: Path, token: str) -> Path:
    """The file that shows other ranks that they see this journal."""
    return journal / f"{token}.run"


def file_name(prefix: str, number: int) -> str:
    """The name of a rank's file of that number."""
    return f"{prefix}-{number:06d}{SUFFIX}"


def check_path(path: Path) -> None:
    """Check that a folder can hold a run."""
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError(
            f"the output folder's name, {str(path)!a}, is not UTF-8: it could not be written into "
            f"{RESULT}. Give another --out."
        ) from None
    with writable(path):  # its name may be too long
        is_file = path.is_file()
    if is_file:
        raise UsageError(f"{path} is a file, and a run needs a folder. Give another --out.")


def check_file_names(names: Sequence[str]) -> None:
    """Check the names of a task's own files."""
    for name in names:
        if not _TASK_FILE.fullmatch(name) or name in (RESULT, STATUS, JOB, LEASE):
            raise UsageError(
                f"a task's exports has {name!r}: expected a name such as predictions.json, without a "
                f"folder, and none of {', '.join((RESULT, STATUS, JOB, LEASE))}"
            )


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Turn the system's refusal to write in a folder into a message."""
    try:
        yield
    except OSError as error:
        # A file that cannot be put in its place.
        named = f"{Path(error.filename2).name}: " if error.filename2 else ""
        raise UsageError(
            f"the output folder {path} cannot be written on {socket.gethostname()} "
            f"({named}{error.strerror or error}). Give a folder of your own with --out."
        ) from error


def files_of_a_run(path: Path) -> list[Path]:
    """The files that a run leaves in its folder, the telling ones first; nothing of anybody else's."""
    names = _names(_files_of_its_task(path))
    stacks = sorted((path / STACKS).glob("rank-[0-9]*.txt"))
    found = [*(path / name for name in names), *partial_files(path)]
    return [file for file in [*found, *journal_files(journal_of(path)), *stacks] if file.is_file()]


def partial_files(path: Path) -> list[Path]:
    """The files that runs have begun to write; the lease's among them."""
    names = "|".join(map(re.escape, [*_names(_files_of_its_task(path)), SAID]))
    name = re.compile(rf"({names})\.{_TOKEN}\.partial|{re.escape(LEASE)}\.{_TOKEN}")
    found = [file for file in path.glob("*") if name.fullmatch(file.name) and file.is_file()]
    return sorted([*found, *(file for file in journal_files(journal_of(path)) if file.suffix == ".partial")])


def journal_files(journal: Path) -> list[Path]:
    """The files of a journal that are this program's, whole and partial ones and probes."""
    return sorted(file for file in journal.glob("*") if _JOURNAL_FILE.fullmatch(file.name) and file.is_file())


def job_there(path: Path) -> dict[str, Any]:
    """What a folder's job.json says; nothing where there is none, or a damaged one."""
    try:
        return read_job(path)
    except (OSError, UsageError):
        return {}


def to_mend_job(path: Path, start_over: str) -> str:
    """What to do about a damaged job.json. A journal says itself whose it is."""
    if (path / _SHARES).is_dir():
        return "Remove it and start a share again, which writes it anew: what was evaluated stays."
    if (path / RESULT).exists():
        return f"{start_over}."
    return (
        "Give another --out; or, if it is a run's, remove it and type the same command again: what was "
        "evaluated stays."
    )


def remove_if_empty(folder: Path) -> None:
    """Remove a folder in which nothing is left."""
    try:
        folder.rmdir()
    except OSError as error:
        # Somebody else's file, or what NFS keeps for one that is still open; the run itself is complete.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise


def _names(files: Sequence[str]) -> tuple[str, ...]:
    return (RESULT, STATUS, PREDICTIONS, REPORT, *files, JOB)


def _files_of_its_task(path: Path) -> list[str]:
    """Names of the files that a folder's job writes for its task, as its job.json has them."""
    names = job_there(path).get("files")
    # A file of that name may be anybody's: what it names is removed only inside its own folder.
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
        """Numbers of its chunks; none where there are more shares than chunks."""
        return plan.static_chunks(self.number - 1, self.count)

    def folder(self, out: Path) -> Path:
        """Its folder in the output folder of all."""
        return out / _SHARES / f"{self.number}-of-{self.count}"


def job_of_shares(out: Path) -> dict[str, Any] | None:
    """What job.json says of the job of all shares; None where a folder holds none."""
    found = job_there(out)
    return found if isinstance(found.get(COUNT), int) else None


def folders_of(out: Path) -> list[Path]:
    """The folders of the shares that were begun, in order."""
    job = job_of_shares(out)
    found = [] if job is None else (out / _SHARES).glob(f"*-of-{job[COUNT]}")
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
    kinds = {"warnings": list[str], "unlike": list[list[str]]}
    remedy = "Remove it: its share's warnings are then not in the result."
    files = [folder / SAID for folder in folders_of(out)]
    return [read_fields(file, kinds, remedy) for file in files if file.exists()]


def files_of_share(folder: Path) -> list[Path]:
    """The files that a share leaves in its folder."""
    return [*files_of_a_run(folder), *folder.glob(f"{SAID}*")]


def remove_shares(out: Path) -> None:
    """Remove the files of all shares, and their folders where nothing else lies in them."""
    folders = folders_of(out)
    for folder in folders:
        for file in [*files_of_share(folder), folder / LEASE]:
            file.unlink(missing_ok=True)
        for empty in (folder / _JOURNAL, folder / STACKS, folder):
            remove_if_empty(empty)
    if job_of_shares(out) is not None:
        remove_if_empty(out / _SHARES)
