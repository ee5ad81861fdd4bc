"""What earlier runs have finished, compared with what this job gives now, before it is gone on with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from dualeval.columns import Rows
from dualeval.engine import replay
from dualeval.engine.evaluation import Evaluation
from dualeval.engine.feed import FailedSample
from dualeval.engine.opened import Opened
from dualeval.engine.parts import name_of
from dualeval.engine.reference import windows_of_file
from dualeval.engine.slices import slicing_of
from dualeval.engine.stored_rows import StoredRows
from dualeval.result import PREDICTIONS, Result

# Gives the kept columns of a batch, and its samples that could not be read.
EvaluatesBatch: TypeAlias = Callable[[range], tuple[Mapping[str, Rows], tuple[FailedSample, ...]]]


@dataclass(frozen=True, kw_only=True)
class Proven:
    """What a comparison with finished batches has come to."""

    # How equal they are; None where nothing is finished.
    replay: str | None = None
    # The result, where an earlier run has come to its end here.
    earlier: Result | None = None


def stored_batches(evaluation: Evaluation, opened: Opened) -> list[replay.StoredBatch]:
    """On rank 0, batches that an earlier run has finished, to be evaluated anew."""
    run, plan, folder = evaluation.run, evaluation.plan, opened.folder
    is_asked = run.options.replay and run.backend.world.is_main and opened.has_earlier(plan.num_chunks)
    if folder is None or not is_asked:
        return []
    run.control.progress.step("setup")
    fingerprint, finished = opened.facts["fingerprint"], opened.previous.finished
    if finished is None:
        found = replay.batches_of_journal(opened.previous.chunks.files, plan, fingerprint)
    else:
        path = folder.path / PREDICTIONS
        found = replay.batches_of_predictions(path, plan, fingerprint, finished.machines)
    return [batch for batch in found if batch.columns and batch.evaluated.any()]


def prove(
    evaluation: Evaluation, opened: Opened, stored: Sequence[replay.StoredBatch], evaluate: EvaluatesBatch
) -> Proven:
    """Compare finished batches with what this job gives now; a collective where anything is finished."""
    run, finished = evaluation.run, opened.previous.finished
    if not opened.has_earlier(evaluation.plan.num_chunks):
        return Proven()
    if not run.options.replay:
        found = replay.SKIPPED
        run.note_all(["what is finished is not compared with what this job gives now"])
    else:
        own = _compare(evaluation, opened, stored, evaluate) if run.backend.world.is_main else None
        found = str(run.from_rank_0(own))
    if finished is None:
        return Proven(replay=found)
    assert opened.folder is not None
    run.note_all([f"this job was finished before, in {opened.folder.path}: its result is shown again"])
    compared = _compare_finished(evaluation, opened)
    run.control.meet()
    # The folder may have been moved since.
    result = replace(finished, earlier=True, replay=found, folder=str(opened.folder.path))
    result = result if compared is None else replace(result, reference=compared)
    return Proven(replay=found, earlier=_sliced(evaluation, opened, result))


def _compare(
    evaluation: Evaluation, opened: Opened, stored: Sequence[replay.StoredBatch], evaluate: EvaluatesBatch
) -> str:
    assert opened.folder is not None
    finished = opened.previous.finished
    digests = {} if finished is None else finished.metric_digests
    compared: dict[str, str | None] = {replay.NOTHING_TO_COMPARE: None}
    for batch in stored:
        proof = replay.Proof(
            batch,
            evaluate,
            machine=opened.facts["machine"],
            precision=evaluation.run.options.precision,
            place=opened.folder.path,
            name=partial(name_of, evaluation.dataset),
        )
        outcome, compared[outcome] = proof.rows()
        proof.texts(evaluation.task, evaluation.dataset)
        # The digests are those of the first batch; a journal file is compared as a whole.
        if batch is stored[0] or batch.file is not stored[0].file:
            proof.metrics(evaluation.metrics, evaluation.row_metrics, evaluation.plan, digests)
    worst = max(compared, key=replay.OUTCOMES.index)
    if (note := compared[worst]) is not None:
        evaluation.run.note(note)
    return worst


def _sliced(evaluation: Evaluation, opened: Opened, result: Result) -> Result:
    """A finished run's result with the groups that are asked for now. A collective where any is.

    Its result.json stays as it was written.
    """
    run = evaluation.run
    slicing = slicing_of(evaluation, partial(run.control.progress.step, "setup"))
    if slicing is None:
        return result
    own: dict[str, Any] | None = None
    if run.backend.world.is_main:
        assert opened.folder is not None
        found = slicing.of_rows(result, StoredRows(opened.folder.path / PREDICTIONS))
        own = {"slices": found.slices, "warnings": found.warnings}
    return replace(result, **run.from_rank_0(own))


def _compare_finished(evaluation: Evaluation, opened: Opened) -> dict[str, Any] | None:
    """What a finished run's rows say beside those of another run; None where there is none. A collective.

    Its result.json stays as it was written.
    """
    if evaluation.run.options.reference is None:
        return None
    compared: dict[str, Any] | None = None
    if opened.reference is not None:
        assert opened.folder is not None and opened.compared is not None
        compared = opened.reference.compare(
            windows_of_file(StoredRows(opened.folder.path / PREDICTIONS), evaluation.plan.num_samples),
            evaluation.dataset,
            opened.compared,
            partial(evaluation.run.control.progress.step, "setup"),
        )
    found: dict[str, Any] = evaluation.run.from_rank_0(compared)
    return found
