"""What a run writes to, goes on from and is compared with: opened when all ranks have agreed on the job."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from dualeval.engine.evaluation import Evaluation
from dualeval.engine.folder.folder import RunFolder
from dualeval.engine.folder.journal import FinishedChunks
from dualeval.engine.folder.opening import PreviousRun, folder_of_launch
from dualeval.engine.options import RunOptions
from dualeval.engine.reference import Reference
from dualeval.engine.stored_rows import Window
from dualeval.result import Result
from dualeval.tasks import Dataset


@dataclass(frozen=True, kw_only=True)
class Opened:
    """What a run on this rank has open."""

    # What the ranks have agreed on (`agreement.agree`).
    facts: Mapping[str, Any]
    # What earlier runs have left.
    previous: PreviousRun
    # None where nothing is written.
    folder: RunFolder | None = None
    # On rank 0 the run that this one is compared with, where there is one; and this run's facts for it.
    reference: Reference | None = None
    compared: Mapping[str, Any] | None = None

    @property
    def remaining(self) -> Sequence[int]:
        """Numbers of the chunks that are still to be evaluated."""
        return self.previous.chunks.remaining

    def has_earlier(self, num_chunks: int) -> bool:
        """Whether earlier runs have finished anything."""
        return self.previous.finished is not None or len(self.remaining) < num_chunks

    def beside_reference(
        self, result: Result, windows: Iterable[Window], dataset: Dataset, step: Callable[[], None]
    ) -> Result:
        """The result with what the reference's rows say beside this run's; rank 0 calls it.

        The reference was readable before the first batch. If it is not any more, no batch is lost for it.
        """
        if self.reference is None:
            return result
        assert self.compared is not None
        found = self.reference.compare(windows, dataset, self.compared, step)
        said = [f"not compared with {found['folder']}: {found['problem']}"] if "problem" in found else []
        return replace(result, reference=found, warnings=[*result.warnings, *said])


def open_rows(evaluation: Evaluation, facts: dict[str, Any]) -> Opened:
    """Open the run to compare with, and the output folder. A collective."""
    run, plan = evaluation.run, evaluation.plan
    compared = {
        "data": {"fingerprint": facts["job"]["data"], "contents": facts["job"]["contents"]},
        "weights": facts["job"]["weights"],
        "job": {**run.job, **evaluation.task.options()},
    }
    reference = _open_reference(evaluation, compared)
    if run.options.out is None:
        chunks = FinishedChunks(files=(), remaining=tuple(range(plan.num_chunks)), left_out=())
        folder, previous = None, PreviousRun(chunks=chunks)
    else:
        folder, previous = _open_folder(evaluation, facts)
        run.watch.keep(folder)
    return Opened(facts=facts, previous=previous, folder=folder, reference=reference, compared=compared)


def _open_reference(evaluation: Evaluation, compared: Mapping[str, Any]) -> Reference | None:
    run, reference = evaluation.run, None
    if run.options.reference is None:
        return None
    if run.backend.world.is_main:
        step = partial(run.control.progress.step, "setup")
        reference = Reference.open(run.options.reference)
        reference.check(evaluation.dataset, evaluation.plan.num_samples, evaluation.columns, compared, step)
    # Nothing is evaluated, and no folder made, where it cannot be compared with.
    run.control.meet()
    return reference


def _open_folder(evaluation: Evaluation, facts: dict[str, Any]) -> tuple[RunFolder, PreviousRun]:
    """Rank 0 makes the output folder, or goes on in it; the others learn what was there."""
    run, plan, options = evaluation.run, evaluation.plan, evaluation.run.options
    control, world = run.control, run.backend.world
    message: dict[str, Any] | None = None
    if world.is_main:
        folder, previous = RunFolder.open(
            _path(options, facts).absolute(),
            secrets.token_hex(4),
            plan,
            facts,
            fresh=options.fresh,
            mix_machines=options.mix_machines,
            step=lambda: control.progress.step("setup"),
            lost=lambda reason: control.give_up(reason, rank=control.name.rank),
        )
        message = folder.to_message(previous, plan)
    message = run.from_rank_0(message)
    if not world.is_main:
        folder, previous = RunFolder.from_message(message, plan, rank=world.rank, path=options.path)
    control.meet()
    apart = run.backend.gather_json(folder.shared)
    if world.is_main:
        hidden = [rank for rank, shared in enumerate(apart or []) if not shared]
        _note_previous_run(evaluation, folder, previous, hidden)
    return folder, previous


def _path(options: RunOptions, facts: Mapping[str, Any]) -> Path:
    if options.path is not None:
        return options.path
    fingerprint = facts["fingerprint"]
    earlier = folder_of_launch(Path("runs"), fingerprint, facts["launches"])
    if earlier is not None:
        return earlier
    now = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S")
    new = [f"{now}{again}-{fingerprint[:8]}" for again in ("", *(f".{n}" for n in range(2, 100)))]
    return next(path for name in new if not (path := Path("runs") / name).exists())


def _note_previous_run(
    evaluation: Evaluation, folder: RunFolder, previous: PreviousRun, hidden: Sequence[int]
) -> None:
    """Say what is gone on from, and which ranks do not see the folder."""
    note, plan, size = evaluation.run.note, evaluation.plan, evaluation.run.backend.world.size
    for sentence in previous.notes:
        note(sentence)
    if previous.finished is not None:
        return
    done = plan.num_chunks - len(previous.chunks.remaining)
    if done:
        note(f"resumes in {folder.path}: {done} of {plan.num_chunks} chunks are finished already")
    if hidden:
        ranks = ", ".join(map(str, hidden[:8])) + (", ..." if len(hidden) > 8 else "")
        note(
            f"rank {ranks} of {size} cannot see {folder.path} on {socket.gethostname()}: "
            "their rows are sent at the end of the run, and are lost if it ends early"
        )
