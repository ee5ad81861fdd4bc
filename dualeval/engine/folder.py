"""RunFolder: the output folder of one run, from its first probe file to result.json."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch

from dualeval.engine.agreement import differences
from dualeval.engine.journal import (
    SUFFIX,
    Earlier,
    JournalFile,
    file_bytes,
    file_name,
    read_again,
    read_journal,
    read_journal_file,
    store_file,
)
from dualeval.engine.lease import LEASE, RENEW_EVERY_S, Lease
from dualeval.engine.machines import check_kinds_of_parts
from dualeval.engine.plan import EvalPlan
from dualeval.engine.predictions import write_json_file, write_predictions
from dualeval.errors import DualevalError, Stopped, UsageError, exit_code_of, message_of
from dualeval.result import (
    JOB,
    PREDICTIONS,
    RESULT,
    STATUS,
    Result,
    Status,
    checksum_of,
    read_result,
    read_status,
    result_from,
    sync_folder,
    write_text,
)

if TYPE_CHECKING:
    from dualeval.backends.base import Backend
    from dualeval.tasks import Task
    from dualeval.world import World

_LEASE_WITHIN_S = 2.0
# Of the fields of /proc/PID/stat behind the process's name.
_START_TIME = 19
_JOURNAL = "journal"
_STACKS = "stacks"
# What job.json says of a run.
_IN_JOB = ("fingerprint", "job", "machine", "files", "task_class", "metrics")
# What this program calls the files in its journal; any other file there is somebody else's.
# What a task may call a file of its own.
_TASK_FILE = re.compile(r"[A-Za-z0-9_-]+\.json")
_OWN_NAME = re.compile(
    rf"[0-9a-f]{{8}}-[0-9]{{5}}-[0-9]{{6}}{re.escape(SUFFIX)}(\.partial)?|[0-9a-f]{{8}}\.run"
)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What rank 0 found in the folder.

    Attributes:
        earlier: what earlier runs of this job have finished.
        finished: the result, where an earlier run came to its end.
        stale: files that killed runs have left, to be removed at the end.
        notes: sentences for people.
    """

    earlier: Earlier
    finished: Result | None = None
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


