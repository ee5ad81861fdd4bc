"""Whose a model is that is to be divided, and how it is given up again."""

from __future__ import annotations

import gc
import inspect
import sys
import traceback
from typing import TYPE_CHECKING, Any

from torch import nn

from dualeval.engine.sharding.detect import is_sharded
from dualeval.errors import UsageError

if TYPE_CHECKING:
    from dualeval.engine.guest import Snapshot
    from dualeval.tasks import Task


def check_owned(task: Task, model: nn.Module, snapshot: Snapshot | None) -> None:
    """Check that a model which is divided was made for this run: it cannot be put back as it was."""
    if is_sharded(model):
        raise UsageError(
            "shard: the model is sharded already, where it is built (fully_shard), and is evaluated as it "
            "is. Leave shard out."
        )
    if snapshot is None:
        return
    named = [value for held in vars(task).values() for value in _named_by(held)]
    if snapshot.knows(model) or any(value is model for value in named):
        raise UsageError(
            f"shard divides the parameters of a model, and this {type(model).__name__} is the script's own: "
            "it would be another one afterwards. Give a function that makes a model of its own, as "
            "model=lambda: make_model(). Or shard it yourself (torch.distributed.fsdp.fully_shard), and "
            "leave shard out."
        )


def _named_by(value: Any) -> list[Any]:
    """What a function's body names outside of it."""
    if not inspect.isfunction(value):
        return []
    named = inspect.getclosurevars(value)
    return [*named.nonlocals.values(), *named.globals.values()]


def release() -> None:
    """Let go of what an evaluation has left in cycles, and in the frames of an error that is under way."""
    error = sys.exc_info()[1]
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()
