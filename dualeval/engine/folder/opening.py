"""What an output folder holds before a run begins in it: nothing, this job's work, or somebody else's."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualeval.engine.agreement import differences, listing, structure_hint
from dualeval.engine.folder.journal import SUFFIX, Earlier, read_journal
from dualeval.engine.folder.lease import LEASE
from dualeval.engine.machines import check_kinds_of_parts
from dualeval.engine.plan import EvalPlan
from dualeval.errors import DualevalError, Stopped, UsageError
from dualeval.result import (
    JOB,
    PREDICTIONS,
    RESULT,
    STATUS,
    Result,
    checksum_of,
    read_result,
    read_status,
    result_from,
)

if TYPE_CHECKING:
    from dualeval.world import World

# Of the fields of /proc/PID/stat behind the process's name.
_START_TIME = 19
JOURNAL = "journal"
STACKS = "stacks"
# What a task may call a file of its own.
_TASK_FILE = re.compile(r"[A-Za-z0-9_-]+\.json")
# What this program calls the files in its journal; any other file there is somebody else's.
_OWN_NAME = re.compile(
    rf"[0-9a-f]{{8}}-[0-9]{{5}}-[0-9]{{6}}{re.escape(SUFFIX)}(\.partial)?|[0-9a-f]{{8}}\.run"
)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What rank 0 found in the folder.

    Attributes:
        earlier: what earlier runs of this job have finished.
        finished: the result, where an earlier run came to its end.
        replaced: its metrics_digest and bits, where a file beside it is damaged, and all is evaluated again.
        stale: files that killed runs have left, to be removed at the end.
        notes: sentences for people.
    """

    earlier: Earlier
    finished: Result | None = None
    replaced: tuple[str, str | None] | None = None
    stale: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def told(cls, remaining: Sequence[int] | None, finished: Any, plan: EvalPlan) -> Found:
        """What the other ranks need of it; None for all chunks."""
        chunks = range(plan.num_chunks) if remaining is None else remaining
        return cls(
            earlier=Earlier(files=(), remaining=tuple(chunks), left_out=()),
            finished=None if finished is None else result_from(finished),
        )


def look(
    path: Path,
    plan: EvalPlan,
    facts: Mapping[str, Any],
    world: World,
    mix_machines: bool,
    step: Callable[[], None],
) -> Found:
    """Find out what a folder holds, and whether this job may go on there; rank 0 calls it.

    Args:
        path: the folder.
        plan: the job's.
        facts: as for ``RunFolder.open``.
        world: this process's place.
        mix_machines: go on from what another kind of machine has computed.
        step: called now and then.

    Raises:
        UsageError: it holds another job, or work of another kind of machine.
        Stopped: the run was stopped, and its launcher has started its ranks again.
    """
    notes = []
    try:
        _check_same_job(path, facts)
    except DualevalError as error:
        if isinstance(error, UsageError):
            raise
        notes.append(f"{error}; it is written anew")
    status = read_status(path)
    finished = replaced = None
    try:
        finished = finished_result(path, facts["fingerprint"])
        if finished is not None:
            _check_files(path, finished, step)
        elif status is not None and status.state == "done":
            notes.append(f"{path / RESULT} is missing; all samples are evaluated again")
    except DualevalError as error:
        if finished is not None and finished.homogeneous:
            replaced = (finished.metrics_digest, finished.device.get("bits"))
        finished = None
        notes.append(f"{error}; all samples are evaluated again")
    launch = launch_of(world)
    if launch is not None and status is not None and (status.state, status.launch_id) == ("stopped", launch):
        # Whoever stopped it wants an end, and the launcher has taken the end for a failure.
        raise Stopped(status.signal or "a signal")
    journal = path / JOURNAL
    earlier = read_journal(journal, plan, facts["fingerprint"], step)
    stale = tuple(
        file
        for file in journal.iterdir()
        if _OWN_NAME.fullmatch(file.name) and file.is_file() and file not in earlier.foreign
    )
    notes += [f"{reason}; it is left out, and its chunks are evaluated again" for reason in earlier.left_out]
    parts = [file.machine for file in earlier.files] if finished is None else finished.machines
    check_kinds_of_parts(path, parts, facts["machine"], mix=mix_machines)
    return Found(earlier=earlier, finished=finished, replaced=replaced, stale=stale, notes=tuple(notes))


