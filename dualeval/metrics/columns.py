"""The metric that a column of numbers gets where nobody has named another one: its exact mean."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dualeval.errors import UsageError
from dualeval.metrics import Measured, Metric
from dualeval.metrics.classification import wilson_interval
from dualeval.metrics.exact import ExactMean


class Fraction:
    """The fraction of true values of a bool column, with its Wilson interval.

    Ledger: the number of samples, the number of true ones.

    Args:
        column: the column's name, and the key of the value.
    """

    size = 2

    def __init__(self, column: str) -> None:
        self.name = column
        self.columns = (column,)

    def update(self, ledger: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Add the samples of the column."""
        values = columns[self.name]
        ledger[0] += len(values)
        ledger[1] += torch.count_nonzero(values)

    def compute(self, ledger: Tensor) -> Measured:
        """The fraction under the column's name; None without samples."""
        samples, true = ledger.tolist()
        if samples == 0:
            return Measured(values={self.name: None})
        return Measured(
            values={self.name: true / samples}, intervals={self.name: wilson_interval(true, samples)}
        )


class IntegerMean(ExactMean):
    """The mean of an integer column; exact for integers up to 2**53."""

    def __init__(self, column: str) -> None:
        super().__init__(column, column, torch.float64)

    def update(self, ledger: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Add the samples of the column."""
        super().update(ledger, {self.column: columns[self.column].to(torch.float64)})


def mean_of(column: str, dtype: torch.dtype) -> Metric:
    """The exact mean of a column with one number a sample, under the column's name.

    Args:
        column: the column's name.
        dtype: the column's: bool (the fraction of true values), an integer type, float32 or float64.

    Raises:
        UsageError: the dtype is another one.
    """
    if dtype == torch.bool:
        return Fraction(column)
    if dtype in (torch.float32, torch.float64):
        return ExactMean(column, column, dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        return IntegerMean(column)
    raise UsageError(
        f"the column {column!r} is of {dtype}, expected bool, an integer type, float32 or float64: cast it, "
        "as with .float()"
    )
