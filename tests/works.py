"""Batches as a loop hands them out."""

from __future__ import annotations

from collections.abc import Sequence

from dualeval.engine.feed import FailedSample
from dualeval.engine.plan import EvalPlan
from dualeval.engine.recorder import Work


def work_of(plan: EvalPlan, batch: int, failed: Sequence[FailedSample] = ()) -> Work:
    """One batch of a plan whose chunks have one batch each."""
    samples = plan.batch_samples(batch)
    return Work(chunk=batch, batch=batch, samples=samples, is_last=True, failed=tuple(failed))
