"""Bits per byte of texts."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from dualeval.metrics.means import Ratio
from dualeval.metrics.metric import Measured
from dualeval.metrics.scores import Score


class BitsPerByte(Ratio):
    """The sum of a column in nats over a column of bytes, divided by log 2.

    As ``bits_per_byte`` of lm-evaluation-harness (``lm_eval/api/metrics.py``). The ledger is that of Ratio.

    Args:
        nats: a column of negative log-likelihoods.
        bytes: a column of how many bytes these are of.
    """

    def __init__(self, nats: str, bytes: str) -> None:
        super().__init__(nats, bytes, name="bits_per_byte", higher_is_better=False)

    @property
    def score(self) -> Score:
        """That of the ratio, in bits."""
        return replace(super().score, factor=1 / math.log(2))

    def compute(self, ledger: Tensor) -> Measured:
        """The ratio and its interval, in bits."""
        found = super().compute(ledger)
        value = found.values[self.name]
        if not isinstance(value, float):
            return found
        ends = {
            name: (low / math.log(2), high / math.log(2)) for name, (low, high) in found.intervals.items()
        }
        return replace(found, values={self.name: value / math.log(2)}, intervals=ends)