class RunFolder:
    """One rank's view of the output folder.

    Args:
        path: the folder, absolute.
        token: names this run's files apart from any other's.
        rank: this rank's number; rank 0 has made the folder.

    Attributes:
        path: as given.
        journal: the folder of the journal's files.
        token: as given.
        shared: whether this rank sees the files of rank 0.
    """

    def __init__(self, path: Path, token: str, *, rank: int) -> None:
        self.path = path
        self.token = token
        self._rank = rank
        self._launch_id: str | None = None
        self._lease: Lease | None = None
        self._renewed = monotonic()
        self._renewing = threading.Lock()
        self.shared = self._probe.exists()
        # Ranks of another node share that node's disk with each other: each has a folder of its own there.
        self.journal = path / (_JOURNAL if self.shared else f"{_JOURNAL}-{rank}-{token}")
        if not self.shared:
            with _writable(path):
                self.journal.mkdir(parents=True, exist_ok=True)

    @classmethod
    def open(
        cls,
        path: Path,
        token: str,
        plan: EvalPlan,
        facts: Mapping[str, Any],
        world: World,
        *,
        fresh: bool,
        lease: bool = True,
        mix_machines: bool = False,
        step: Callable[[], None] = lambda: None,
    ) -> tuple[RunFolder, Found]:
        """Make the folder, or go on in it; rank 0 calls it.

        Args:
            path: the folder, absolute.
            token: as for the class.
            plan: the job's.
            facts: the job's ``fingerprint``, what it is made of (``job``), ``machine``, which is rank 0's,
                and ``files``, the names of those that it writes besides the ones of every job.
            world: this process's place.
            fresh: remove an earlier run's files first.
            lease: keep other runs out of the folder for as long as this one lasts.
            mix_machines: go on from what another kind of machine has computed.
            step: called now and then, while waiting or reading.

        Raises:
            UsageError: the folder cannot be written, another run is at work in it, it holds another job, work
                of another kind of machine, or files of the names that this one would write.
            Stopped: the run was stopped, and its launcher has started its ranks again.
        """
        _check_file_names(facts["files"])
        with _writable(path):
            (path / _JOURNAL).mkdir(parents=True, exist_ok=True)
            held = Lease.take(path, token, waiting=step) if lease else None
        renewed = monotonic()

        def step_and_renew() -> None:
            nonlocal renewed
            step()
            if held is not None and monotonic() - renewed > RENEW_EVERY_S:
                renewed = monotonic()
                held.renew()

        try:
            if fresh:
                with _writable(path):
                    for file in _files_of_a_run(path):
                        file.unlink()
            found = _look(path, plan, facts, world, mix_machines, step_and_renew)
            with _writable(path):
                if found.finished is None:
                    named = {name: facts[name] for name in _IN_JOB}
                    write_text(path / JOB, json.dumps(named, indent=2, ensure_ascii=False) + "\n")
                    Status(state="running", launch_id=launch_of(world)).write(path)
                else:
                    _tidy_up(
                        path, [*found.stale, *(file.path for file in found.earlier.files)], launch_of(world)
                    )
                _probe(path, token).touch()
                folder = cls(path, token, rank=0)
        except BaseException:
            if held is not None:
                held.release()
            raise
        folder._lease = held
        folder._launch_id = launch_of(world)
        return folder, found

    @property
    def _probe(self) -> Path:
        return _probe(self.path, self.token)

    @property
    def is_done(self) -> bool:
        """Whether a run of this job has come to its end here."""
        status = read_status(self.path)
        return status is not None and status.state == "done"

    @property
    def stacks(self) -> Path:
        """Where this rank writes its stacks, should it hang."""
        return self.path / _STACKS / f"rank-{self._rank:05d}.txt"

    def prefix(self, rank: int) -> str:
        """The start of the names of a rank's journal files."""
        return f"{self.token}-{rank:05d}"

    def renew_lease(self) -> str | None:
        """Show other runs that this one goes on; returns what is wrong, where another one has taken over."""
        with self._renewing:
            if self._lease is None or monotonic() - self._renewed < RENEW_EVERY_S:
                return None
            self._renewed = monotonic()
            try:
                if self._lease.renew():
                    return None
            except OSError as error:
                return f"{self.path} cannot be written any more: {error.strerror or error}"
        return (
            f"another run has taken over {self.path}: this one stood still for too long. What it has "
            "finished is saved, and the other goes on from there."
        )

    def note_end(self, error: BaseException, chunks_saved: int | None = None) -> None:
        """Write into status.json that the run failed or was stopped, and why."""
        status = Status(
            state="stopped" if isinstance(error, Stopped) else "failed",
            exit_code=exit_code_of(error),
            reason=f"stopped by {error}" if isinstance(error, Stopped) else message_of(error),
            signal=str(error) if isinstance(error, Stopped) else None,
            chunks_saved=chunks_saved,
            launch_id=self._launch_id,
        )
        # Another run of the same job may have come to its end here: then that is the state.
        before = read_status(self.path)
        if before is None or before.state != "done":
            # Where the disk is what failed, this fails too; the first error is the one to report.
            with suppress(OSError):
                status.write(self.path)

    def collect(
        self,
        backend: Backend,
        written: Sequence[Path],
        reports: Sequence[dict[str, Any]],
        step: Callable[[], None] = lambda: None,
    ) -> None:
        """Bring the journal files of ranks that do not share the folder to rank 0, a file a round.

        A collective where any rank does not share; nothing otherwise.

        Args:
            backend: carries the files.
            written: this rank's files.
            reports: each rank's ``files`` (a count) and ``shared``, the same on every rank.
            step: called with every round, and every file that is stored.
        """
        apart = [rank for rank, report in enumerate(reports) if not report["shared"]]
        for number in range(max((reports[rank]["files"] for rank in apart), default=0)):
            mine = not self.shared and number < len(written)
            content = file_bytes(written[number]) if mine else torch.empty(0, dtype=torch.uint8)
            pieces = backend.gather(content, dst=0)
            for rank, piece in enumerate(pieces or []):
                if len(piece):
                    store_file(self.journal / file_name(self.prefix(rank), number), piece)
                    step()
            step()

    def merged_files(
        self,
        found: Found,
        reports: Sequence[dict[str, Any]],
        fingerprint: str,
        step: Callable[[], None] = lambda: None,
    ) -> list[JournalFile]:
        """Check all journal files that the result is made of, those of earlier runs once more.

        Args:
            found: what was there at the start.
            reports: each rank's ``files``, a count.
            fingerprint: the job's.
            step: called with every file.

        Returns:
            the files; none where another run of this job has come to its end here, and removed them.

        Raises:
            DualevalError: one of them is damaged, or has been replaced.
            OSError: one of them cannot be read.
        """
        files = []
        try:
            for file in found.earlier.files:
                files.append(read_again(file))
                step()
            for path in self._own_files(reports):
                files.append(read_journal_file(path))
                step()
        except DualevalError as error:
            raise DualevalError(
                f"{error}. Type the same command again: only the chunks of that file are evaluated anew."
            ) from error
        except OSError:
            # Without a lease a second run of this job may have come first, and removed what it had merged.
            if _finished(self.path, fingerprint) is None:
                raise
            return []
        return files

    def write(
        self,
        result: Result,
        plan: EvalPlan,
        task: Task,
        kept: Sequence[str],
        found: Found,
        files: Sequence[JournalFile],
        step: Callable[[], None] = lambda: None,
    ) -> Result:
        """Write predictions.parquet, result.json and, last, status.json; then the journal has served.

        Args:
            result: what is written.
            plan: the run's.
            task: says which texts and which other files are wanted.
            kept: the columns of the journal that are written.
            found: what was there at the start.
            files: as ``merged_files`` gave them.
            step: called now and then.

        Returns:
            the result with the checksums of the files beside it.
        """
        try:
            if files:
                write_predictions(self.path / PREDICTIONS, files, plan, task, kept, step)
                for name, column in task.json_files.items():
                    write_json_file(self.path / name, files, plan, task, kept, column, step)
                names = (PREDICTIONS, *task.json_files)
                result = replace(result, files={name: checksum_of(self.path / name, step) for name in names})
                write_text(self.path / RESULT, result.to_json())
                # Their names, too, must be on the disk before the journal goes.
                sync_folder(self.path)
        except OSError:
            # As in merged_files, a moment later.
            if _finished(self.path, result.fingerprint) is None:
                raise
        _tidy_up(self.path, [*(file.path for file in files), *found.stale], self._launch_id)
        return result

    def _own_files(self, reports: Sequence[dict[str, Any]]) -> list[Path]:
        # By name: a list of the folder may be seconds old where it is on NFS.
        return [
            self.journal / file_name(self.prefix(rank), number)
            for rank, report in enumerate(reports)
            for number in range(report["files"])
        ]

    def close(self) -> None:
        """Remove what shows that this run is at work; a second call does nothing."""
        # Not for ever: a file system that hangs may hold up who renews it.
        alone = self._renewing.acquire(timeout=_LEASE_WITHIN_S)
        lease, self._lease = self._lease, None
        if alone:
            self._renewing.release()
        # Where the disk is what failed, this fails too; and what is left over hurts nobody.
        with suppress(OSError):
            if not self.shared:
                # Rank 0 cannot see it, so it serves nobody.
                shutil.rmtree(self.journal)
            self._probe.unlink(missing_ok=True)
            _remove_if_empty(self.path / _JOURNAL)
            _remove_if_empty(self.path / _STACKS)
            if lease is not None:
                lease.release()


