"""What limited a run, where that can be said and something can be done about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dualeval.options.evaluation import cores_for
from dualeval.result import TimedStage

# In a shorter loop, or one of few batches a reading process, their start decides how long it waits for data.
_LEAST_S, _LEAST_BATCHES = 10.0, 8
_LEAST_SHARE = 0.2


def limit_of(ranks: Sequence[Mapping[str, Any]], batches: int, device: str) -> dict[str, str | float] | None:
    """Say that ranks have waited for data, and what to do; None where they have not, or the run was short.

    Each rank has the ``times`` of its loop, and how many ``workers`` and ``cores``. One that reads samples
    itself does not wait for them: its GPU may have computed all the while.
    """
    readers = sum(rank["workers"] for rank in ranks)
    seconds = [rank["times"]["evaluate"] for rank in ranks]
    if not readers or max(seconds) < _LEAST_S or batches < _LEAST_BATCHES * readers:
        return None
    share = sum(rank["times"].get(TimedStage.DATA, 0.0) for rank in ranks) / sum(seconds)
    if share < _LEAST_SHARE:
        return None
    longest = max(ranks, key=lambda rank: rank["times"].get(TimedStage.DATA, 0.0))
    workers, cores = longest["workers"], longest["cores"]
    most = cores if device == "cpu" else cores - cores_for(0)
    if workers < most:
        advice = f"more reading processes (--workers {min(2 * workers, most)})"
    else:
        advice = f"more cores a rank than its {cores} (under Slurm --cpus-per-task), or smaller files"
    text = f"waited {100 * share:.0f} % of the time for data: {advice}"
    return {"stage": TimedStage.DATA.value, "share": share, "text": text}
