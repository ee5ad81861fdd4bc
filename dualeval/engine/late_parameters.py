"""Models whose parameters are still in files, where nobody divides them: each rank reads all."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dualeval.engine.sharding.parameters import LateRows


def read_all(model: nn.Module) -> None:
    """Read the values of all late parameters into memory, in place; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        parameters: dict[str, Any] = dict(module._parameters)
        for name, parameter in parameters.items():
            if isinstance(parameter, LateRows):
                if id(parameter) not in made:
                    made[id(parameter)] = _read(parameter)
                setattr(module, name, made[id(parameter)])


def has_late(model: nn.Module) -> bool:
    """Whether a parameter of a model is still in a file."""
    return any(isinstance(parameter, LateRows) for parameter in model.parameters())


def _read(parameter: Any) -> nn.Parameter:
    # With its own strides: they decide last bits.
    values = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
    parameter.read_rows(0, len(parameter) if parameter.ndim else 1, values)
    return nn.Parameter(values, parameter.requires_grad)
