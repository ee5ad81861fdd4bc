"""The names of all files in an output folder: which are a run's, and which may be its task's."""

from __future__ import annotations

import errno
import json
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dualeval.errors import UsageError
from dualeval.result import JOB, PREDICTIONS, REPORT, RESULT, STATUS

LEASE = "lease.json"
JOURNAL = "journal"
STACKS = "stacks"
SUFFIX = ".journal"
# A run's token, as ``secrets.token_hex(4)`` makes it; and what makes the name of a partial file unique.
_TOKEN = "[0-9a-f]{8}"
# What a task may call a file of its own.
_TASK_FILE = re.compile(r"[A-Za-z0-9_-]+\.json")
# What this program calls the files in its journal; any other file there is somebody else's.
_JOURNAL_FILE = re.compile(rf"{_TOKEN}(-[0-9]{{5}}-[0-9]{{6}}{re.escape(SUFFIX)}(\.partial)?|\.run)")


def journal_of(path: Path) -> Path:
    """The journal of all ranks that see the folder."""
    return path / JOURNAL


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
        raise UsageError(f"{path} is a file, and a run needs a folder. Remove it, or give another --out.")


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
        raise UsageError(
            f"the output folder {path} cannot be written on {socket.gethostname()} "
            f"({error.strerror or error}). Give a folder of your own with --out."
        ) from error


def files_of_a_run(path: Path) -> list[Path]:
    """The files that a run leaves in its folder, the telling ones first; nothing of anybody else's."""
    names = _names(_files_of_its_task(path))
    stacks = sorted((path / STACKS).glob("rank-[0-9]*.txt"))
    found = [*(path / name for name in names), *partial_files(path)]
    return [file for file in [*found, *journal_files(journal_of(path)), *stacks] if file.is_file()]


def partial_files(path: Path) -> list[Path]:
    """The files that runs have begun to write; the lease's among them."""
    names = "|".join(map(re.escape, _names(_files_of_its_task(path))))
    name = re.compile(rf"({names})\.{_TOKEN}\.partial|{re.escape(LEASE)}\.{_TOKEN}")
    found = [file for file in path.glob("*") if name.fullmatch(file.name) and file.is_file()]
    return sorted([*found, *(file for file in journal_files(journal_of(path)) if file.suffix == ".partial")])


def journal_files(journal: Path) -> list[Path]:
    """The files of a journal that are this program's, whole and partial ones and probes."""
    return sorted(file for file in journal.glob("*") if _JOURNAL_FILE.fullmatch(file.name) and file.is_file())


def job_there(path: Path) -> dict[str, Any]:
    """What a folder's job.json says; nothing where there is none, or a damaged one."""
    try:
        found = json.loads((path / JOB).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


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
