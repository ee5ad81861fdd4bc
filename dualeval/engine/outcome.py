"""From what the ranks have counted and reported to the result that is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from dualeval.engine.description import describe
from dualeval.engine.folder.opening import PreviousRun
from dualeval.engine.plan import EvalPlan
from dualeval.metrics import Measured
from dualeval.result import Result
from dualeval.tasks import Task

_NAMED_AT_MOST = 5


def make_result(
    task: Task,
    plan: EvalPlan,
    measured: Sequence[Measured],
    facts: Mapping[str, Any],
    previous: PreviousRun,
    reports: Sequence[Mapping[str, Any]],
    *,
    failures: Sequence[tuple[int, str]],
    machines: Sequence[Mapping[str, Any]],
    replay: str | None,
    totals: tuple[int, int],
    world: Mapping[str, Any],
    job: Mapping[str, Any],
    folder: Path,
    setup_s: float,
    total_s: float,
) -> Result:
    """Put a run's result together; the same on every rank, but for the seconds before the loop.

    Args:
        task: names the samples.
        plan: the run's.
        measured: what each metric says.
        facts: about job and machines, as the ranks have agreed on them.
        previous: what was in the folder at the start.
        reports: each rank's ``times``, and ``settings``: sentences about its numeric settings.
        failures: index and error of each failed sample, in order; on rank 0 alone with the errors.
        machines: each kind of machine that has computed chunks; on rank 0 those of earlier runs, too.
        replay: how the comparison of a finished batch went.
        totals: samples evaluated, samples failed.
        world: as in the result, as ``folder``.
        job: the options as the caller has them; those of the task are added as it uses them.
        setup_s: seconds before the loop.
        total_s: seconds in all.
    """
    dataset = task.dataset()
    evaluated, failed = totals
    # The slowest rank's: the run is not through before.
    evaluate_s = max(report["times"]["evaluate"] for report in reports)
    odd = {kind: list(ids) for kind, ids in task.findings(plan.num_samples).items() if ids}
    remaining = previous.chunks.remaining
    machine = facts["machine"]
    return Result(
        metrics={name: value for part in measured for name, value in part.values.items()},
        intervals={name: interval for part in measured for name, interval in part.intervals.items()},
        nonfinite={name: counts for part in measured for name, counts in part.nonfinite.items()},
        units={name: unit for part in measured for name, unit in part.units.items()},
        samples={"total": plan.num_samples, "evaluated": evaluated, "failed": failed},
        failed=[{"id": dataset.id(index), "error": error} for index, error in failures],
        chunks={
            "total": plan.num_chunks,
            "evaluated_now": len(remaining),
            "resumed": plan.num_chunks - len(remaining),
        },
        job={**job, **task.options()},
        description=describe(task, plan, facts["job"], facts["fingerprint"]),
        fingerprint=facts["fingerprint"],
        data={
            "fingerprint": facts["job"]["data"],
            "contents": facts["job"]["contents"],
            "samples": len(dataset),
            "findings": odd,
        },
        weights=facts["job"]["weights"],
        versions=machine["versions"],
        world=dict(world),
        device={key: machine[key] for key in ("device", "model", "cpu_capability", "bits")},
        homogeneous=len(machines) == 1,
        machines=[dict(kind) for kind in machines],
        finished_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        replay=replay,
        timing={
            "total_s": total_s,
            "setup_s": setup_s,
            "evaluate_s": evaluate_s,
            "ranks": [report["times"] for report in reports],
        },
        samples_per_s=plan.samples_in(remaining) / evaluate_s,
        work={name: count for part in measured for name, count in part.work.items()},
        warnings=[
            *previous.notes,
            *dict.fromkeys(sentence for report in reports for sentence in report["settings"]),
            *_warnings(measured, failed, odd, len(machines)),
        ],
        folder=str(folder),
    )


def compared_with_replaced(result: Result, previous: PreviousRun) -> Result:
    """Warn where all was evaluated again, on a machine of the same bits, and came to other metrics."""
    if previous.replaced is None or not result.homogeneous:
        return result
    digest, bits = previous.replaced
    if result.device.get("bits") != bits or result.metrics_digest == digest:
        return result
    warning = (
        f"the result that was there before its files were damaged had metrics_digest {digest}, and this one "
        f"has {result.metrics_digest}: something that the job's identity does not name has changed since"
    )
    return replace(result, warnings=[*result.warnings, warning])


def _warnings(
    measured: Sequence[Measured], failed: int, odd: Mapping[str, Sequence[str]], machines: int
) -> Iterator[str]:
    if failed:
        yield f"{failed} samples could not be read and are in no metric; result.json lists them"
    for kind, ids in odd.items():
        more = ", ..." if len(ids) > _NAMED_AT_MOST else ""
        named = ", ".join(ids[:_NAMED_AT_MOST])
        yield f"{kind.replace('_', ' ')}: {len(ids)} samples ({named}{more}), listed in result.json"
    for part in measured:
        yield from part.warnings
    if machines > 1:
        yield (
            f"{machines} kinds of machine have computed this (machines in result.json: device model, CPU "
            "capability, bits or versions differ): metrics agree to tolerance only, and metrics_digest can "
            "be compared with none"
        )
