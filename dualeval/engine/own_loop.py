"""OwnLoop: a loop of the caller's own, counted, saved and resumed as the engine's is."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import nn

from dualeval.columns import Column, to_rows
from dualeval.engine import numerics
from dualeval.engine.agreement import agree
from dualeval.engine.evaluation import Evaluation, evaluation_of, plan_of
from dualeval.engine.feed import FailedSample, checked_workers
from dualeval.engine.finish import finish, let_go
from dualeval.engine.guest import rank_0s_buffers
from dualeval.engine.loop import Loop, compute_alone
from dualeval.engine.opened import open_rows
from dualeval.engine.own_task import LoopKind, LoopTask, check_asked, column_of, named
from dualeval.engine.parts import drawn
from dualeval.engine.preparation import training_note
from dualeval.engine.proving import prove, stored_batches
from dualeval.engine.run_state import Run
from dualeval.engine.samples import Samples, wrap
from dualeval.errors import UsageError
from dualeval.metrics import Metric, RowMetric
from dualeval.options.choices import DYNAMIC
from dualeval.result import Result

_HOST = torch.device("cpu")
_USAGE = "for batch in session.batches(dataset): ...; session.add(batch, loss=losses)"
# The caller's own matter: the loop may be inside of torch.no_grad().
_CALLERS = ("torch.is_grad_enabled()", "torch.get_default_dtype()")

Columns = dict[str, Column]


class OwnLoop:
    """The batches of a caller's own loop, its columns, and the result.

    Every sample is in one batch of one rank. The caller computes each batch that ``batches`` gives, and hands
    its columns to ``add``. The batches are the same at every number of ranks, finished ones are saved in
    ``out``, and a loop that is started again there goes on. While it lasts, numeric settings are those of
    ``dualeval run``: one thread a kernel on a CPU, no TF32 unless asked for, deterministic kernels.

    Before the first batch is counted, each rank computes one, from whose columns all ranks learn what the
    caller adds; and where an earlier run has left finished batches, rank 0 computes two of them anew, which
    must have the same bits.
    """

    def __init__(
        self,
        dataset: Any,
        run: Run,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        metrics: Sequence[Metric | RowMetric] | None = None,
        model: nn.Module | None = None,
    ) -> None:
        check_asked(dataset, run, collate, metrics, model)
        self._run = run
        run.device, run.workers = _HOST, checked_workers(run.options)
        samples = drawn(
            dataset if isinstance(dataset, Samples) else wrap(dataset),
            run.options,
            lambda sentence: run.note_all([sentence]),
            lambda: run.control.progress.step("setup"),
        )
        self._task = LoopTask(samples, collate, metrics, model)
        self._plan = plan_of(self._task.dataset(), run)
        self._batches: Generator[Any, None, None] | None = None
        # Makes the result, once the loop is through.
        self._finish: Callable[[], Result]
        self._in_hand: tuple[Any, range] | None = None
        self._added: Columns | None = None
        self._first: tuple[int, Columns] | None = None
        self._done = 0
        self._samples_of_rank = 0
        self._is_through = False
        self._result: Result | None = None

    def batches(self) -> Generator[Any, None, None]:
        """This rank's batches, as ``collate`` made them, on the CPU."""
        if self._batches is not None:
            raise UsageError("the batches of this loop were already requested: one loop gives one result")
        self._batches = self._steps()
        return self._batches

    def add(self, batch: Any, **columns: Any) -> None:
        """Take the columns of the batch in hand, as ``Session.add`` was given them."""
        if self._in_hand is None:
            raise UsageError(f"add was called without a current batch: {_USAGE}")
        given, samples = self._in_hand
        if self._added is not None:
            raise UsageError(f"the batch of {named(samples)} was added before: add each batch once")
        if not any(batch is part for part in _parts(given)):
            raise UsageError(
                f"add was given a {type(batch).__name__} that is not the current batch, of "
                f"{named(samples)}: give the loop's last batch, or a part of it, unchanged: {_USAGE}"
            )
        if not columns:
            raise UsageError(f"add was given no column for the batch of {named(samples)}: {_USAGE}")
        added = {name: column_of(name, values, samples) for name, values in columns.items()}
        names = self._task.kinds or added
        if list(names) != list(added) and set(names) != set(added):
            raise UsageError(
                f"the batch of {named(samples)} was added with the columns {', '.join(added)}, and others "
                f"with {', '.join(names)}: add the same columns for each batch"
            )
        self._added = {name: added[name] for name in names}

    def result(self) -> Result:
        """The result of all ranks' batches; a collective."""
        if self._result is None:
            if self._batches is None:
                raise UsageError(f"there is no result without a loop: {_USAGE}")
            if not self._is_through:
                self._batches.close()
                count = self._samples_of_rank or self._plan.num_samples
                raise UsageError(
                    f"the loop was left before its end: {count - self._done} of the {count} samples of this "
                    "rank are missing. Let the loop come to its end (no break) before you call result()."
                )
            with numerics.settings(self._run.options.precision, self._run.backend.device):
                self._result = self._finish()
        return self._result

    def close(self) -> None:
        """End the loop where it is, with what was added saved."""
        if self._batches is not None:
            self._batches.close()

    def _steps(self) -> Generator[Any, None, None]:
        run, task = self._run, self._task
        with (
            numerics.settings(run.options.precision, run.backend.device, leave=_CALLERS) as settings,
            rank_0s_buffers(task.given_model, run),
        ):
            task.compare_samples(run)
            run.note_all([*settings.notes, *training_note(task.model)])
            yield from self._learn_columns()
            evaluation = evaluation_of(task, task.dataset(), task.model, run, task.rows)
            run.note_all([*evaluation.warnings, *(task.unknown() if run.options.out is not None else [])])
            opened = open_rows(evaluation, agree(evaluation))
            stored = stored_batches(evaluation, opened)
            again = {}
            for samples in [batch.samples for batch in stored]:
                columns, failed = yield from self._compute_alone(evaluation, samples)
                found = evaluation.with_data(columns, samples) if columns else columns
                again[samples] = {name: to_rows(column) for name, column in found.items()}, failed
            proven = prove(evaluation, opened, stored, again.__getitem__)
            self._result = proven.earlier
            if self._result is not None:
                let_go(evaluation, opened)
            else:
                loop = Loop(evaluation, opened)
                yield from self._counted(loop)
                notes = [*evaluation.warnings, *settings.notes, *settings.check_after_loop()]
                self._finish = partial(finish, evaluation, opened, loop, proven, notes)
            self._is_through = True
            # What the caller does until it asks for the result is no part of the run.
            run.control.progress.step("idle")

    def _counted(self, loop: Loop) -> Generator[Any, None, None]:
        """Hand out this rank's batches, and count what is added of each."""
        world, dynamic = self._run.backend.world, self._run.options.schedule == DYNAMIC
        mine = loop.remaining if dynamic else loop.remaining[world.rank :: world.size]
        self._samples_of_rank = self._plan.samples_in(mine)
        compute_s = 0.0
        with loop.running():
            for work, data in loop.read():
                columns: Columns | None = None
                if self._first is not None and self._first[0] == work.batch and data is not None:
                    columns, self._first = self._first[1], None
                elif data is not None:
                    start = perf_counter()
                    try:
                        columns = yield from self._hand_out(data, work.samples)
                    except GeneratorExit:
                        # What was added before the caller left is a finished batch.
                        if (columns := self._take_added()) is not None:
                            loop.count(work, columns)
                            self._done += len(work.samples)
                        raise
                    compute_s += perf_counter() - start
                loop.count(work, columns)
                self._done += len(work.samples)
        loop.times["compute"] = compute_s

    def _learn_columns(self) -> Generator[Any, None, None]:
        """Have this rank's first batch computed, and agree with the other ranks on the columns."""
        run, world, task = self._run, self._run.backend.world, self._task
        reading = Evaluation(task=task, dataset=task.dataset(), model=task.model, plan=self._plan, run=run)
        own: Columns = {}
        for chunk in self._plan.static_chunks(world.rank, world.size):
            batch = self._plan.chunk_batches(chunk)[0]
            own, failed = yield from self._compute_alone(reading, self._plan.batch_samples(batch))
            if own:
                # Where a sample could not be read, the loop may find that it can.
                self._first = None if failed else (batch, own)
                break
        kinds = [LoopKind.of(column).plain(name) for name, column in own.items()]
        run.control.meet()
        everyone = run.backend.all_gather_json(kinds)
        task.learn(everyone)
        if self._first is not None:
            self._first = self._first[0], {name: own[name] for name in self._task.kinds}

    def _compute_alone(
        self, evaluation: Evaluation, samples: range
    ) -> Generator[Any, None, tuple[Columns, tuple[FailedSample, ...]]]:
        """Read one batch by itself and have it computed; without columns where no sample could be read."""
        handed_out, failed = compute_alone(evaluation, samples, self._hand_out)
        if handed_out is None:
            return {}, failed
        self._run.control.progress.step("forward")
        columns = yield from handed_out
        self._run.control.progress.step("setup")
        return columns, failed

    def _hand_out(self, data: Any, samples: range) -> Generator[Any, None, Columns]:
        self._in_hand, self._added = (data, samples), None
        yield data
        added = self._take_added()
        if added is None:
            raise UsageError(
                f"the batch of {named(samples)} was not added: call add(batch, ...) for every batch, before "
                f"the next one: {_USAGE}"
            )
        return added

    def _take_added(self) -> Columns | None:
        added, self._in_hand, self._added = self._added, None, None
        return added


def _parts(batch: Any) -> list[Any]:
    """A batch and what it is made of: a loop may unpack it at once."""
    if isinstance(batch, Mapping):
        return [batch, *batch.values()]
    return [batch, *batch] if isinstance(batch, list | tuple) else [batch]
