"""What a metric says of columns, however their samples are split among updates and ranks."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace
from random import Random

import torch
from torch import Tensor

from dualeval.metrics import Measured, Metric


def same_bits(found: object, expected: float) -> bool:
    return isinstance(found, float) and struct.pack("<d", found) == struct.pack("<d", expected)


def ledger_of(metric: Metric, columns: Mapping[str, Tensor], random: Random | None = None) -> Tensor:
    """The ledger of all samples; with ``random`` of updates with some of them each, added in any order."""
    count = len(next(iter(columns.values())))
    samples = list(range(count))
    owners = [0] * count
    if random is not None:
        random.shuffle(samples)
        owners = [random.randrange(6) for _ in samples]
    ledgers = []
    for rank in range(1 if random is None else 3):
        ledger = torch.zeros(metric.size, dtype=torch.int64)
        for update in (0,) if random is None else (2 * rank, 2 * rank + 1):
            chosen = [sample for sample, owner in zip(samples, owners, strict=True) if owner == update]
            metric.update(ledger, {name: column[chosen] for name, column in columns.items()})
        ledgers.append(ledger)
    if random is not None:
        random.shuffle(ledgers)
    return torch.stack(ledgers).sum(dim=0)


def measure(metric: Metric, columns: Mapping[str, Tensor], seed: int = 0) -> Measured:
    """What the metric says, which no split and no order changes. Scores: test_intervals.py."""
    whole = metric.compute(ledger_of(metric, columns))
    assert metric.compute(ledger_of(metric, columns, Random(seed))) == whole
    return replace(whole, scores={})
