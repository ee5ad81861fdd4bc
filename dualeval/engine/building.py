"""What a run is given, before anything is built: a task, checked, its samples, and its strategy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

from torch import nn

from dualeval.engine.control.progress import Stage
from dualeval.engine.device.accelerator import accelerator_of
from dualeval.engine.device.divided import check_sharded, is_sharded
from dualeval.engine.job.run_state import Run
from dualeval.engine.loop.strategy import Strategy
from dualeval.engine.samples.feed import checked_workers, why_not_forked
from dualeval.engine.samples.samples import as_dataset
from dualeval.engine.samples.subset import drawn
from dualeval.errors import UsageError
from dualeval.options.choices import LOCKSTEP
from dualeval.options.evaluation import readers_of
from dualeval.process.status_line import doing
from dualeval.tasks import Dataset, Task

# Methods that every task has, and the arguments that they are called with.
_CALLED_WITH = {"build_model": ("device",), "forward": ("model", "batch"), "observe": ("outputs", "batch")}


def check(task: Task, run: Run) -> None:
    """Check what can be checked before anything is built."""
    if isinstance(task, type) and Task in task.__mro__:
        raise UsageError(
            f"{task.__name__} is the class of a task: give an object of it, {task.__name__}(...)"
        )
    if not isinstance(task, Task):
        raise UsageError(
            f"{type(task).__name__} is not a task: expected an object whose class is derived from "
            "dualeval.Task. For your own loop over a data set use session.batches(dataset)."
        )
    check_methods(task)
    run.precision.check(run.device)
    if run.options.offload and run.device.type == "cpu":
        raise UsageError(
            "offload keeps a rank's part of the model in host memory, and this run computes there (device "
            "cpu). Leave offload out."
        )


def check_methods(task: Task) -> None:
    """Check that the methods of a user's task take what they are called with."""
    for name, arguments in _CALLED_WITH.items():
        # Not the wrapped function's signature: its wrapper may take other arguments.
        signature = inspect.signature(getattr(task, name), follow_wrapped=False)
        try:
            signature.bind(*arguments)
        except TypeError as error:
            raise UsageError(
                f"{type(task).__name__}.{name}({', '.join(signature.parameters)}) does not accept its "
                f"arguments: {error}. Write def {name}(self, {', '.join(arguments)})."
            ) from error


@doing("setting up the task")
def samples_of(task: Task, run: Run) -> Dataset:
    """The task's samples, or those that the options select; decides how many processes read them."""
    step = partial(run.control.progress.step, Stage.SETUP)
    dataset = drawn(as_dataset(task.dataset()), run.options, lambda text: run.note_all([text]), step)
    if run.options.workers is None:
        workers = automatic_workers(
            task, dataset, run.cores, run.device.type, lambda text: run.note_all([text])
        )
        shown = {"workers": workers} if "workers" in run.job else {}
        run.decide(shown, workers=workers)
    run.workers = checked_workers(run.options)
    return dataset


def automatic_workers(
    task: Task, dataset: Dataset, cores: int, device: str, note: Callable[[str], object] = lambda text: None
) -> int:
    """The default number of processes that read for a rank: 0 if reading costs nothing."""
    wanted = task.wants_workers
    if wanted is None:
        wanted = not getattr(dataset, "in_memory", False)
    if wanted and (why := why_not_forked()) is not None:
        note(f"{why}: samples are read in the process that computes, as with --workers 0")
        return 0
    return readers_of(cores, device) if wanted else 0


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
