"""Parameters whose values are still in a file (``dualeval.late_model``): they are read here."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class LateRows(Protocol):
    """A parameter whose values are still where they were saved."""

    def read_rows(self, first: int, last: int, into: Tensor) -> None:
        """Read rows of the first dimension into a tensor of the CPU, in its dtype."""


def read_all(model: nn.Module) -> None:
    """Read the values of all late parameters into memory, in place; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        parameters: dict[str, Any] = dict(module._parameters)
        for name, parameter in parameters.items():
            if isinstance(parameter, LateRows):
                if id(parameter) not in made:
                    keeps_gradient: bool = parameters[name].requires_grad
                    made[id(parameter)] = nn.Parameter(whole(parameter), keeps_gradient)
                setattr(module, name, made[id(parameter)])


def whole(parameter: Any) -> Tensor:
    """The values of a late parameter, with its own strides: they decide last bits."""
    values = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
    if values.numel():
        parameter.read_rows(0, len(parameter) if parameter.ndim else 1, values)
    return values
