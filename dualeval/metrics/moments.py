"""Exact sums of columns and of their products, as slots of a ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dualeval.errors import UsageError
from dualeval.metrics.exact import (
    DOUBLE_CUBE_LIMBS,
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
    """What ``Moments`` hold."""

    # The number of samples, and others of the metric's own.
    counts: tuple[int, ...]
    # How many values were NaN, +inf and -inf; their samples are in no sum.
    nonfinite: tuple[int, ...]
    # In units of 2**-1074.
    sums: tuple[int, ...]
    # Sums of products of two columns, in units of 2**-2148.
    products: tuple[int, ...]
    # Sums of products of three columns, in units of 2**-3222.
    cubes: tuple[int, ...]


class Moments:
    """A number of counts, and of sums of one, two and three factors, which merge by adding their ledgers.

    Wide enough for any float64, so that the ledger's size does not depend on what a column holds: 67 slots a
    sum, 133 a sum of products of two, 198 one of three.
    """

    def __init__(self, *, counts: int, sums: int, products: int, cubes: int) -> None:
        self._counts = counts
        self._limbs = [
            *[DOUBLE_SUM_LIMBS] * sums,
            *[DOUBLE_PRODUCT_LIMBS] * products,
            *[DOUBLE_CUBE_LIMBS] * cubes,
        ]
        self._kinds = (sums, sums + products)
        self._lengths = [counts, len(NONFINITE_KINDS), *self._limbs]
        self.size = sum(self._lengths)

    def add(self, ledger: Tensor, added: Sums) -> None:
        """Add to the ledger, in place."""
        counts, nonfinite, *before = torch.split(ledger, self._lengths)
        counts += torch.tensor(added.counts, dtype=torch.int64)
        nonfinite += torch.tensor(added.nonfinite, dtype=torch.int64)
        new = (*added.sums, *added.products, *added.cubes)
        for slots, limbs, number in zip(before, self._limbs, new, strict=True):
            mapped = slots.numpy()
            mapped[:] = to_limbs(from_limbs(mapped) + number, limbs)

    def read(self, ledger: Tensor) -> Sums:
        """What is in the ledger."""
        counts, nonfinite, *limbs = torch.split(ledger, self._lengths)
        numbers = tuple(from_limbs(slots.numpy()) for slots in limbs)
        sums, products = self._kinds
        return Sums(
            counts=tuple(counts.tolist()),
            nonfinite=tuple(nonfinite.tolist()),
            sums=numbers[:sums],
            products=numbers[sums:products],
            cubes=numbers[products:],
        )


def numbers_of(metric: str, column: str, values: object) -> Tensor:
    """A column as one number a sample, shape (samples,)."""
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
