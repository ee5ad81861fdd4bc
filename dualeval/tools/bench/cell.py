"""A cell of ``dualeval bench``: what it is, and one start of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

# One process, one process that splits its batches over several GPUs, and ranks over two backends.
SINGLE, DATAPARALLEL, TORCH, HOROVOD = "single", "dataparallel", "torch", "horovod"
MODES = (SINGLE, DATAPARALLEL, TORCH, HOROVOD)
# Modes whose ranks are a group, and their backend of that name.
OF_RANKS = (TORCH, HOROVOD)
# Of a training step, in their order.
STAGES = ("forward", "backward", "all_reduce", "optimiser")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination that is measured."""

    # One of `MODES`.
    mode: str
    # How many ranks; for "dataparallel" how many GPUs its one process uses.
    processes: int
    # One of `options.precision.PRECISIONS`.
    precision: str
    # Samples a batch of each process.
    batch_size: int
    # Why it cannot be measured here; None where it can.
    reason: str | None = None

    @property
    def label(self) -> str:
        """The cell in words."""
        unit = "GPU" if self.mode == DATAPARALLEL else "process"
        plural = "" if self.processes == 1 else "s" if unit == "GPU" else "es"
        return f"{self.mode}, {self.processes} {unit}{plural}, {self.precision}, batch size {self.batch_size}"


@dataclass(frozen=True, kw_only=True)
class CellStart(Cell):
    """What one start of a cell does."""

    # Of each process, which are its own.
    cores: int
    # The least time that is measured.
    min_seconds: float
    # Batches a process before that.
    warmup: int
    # Whether training steps are timed in place of evaluations.
    train: bool
    # `time.monotonic()` when its command was started.
    begun: float
    # The file for what was measured.
    to: str


def plan_cells(
    modes: Sequence[str],
    processes: Sequence[int],
    precisions: Sequence[str],
    batch_sizes: Sequence[int],
    why_not: Callable[[Cell], str | None],
) -> list[Cell]:
    """List the cells: every combination that is one, in a fixed order.

    One process is a cell of its own mode; DataParallel needs at least two GPUs to differ from it.
    """
    cells = []
    for precision in precisions:
        for batch_size in batch_sizes:
            for mode in (mode for mode in MODES if mode in modes):
                counts = [1] if mode == SINGLE else processes
                for count in (count for count in counts if mode != DATAPARALLEL or count > 1):
                    cell = Cell(mode=mode, processes=count, precision=precision, batch_size=batch_size)
                    cells.append(replace(cell, reason=why_not(cell)))
    return cells


def order_of_round(count: int, number: int) -> list[int]:
    """In which order a round measures its cells: each round begins one cell later, every second backwards.

    So no cell is always first, or always behind the same one.
    """
    first = number % max(count, 1)
    order = [*range(first, count), *range(first)]
    return order if number % 2 == 0 else order[::-1]


def cores_of_processes(processes: Sequence[int], usable: int) -> int:
    """How many cores each process gets, the same in all cells: a share of the most processes that fit."""
    return max(1, usable // max([count for count in processes if count <= usable], default=1))


def own_part(cores: Sequence[int], each: int, local_rank: int) -> list[int]:
    """The cores of one of the ranks of this machine."""
    return list(cores[local_rank * each : (local_rank + 1) * each])


# Starts this command line anew, with the same interpreter and code.
OWN_COMMAND = (sys.executable, str(Path(__file__).resolve().parents[2] / "__main__.py"))
