"""What a run evaluates, in words for people, so that two saved logs can be told apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dualeval.engine.plan import EvalPlan
from dualeval.result import FIRST_SAMPLES
from dualeval.tasks import Task
from dualeval.wording import counted

_SHOWN_DIGITS = 8


def describe(
    task: Task, part: Mapping[str, Any], plan: EvalPlan, job: Mapping[str, Any], fingerprint: str
) -> dict[str, str]:
    """Complete a task's description with what the engine knows."""
    own = task.description()
    first = {} if "model" in own else {"task": task.name}
    # In this order, whatever the task's.
    lines = {**first, "model": "", "weights": "", "data": "", **own}
    weights, data = job["weights"], f"fingerprint {job['data'][:_SHOWN_DIGITS]}"
    if job["contents"] is not None:
        data += f", contents {job['contents'][:_SHOWN_DIGITS]}"
    mark = f"fingerprint {weights['fingerprint'][:_SHOWN_DIGITS]}" if weights["elements"] else ""
    lines["weights"] = _with(lines["weights"], mark)
    lines["data"] = _with(lines["data"], f"{_samples(part)}, {data}")
    done = ", ".join([f"batch size {plan.batch_size}", *_prepared(job)])
    lines["job"] = f"{done} (fingerprint {fingerprint[:_SHOWN_DIGITS]})"
    return {label: text for label, text in lines.items() if text}


def _prepared(job: Mapping[str, Any]) -> list[str]:
    """What was done to the model, in the words of the options."""
    kept = ["batch norms in fp32"] if job.get("keep_batchnorm_fp32") else []
    return [job["precision"], *kept, *(job[name] for name in ("layout", "optimize") if name in job)]


def _with(text: str, more: str) -> str:
    return f"{text} ({more})" if text and more else text or more


def _samples(part: Mapping[str, Any]) -> str:
    count, total = f"{part['samples']:,}", counted(part["of"], "sample")
    if part["kind"] == FIRST_SAMPLES:
        return f"the first {count} of {total}"
    return f"{count} of {total}, seed {part['seed']}" if "seed" in part else total
