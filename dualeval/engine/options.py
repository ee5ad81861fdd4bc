"""RunOptions: how one evaluation runs, as the caller asks for it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from dualeval.choices import ON_ERROR, PRECISIONS, SCHEDULES, check_choice, check_count
from dualeval.errors import UsageError


class NewFolder(enum.Enum):
    """The value of ``out`` that asks for a new folder, ``runs/<UTC time>-<fingerprint>``."""

    NEW_FOLDER = "runs/<UTC time>-<fingerprint>"


NEW_FOLDER: Final = NewFolder.NEW_FOLDER
Out: TypeAlias = str | Path | Literal[NewFolder.NEW_FOLDER] | None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of one evaluation; the same on every rank.

    Attributes:
        out: folder for result.json and the rest, the same path on every rank; a run of the same job that
            was begun there is gone on with. ``NEW_FOLDER`` makes a new one, None writes nothing at all.
        batch_size: samples a batch.
        limit: evaluate only the first samples; None for all.
        precision: one of ``choices.PRECISIONS``.
        workers: reading processes of each rank; 0 reads in the rank's own process.
        fewer_workers: take fewer, with a note, where the shared memory has no room for the batches of all.
            Without it that is an error.
        on_error: what a sample that cannot be read does: "stop" ends the run, "skip" leaves it out.
        schedule: how chunks go to ranks: "static", chunk c to rank c mod size, or "dynamic", to the rank that
            has time for it.
        fresh: remove an earlier run's files from ``out`` first; not again where torchrun starts the ranks of
            the same launch again.
        replay: before going on from what is finished in ``out``, or giving back a finished result, evaluate
            one finished batch anew and compare it with its rows.
        mix_machines: let ranks of different device types or versions compute one result, and go on from what
            another kind of machine has computed.
        lease: keep other runs out of ``out`` for as long as this one lasts. Without it two runs there do the
            same work twice, for one right result.

    Raises:
        UsageError: an option has a value that it cannot have.
    """

    out: Out = None
    batch_size: int = 64
    limit: int | None = None
    precision: str = "fp32"
    workers: int = 0
    fewer_workers: bool = False
    on_error: str = "stop"
    schedule: str = "static"
    fresh: bool = False
    replay: bool = True
    mix_machines: bool = False
    lease: bool = True

    def __post_init__(self) -> None:
        if self.batch_size is None or self.workers is None:
            raise UsageError("batch_size and workers: expected a whole number, found None")
        check_count("batch_size", self.batch_size, 1)
        check_count("limit", self.limit, 1)
        check_count("workers", self.workers, 0)
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("on_error", self.on_error, ON_ERROR)
        check_choice("schedule", self.schedule, SCHEDULES)
        if self.out is not None and not isinstance(self.out, str | Path | NewFolder):
            raise UsageError(
                f"out {self.out!r}: expected a path, None (nothing is written) or dualeval.NEW_FOLDER "
                f"({NEW_FOLDER.value})"
            )
        if self.path is not None:
            # It imports torch, and the names of this module are wanted without.
            from dualeval.engine.folder.layout import check_path

            check_path(self.path)
        if self.fresh and self.out is None:
            raise UsageError(
                "fresh=True removes an earlier run's files from out, and out is None: give a folder"
            )

    @property
    def path(self) -> Path | None:
        """The folder that was given by its path; None where there is none, or a new one is wanted."""
        return None if self.out is None or isinstance(self.out, NewFolder) else Path(self.out)
