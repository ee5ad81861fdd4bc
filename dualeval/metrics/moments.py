"""Exact sums of columns and of their products, as slots of a ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dualeval.errors import UsageError
from dualeval.metrics.exact import (
    DOUBLE_PRODUCT_LIMBS,
    DOUBLE_SUM_LIMBS,
    NONFINITE_KINDS,
    count_nonfinite,
    from_limbs,
    to_limbs,
)

_KINDS = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)


@dataclass(frozen=True, kw_only=True)
class Sums:
    """What ``Moments`` hold.

    Attributes:
        counts: the number of samples, and others of the metric's own.
        nonfinite: how many values were NaN, +inf and -inf; their samples are in no sum.
        sums: in units of 2**-1074.
        products: sums of products of two columns, in units of 2**-2148.
    """

    counts: tuple[int, ...]
    nonfinite: tuple[int, ...]
    sums: tuple[int, ...]
    products: tuple[int, ...]


class Moments:
    """A number of counts, sums and sums of products, which merge by adding their ledgers.

    Wide enough for any float64, so that the ledger's size does not depend on what a column holds: 67 slots a
    sum, 133 a sum of products.
    """

    def __init__(self, *, counts: int, sums: int, products: int) -> None:
        self._lengths = [
            counts,
            len(NONFINITE_KINDS),
            sums * DOUBLE_SUM_LIMBS,
            products * DOUBLE_PRODUCT_LIMBS,
        ]
        self.size = sum(self._lengths)

    def add(self, ledger: Tensor, added: Sums) -> None:
        """Add to the ledger, in place."""
        before = self.read(ledger)
        slots = [
            *(one + new for one, new in zip(before.counts, added.counts, strict=True)),
            *(one + new for one, new in zip(before.nonfinite, added.nonfinite, strict=True)),
        ]
        for one, new in zip(before.sums, added.sums, strict=True):
            slots += to_limbs(one + new, DOUBLE_SUM_LIMBS)
        for one, new in zip(before.products, added.products, strict=True):
            slots += to_limbs(one + new, DOUBLE_PRODUCT_LIMBS)
        ledger.copy_(torch.tensor(slots, dtype=torch.int64))

    def read(self, ledger: Tensor) -> Sums:
        """What is in the ledger."""
        counts, nonfinite, sums, products = (part.tolist() for part in torch.split(ledger, self._lengths))
        return Sums(
            counts=tuple(counts),
            nonfinite=tuple(nonfinite),
            sums=tuple(_numbers(sums, DOUBLE_SUM_LIMBS)),
            products=tuple(_numbers(products, DOUBLE_PRODUCT_LIMBS)),
        )


def _numbers(limbs: Sequence[int], each: int) -> list[int]:
    return [from_limbs(limbs[start : start + each]) for start in range(0, len(limbs), each)]


def numbers_of(metric: str, column: str, values: object) -> Tensor:
    """A column as one number a sample, shape (samples,).

    Raises:
        UsageError: it is not one number a sample, or not of a dtype whose sums are exact.
    """
    whose = f"metric {metric!r} reads the column {column!r}, which"
    if not isinstance(values, Tensor) or values.numel() != len(values):
        has = (
            f"has shape {tuple(values.shape)}"
            if isinstance(values, Tensor)
            else f"is {type(values).__name__}"
        )
        raise UsageError(
            f"{whose} {has}: it takes one number a sample. Make one in observe, as by .mean(1), or a sum and "
            "a count, whose Ratio is the mean over all values"
        )
    if values.dtype not in _KINDS:
        raise UsageError(
            f"{whose} is of {values.dtype}: expected bool, a float type, uint8, or an integer type with a "
            "sign. Cast it, as with .float()"
        )
    return values.reshape(-1)


def finite_of(columns: Sequence[Tensor]) -> tuple[list[Tensor], tuple[int, int, int]]:
    """The samples at which all columns are finite, and how many values are NaN, +inf and -inf."""
    counts = [count_nonfinite(column) for column in columns if column.is_floating_point()]
    nan, pos_inf, neg_inf = (sum(count) for count in zip((0, 0, 0), *counts, strict=True))
    nonfinite = (nan, pos_inf, neg_inf)
    if not any(nonfinite):
        return list(columns), nonfinite
    finite = torch.stack([column.isfinite() for column in columns]).all(dim=0)
    return [column[finite] for column in columns], nonfinite
