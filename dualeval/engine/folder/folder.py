"""RunFolder: the output folder of one run, from its first probe file to result.json."""

from __future__ import annotations

import errno
import json
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import torch

from dualeval.engine.folder.journal import (
    JournalFile,
    file_bytes,
    file_name,
    read_again,
    read_journal_file,
    store_file,
)
from dualeval.engine.folder.lease import RENEW_EVERY_S, Lease
from dualeval.engine.folder.opening import (
    JOURNAL,
    STACKS,
    Found,
    check_file_names,
    files_of_a_run,
    finished_result,
    launch_of,
    look,
    writable,
)
from dualeval.engine.folder.predictions import write_json_file, write_predictions
from dualeval.engine.plan import EvalPlan
from dualeval.errors import DualevalError, Stopped, exit_code_of, message_of
from dualeval.result import (
    JOB,
    PREDICTIONS,
    RESULT,
    Result,
    Status,
    checksum_of,
    read_status,
    sync_folder,
    write_text,
)

if TYPE_CHECKING:
    from dualeval.backends.base import Backend
    from dualeval.tasks import Task
    from dualeval.world import World

_LEASE_WITHIN_S = 2.0
# What job.json says of a run.
_IN_JOB = ("fingerprint", "job", "machine", "files", "task_class", "metrics")


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
        self.journal = path / (JOURNAL if self.shared else f"{JOURNAL}-{rank}-{token}")
        if not self.shared:
            with writable(path):
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
        check_file_names(facts["files"])
        with writable(path):
            (path / JOURNAL).mkdir(parents=True, exist_ok=True)
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
                with writable(path):
                    for file in files_of_a_run(path):
                        file.unlink()
            found = look(path, plan, facts, world, mix_machines, step_and_renew)
            with writable(path):
                if found.finished is None:
                    named = {name: facts[name] for name in _IN_JOB}
                    write_text(path / JOB, json.dumps(named, indent=2, ensure_ascii=False) + "\n")
                    Status(state="running", launch_id=launch_of(world), run=token).write(path)
                else:
                    _tidy_up(
                        path,
                        [*found.stale, *(file.path for file in found.earlier.files)],
                        Status(state="done", exit_code=0, launch_id=launch_of(world), run=token),
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
        return self.path / STACKS / f"rank-{self._rank:05d}.txt"

    def prefix(self, rank: int) -> str:
        """The start of the names of a rank's journal files."""
        return f"{self.token}-{rank:05d}"

    def keep_lease(self, lost: Callable[[str], None]) -> None:
        """Renew the lease until ``close``, from a thread that may hang on the disk.

        Args:
            lost: called with what is wrong, where another run has taken over.
        """

        def keep() -> None:
            while self._lease is not None:
                reason = self.renew_lease()
                if reason is not None:
                    lost(reason)
                    return
                sleep(RENEW_EVERY_S / 4)

        threading.Thread(target=keep, name="dualeval-lease", daemon=True).start()

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
            run=self.token,
        )
        # The first word stays, and another run's: a rank that was stopped and wakes, as one does that mpirun
        # ends, knows neither what the others have said of it nor who has gone on here since.
        before = read_status(self.path)
        if before is None or (before.state, before.run) == ("running", self.token):
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
            if finished_result(self.path, fingerprint) is None:
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
        digests: Callable[[Path, str], dict[str, str]],
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
            digests: makes ``metric_digests`` of predictions.parquet, for this fingerprint.
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
                result = replace(
                    result,
                    files={name: checksum_of(self.path / name, step) for name in names},
                    metric_digests=digests(self.path / PREDICTIONS, result.fingerprint),
                )
                write_text(self.path / RESULT, result.to_json())
                # Their names, too, must be on the disk before the journal goes.
                sync_folder(self.path)
        except OSError:
            # As in merged_files, a moment later.
            if finished_result(self.path, result.fingerprint) is None:
                raise
        done = Status(state="done", exit_code=0, launch_id=self._launch_id, run=self.token)
        _tidy_up(self.path, [*(file.path for file in files), *found.stale], done)
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
            _remove_if_empty(self.path / JOURNAL)
            _remove_if_empty(self.path / STACKS)
            if lease is not None:
                lease.release()


def _tidy_up(path: Path, served: Sequence[Path], done: Status) -> None:
    """Say that the result is there, and remove what has served to make it."""
    done.write(path)
    for file in served:
        file.unlink(missing_ok=True)


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError as error:
        # Somebody else's file, or what NFS keeps for one that is still open; the run itself is complete.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise


def _probe(path: Path, token: str) -> Path:
    return path / JOURNAL / f"{token}.run"
