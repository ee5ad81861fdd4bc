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

from dualeval.backends.base import Backend
from dualeval.engine.control.plane import ControlPlane
from dualeval.engine.identity.hasher import Hasher
from dualeval.engine.loop.strategy import Strategy, built, moved
from dualeval.engine.model.snapshot import Generators, Snapshot, named_by
from dualeval.engine.values.nests import held_by
from dualeval.result import sha256_of_json
from dualeval.tasks import Task

# Levels that are searched for models: attributes and names, what these hold, and what that holds.
_LEVELS = 3
_LOOKED_AT_EACH = 256


class Guest(Strategy):
    """Of a run in a caller's script: its model loses its wrapper and gets rank 0's buffers meanwhile."""

    @contextmanager
    def lasting(self) -> Iterator[None]:
        with as_it_was(self._task) as self._snapshot:
            yield

    def build(self) -> nn.Module:
        run = self._run
        model = moved(self._snapshot.take(built(self._task.build_model, run)), run.device)
        run.note_all(self._snapshot.share_buffers(model, run.backend, run.control))
        return model


class CallersModels(Snapshot):
    """The state of a caller's models, and what is evaluated of them."""

    def take(self, model: nn.Module) -> nn.Module:
        """The model to evaluate, without its wrappers for training on several processes."""
        self.remember(model)
        model = unwrapped(model)
        # A compiled program is wrapped as a whole, and its parts cannot be exchanged.
        for module in [] if isinstance(model, torch.jit.ScriptModule) else list(model.modules()):
            module._modules.update(
                {name: unwrapped(part) for name, part in module._modules.items() if part is not None}
            )
        return model

    def share_buffers(self, model: nn.Module, backend: Backend, control: ControlPlane) -> list[str]:
        """Give every rank rank 0's buffers, until ``put_back``; a collective.

        In training, each rank's batch norms see only that rank's samples. ``DistributedDataParallel`` sends
        rank 0's buffers to all ranks before its next forward, and a checkpoint has them.

        New tensors replace the model's own buffers. If these were written into, a backward whose forward came
        before would fail.
        """
        if backend.world.size == 1:
            return []
        buffers = dict(model.named_buffers())
        kinds = [[name, str(buffer.dtype), list(buffer.shape)] for name, buffer in buffers.items()]
        digest = Hasher().digest(list(buffers.values())).hex()
        control.meet()
        everyone = backend.all_gather_json([sha256_of_json(kinds), digest])
        # Models of different structure are refused later, with what differs.
        if any(one[0] != everyone[0][0] for one in everyone) or all(one == everyone[0] for one in everyone):
            return []
        rank_0s = {}
        for buffer in buffers.values():
            values = backend.broadcast(buffer.detach().cpu().contiguous(), src=0)
            rank_0s[id(buffer)] = torch.empty_like(buffer.detach()).copy_(values)
        for module in model.modules():
            for name, held in list(module._buffers.items()):
                if held is not None:
                    module._buffers[name] = rank_0s[id(held)]
        return [
            "the ranks have different buffers (running statistics of batch norms, for instance): rank 0's "
            "are evaluated, and every rank gets its own back afterwards"
        ]


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of DistributedDataParallel and DataParallel.

    Even in evaluation mode, the wrapper would broadcast the buffers before each forward.
    """
    while isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        model = model.module
    return model


@contextmanager
def as_it_was(task: Task) -> Iterator[CallersModels]:
    """Put back at the end what an evaluation of a task may change in the process and in the task's models.

    The models are those inside of the task or of what its ``build_model`` names, and the one that it returns.
    Put back are every module's attributes with its mode, its configs' attributes, its hooks and its parts;
    device, dtype, ``requires_grad`` and ``grad`` of parameters and buffers, and the values of buffers; the
    states of Python's, numpy's and torch's random generators; and grad mode. Attributes get the same objects
    back, but what was written into an object stays. ``numerics.settings`` puts back torch's other settings.
    """
    snapshot = CallersModels()
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
    models: dict[int, nn.Module] = {}
    for _ in range(_LEVELS):
        # By type: a proxy answers isinstance for the object that it stands for.
        models |= {id(part): part for part in level if issubclass(type(part), nn.Module)}
        level = [
            value
            for part in level
            if not issubclass(type(part), nn.Module)
            for value in held_by(part, _LOOKED_AT_EACH)
        ]
    return list(models.values())
