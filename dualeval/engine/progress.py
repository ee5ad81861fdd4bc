"""Progress: what a rank's main thread is at, for the threads that watch it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# In the order in which a run goes through them; a batch goes through load to journal.
Stage = Literal[
    "setup", "load", "transfer", "forward", "metrics", "journal", "meet", "reduce", "write", "end", "idle"
]


@dataclass(frozen=True)
class Place:
    """One moment of a rank.

    Attributes:
        count: grows with every step; a rank whose count stands still makes no progress.
        stage: what it is doing.
        chunk: the chunk in hand; None outside of the loop.
    """

    count: int = 0
    stage: Stage = "setup"
    chunk: int | None = None

    def __str__(self) -> str:
        return described(self.stage, self.chunk)


def described(stage: str, chunk: int | None) -> str:
    """Where a rank is, for people."""
    return f"stage {stage}" if chunk is None else f"chunk {chunk}, stage {stage}"


class Progress:
    """Where a rank is. Its main thread steps, until another one saves what it had; any thread may look.

    Attributes:
        place: the last step.
    """

    def __init__(self) -> None:
        self.place = Place()

    def step(self, stage: Stage, chunk: int | None = None) -> None:
        """Note that the main thread has come to a stage. Costs about a microsecond."""
        # One assignment: another thread sees the old place or the new one, never a mixture.
        self.place = Place(self.place.count + 1, stage, chunk)
