"""RunContext: what an evaluation gets from its caller, beside the task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

from dualeval.engine.control.plane import ControlPlane
from dualeval.engine.end.watch import Watch
from dualeval.engine.options import RunOptions
from dualeval.engine.sharding.gathers import Gathers

if TYPE_CHECKING:
    from torch import nn

    from dualeval.backends.base import Backend

# Called with (samples done over all ranks, samples in all); on rank 0 only.
Show: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Where an evaluation runs, how, and whom it reports to."""

    # How the ranks reduce and gather.
    backend: Backend
    # Where the ranks meet; opened on the same backend.
    control: ControlPlane
    # How it runs, and where its files go.
    options: RunOptions
    # Saves what is finished, and ends this process, where it cannot end by itself.
    watch: Watch
    # Called with sentences for people, on rank 0 only.
    note: Callable[[str], None] = lambda sentence: None
    # The options as the caller wants them recorded in the result; `task.options()` is added.
    job: Mapping[str, Any] = field(default_factory=dict)
    # Progress display, called on rank 0 from a thread of its own.
    show: Show | None = None
    # `perf_counter()` at the start of the run.
    started: float = field(default_factory=perf_counter)
    # The process belongs to a caller's script, such as one that trains; it finds everything afterwards as it
    # was before.
    guest: bool = False
    # Number of cores that are this rank's.
    cores: int = 1
    # Watches the collectives inside of the model's forward; None before there is a model.
    gathers: Gathers | None = None

    @contextmanager
    def watching_gathers(self, model: nn.Module) -> Iterator[RunContext]:
        """This context with the gathers of a model, watched for as long as the block lasts."""
        owned = self.options.shard is not None
        with Gathers(model, self.control, self.backend, owned=owned) as gathers:
            yield replace(self, gathers=gathers)

    def from_rank_0(self, value: Any) -> Any:
        """Rank 0's value, on every rank; a collective. The others' own is not looked at."""
        self.control.meet()
        return self.backend.broadcast_json(value, src=0)

    def note_all(self, sentences: list[str]) -> None:
        """Call ``note`` with each sentence, on rank 0."""
        if self.backend.world.is_main:
            for sentence in sentences:
                self.note(sentence)
