"""What ranks send after the loop: journal files that rank 0 does not see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dualeval.engine.folder.layout import file_name
from dualeval.whole_files import partial_of, put_in_place

if TYPE_CHECKING:
    from dualeval.backends.base import Backend

# Bytes that rank 0 takes at a time of files that it does not see, from all ranks together.
_PIECES_BYTES = 16 << 20
_LEAST_PIECE_BYTES = 64 << 10


def collect_files(
    journal: Path,
    backend: Backend,
    written: Sequence[Path],
    apart: Sequence[int],
    prefixes: Callable[[int], str],
    step: Callable[[], None] = lambda: None,
) -> None:
    """Bring the journal files of ranks that do not see rank 0's journal to it; a collective."""
    sizes = backend.all_gather_json([path.stat().st_size for path in written])
    piece = max(_LEAST_PIECE_BYTES, _PIECES_BYTES // len(apart))
    for number in range(max(len(sizes[rank]) for rank in apart)):
        for start in range(0, max(sizes[rank][number] for rank in apart if number < len(sizes[rank])), piece):
            own = torch.empty(0, dtype=torch.uint8)
            if number < len(written) and start < sizes[backend.world.rank][number]:
                own = torch.from_numpy(np.fromfile(written[number], np.uint8, count=piece, offset=start))
            for rank, content in enumerate(backend.gather(own, dst=0) or []):
                if len(content):
                    path = journal / file_name(prefixes(rank), number)
                    _append(path, content, start, sizes[rank][number])
                    step()
            step()


def _append(path: Path, content: Tensor, start: int, size: int) -> None:
    """Write a piece of a file that comes from another rank; whole under its name, or not there."""
    partial = partial_of(path)
    with partial.open("ab" if start else "wb") as file:
        file.write(content.numpy().data)
    if start + len(content) == size:
        put_in_place(partial, path)