def _check_same_job(path: Path, facts: Mapping[str, Any]) -> None:
    """Check that a folder holds no run, or one of this job.

    Raises:
        UsageError: it holds another job; names the fields that differ.
        DualevalError: what says which job it holds is damaged.
    """
    try:
        there = json.loads((path / JOB).read_text("utf-8"))
        kept = {"job": there["job"]}
    except FileNotFoundError:
        old = [file for file in files_of_a_run(path) if file.name != JOB]
        if any(file.name in (RESULT, STATUS, PREDICTIONS) for file in old):
            raise UsageError(
                f"{path} holds an earlier run ({old[0].name}), but no {JOB} that says of which job. Give "
                "another --out, or --fresh to remove that run and start over."
            ) from None
        foreign = [name for name in facts["files"] if (path / name).exists()]
        if foreign:
            raise UsageError(
                f"{path} holds {' and '.join(foreign)}, which this run would overwrite, and no {JOB}: it is "
                "not a run's. Give another --out."
            ) from None
        return
    except (ValueError, KeyError, TypeError) as error:
        raise DualevalError(f"{path / JOB} is damaged ({type(error).__name__}: {error})") from error
    # As JSON has them: a tuple comes back as a list.
    own = json.loads(json.dumps({"job": facts["job"]}))
    differing = differences(kept, own)
    if differing:
        shown = listing(differing, "there", "now")
        raise UsageError(
            f"{path} holds another job ({shown}). Give another --out, or --fresh to remove that job's files "
            f"and start over.{structure_hint(differing)}"
        )


def _check_files(path: Path, result: Result, step: Callable[[], None]) -> None:
    """Check the files beside a result.json against the checksums in it.

    Raises:
        DualevalError: one is not there, or is damaged.
    """
    for name, wanted in result.files.items():
        try:
            found = checksum_of(path / name, step)
        except OSError as error:
            gone = isinstance(error, FileNotFoundError)
            said = "is missing" if gone else f"cannot be read: {error.strerror or error}"
            raise DualevalError(f"{path / name} {said}") from error
        if found["bytes"] != wanted["bytes"]:
            raise DualevalError(
                f"{path / name} is damaged: it has {found['bytes']} bytes, expected {wanted['bytes']}"
            )
        if found != wanted:
            raise DualevalError(
                f"{path / name} is damaged: its content does not fit its checksum in {RESULT}"
            )


def finished_result(path: Path, fingerprint: str) -> Result | None:
    """The result of a run of this job that came to its end; raises DualevalError where it is damaged."""
    try:
        result = read_result(path / RESULT)
    except FileNotFoundError:
        return None
    return result if result.fingerprint == fingerprint else None


def check_file_names(names: Sequence[str]) -> None:
    """Check the names of a task's own files.

    Raises:
        UsageError: one is no plain name, or is taken.
    """
    for name in names:
        if not _TASK_FILE.fullmatch(name) or name in (RESULT, STATUS, JOB, LEASE):
            raise UsageError(
                f"a task's json_files has {name!r}: expected a name such as predictions.json, without a "
                f"folder, and none of {', '.join((RESULT, STATUS, JOB, LEASE))}"
            )


def launch_of(world: World) -> str | None:
    """What rank 0 has in common with the one before it that the same agent of torchrun has started.

    The number of restarts is no help: an agent does not count those that another node has caused.

    Returns:
        the launch's name, and which process the agent is; None where nobody starts ranks again.
    """
    if world.launch_id is None:
        return None
    agent = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    # A process id may be another one's later; along with the time of its start it is not.
    return f"{world.launch_id} {socket.gethostname()} {os.getppid()} {agent[_START_TIME]}"


def folder_of_launch(runs: Path, fingerprint: str, world: World) -> Path | None:
    """Find the folder that ranks of the same launch and job made before they were started again."""
    launch = launch_of(world)
    if launch is None:
        return None
    for path in sorted(runs.glob(f"*-{fingerprint[:8]}"), reverse=True):
        status = read_status(path)
        if status is not None and status.launch_id == launch and status.state != "done":
            return path
    return None


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
    names = (RESULT, STATUS, PREDICTIONS, *_files_of_its_task(path), JOB)
    named = [path / name for name in names]
    partial = [file for name in names for file in path.glob(f"{name}.*.partial")]
    partial += path.glob(f"{LEASE}.*")
    journal = sorted(
        file
        for folder in (path / JOURNAL, *path.glob(f"{JOURNAL}-[0-9]*"))
        for file in folder.glob("*")
        if _OWN_NAME.fullmatch(file.name)
    )
    stacks = sorted((path / STACKS).glob("rank-[0-9]*.txt"))
    return [file for file in [*named, *partial, *journal, *stacks] if file.is_file()]


def _files_of_its_task(path: Path) -> list[str]:
    """Names of the files that a folder's job writes for its task, as its job.json has them."""
    try:
        names = json.loads((path / JOB).read_text("utf-8"))["files"]
        # A file of that name may be anybody's: what it names is removed only inside its own folder.
        return [name for name in names if _TASK_FILE.fullmatch(name)]
    except (OSError, ValueError, KeyError, TypeError):
        return []
