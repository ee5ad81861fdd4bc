"""The output folder, earlier work and reference of a run, opened once all ranks have agreed on the job."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualeval.engine.control.progress import Stage
from dualeval.engine.folder.folder import RunFolder
from dualeval.engine.folder.journal import FinishedChunks
from dualeval.engine.folder.layout import JobFacts
from dualeval.engine.folder.opening import PreviousRun, folder_of_launch, join_shares
from dualeval.engine.folder.stored_rows import Window
from dualeval.engine.job.evaluation import Evaluation
from dualeval.errors import UsageError
from dualeval.messages import first_of, listed
from dualeval.result import Result
from dualeval.tasks import Dataset

if TYPE_CHECKING:
    from dualeval.engine.job.reference import Reference


@dataclass(frozen=True, kw_only=True)
class Opened:
    """What a run on this rank has open."""

    # What the ranks have agreed on (`agreement.agree`).
    facts: JobFacts
    # The state that earlier runs have left.
    previous: PreviousRun
    # Numbers of the chunks of this run: all, or a share's.
    chunks: Sequence[int]
    # The machine that the result names: rank 0's, or an earlier run's if nothing remains.
    machine: Mapping[str, Any]
    # None if nothing is written.
    folder: RunFolder | None = None
    # On rank 0, the run that this one is compared with, if any.
    reference: Reference | None = None

    @property
    def remaining(self) -> Sequence[int]:
        """Numbers of the chunks that are still to be evaluated."""
        return self.previous.chunks.remaining

    @property
    def has_earlier(self) -> bool:
        """Whether earlier runs have finished anything."""
        return self.previous.finished is not None or len(self.remaining) < len(self.chunks)

    def beside_reference(
        self, result: Result, windows: Iterable[Window], dataset: Dataset, step: Callable[[], None]
    ) -> Result:
        """The result with the comparison to the reference's rows; rank 0 calls it.

        The reference was readable before the first batch. If it no longer is, the result is kept without it.
        """
        if self.reference is None:
            return result
        report = self.reference.compare(windows, dataset, result, step)
        notes = [f"not compared with {report['folder']}: {report['problem']}"] if "problem" in report else []
        return replace(result, reference=report, warnings=[*result.warnings, *notes])


def open_rows(evaluation: Evaluation, facts: JobFacts) -> Opened:
    """Open the run to compare with, and the output folder. A collective."""
    run, plan = evaluation.run, evaluation.plan
    chunks = range(plan.num_chunks) if run.share is None else run.share.chunks(plan)
    reference = _open_reference(evaluation, facts)
    nothing = FinishedChunks(files=(), remaining=tuple(chunks), left_out=())
    folder, previous, machine = None, PreviousRun(chunks=nothing), facts.machine
    if run.options.out is not None and not _has_whole_result(evaluation, facts):
        folder, previous, machine = _open_folder(evaluation, facts, chunks)
    return Opened(
        facts=facts, previous=previous, chunks=chunks, machine=machine, folder=folder, reference=reference
    )


def _has_whole_result(evaluation: Evaluation, facts: JobFacts) -> bool:
    """If this run is a share, join the other shares; whether all have their result already. A collective."""
    run, options = evaluation.run, evaluation.run.options
    if run.share is None:
        return False
    assert options.path is not None
    is_open = run.backend.world.is_main and join_shares(
        options.path.absolute(), run.share, facts, run.command, mix_machines=options.mix_machines
    )
    return not run.from_rank_0(is_open)


def _open_reference(evaluation: Evaluation, facts: JobFacts) -> Reference | None:
    run, reference = evaluation.run, None
    if run.options.reference is None or run.share is not None:
        return None
    if run.backend.world.is_main:
        from dualeval.engine.job.reference import Reference

        step = partial(run.control.progress.step, Stage.SETUP)
        reference = Reference.open(run.options.reference)
        reference.check(evaluation, facts, step)
    # An unusable reference stops all ranks here, before a folder is made or anything evaluated.
    run.control.meet()
    return reference


def _open_folder(
    evaluation: Evaluation, facts: JobFacts, chunks: Sequence[int]
) -> tuple[RunFolder, PreviousRun, dict[str, Any]]:
    """Rank 0 makes the output folder or resumes in it; the others receive its state, and its machine."""
    run, plan, options = evaluation.run, evaluation.plan, evaluation.run.options
    control, world = run.control, run.backend.world
    message: dict[str, Any] | None = None
    path = options.path
    if path is not None and run.share is not None:
        path = run.share.folder(path)
    if world.is_main:
        folder, previous = RunFolder.open(
            (path or _new_path(facts)).absolute(),
            secrets.token_hex(4),
            plan,
            facts,
            options,
            share=run.share,
            step=lambda: control.progress.step(Stage.SETUP),
            lost=lambda reason: control.give_up(reason, rank=control.name.rank),
        )
        # From here on, an early exit is recorded in the folder, and closes it.
        run.watch.keep(folder)
        machine = previous.chunks.machine(facts.machine)
        message = {**folder.to_message(previous, plan), "machine": machine}
    message = run.from_rank_0(message)
    if not world.is_main:
        folder, previous = RunFolder.from_message(message, plan, rank=world.rank, path=path)
        run.watch.keep(folder)
    control.meet()
    apart = run.backend.gather_json(folder.shared)
    if world.is_main:
        hidden = [rank for rank, shared in enumerate(apart or []) if not shared]
        if hidden and run.share is not None:
            raise UsageError(
                f"rank {listed(map(str, hidden))} of {world.size} cannot see {folder.path} on "
                f"{socket.gethostname()}, where all ranks of a share write: give an --out that they all see."
            )
        _note_previous_run(evaluation, folder, previous, len(chunks), hidden)
    return folder, previous, message["machine"]


def _new_path(facts: JobFacts) -> Path:
    fingerprint = facts.fingerprint
    earlier = folder_of_launch(Path("runs"), fingerprint, facts.launches)
    if earlier is not None:
        return earlier
    now = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S")
    new = [f"{now}{again}-{fingerprint[:8]}" for again in ("", *(f".{n}" for n in range(2, 100)))]
    return next(path for name in new if not (path := Path("runs") / name).exists())


def _note_previous_run(
    evaluation: Evaluation, folder: RunFolder, previous: PreviousRun, chunks: int, hidden: Sequence[int]
) -> None:
    """Note what the run resumes from, and which ranks cannot see the folder."""
    note, size = evaluation.run.note, evaluation.run.backend.world.size
    for sentence in previous.notes:
        note(sentence)
    if previous.finished is not None:
        return
    done = chunks - len(previous.chunks.remaining)
    if done:
        note(f"resumes in {folder.path}: {done} of {chunks} chunks are finished already")
    if hidden:
        note(
            f"rank {first_of(hidden, 8)} of {size} cannot see {folder.path} on {socket.gethostname()}: "
            "their rows are sent at the end of the run, and are lost if it ends early"
        )
