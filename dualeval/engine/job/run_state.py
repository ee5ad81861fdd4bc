"""Run: one evaluation on this rank: where it runs, how, whom it reports to, and what was decided so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, TypeAlias

import torch

from dualeval.backends.base import Backend
from dualeval.engine.control.plane import ControlPlane
from dualeval.engine.end.watch import Watch
from dualeval.engine.folder.layout import Share
from dualeval.engine.values.options import RunOptions
from dualeval.options.evaluation import precision_of
from dualeval.options.precision import Precision

# Called with (samples done over all ranks, samples in all); on rank 0 only.
Show: TypeAlias = Callable[[int, int], None]


@dataclass(kw_only=True)
class Run:
    """One evaluation on this rank, from its first step to its last."""

    # How the ranks reduce and gather.
    backend: Backend
    # Where the ranks meet; opened on the same backend.
    control: ControlPlane
    # How it runs, and where its files go: as asked for, with options that were left open as decided.
    options: RunOptions
    # Saves finished work and ends this process if it cannot end by itself; for that it holds `recorder` and
    # `folder`.
    watch: Watch
    # The device that batches are brought to.
    device: torch.device
    # Called with sentences for the user, on rank 0 only.
    note: Callable[[str], None] = lambda sentence: None
    # The options as the caller wants them recorded in the result; `task.options()` is added.
    job: dict[str, Any] = field(default_factory=dict)
    # Progress display, called on rank 0 from a thread of its own.
    show: Show | None = None
    # `perf_counter()` at the start of the run.
    started: float = field(default_factory=perf_counter)
    # The process belongs to a caller's script, such as one that trains: its state is put back afterwards.
    guest: bool = False
    # Number of this rank's cores.
    cores: int = 1
    # Those on which its reading processes run; empty for all.
    readers_cores: Sequence[int] = ()
    # The part of the job that is evaluated, and the command that asks for it; None for the whole job.
    share: Share | None = None
    command: Mapping[str, Any] | None = None
    # Threads that this rank may compute in.
    threads: int = field(default_factory=torch.get_num_threads)
    # Reading processes of this rank.
    workers: int = 0
    # The context of a forward that takes all ranks (``sharding.lockstep``); None where each computes alone.
    around_forward: Callable[[], AbstractContextManager[None]] | None = None

    @property
    def precision(self) -> Precision:
        """How the model computes."""
        return precision_of(self.options)

    def decide(self, shown: Mapping[str, Any], **options: Any) -> None:
        """Decide options that were left open; ``shown`` is the part that the result shows."""
        self.options = replace(self.options, **options)
        self.job = {**self.job, **shown}

    def trying(self, **options: Any) -> Run:
        """A copy of this run with other options; its decisions do not affect this one."""
        return replace(self, options=replace(self.options, **options))

    def from_rank_0(self, value: Any) -> Any:
        """Rank 0's value, on every rank; the other ranks' values are ignored. A collective."""
        self.control.meet()
        return self.backend.broadcast_json(value, src=0)

    def note_all(self, sentences: Iterable[str]) -> None:
        """Call ``note`` with each sentence, on rank 0."""
        if self.backend.world.is_main:
            for sentence in sentences:
                self.note(sentence)
