"""Parameters whose values are still in files: each rank reads its own part of them, or all."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class LateParameter(Protocol):
    """A parameter whose values are in a file. Any operation on it reads them, and does not keep them."""

    def read_rows(self, first: int, last: int, into: Tensor) -> None:
        """Read some rows, which are indices of the first dimension; one of no dimensions is one row.

        Args:
            first: the first row.
            last: the one behind the last row.
            into: takes the values in its own dtype.

        Raises:
            UsageError: they cannot be read.
        """


def read_all(model: nn.Module) -> None:
    """Read the values of all late parameters into memory, in place; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        parameters: dict[str, Any] = dict(module._parameters)
        for name, parameter in parameters.items():
            if isinstance(parameter, LateParameter):
                if id(parameter) not in made:
                    made[id(parameter)] = _read(parameter)
                setattr(module, name, made[id(parameter)])


def _read(parameter: Any) -> nn.Parameter:
    values = torch.empty(parameter.shape, dtype=parameter.dtype)
    parameter.read_rows(0, len(parameter) if parameter.ndim else 1, values)
    return nn.Parameter(values, parameter.requires_grad)