def _tidy_up(path: Path, served: Sequence[Path], launch_id: str | None) -> None:
    """Say that the result is there, and remove what has served to make it."""
    Status(state="done", exit_code=0, launch_id=launch_id).write(path)
    for file in served:
        file.unlink(missing_ok=True)


def _look(
    path: Path,
    plan: EvalPlan,
    facts: Mapping[str, Any],
    world: World,
    mix_machines: bool,
    step: Callable[[], None],
) -> Found:
    """Find out what a folder holds, and whether this job may go on there."""
    notes = []
    try:
        _check_same_job(path, facts)
    except DualevalError as error:
        if isinstance(error, UsageError):
            raise
        notes.append(f"{error}; it is written anew")
    try:
        finished = _finished(path, facts["fingerprint"])
        if finished is not None:
            _check_files(path, finished, step)
    except DualevalError as error:
        finished = None
        notes.append(f"{error}; it is left out, and made again")
    status = read_status(path)
    launch = launch_of(world)
    if launch is not None and status is not None and (status.state, status.launch_id) == ("stopped", launch):
        # Whoever stopped it wants an end, and the launcher has taken the end for a failure.
        raise Stopped(status.signal or "a signal")
    journal = path / _JOURNAL
    earlier = read_journal(journal, plan, facts["fingerprint"], step)
    stale = tuple(
        file
        for file in journal.iterdir()
        if _OWN_NAME.fullmatch(file.name) and file.is_file() and file not in earlier.foreign
    )
    notes += [f"{reason}; it is left out, and its chunks are evaluated again" for reason in earlier.left_out]
    parts = [file.machine for file in earlier.files] if finished is None else finished.machines
    check_kinds_of_parts(path, parts, facts["machine"], mix=mix_machines)
    return Found(earlier=earlier, finished=finished, stale=stale, notes=tuple(notes))


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
        old = [file for file in _files_of_a_run(path) if file.name != JOB]
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
        shown = "; ".join(f"{name}: {old} there, {new} now" for name, old, new in differing)
        raise UsageError(
            f"{path} holds another job ({shown}). Give another --out, or --fresh to remove that job's files "
            "and start over."
        )


