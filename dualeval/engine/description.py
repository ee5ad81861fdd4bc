"""What a run evaluates, in words for people, so that two saved logs can be told apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dualeval.engine.plan import EvalPlan
from dualeval.tasks import Dataset, Task

_SHOWN_DIGITS = 8


def describe(
    task: Task, dataset: Dataset, plan: EvalPlan, job: Mapping[str, Any], fingerprint: str
) -> dict[str, str]:
    """Complete a task's description with what the engine knows.

    Args:
        task: says what it evaluates; one that does not is named.
        dataset: the task's.
        plan: the run's.
        job: the facts of the run's identity: ``data``, ``contents`` (None where the data set gives none) and
            ``weights`` with fingerprints, ``precision``.
        fingerprint: of the whole job; two jobs whose other lines are equal differ in it.

    Returns:
        By label: the task's own lines, of which ``weights`` and ``data`` get a fingerprint, and ``job``.
    """
    own = task.description()
    first = {} if "model" in own else {"task": task.name}
    # In this order, whatever the task's.
    lines = {**first, "model": "", "weights": "", "data": "", **own}
    weights, data = job["weights"], f"fingerprint {job['data'][:_SHOWN_DIGITS]}"
    if job["contents"] is not None:
        data += f", contents {job['contents'][:_SHOWN_DIGITS]}"
    mark = f"fingerprint {weights['fingerprint'][:_SHOWN_DIGITS]}" if weights["elements"] else ""
    lines["weights"] = _with(lines["weights"], mark)
    lines["data"] = _with(lines["data"], f"{_samples(dataset, plan)}, {data}")
    lines["job"] = (
        f"batch size {plan.batch_size}, {job['precision']} (fingerprint {fingerprint[:_SHOWN_DIGITS]})"
    )
    return {label: text for label, text in lines.items() if text}


def _with(text: str, more: str) -> str:
    return f"{text} ({more})" if text and more else text or more


def _samples(dataset: Dataset, plan: EvalPlan) -> str:
    total = len(dataset)
    if plan.num_samples == total:
        return f"{total:,} samples"
    return f"the first {plan.num_samples:,} of {total:,} samples"
