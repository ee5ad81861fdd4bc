"""Which strategy a run has: the plain one, or one that is imported where options or the caller ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch import nn

from dualeval.engine.device.accelerator import accelerator_of
from dualeval.engine.device.divided import check_sharded, is_sharded
from dualeval.engine.job.run_state import Run
from dualeval.engine.loop.strategy import Strategy
from dualeval.options.choices import LOCKSTEP
from dualeval.tasks import Task


@contextmanager
def strategy_of(task: Task, run: Run) -> Iterator[Strategy]:
    """The strategy that options and caller ask for, as long as the run lasts."""
    kind = Strategy
    if run.options.shard is not None:
        from dualeval.engine.sharding.sharded import Sharded as kind
    elif run.guest:
        from dualeval.engine.guest import Guest as kind
    strategy = kind(task, run)
    # A caller's current GPU may be another, as GPU 0 is on all ranks: its code may say "cuda" for the device.
    current = accelerator_of(run.device).as_current() if run.guest else nullcontext()
    with current, strategy.lasting():
        yield strategy


def strategy_for(model: nn.Module, strategy: Strategy, task: Task, run: Run) -> Strategy:
    """The strategy for a model as it was built: its own forward may take all ranks."""
    if run.options.shard is not None:
        return strategy
    check_sharded(model, run.backend.world)
    if run.options.schedule != LOCKSTEP and not is_sharded(model):
        return strategy
    from dualeval.engine.sharding.lockstep import Lockstep

    return Lockstep(task, run)
