"""Rows in memory: of an evaluation that writes nothing, and of ranks that do not see rank 0's folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualeval.columns import Column
from dualeval.engine.folder.windows import RowsOfChunks, describe_columns, place_columns

if TYPE_CHECKING:
    from dualeval.backends.base import Backend


@dataclass(frozen=True, kw_only=True)
class MemoryRows(RowsOfChunks):
    """Rows of finished chunks, read as those of a journal file are."""

    # The columns in C order, one after the other, uint8.
    content: npt.NDArray[np.uint8]

    def _read(self, dtype: np.dtype[Any], count: int, offset: int) -> npt.NDArray[Any]:
        return self.content[offset : offset + count * dtype.itemsize].view(dtype)


class MemoryWriter:
    """Takes what a ``JournalWriter`` takes, and keeps the rows alone."""

    def __init__(self, *, keeps: bool) -> None:
        self.folder = None
        self._keeps = keeps
        # Index and error of each sample that could not be read.
        self.failures: list[tuple[int, str]] = []
        # Of each part: how to read it, and the columns themselves.
        self.written: list[tuple[dict[str, Any], list[npt.NDArray[Any]]]] = []

    def write(
        self,
        chunks: Sequence[int],
        rows: Sequence[int],
        delta: Tensor,
        columns: Mapping[str, Column],
        failures: Sequence[tuple[int, str]] = (),
    ) -> None:
        """Keep the rows of finished chunks; arguments as for ``JournalWriter``."""
        self.failures += failures
        if self._keeps:
            described, arrays = describe_columns(columns)
            self.written.append(({"chunks": list(chunks), "rows": list(rows), "columns": described}, arrays))


def collect_rows(
    writer: object, backend: Backend, rounds: int, step: Callable[[], None] = lambda: None
) -> list[MemoryRows]:
    """Bring the rows in memory of all ranks to rank 0, a part of each rank a round; a collective."""
    found, parts = [], []
    if isinstance(writer, MemoryWriter):
        parts, writer.written = writer.written[::-1], []
    for _ in range(rounds):
        header, arrays = parts.pop() if parts else (None, [])
        pieces = [torch.from_numpy(array.reshape(-1).view(np.uint8)) for array in arrays]
        content = torch.cat([torch.empty(0, dtype=torch.uint8), *pieces])
        del arrays, pieces
        headers = backend.gather_json(header) or []
        contents = backend.gather(content) or []
        for rank, (described, values) in enumerate(zip(headers, contents, strict=True)):
            if described is not None:
                rows = tuple(described["rows"])
                found.append(
                    MemoryRows(
                        path=Path(f"the memory of rank {rank}"),
                        chunks=tuple(described["chunks"]),
                        rows=rows,
                        columns=place_columns(described["columns"], sum(rows), 0),
                        content=values.numpy(),
                    )
                )
        step()
    return found
