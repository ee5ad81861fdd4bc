"""Evaluator: evaluates a task, whatever launcher, backend or number of processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dualeval.engine import numerics
from dualeval.engine.context import RunContext, Show
from dualeval.engine.control.plane import ControlPlane
from dualeval.engine.end.watch import Watch
from dualeval.engine.evaluation_mode import set_evaluation_mode
from dualeval.engine.execution import Execution, plan_of
from dualeval.engine.forward import evaluate_all, evaluate_alone, first_columns, with_layout
from dualeval.engine.guest import Snapshot, as_it_was
from dualeval.engine.identity import ModelIdentity, both_readings, task_attributes
from dualeval.engine.late_parameters import has_late, read_all
from dualeval.engine.looks import as_before
from dualeval.engine.options import RunOptions
from dualeval.engine.parts import drawn
from dualeval.engine.preparation import check_model, compiler_settings, prepare
from dualeval.engine.rounds import EvaluatesBatch, evaluate_in_rounds, evaluated_together, with_schedule
from dualeval.engine.samples import as_dataset
from dualeval.engine.sharding.heap import return_large_blocks
from dualeval.engine.sharding.model import ShardedModel
from dualeval.engine.sharding.ownership import check_owned, release
from dualeval.engine.sharding.parameters import check_device
from dualeval.engine.sharding.torch_fsdp import check_torch
from dualeval.errors import UsageError
from dualeval.options.choices import LOCKSTEP
from dualeval.result import Result
from dualeval.tasks import Dataset, Task

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from dualeval.backends.base import Backend

_MOST_AUTOMATIC_WORKERS = 8


class Evaluator:
    """Evaluates one task on the ranks of one backend."""

    def __init__(
        self,
        task: Task,
        backend: Backend,
        control: ControlPlane,
        options: RunOptions,
        *,
        watch: Watch,
        note: Callable[[str], None] = lambda sentence: None,
        job: Mapping[str, Any] | None = None,
        show: Show | None = None,
        started: float | None = None,
        guest: bool = False,
        cores: int = 1,
    ) -> None:
        if isinstance(task, type) and Task in task.__mro__:
            raise UsageError(
                f"{task.__name__} is the class of a task: give an object of it, {task.__name__}(...)"
            )
        if not isinstance(task, Task):
            raise UsageError(
                f"{type(task).__name__} is not a task: expected an object whose class is derived from "
                "dualeval.Task. For your own loop over a data set use session.batches(dataset)."
            )
        numerics.check_precision(options.precision, backend.device)
        check_device(options.offload, backend.device)
        self._task = task
        self._context = RunContext(
            backend=backend,
            control=control,
            options=options,
            watch=watch,
            note=note,
            job=dict(job or {}),
            show=show,
            started=perf_counter() if started is None else started,
            guest=guest,
            cores=cores,
        )

    def _with_workers(self, dataset: Dataset) -> RunContext:
        """The context, with the number of reading processes that was left open."""
        context = self._context
        if context.options.workers is not None:
            return context
        workers = automatic_workers(self._task, dataset, context.cores)
        return replace(
            context,
            options=replace(context.options, workers=workers, fewer_workers=True),
            job={**context.job, "workers": workers} if "workers" in context.job else context.job,
        )

    def run(self) -> Result:
        """Evaluate; every rank calls this and gets the same metrics."""
        context = self._context
        if context.options.shard is None:
            return self._run(None)
        check_torch()
        if context.backend.device.type == "cpu":
            return_large_blocks()
        with context.backend.mesh() as mesh:
            try:
                return self._run(mesh)
            finally:
                # A group that ends before the model that uses it may abort the process.
                release()

    def _run(self, mesh: DeviceMesh | None) -> Result:
        context, device = self._context, self._context.backend.device
        precision = context.options.precision
        threads = torch.get_num_threads()
        with ExitStack() as stack:
            snapshot = stack.enter_context(as_it_was(self._task)) if context.guest else None
            settings = stack.enter_context(numerics.settings(precision, device))
            context.note_all(settings.notes)  # before a forward that misses its default device
            with numerics.autocast(precision, device):
                model = self._build(device)
            if mesh is not None:
                check_owned(self._task, model, snapshot)
            else:
                model = self._taken(model, snapshot)
            mode_notes = set_evaluation_mode(model)
            context.note_all([*self._task.notes()])
            dataset = drawn(
                as_dataset(self._task.dataset()),
                context.options,
                lambda sentence: context.note_all([sentence]),
                lambda: context.control.progress.step("setup"),
            )
            context = self._with_workers(dataset)
            attributes = both_readings(context.backend.world, partial(task_attributes, self._task))
            stack.enter_context(compiler_settings(context.options.optimize))
            if mesh is None:
                ready = self._prepared(model, dataset, context, stack)
            else:
                ready = self._divided(model, dataset, context, stack, mesh)
            model, context, identity = ready
            del ready
            rows = self._task.rows
            if rows is None:
                # One that looks at its columns keeps what its first observe has found.
                keeps = type(self._task).see is not Task.see
                with as_before(model, None if keeps else self._task):
                    first = first_columns(self._task, dataset, model, plan_of(dataset, context), context)
                rows = tuple(self._task.see(first, context.options.metric))
            execution = Execution(
                self._task,
                dataset,
                model,
                context,
                rows,
                threads=threads,
                identity=identity,
                attributes=attributes,
            )
            del identity
            # After all that a task's own code may have set. What this rank says of it is in the result.
            execution.settings_notes += [
                *self._task.data_warnings(),
                *mode_notes,
                *settings.notes,
                *settings.check_after_build(),
            ]
            context.note_all([said for said in execution.settings_notes if said not in settings.notes])
            return self._evaluated(execution, settings)

    def _evaluated(self, execution: Execution, settings: numerics.NumericSettings) -> Result:
        """What an execution comes to, from its first meeting on; an earlier result where all is finished."""
        execution.begin()
        evaluation = execution.evaluation
        in_lockstep = evaluation.context.options.schedule == LOCKSTEP
        stored = execution.stored_batches()
        again: EvaluatesBatch = partial(evaluate_alone, evaluation)
        if in_lockstep:
            again = evaluated_together(evaluation, stored)
        earlier = execution.prove(stored, again)
        if earlier is not None:
            return earlier
        execution.start_loop()
        evaluates = evaluate_in_rounds if in_lockstep else evaluate_all
        execution.settings_notes += evaluates(evaluation, execution.loop, execution.previous, settings)
        return execution.finish()

    def _build(self, device: torch.device) -> nn.Module:
        if self._context.options.shard is None:
            return self._task.build_model(device)
        return self._task.build_late(device)

    def _taken(self, model: nn.Module, snapshot: Snapshot | None) -> nn.Module:
        """The model on the device; of a caller's script without what wraps it, and with rank 0's buffers."""
        context = self._context
        if snapshot is None:
            return moved(model, context.backend.device)
        model = moved(snapshot.take(model), context.backend.device)
        context.note_all(snapshot.share_buffers(model, context.backend, context.control))
        return model

    def _prepared(
        self, model: nn.Module, dataset: Dataset, context: RunContext, stack: ExitStack
    ) -> tuple[nn.Module, RunContext, ModelIdentity]:
        """The model that computes, where the task has built it as it is to be; and its context."""
        context = with_schedule(model, context)
        around_gather = partial(context.control.progress.inside, "collective")
        identity = ModelIdentity.of(model, around_gather, context.backend.world)
        check_model(model, context.options)
        # After the identity: its hooks are no part of the model.
        context = stack.enter_context(context.watching_gathers(model))
        context = with_layout(self._task, dataset, model, plan_of(dataset, context), context)
        model = prepare(
            model,
            context.options,
            context.backend.device,
            owned=not context.guest,
            note=lambda said: context.note_all([said]),
        )
        return model, context, identity

    def _divided(
        self, model: nn.Module, dataset: Dataset, context: RunContext, stack: ExitStack, mesh: DeviceMesh
    ) -> tuple[nn.Module, RunContext, ModelIdentity]:
        """As ``_prepared``, for a model that is divided over the ranks of a mesh. A collective."""
        if type(self._task).build_late is Task.build_late and not has_late(model):
            size = sum(parameter.nbytes for parameter in model.parameters())
            context.note_all(
                [
                    f"model: each rank has built all of it ({size / 1e6:,.1f} MB) before it keeps its part. "
                    "Build it by dualeval.late_model, and each rank reads its part alone"
                ]
            )
        sharded = ShardedModel(model, mesh, context)
        check_model(model, context.options)
        plan = plan_of(dataset, context)
        context = with_layout(self._task, dataset, model, plan, context, sharded.copy_in)
        model = sharded.filled(context.options)
        context = stack.enter_context(with_schedule(model, context).watching_gathers(model))
        return model, context, sharded.identity


def automatic_workers(task: Task, dataset: Dataset, cores: int) -> int:
    """How many processes read for a rank where nobody says it: none where reading costs nothing."""
    wanted = task.wants_workers
    if wanted is None:
        wanted = not getattr(dataset, "in_memory", False)
    return min(_MOST_AUTOMATIC_WORKERS, cores) if wanted else 0


def moved(model: nn.Module, device: torch.device) -> nn.Module:
    """The model on the device; one that has a part there already is left as its author has placed it."""
    read_all(model)
    kinds = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    return model.to(device) if kinds and device.type not in kinds else model
