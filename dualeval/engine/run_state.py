"""Run: one evaluation on this rank: where it runs, how, whom it reports to, and what was decided so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch import nn

from dualeval.backends.base import Backend
from dualeval.engine.control.plane import ControlPlane
from dualeval.engine.end.watch import Watch
from dualeval.engine.folder.layout import Share
from dualeval.engine.options import RunOptions
from dualeval.engine.sharding.gathers import Gathers

# Called with (samples done over all ranks, samples in all); on rank 0 only.
Show: TypeAlias = Callable[[int, int], None]


@dataclass(kw_only=True)
class Run:
    """One evaluation on this rank, from its first step to its last."""

    # How the ranks reduce and gather.
    backend: Backend
    # Where the ranks meet; opened on the same backend.
    control: ControlPlane
    # How it runs, and where its files go: as asked for, and what was left open as it has been decided.
    options: RunOptions
    # What is in hand is known to it (`recorder`, `folder`): it saves what is finished, and ends this process,
    # where it cannot end by itself.
    watch: Watch
    # Where the batches are wanted.
    device: torch.device
    # Called with sentences for people, on rank 0 only.
    note: Callable[[str], None] = lambda sentence: None
    # The options as the caller wants them recorded in the result; `task.options()` is added.
    job: dict[str, Any] = field(default_factory=dict)
    # Progress display, called on rank 0 from a thread of its own.
    show: Show | None = None
    # `perf_counter()` at the start of the run.
    started: float = field(default_factory=perf_counter)
    # The process belongs to a caller's script, such as one that trains; it finds everything afterwards as it
    # was before.
    guest: bool = False
    # Number of cores that are this rank's.
    cores: int = 1
    # Which part of the job alone is evaluated, and the command that asks for it; None for the whole job.
    share: Share | None = None
    command: Mapping[str, Any] | None = None
    # Threads that this rank may compute in.
    threads: int = field(default_factory=torch.get_num_threads)
    # Reading processes of this rank.
    workers: int = 0
    # Watches the collectives inside of the model's forward; None before there is a model.
    gathers: Gathers | None = None

    def decide(self, shown: Mapping[str, Any], **options: Any) -> None:
        """Settle options that were left open; ``shown`` is what the result has of them."""
        self.options = replace(self.options, **options)
        self.job = {**self.job, **shown}

    def trying(self, **options: Any) -> Run:
        """A run beside this one, with other options; nothing that it decides is decided for this one."""
        return replace(self, options=replace(self.options, **options))

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Watch the gathers of a model for as long as the block lasts."""
        with Gathers(model, self.control, self.backend, owned=self.options.shard is not None) as gathers:
            self.gathers = gathers
            try:
                yield
            finally:
                self.gathers = None  # it holds the model

    def from_rank_0(self, value: Any) -> Any:
        """Rank 0's value, on every rank; a collective. The others' own is not looked at."""
        self.control.meet()
        return self.backend.broadcast_json(value, src=0)

    def note_all(self, sentences: Iterable[str]) -> None:
        """Call ``note`` with each sentence, on rank 0."""
        if self.backend.world.is_main:
            for sentence in sentences:
                self.note(sentence)
