"""An evaluation inside a caller's script, whose state is afterwards what it was before.

A training loop continues after an evaluation bit for bit as without it. Therefore the model's modes, hooks,
tensors and gradients, the states of all random generators and torch's settings are put back, also after an
error.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dualeval.engine.model.snapshot import Generators, Snapshot, named_by
from dualeval.engine.values.nests import held_by
from dualeval.tasks import Task

# Levels that are searched for models: attributes and names, what these hold, and what that holds.
_LEVELS = 3
_LOOKED_AT_EACH = 256


@contextmanager
def as_it_was(task: Task) -> Iterator[Snapshot]:
    """Put back at the end what an evaluation of a task may change in the process and in the task's models.

    The models are those inside of the task or of what its ``build_model`` names, and the one that it returns.
    Put back are every module's attributes with its mode, its configs' attributes, its hooks and its parts;
    device, dtype, ``requires_grad`` and ``grad`` of parameters and buffers, and the values of buffers; the
    states of Python's, numpy's and torch's random generators; and grad mode. Attributes get the same objects
    back, but what was written into an object stays. ``numerics.settings`` puts back torch's other settings.
    """
    snapshot = Snapshot()
    for model in _models_of(task):
        snapshot.remember(model)
    generators = Generators()
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            yield snapshot
        snapshot.check()
    finally:
        snapshot.put_back()
        generators.put_back()


def _models_of(task: Task) -> list[nn.Module]:
    """The models that a task may return: in the task, its class, or what its ``build_model`` names.

    A trainer, for instance, has the model as an attribute. A model further down is remembered when it is
    returned.
    """
    level: list[Any] = [
        *vars(task).values(),
        *(value for kind in type(task).__mro__ for value in vars(kind).values()),
        *named_by(inspect.unwrap(task.build_model)),
    ]
    found: dict[int, nn.Module] = {}
    for _ in range(_LEVELS):
        # By type: a proxy answers isinstance for the object that it stands for.
        found |= {id(part): part for part in level if issubclass(type(part), nn.Module)}
        level = [
            value
            for part in level
            if not issubclass(type(part), nn.Module)
            for value in held_by(part, _LOOKED_AT_EACH)
        ]
    return list(found.values())
