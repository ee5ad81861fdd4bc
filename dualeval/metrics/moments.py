"""Exact sums of columns and of their products, as slots of a ledger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dualeval.errors import UsageError
from dualeval.metrics import exact

_KINDS = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
# What ``Moments`` hold: counts of samples and of the metric's own; how many values were NaN, +inf and -inf,
# whose samples are in no sum; sums in units of 2**-1074, then those of products of two columns in units of
# 2**-2148, then of three in units of 2**-3222.
Sums: TypeAlias = tuple[Sequence[int], Sequence[int], Sequence[int]]


class Moments:
    """A number of counts, and of sums of one, two and three factors, which merge by adding their ledgers.

    Wide enough for any float64, so that the ledger's size does not depend on what a column holds: 67 slots a
    sum, 133 a sum of products of two, 198 one of three.
    """

    def __init__(self, *, counts: int, sums: int, products: int, cubes: int) -> None:
        # The attributes stand in the job's identity: other ones make other jobs.
        self._counts = counts
        self._limbs = (
            sums * [exact.DOUBLE_SUM_LIMBS]
            + products * [exact.DOUBLE_PRODUCT_LIMBS]
            + cubes * [exact.DOUBLE_CUBE_LIMBS]
        )
        self._kinds = (sums, sums + products)
        self._lengths = [counts, len(exact.NONFINITE_KINDS), *self._limbs]
        self.size = sum(self._lengths)

    def add(self, ledger: Tensor, added: Sums) -> None:
        """Add to the ledger, in place."""
        counts, nonfinite, *before = torch.split(ledger, self._lengths)
        counts += torch.tensor(added[0], dtype=torch.int64)
        nonfinite += torch.tensor(added[1], dtype=torch.int64)
        for limbs, number in zip(before, added[2], strict=True):
            slots = limbs.numpy()
            slots[:] = exact.to_limbs(exact.from_limbs(slots) + number, len(slots))

    def read(self, ledger: Tensor) -> Sums:
        """What is in the ledger."""
        counts, nonfinite, *limbs = torch.split(ledger, self._lengths)
        return counts.tolist(), nonfinite.tolist(), [exact.from_limbs(slots.numpy()) for slots in limbs]


def numbers_of(metric: str, column: str, values: Any) -> Tensor:
    """A column as one number a sample, shape (samples,)."""
    whose = f"metric {metric!r} reads the column {column!r}, which"
    if not isinstance(values, Tensor) or values.numel() != len(values):
        is_tensor = isinstance(values, Tensor)
        has = f"has shape {tuple(values.shape)}" if is_tensor else f"is {type(values).__name__}"
        rows = len(values)
        if is_tensor and tuple(values.shape) == (rows, rows):
            raise UsageError(
                f"{whose} {has}, for {rows} samples: torch broadcasts outputs ({rows}, 1) and a target "
                f"({rows},) to one number for each pair of samples. In observe write outputs[:, 0]"
            )
        raise UsageError(
            f"{whose} {has}: it takes one number per sample. Make one in observe, such as by .mean(1), or a "
            "sum and a count, whose Ratio is the mean over all values"
        )
    if values.dtype not in _KINDS:
        raise UsageError(
            f"{whose} is {values.dtype}: expected bool, a float type, uint8, or an integer type with a sign. "
            "Cast it, as with .float()"
        )
    return values.reshape(-1)


def finite_of(columns: Sequence[Tensor]) -> tuple[list[Tensor], tuple[int, int, int]]:
    """The samples at which all columns are finite, and how many values are NaN, +inf and -inf."""
    counts = [exact.count_nonfinite(column) for column in columns if column.is_floating_point()]
    nan, pos_inf, neg_inf = (sum(count) for count in zip((0, 0, 0), *counts, strict=True))
    nonfinite = (nan, pos_inf, neg_inf)
    if not any(nonfinite):
        return list(columns), nonfinite
    finite = torch.stack([column.isfinite() for column in columns]).all(dim=0)
    return [column[finite] for column in columns], nonfinite
