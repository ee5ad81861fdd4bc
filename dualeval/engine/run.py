"""A run, from its task to its result: the same steps on every rank, whatever launcher or backend.

Read ``evaluate`` from top to bottom. Each step is a room of its own; what a step decides, the ``Run`` keeps.
What differs where the model is a caller's, is divided or computes in lockstep, is a ``Strategy``'s.

Where to look: a batch is counted in ``engine/folder/recorder.py``, a killed rank is named in
``engine/control/ending.py``; ``--precision`` acts where ``options/precision.py`` says; the prefix of a
checkpoint's names goes in ``models/prefixes.py``; the page gets its pictures in ``report/page/content.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext

from torch import nn

from dualeval.engine.building import check, samples_of, strategy_for, strategy_of
from dualeval.engine.checks.repeatability import as_before
from dualeval.engine.checks.replay import prove, stored_batches
from dualeval.engine.device import numerics
from dualeval.engine.finish import finish, finish_share, let_go
from dualeval.engine.identity.job import task_attributes
from dualeval.engine.job.agreement import agree
from dualeval.engine.job.evaluation import evaluation_of
from dualeval.engine.job.opened import open_rows
from dualeval.engine.job.run_state import Run
from dualeval.engine.loop.forward import first_columns
from dualeval.engine.loop.loop import Loop
from dualeval.engine.loop.strategy import Strategy
from dualeval.engine.model.preparation import compiler_settings, set_evaluation_mode
from dualeval.process.status_line import doing
from dualeval.result import Result
from dualeval.tasks import Dataset, Task


def evaluate(task: Task, run: Run) -> Result:
    """Evaluate a task; every rank calls this and gets the same metrics."""
    check(task, run)
    with strategy_of(task, run) as strategy:
        # A function of its own: a model that is divided is gone before the ranks' mesh ends.
        result = _evaluate(task, run, strategy)
    assert result is not None
    return result


def evaluate_share(task: Task, run: Run) -> None:
    """Evaluate the chunks of the run's share, which has no result of its own; every rank calls this."""
    check(task, run)
    with strategy_of(task, run) as strategy:
        _evaluate(task, run, strategy)


def try_out(task: Task, run: Run) -> None:
    """Do all that ``evaluate`` does before it opens a folder: what cannot be evaluated is refused."""
    check(task, run)
    with strategy_of(task, run) as strategy:
        _evaluate(task, run, strategy, is_dry=True)


def _evaluate(task: Task, run: Run, strategy: Strategy, *, is_dry: bool = False) -> Result | None:
    # A step that changes something for as long as the run lasts enters the stack. One that has something for
    # people to read calls ``note_all``; what the result has to say, too, is joined to the warnings as well.
    with ExitStack() as stack:
        stack.enter_context(doing("preparing the evaluation"))  # ends with the first batch
        # The process: torch's numeric settings are put back at the end.
        stack.enter_context(numerics.without_autocast(run.device))
        settings = stack.enter_context(numerics.settings(run.precision, run.device))
        # At once: a forward that fails as its default device is another one is understood by them.
        run.note_all(settings.notes)

        # What is evaluated: model and samples, as the task gives them.
        with doing("building the model"):
            model = strategy.build()
        mode_warnings = set_evaluation_mode(model)
        run.note_all(task.notes())
        dataset = samples_of(task, run)
        # Of the task before its first batch, which may change it: for the identity, below.
        attributes = task_attributes(task)

        # The model is identified as it was built; then it is folded, cast, laid out, compiled, or divided.
        stack.enter_context(compiler_settings(run.options.optimize))
        strategy = strategy_for(model, strategy, task, run)  # a forward that takes all ranks is the model's
        model, identity = strategy.prepare(dataset, model, stack)
        evaluation = evaluation_of(task, dataset, model, run, _rows(task, dataset, model, run))
        # Once for all: pictures are opened for them.
        of_data = task.data_warnings() if run.backend.world.is_main else ()
        warnings = [*evaluation.warnings, *of_data, *mode_warnings]
        # The task's own code has run: it may have set torch's settings, which are set again.
        changed = settings.check_after_build()
        run.note_all([*warnings, *changed])

        # All ranks agree on the job, and open what earlier runs have left of it.
        facts = agree(evaluation, identity, attributes)
        del identity  # holds the model's tensors as they were built
        if is_dry:
            return None
        # ``finish`` and ``let_go`` close it; where a step raises, the end of the session does (engine/end/).
        opened = open_rows(evaluation, facts)
        if run.share is not None and opened.folder is None:
            run.note_all([f"share {run.share} is done: the result of all shares is in {run.options.path}"])
            return None

        # What is finished must be what this job gives now.
        stored = stored_batches(evaluation, opened)
        # Put back behind all of them: what a second forward gives otherwise shows a model that is unsteady.
        with as_before(model, task) if opened.has_earlier else nullcontext():
            proven = prove(evaluation, opened, stored, strategy.evaluate_again(evaluation, stored))
        if proven.earlier is not None:  # an earlier run's result: nothing remains
            let_go(evaluation, opened)
            return proven.earlier

        # The loop of what remains: read, compute, count. Then sum over the ranks, check, write.
        loop = Loop(evaluation, opened)
        changed_in_loop = strategy.evaluate_remaining(evaluation, loop, settings)
        warnings += [*settings.notes, *changed, *changed_in_loop]
        if run.share is not None:
            finish_share(evaluation, opened, loop, warnings)
            return None
        return finish(evaluation, opened, loop, proven, warnings)


def _rows(task: Task, dataset: Dataset, model: nn.Module, run: Run) -> Sequence[str]:
    """The names of a task's columns; where it names none, a forward of its first samples shows them."""
    if task.rows is not None:
        return task.rows
    return tuple(task.see(first_columns(task, dataset, model, run), run.options.metric))