def _check_file_names(names: Sequence[str]) -> None:
    for name in names:
        if not _TASK_FILE.fullmatch(name) or name in (RESULT, STATUS, JOB, LEASE):
            raise UsageError(
                f"a task's json_files has {name!r}: expected a name such as predictions.json, without a "
                f"folder, and none of {', '.join((RESULT, STATUS, JOB, LEASE))}"
            )


def _finished(path: Path, fingerprint: str) -> Result | None:
    """The result of a run of this job that came to its end; raises DualevalError where it is damaged."""
    try:
        result = read_result(path / RESULT)
    except FileNotFoundError:
        return None
    return result if result.fingerprint == fingerprint else None


def _check_files(path: Path, result: Result, step: Callable[[], None]) -> None:
    """Check the files beside a result.json against the checksums in it.

    Raises:
        DualevalError: one is not there, or is damaged.
    """
    for name, wanted in result.files.items():
        try:
            found = checksum_of(path / name, step)
        except OSError as error:
            raise DualevalError(f"{path / name} cannot be read: {error.strerror or error}") from error
        if found["bytes"] != wanted["bytes"]:
            raise DualevalError(
                f"{path / name} is damaged: it has {found['bytes']} bytes, expected {wanted['bytes']}"
            )
        if found != wanted:
            raise DualevalError(
                f"{path / name} is damaged: its content does not fit its checksum in {RESULT}"
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
def _writable(path: Path) -> Iterator[None]:
    """Turn the system's refusal to write in a folder into a message."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"the output folder {path} cannot be written on {socket.gethostname()} "
            f"({error.strerror or error}). Give a folder of your own with --out."
        ) from error


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError as error:
        # Somebody else's file, or what NFS keeps for one that is still open; the run itself is complete.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise


def _probe(path: Path, token: str) -> Path:
    return path / _JOURNAL / f"{token}.run"


def _files_of_a_run(path: Path) -> list[Path]:
    """The files that a run leaves in its folder, the telling ones first; nothing of anybody else's."""
    names = (RESULT, STATUS, PREDICTIONS, *_files_of_its_task(path), JOB)
    named = [path / name for name in names]
    partial = [file for name in names for file in path.glob(f"{name}.*.partial")]
    partial += path.glob(f"{LEASE}.*")
    journal = sorted(
        file
        for folder in (path / _JOURNAL, *path.glob(f"{_JOURNAL}-[0-9]*"))
        for file in folder.glob("*")
        if _OWN_NAME.fullmatch(file.name)
    )
    stacks = sorted((path / _STACKS).glob("rank-[0-9]*.txt"))
    return [file for file in [*named, *partial, *journal, *stacks] if file.is_file()]


def _files_of_its_task(path: Path) -> list[str]:
    """Names of the files that a folder's job writes for its task, as its job.json has them."""
    try:
        names = json.loads((path / JOB).read_text("utf-8"))["files"]
        # A file of that name may be anybody's: what it names is removed only inside its own folder.
        return [name for name in names if _TASK_FILE.fullmatch(name)]
    except (OSError, ValueError, KeyError, TypeError):
        return []
