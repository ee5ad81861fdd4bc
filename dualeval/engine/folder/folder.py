"""RunFolder: the output folder of one run, from its first probe file to result.json."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dualeval.atomic_files import check_path, writable, write_text
from dualeval.engine.folder import layout, opening
from dualeval.engine.folder.journal import JournalFile, read_journal, read_journal_file
from dualeval.engine.folder.layout import JobFacts
from dualeval.engine.folder.lease import Lease, gone
from dualeval.engine.values.options import RunOptions
from dualeval.engine.values.plan import EvalPlan
from dualeval.errors import DualevalError, Stopped, UsageError, exit_code_of, message_of, text_of
from dualeval.messages import counted
from dualeval.process.speech import try_for
from dualeval.result import JOB, RESULT, Result, Status, json_text, read_status

# The longest that a hanging file system delays the exit.
_CLOSE_WITHIN_S = 3.0


class RunFolder:
    """One rank's view of the output folder."""

    def __init__(self, path: Path, token: str, *, rank: int) -> None:
        self.path = path
        self.token = token
        self._rank = rank
        self._launch: str | None = None
        self._fingerprint: str | None = None  # None until the folder's files name the job
        self._lease: Lease | None = None
        self._closing = threading.Event()
        self._writing_status = threading.Lock()
        # The folder of the journal's files.
        self.journal = layout.journal_of(path)
        # Whether this rank sees the files of rank 0.
        self.shared = self._probe.exists()

    @classmethod
    def open(
        cls,
        path: Path,
        token: str,
        plan: EvalPlan,
        facts: JobFacts,
        options: RunOptions,
        *,
        share: layout.Share | None = None,
        step: Callable[[], None] = lambda: None,
        lost: Callable[[str], None] = lambda reason: None,
    ) -> tuple[RunFolder, opening.PreviousRun]:
        """Make the folder, or continue in it; rank 0 calls this.

        It belongs to one ``share``, or to the whole job. ``lost`` is called as by ``Lease.take``.
        """
        layout.check_file_names(facts.files)
        check_path(path)
        with writable(path):
            is_new = not path.exists()
            path.mkdir(parents=True, exist_ok=True)
        held = folder = None
        try:
            with writable(path):
                held = Lease.take(path, token, waiting=step, lost=lost)
                # Only with the lease: a run that ends here meanwhile removes its empty journal folder.
                layout.journal_of(path).mkdir(exist_ok=True)
                layout.probe_of(layout.journal_of(path), token).touch()
                folder = cls(path, token, rank=0)
            folder._lease, folder._launch = held, opening.named_launch(facts.launches)
            return folder, folder._begin(plan, facts, options, share, step)
        except BaseException:
            if folder is not None:
                folder.close()
            elif held is not None:
                held.close()
            if is_new:
                layout.remove_if_empty(layout.journal_of(path))
                layout.remove_if_empty(path)
            raise

    def _begin(
        self,
        plan: EvalPlan,
        facts: JobFacts,
        options: RunOptions,
        share: layout.Share | None,
        step: Callable[[], None],
    ) -> opening.PreviousRun:
        """Read what is there, remove what is not wanted, and record that this run is at work."""
        with writable(self.path):
            # With its own lease held: of a share and a run that joins shares, at least one sees the other.
            (layout.check_idle if share is None else layout.check_joined_by_none)(self.path, step)
            if opening.begins_anew(self.path, facts.fingerprint, facts.launches, fresh=options.fresh):
                layout.remove_shares(self.path)
                for file in (layout.files_of_a_run if share is None else layout.files_of_share)(self.path):
                    if file != self._probe:
                        file.unlink(missing_ok=True)
            opening.remove_leftovers(self.path)
            previous = opening.read_previous(
                self.path, plan, facts, options.mix_machines, step, kept=self._probe, share=share
            )
            if previous.finished is None:
                if previous.chunks.remaining and not options.evaluate_missing:
                    why = previous.chunks.left_out or previous.notes
                    raise UsageError(layout.missing(self.path, previous.chunks.remaining, why))
                # The job.json of shares stays: it names the kind of machine that they are computed on.
                if layout.job_of_shares(self.path) is None:
                    write_text(self.path / JOB, json_text(facts.to_json()))
                self._status("running").write(self.path)
            else:
                self.finish(previous)
        self._fingerprint = facts.fingerprint
        return previous

    def to_message(self, previous: opening.PreviousRun, plan: EvalPlan) -> dict[str, Any]:
        """What the other ranks need to know of the folder, in plain values."""
        return {
            "path": str(self.path),
            "token": self.token,
            "launch": self._launch,
            "fingerprint": self._fingerprint,
            **previous.to_message(plan),
        }

    @classmethod
    def from_message(
        cls, message: Mapping[str, Any], plan: EvalPlan, *, rank: int, path: Path | None
    ) -> tuple[RunFolder, opening.PreviousRun]:
        """Another rank's view of the folder that rank 0 has opened."""
        # This rank resolves a given path itself: without a shared folder the path is on another disk.
        where = Path(message["path"]) if path is None else path.absolute()
        folder = cls(where, message["token"], rank=rank)
        folder._launch = message["launch"]
        folder._fingerprint = message["fingerprint"]
        return folder, opening.PreviousRun.from_message(message, plan)

    @property
    def _probe(self) -> Path:
        return layout.probe_of(self.journal, self.token)

    @property
    def is_done(self) -> bool:
        """Whether a run of this job is complete here."""
        status = read_status(self.path)
        return status is not None and status.state == "done"

    @property
    def is_written(self) -> bool:
        """Whether this run, and no earlier one, has written its result here."""
        status = read_status(self.path)
        return status is not None and (status.state, status.run) == ("done", self.token)

    def _is_own(self) -> bool:
        """Whether the folder is still this run's: neither emptied nor replaced by another."""
        if self._fingerprint is None:
            return self.path.is_dir()
        status = read_status(self.path)
        is_in_status = status is not None and status.run == self.token
        return is_in_status or layout.job_there(self.path).get("fingerprint") == self._fingerprint

    @property
    def stacks(self) -> Path:
        """Where this rank writes its stacks, should it hang."""
        return self.path / layout.STACKS / f"rank-{self._rank:05d}.txt"

    def prefix(self, rank: int) -> str:
        """The start of the names of a rank's journal files."""
        return f"{self.token}-{rank:05d}"

    def _status(self, state: str, **fields: Any) -> Status:
        return Status(
            state=state, launch_id=self._launch, run=self.token, process=opening.own_process(), **fields
        )

    # -- the end -----------------------------------------------------------------------------------

    def note_end(self, error: BaseException, chunks_saved: int | None = None) -> None:
        """Write into status.json that the run failed or was stopped, and why."""
        status = self._status(
            "stopped" if isinstance(error, Stopped) else "failed",
            exit_code=exit_code_of(error),
            reason=f"stopped by {text_of(error)}" if isinstance(error, Stopped) else message_of(error),
            signal=text_of(error) if isinstance(error, Stopped) else None,
            chunks_saved=chunks_saved,
        )
        # Keep what was written first, and another run's status: a suspended rank that wakes, such as one that
        # mpirun ends, knows neither what the others reported nor which run has continued here since.
        with self._writing_status:
            before = read_status(self.path)
            is_first = before is None and self._is_own()
            is_open = before is not None and (before.state, before.run) == ("running", self.token)
            if is_first or is_open:
                # If the disk has failed, this fails too; the first error is the one to report.
                with suppress(OSError):
                    status.write(self.path)

    def merged_files(
        self, previous: opening.PreviousRun, counts: Sequence[int], step: Callable[[], None]
    ) -> list[JournalFile]:
        """Check the result's journal files: ``counts`` of them per rank, and those of earlier runs again."""
        # By name: on NFS a listing of the folder may be seconds old.
        names = [
            layout.file_name(self.prefix(rank), number)
            for rank, count in enumerate(counts)
            for number in range(count)
        ]
        files = []
        try:
            for file in previous.chunks.files:
                files.append(read_journal_file(file.path))
                if files[-1].checksum != file.checksum:
                    raise DualevalError(f"{file.path} is not the same file as at the start of the run")
                step()
            for name in names:
                files.append(read_journal_file(self.journal / name))
                step()
        except DualevalError as error:
            raise DualevalError(
                f"{error}. Type the same command again: only the chunks of that file are evaluated again."
            ) from error
        return files

    def check(self) -> None:
        """Check that the folder is still there, and still this run's."""
        reason = None if self._lease is None else self._lease.renew()
        if reason is None and not self._is_own():
            reason = gone(self.path)
        if reason is not None:
            raise DualevalError(reason)

    def write(self, result: Result) -> None:
        """Write result.json, once all files beside it are complete."""
        write_text(self.path / RESULT, result.to_json())

    def finish(self, previous: opening.PreviousRun, files: Sequence[Path] = ()) -> None:
        """Record that the result is complete, and remove the files that it was made from."""
        with self._writing_status:
            self._status("done", exit_code=0).write(self.path)
        for file in (*files, *previous.stale):
            file.unlink(missing_ok=True)
        layout.remove_shares(self.path)

    def finish_share(
        self, plan: EvalPlan, share: layout.Share, previous: opening.PreviousRun, content: Mapping[str, Any]
    ) -> str:
        """Check that a share's chunks are all on the disk, and record that it is done; returns a sentence."""
        self.check()
        assert self._fingerprint is not None
        # Damaged files, and files with failed samples: their chunks were evaluated again.
        for file in {*previous.stale} - {file.path for file in previous.chunks.files}:
            file.unlink(missing_ok=True)
        chunks = read_journal([self.journal], plan, self._fingerprint, wanted=share.chunks(plan))
        if chunks.remaining:
            why = "; ".join(chunks.left_out) or "files of its journal are gone"
            raise DualevalError(
                f"share {share} lacks {counted(len(chunks.remaining), 'chunk')}: {why}. Type the same "
                "command again."
            )
        # If all chunks were finished before, what was said of them stays.
        if previous.chunks.remaining or not (self.path / layout.SAID).exists():
            write_text(self.path / layout.SAID, json_text(content))
        with self._writing_status:
            self._status("done", exit_code=0).write(self.path)
        failed = sum(file.failed for file in chunks.files)
        unread = f", {counted(failed, 'sample')} could not be read" if failed else ""
        now, chunks_of_it = len(previous.chunks.remaining), counted(len(share.chunks(plan)), "chunk")
        return f"share {share} is done, {now} of its {chunks_of_it} evaluated now{unread}: {self.path}"

    def close(self, limit_s: float = _CLOSE_WITHIN_S) -> None:
        """Remove the signs that this run is at work; a second call does nothing."""
        if not self._closing.is_set():
            self._closing.set()
            try_for(limit_s, self._clean_up)

    def _clean_up(self) -> None:
        # If the disk has failed, this fails too; leftover files do no harm.
        with suppress(OSError):
            if self.shared:
                self._probe.unlink(missing_ok=True)
            status = read_status(self.path)
            # A run that has taken over may be about to write into these folders.
            if status is None or status.run in (None, self.token) or status.state != "running":
                layout.remove_if_empty(self.journal)
                layout.remove_if_empty(self.path / layout.STACKS)
        with suppress(OSError):
            if self._lease is not None:
                self._lease.close()
