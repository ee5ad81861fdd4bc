"""Progress: what a rank's main thread is at, for the threads that watch it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

# In the order in which a run goes through them; a batch goes through load to journal. "device" is the wait
# for what a GPU computes, "collective" any collective of the backend, "idle" between two runs.
Stage = Literal[
    "setup",
    "load",
    "transfer",
    "forward",
    "device",
    "metrics",
    "journal",
    "meet",
    "collective",
    "write",
    "end",
    "idle",
]


class Position(NamedTuple):
    """One moment of a rank."""

    # Grows with every step; a rank whose steps stand still makes no progress.
    steps: int = 0
    # What it is doing.
    stage: Stage = "setup"
    # The chunk in hand; None outside of the loop.
    chunk: int | None = None

    def __str__(self) -> str:
        return described(self.stage, self.chunk)


def described(stage: str, chunk: int | None) -> str:
    """Where a rank is, for people."""
    return f"stage {stage}" if chunk is None else f"chunk {chunk}, stage {stage}"


class Progress:
    """Where a rank is. Its main thread steps, until another one saves what it had; any thread may look."""

    def __init__(self) -> None:
        # The last step.
        self.position = Position()

    def step(self, stage: Stage, chunk: int | None = None) -> None:
        """Note that the main thread has come to a stage. Costs less than a microsecond."""
        # One assignment: another thread sees the old position or the new one, never a mixture.
        self.position = Position(self.position.steps + 1, stage, chunk)

    @contextmanager
    def inside(self, stage: Stage) -> Iterator[None]:
        """Note that the main thread is at a stage within the block, and then again where it was before."""
        before = self.position
        self.step(stage, before.chunk)
        try:
            yield
        finally:
            self.step(before.stage, before.chunk)
