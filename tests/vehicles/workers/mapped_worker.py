"""Evaluates N samples with a metric of all rows: ``mapped_worker.py N OUT``; prints its memory as JSON.

Memory is what the process alone holds (``RssAnon``): pages of mapped files belong to the system, which takes
them back when it needs them.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import dualeval
from dualeval.columns.ragged import Ragged
from dualeval.metrics import Measured, Value

BATCH = 65_536
_PIECE = 1 << 20


class Sums:
    """Sums over all rows, a piece at a time; and the memory that is held meanwhile."""

    name = "sums"
    columns = ("value", "number", "tokens")

    def __init__(self) -> None:
        self.held = 0

    def compute(self, columns: Mapping[str, Any]) -> Measured:
        arrays = {**columns, "tokens": columns["tokens"].values}
        found: dict[str, Value] = {
            name: float(
                sum(
                    array[start : start + _PIECE].sum(dtype=np.float64)
                    for start in range(0, len(array), _PIECE)
                )
            )
            for name, array in arrays.items()
        }
        self.held = max(self.held, anonymous_bytes())
        return Measured(values=found)


def observe(outputs: Tensor, batch: Tensor) -> dict[str, Any]:
    """A value, a number and two tokens a sample."""
    tokens = Ragged(batch.repeat_interleave(2), torch.full((len(batch),), 2))
    return {"value": batch / 3, "number": batch, "tokens": tokens}


def anonymous_bytes() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text("ascii").splitlines() if "RssAnon" in line]
    return int(line.split()[1]) << 10


@contextmanager
def watched() -> Iterator[list[int]]:
    """Note the largest amount of memory that is held meanwhile."""
    peak, through = [0], threading.Event()

    def watch() -> None:
        while not through.wait(0.01):
            peak[0] = max(peak[0], anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        through.set()
        thread.join()


def main(count: int, out: Path) -> None:
    torch.set_num_threads(1)
    metric = Sums()
    found: dict[str, Any] = {}
    with watched() as peak:
        result = dualeval.evaluate(
            model=nn.Identity().eval(),
            data=range(count),
            metrics=[metric],
            observe=observe,
            workers=0,
            batch_size=BATCH,
            out=out,
            replay=False,
        )
    found["run"] = peak[0]
    with watched() as peak:
        again = dualeval.rescore(out, metrics=[metric])
    found["rescore"] = peak[0]
    assert again.metrics == result.metrics
    wanted = count * (count - 1) / 2
    assert result.metrics["number"] == wanted and result.metrics["tokens"] == 2 * wanted
    print(json.dumps({**found, "in_metric": metric.held}))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
