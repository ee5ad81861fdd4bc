"""From a task to the model as it is built, the samples, and the prepared model that computes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dualeval.engine.identity.model import ModelIdentity
from dualeval.engine.job.run_state import Run
from dualeval.engine.loop.forward import settle_layout
from dualeval.engine.model.preparation import check_initialized, check_model, prepare
from dualeval.engine.model.snapshot import Snapshot
from dualeval.engine.samples.feed import checked_workers, why_not_forked
from dualeval.engine.samples.samples import as_dataset
from dualeval.engine.samples.subset import drawn
from dualeval.engine.sharding.fsdp import check_torch
from dualeval.engine.sharding.gathers import watching
from dualeval.engine.sharding.lockstep import settle_schedule
from dualeval.engine.sharding.model import ShardedModel, release, return_large_blocks
from dualeval.engine.sharding.parameters import check_device, check_owned, has_late, read_all
from dualeval.errors import UsageError
from dualeval.process.status_line import doing
from dualeval.tasks import Dataset, Task

_MOST_AUTOMATIC_WORKERS = 8
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
    check_device(run.options.offload, run.device)


def check_methods(task: Task) -> None:
    """Check that the methods of a user's task take what they are called with."""
    for name, given in _CALLED_WITH.items():
        # Not the wrapped function's signature: its wrapper may take other arguments.
        signature = inspect.signature(getattr(task, name), follow_wrapped=False)
        try:
            signature.bind(*given)
        except TypeError as error:
            raise UsageError(
                f"{type(task).__name__}.{name}({', '.join(signature.parameters)}) does not accept its "
                f"arguments: {error}. Write def {name}(self, {', '.join(given)})."
            ) from error


@contextmanager
def mesh_of(run: Run) -> Iterator[DeviceMesh | None]:
    """The ranks that a model is divided over, while the context lasts; None if each rank has all of it."""
    if run.options.shard is None:
        yield None
        return
    check_torch()
    if run.device.type == "cpu":
        return_large_blocks()
    with run.backend.mesh() as mesh:
        try:
            yield mesh
        finally:
            # A group that ends before the model that uses it may abort the process.
            release()


@doing("building the model")
def build(task: Task, run: Run, caller: Snapshot | None) -> nn.Module:
    """The task's model on the device. A caller's model loses its wrapper and gets rank 0's buffers.

    A model that will be divided stays where it was built.
    """
    is_divided = run.options.shard is not None
    with run.precision.forward_context(run.device)():
        model = task.build_late(run.device) if is_divided else task.build_model(run.device)
    check_initialized(model)
    if is_divided:
        check_owned(task, model, caller)
        return model
    if caller is None:
        return moved(model, run.device)
    model = moved(caller.take(model), run.device)
    run.note_all(caller.share_buffers(model, run.backend, run.control))
    return model


@doing("setting up the task")
def samples_of(task: Task, run: Run) -> Dataset:
    """The task's samples, or those that the options select; decides how many processes read them."""
    step = partial(run.control.progress.step, "setup")
    dataset = drawn(as_dataset(task.dataset()), run.options, lambda said: run.note_all([said]), step)
    if run.options.workers is None:
        workers = automatic_workers(task, dataset, run.cores, lambda said: run.note_all([said]))
        shown = {"workers": workers} if "workers" in run.job else {}
        run.decide(shown, workers=workers)
    run.workers = checked_workers(run.options)
    return dataset


def automatic_workers(
    task: Task, dataset: Dataset, cores: int, note: Callable[[str], object] = lambda said: None
) -> int:
    """The default number of processes that read for a rank: 0 if reading costs nothing."""
    wanted = task.wants_workers
    if wanted is None:
        wanted = not getattr(dataset, "in_memory", False)
    if wanted and (why := why_not_forked()) is not None:
        note(f"{why}: samples are read in the process that computes, as with --workers 0")
        return 0
    return min(_MOST_AUTOMATIC_WORKERS, cores) if wanted else 0


def identify_and_prepare(
    task: Task, dataset: Dataset, model: nn.Module, run: Run, mesh: DeviceMesh | None, stack: ExitStack
) -> tuple[nn.Module, ModelIdentity]:
    """The model that computes, and the identity of the model as it was built; decides schedule and layout.

    The stack holds the contexts that last as long as the model computes.
    """
    if mesh is not None:
        return _divided(task, dataset, model, run, mesh, stack)
    settle_schedule(model, run)
    around_gather = partial(run.control.progress.inside, "collective")
    identity = ModelIdentity.of(model, around_gather)
    check_model(model, run.options)
    # After the identity: its hooks are no part of the model.
    stack.enter_context(watching(model, run))
    settle_layout(task, dataset, model, run)
    model = prepare(model, run.options, owned=not run.guest, note=lambda said: run.note_all([said]))
    return model, identity


def _divided(
    task: Task, dataset: Dataset, model: nn.Module, run: Run, mesh: DeviceMesh, stack: ExitStack
) -> tuple[nn.Module, ModelIdentity]:
    """Like ``identify_and_prepare``, for a model that is divided over the ranks of a mesh. A collective."""
    if type(task).build_late is Task.build_late and not has_late(model):
        size = sum(parameter.nbytes for parameter in model.parameters())
        run.note_all(
            [
                f"model: each rank has built all of it ({size / 1e6:,.1f} MB) before it keeps its part. "
                "Build it by dualeval.late_model, and each rank reads only its part"
            ]
        )
    sharded = ShardedModel(model, mesh, run)
    check_model(model, run.options)
    settle_layout(task, dataset, model, run)
    model, identity = sharded.filled()
    settle_schedule(model, run)
    stack.enter_context(watching(model, run))
    return model, identity


def moved(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to the device, unless a part is there already: then its author has placed it."""
    read_all(model)
    kinds = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    return model.to(device) if kinds and device.type not in kinds else model
