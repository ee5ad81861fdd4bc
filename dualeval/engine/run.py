"""A run, from its task to its result: the same steps on every rank, whatever launcher or backend.

Read ``evaluate`` from top to bottom. Each step is a room of its own; what a step decides, the ``Run`` keeps.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from dualeval.engine import numerics
from dualeval.engine.agreement import agree
from dualeval.engine.building import build, check, mesh_of, prepared, samples_of
from dualeval.engine.evaluation import evaluation_of
from dualeval.engine.evaluation_mode import set_evaluation_mode
from dualeval.engine.finish import finish, let_go
from dualeval.engine.forward import evaluate_all, evaluate_alone, first_columns
from dualeval.engine.guest import as_it_was
from dualeval.engine.identity import both_readings, task_attributes
from dualeval.engine.looks import as_before
from dualeval.engine.loop import Loop
from dualeval.engine.opened import open_rows
from dualeval.engine.preparation import compiler_settings
from dualeval.engine.proving import prove, stored_batches
from dualeval.engine.rounds import evaluate_in_rounds, evaluated_together
from dualeval.engine.run_state import Run
from dualeval.options.choices import LOCKSTEP
from dualeval.result import Result
from dualeval.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from dualeval.tasks import Dataset


def evaluate(task: Task, run: Run) -> Result:
    """Evaluate a task; every rank calls this and gets the same metrics."""
    check(task, run)
    with mesh_of(run) as mesh:
        return _evaluate(task, run, mesh)


def _evaluate(task: Task, run: Run, mesh: DeviceMesh | None) -> Result:
    with ExitStack() as stack:
        # The process: what the caller has is put back at the end, and the settings are those of every rank.
        before = stack.enter_context(as_it_was(task)) if run.guest else None
        settings = stack.enter_context(numerics.settings(run.options.precision, run.device))
        run.note_all(settings.notes)  # before a forward that misses its default device

        # What is evaluated: model and samples, as they were given.
        model = build(task, run, before)
        mode_notes = set_evaluation_mode(model)
        run.note_all(task.notes())
        dataset = samples_of(task, run)
        attributes = both_readings(run.backend.world, partial(task_attributes, task))

        # The model that computes: its identity is that of the model before.
        stack.enter_context(compiler_settings(run.options.optimize))
        model, identity = prepared(task, dataset, model, run, mesh, stack)
        evaluation = evaluation_of(task, dataset, model, run, _rows(task, dataset, model, run))
        own = [*evaluation.warnings, *task.data_warnings(), *mode_notes]
        changed = settings.check_after_build()  # after all that a task's own code may have set
        run.note_all([*own, *changed])

        # All ranks agree on the job, and open what earlier runs have left of it.
        facts = agree(evaluation, identity, attributes)
        del identity  # holds the model's tensors as they were built
        opened = open_rows(evaluation, facts)

        # What is finished must be what this job gives now.
        together = run.options.schedule == LOCKSTEP
        stored = stored_batches(evaluation, opened)
        again = evaluated_together(evaluation, stored) if together else partial(evaluate_alone, evaluation)
        proven = prove(evaluation, opened, stored, again)
        if proven.earlier is not None:
            let_go(evaluation, opened)
            return proven.earlier

        # Read, compute, count; then sum, check, write.
        loop = Loop(evaluation, opened)
        compute = evaluate_in_rounds if together else evaluate_all
        changed_in_loop = compute(evaluation, loop, settings)
        notes = [*own, *settings.notes, *changed, *changed_in_loop]
        return finish(evaluation, opened, loop, proven, notes)


def _rows(task: Task, dataset: Dataset, model: nn.Module, run: Run) -> Sequence[str]:
    """The names of a task's columns: what it makes of its first samples, where it does not say them."""
    if task.rows is not None:
        return task.rows
    # One that looks at its columns keeps what its first observe has found.
    keeps = type(task).see is not Task.see
    with as_before(model, None if keeps else task):
        first = first_columns(task, dataset, model, run)
    return tuple(task.see(first, run.options.metric))
