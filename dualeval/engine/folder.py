"""RunFolder: the output folder of one run, from its first probe file to result.json."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dualeval.engine.journal import SUFFIX, file_bytes, read_journal_file, store_file
from dualeval.engine.plan import EvalPlan
from dualeval.engine.predictions import write_predictions
from dualeval.errors import UsageError, exit_code_of, message_of
from dualeval.result import Result, partial_of, write_status, write_text

if TYPE_CHECKING:
    from dualeval.backends.base import Backend

_JOURNAL = "journal"
_RESULT = "result.json"
_STATUS = "status.json"
_PREDICTIONS = "predictions.parquet"


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
        self._is_main = rank == 0
        self.token = token
        self.shared = _probe(path, token).exists()
        # Ranks of another node share that node's disk with each other: each has a folder of its own there.
        self.journal = path / (_JOURNAL if self.shared else f"{_JOURNAL}-{rank}")
        if not self.shared:
            with _writable(path):
                self.journal.mkdir(parents=True, exist_ok=True)

    @staticmethod
    def check_unused(path: Path) -> None:
        """Check that a folder holds no run.

        Raises:
            UsageError: it does.
        """
        if old := _files_of_a_run(path):
            raise UsageError(
                f"{path} holds an earlier run ({old[0].name}). Give another --out, "
                "or --fresh to remove that run and start over."
            )

    @staticmethod
    def create(path: Path, token: str, *, fresh: bool) -> None:
        """Make the folder and its probe file; rank 0 calls it.

        Raises:
            UsageError: the folder cannot be written, or holds another run and ``fresh`` is not set.
        """
        if not fresh:
            RunFolder.check_unused(path)
        with _writable(path):
            for file in _files_of_a_run(path):
                file.unlink()
            (path / _JOURNAL).mkdir(parents=True, exist_ok=True)
            _probe(path, token).touch()
            write_status(path, "running")

    def note_failure(self, error: BaseException) -> None:
        """Write into status.json that the run failed, and why; rank 0 only."""
        if self._is_main:
            # Where the disk is what failed, this fails too; the first error is the one to report.
            with suppress(OSError):
                write_status(self.path, "failed", exit_code=exit_code_of(error), reason=message_of(error))

    def collect(self, backend: Backend, written: Sequence[Path], reports: Sequence[dict[str, Any]]) -> None:
        """Bring the journal files of ranks that do not share the folder to rank 0, a file a round.

        A collective where any rank does not share; nothing otherwise.

        Args:
            backend: carries the files.
            written: this rank's files.
            reports: each rank's ``files`` (a count) and ``shared``, the same on every rank.
        """
        apart = [rank for rank, report in enumerate(reports) if not report["shared"]]
        for number in range(max((reports[rank]["files"] for rank in apart), default=0)):
            mine = not self.shared and number < len(written)
            content = file_bytes(written[number]) if mine else torch.empty(0, dtype=torch.uint8)
            pieces = backend.gather(content, dst=0)
            for rank, piece in enumerate(pieces or []):
                if len(piece):
                    store_file(self.journal / f"{self.token}-{rank:05d}-{number:06d}{SUFFIX}", piece)
        if not self.shared:
            for file in written:
                file.unlink()
            _remove_if_empty(self.journal)

    def write(
        self, result: Result, plan: EvalPlan, sample_id: Callable[[int], str], columns: Sequence[str]
    ) -> None:
        """Write predictions.parquet, result.json and, last, status.json; then the journal has served."""
        paths = sorted(self.journal.glob(f"{self.token}-*{SUFFIX}"))
        files = [read_journal_file(path) for path in paths]
        write_predictions(self.path / _PREDICTIONS, files, plan, sample_id, columns)
        write_text(self.path / _RESULT, result.to_json())
        write_status(self.path, "done", exit_code=0)
        for path in paths:
            path.unlink()
        _probe(self.path, self.token).unlink()
        _remove_if_empty(self.journal)


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
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def _probe(path: Path, token: str) -> Path:
    return path / _JOURNAL / f"{token}.run"


def _files_of_a_run(path: Path) -> list[Path]:
    """The files that a run leaves in its folder, the telling ones first; nothing of anybody else's."""
    named = [path / name for name in (_RESULT, _STATUS, _PREDICTIONS)]
    partial = [partial_of(file) for file in named]
    journal = sorted(
        file
        for folder in (path / _JOURNAL, *path.glob(f"{_JOURNAL}-[0-9]*"))
        for kind in (SUFFIX, ".partial", ".run")
        for file in folder.glob(f"*{kind}")
    )
    return [file for file in [*named, *partial, *journal] if file.is_file()]
