"""JobFacts: what all ranks have agreed on before the first batch, of the job, the data and their machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_IN_JOB = ("fingerprint", "job", "machine", "files", "task_class", "metrics", "options")


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """What the ranks have agreed on; made by ``agreement.agree``, the same on every rank."""

    # All that decides the numbers, and its sha256, in hex.
    job: Mapping[str, Any]
    fingerprint: str
    # sha256, in hex, over the samples' ids in order; None where there are none.
    samples_digest: str | None
    # The machine (`machines.machine_facts`) and the host of each rank.
    machines: Sequence[Mapping[str, Any]]
    hosts: Sequence[str]
    # The agents of torchrun that have started the ranks, in order.
    launches: Sequence[str]
    # Names of the task's files beside predictions.parquet.
    files: Sequence[str]
    task_class: str
    # Metrics as they are asked for by name.
    metrics: Sequence[str]
    # The options that people know a job by, for messages.
    options: Mapping[str, Any]
    # How to start over, for messages: a sentence without its full stop.
    start_over: str

    @property
    def machine(self) -> Mapping[str, Any]:
        """Rank 0's machine."""
        return self.machines[0]

    def to_json(self) -> dict[str, Any]:
        """What job.json says of a run."""
        return {name: getattr(self, name) for name in _IN_JOB}
