"""A caller's own loop: counted, saved and resumed like the engine's; for the engine it is a task."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from dualeval.columns.ragged import (
    Column,
    Ragged,
    as_column,
    host_columns,
    kind_of,
    of_parts,
    parts_of,
    refuse_masked,
    to_rows,
)
from dualeval.engine.checks.replay import prove, stored_batches
from dualeval.engine.control.progress import Stage
from dualeval.engine.device import numerics
from dualeval.engine.device.divided import is_sharded
from dualeval.engine.finish import finish, let_go
from dualeval.engine.guest import CallersModels, unwrapped
from dualeval.engine.job.agreement import agree
from dualeval.engine.job.evaluation import Evaluation, compute_alone, evaluation_of, plan_of
from dualeval.engine.job.opened import open_rows
from dualeval.engine.job.run_state import Run
from dualeval.engine.loop.loop import Loop
from dualeval.engine.model.preparation import check_initialized, training_note
from dualeval.engine.samples.feed import FailedSample, checked_workers
from dualeval.engine.samples.samples import Samples, check_samples, wrap
from dualeval.engine.samples.subset import drawn
from dualeval.engine.values.options import RunOptions
from dualeval.errors import DualevalError, UsageError
from dualeval.metrics import Metric, RowMetric
from dualeval.metrics.by_name import as_metrics
from dualeval.metrics.means import Mean
from dualeval.options.choices import AUTO, DYNAMIC, LOCKSTEP, check_kind
from dualeval.options.precision import PRECISIONS
from dualeval.result import Result, TimedStage
from dualeval.tasks import Dataset, Task

_HOST = torch.device("cpu")
_USAGE = "for batch in session.batches(dataset): ...; session.add(batch, loss=losses)"
# Left to the caller: the loop may be inside of torch.no_grad().
_CALLERS = ("torch.is_grad_enabled()", "torch.get_default_dtype()")

Columns = dict[str, Column]
_HALF = (torch.float16, torch.bfloat16)


class OwnLoop:
    """The batches of a caller's own loop, its columns, and the result.

    Every sample is in one batch of one rank. The caller computes each batch of ``batches``, and passes its
    columns to ``add``. The batches are the same at every number of ranks. Finished ones are saved in ``out``,
    and a loop that is started again there resumes. During the loop, numeric settings are those of ``dualeval
    run``: one thread a kernel on a CPU, no TF32 unless asked for, deterministic kernels.

    Before the first batch is counted, each rank computes one, and its columns show all ranks what the caller
    adds. If an earlier run has left finished batches, rank 0 computes two of them again, which must give the
    same bits.
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
        _check_asked(dataset, run, collate, metrics, model)
        self._run = run
        run.device, run.workers = _HOST, checked_workers(run.options)
        samples = drawn(
            dataset if isinstance(dataset, Samples) else wrap(dataset),
            run.options,
            lambda sentence: run.note_all([sentence]),
            lambda: run.control.progress.step(Stage.SETUP),
        )
        self._task = LoopTask(samples, collate, metrics, model)
        self._plan = plan_of(self._task.dataset(), run)
        self._batches: Generator[Any, None, None] | None = None
        # Makes the result after the loop.
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
        """Take the columns of the current batch, as passed to ``Session.add``."""
        if self._in_hand is None:
            raise UsageError(f"add was called without a current batch: {_USAGE}")
        current, samples = self._in_hand
        if self._added is not None:
            raise UsageError(f"the batch of {named(samples)} was added before: add each batch once")
        if not any(batch is part for part in _parts(current)):
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
                    "rank are missing. Let the loop finish (no break) before you call result()."
                )
            with numerics.settings(self._run.precision, self._run.backend.device):
                self._result = self._finish()
        return self._result

    def close(self) -> None:
        """End the loop here; the columns added so far are saved."""
        if self._batches is not None:
            self._batches.close()

    def _steps(self) -> Generator[Any, None, None]:
        run, task = self._run, self._task
        with (
            numerics.settings(run.precision, run.backend.device, leave=_CALLERS) as settings,
            rank_0s_buffers(task.given_model, run),
        ):
            run.note_all([*settings.notes, *training_note(task.model)])
            yield from self._learn_columns()
            evaluation = evaluation_of(task, task.dataset(), task.model, run, task.rows)
            run.note_all([*evaluation.warnings, *(task.unknown() if run.options.out is not None else [])])
            opened = open_rows(evaluation, agree(evaluation))
            stored = stored_batches(evaluation, opened)
            again = {}
            for samples in [batch.samples for batch in stored]:
                columns, failed = yield from self._compute_alone(evaluation, samples)
                all_columns = evaluation.with_data(columns, samples) if columns else columns
                again[samples] = {name: to_rows(column) for name, column in all_columns.items()}, failed
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
            # The run does not include what the caller does before it asks for the result.
            run.control.progress.step(Stage.IDLE)

    def _counted(self, loop: Loop) -> Generator[Any, None, None]:
        """Hand out this rank's batches, and count the columns added for each."""
        world, dynamic = self._run.backend.world, self._run.options.schedule == DYNAMIC
        mine = loop.remaining if dynamic else loop.remaining[world.rank :: world.size]
        self._samples_of_rank = self._plan.samples_in(mine)
        compute_s = 0.0
        with loop.running():
            for handed, data in loop.read():
                columns: Columns | None = None
                if self._first is not None and self._first[0] == handed.batch and data is not None:
                    columns, self._first = self._first[1], None
                elif data is not None:
                    start = perf_counter()
                    try:
                        columns = yield from self._hand_out(data, handed.samples)
                    except GeneratorExit:
                        # A batch that was added before the caller left the loop is finished.
                        if (columns := self._take_added()) is not None:
                            loop.count(handed, columns)
                            self._done += len(handed.samples)
                        raise
                    compute_s += perf_counter() - start
                loop.count(handed, columns)
                self._done += len(handed.samples)
        loop.times[TimedStage.COMPUTE] = compute_s

    def _learn_columns(self) -> Generator[Any, None, None]:
        """Have this rank's first batch computed, and agree with the other ranks on the columns."""
        run, world, task = self._run, self._run.backend.world, self._task
        reading = Evaluation(task=task, dataset=task.dataset(), model=task.model, plan=self._plan, run=run)
        columns: Columns = {}
        for chunk in self._plan.static_chunks(world.rank, world.size):
            batch = self._plan.chunk_batches(chunk)[0]
            columns, failed = yield from self._compute_alone(reading, self._plan.batch_samples(batch))
            if columns:
                # After a failed sample the batch is not reused: the loop may be able to read it.
                self._first = None if failed else (batch, columns)
                break
        kinds = {name: _kind_for_all(column) for name, column in columns.items()}
        run.control.meet()
        everyone = run.backend.all_gather_json(kinds)
        task.learn(everyone)
        if self._first is not None:
            self._first = self._first[0], {name: columns[name] for name in self._task.kinds}

    def _compute_alone(
        self, evaluation: Evaluation, samples: range
    ) -> Generator[Any, None, tuple[Columns, tuple[FailedSample, ...]]]:
        """Read one batch by itself and have it computed; without columns if no sample could be read."""
        handed_out, failed = compute_alone(evaluation, samples, self._hand_out)
        if handed_out is None:
            return {}, failed
        self._run.control.progress.step(Stage.FORWARD)
        columns = yield from handed_out
        self._run.control.progress.step(Stage.SETUP)
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
    """A batch and its parts: the loop may have unpacked it."""
    if isinstance(batch, Mapping):
        return [batch, *batch.values()]
    return [batch, *batch] if isinstance(batch, list | tuple) else [batch]


class LoopTask(Task):
    """A caller's own loop as a task, as far as it can be one."""

    name = "loop"
    wants_workers = False

    def __init__(
        self,
        dataset: Dataset,
        collate: Callable[[list[Any]], Any] | None,
        metrics: Sequence[Metric | RowMetric] | None,
        model: nn.Module | None,
    ) -> None:
        assert isinstance(dataset, Samples)
        self._samples = dataset
        self._collate = collate
        self._given = metrics
        self._metrics: list[Metric | RowMetric] = []
        # As given: it may be wrapped for training on several processes.
        self.given_model = model
        # The unwrapped model; an empty module if none was given.
        self.model = nn.Module().eval() if model is None else unwrapped(model)
        # The ``_kind_for_all`` of each column; known after the first batch.
        self.kinds: dict[str, list[Any]] = {}

    def learn(self, everyone: Sequence[dict[str, list[Any]]]) -> None:
        """Learn the columns' kinds from all ranks'; a rank that could read nothing has none."""
        known = [(rank, kinds) for rank, kinds in enumerate(everyone) if kinds]
        if not known:
            raise UsageError("no sample could be read in the first batch of any chunk")
        first_rank, first = known[0]
        for rank, others in known:
            if others != first:
                raise UsageError(
                    f"rank {rank} has added other columns than rank {first_rank} ({_kinds_listed(others)}; "
                    f"{_kinds_listed(first)}): add the same columns, of the same dtype, on every rank"
                )
        self.kinds = first
        self._make_metrics()

    def _make_metrics(self) -> None:
        """Make the metrics of the columns that are known now."""
        metrics = self._given
        if metrics is not None:
            self._metrics = as_metrics(metrics)
            return
        for name, (_, dimensions, *form) in self.kinds.items():
            if form:
                continue  # kept in predictions.parquet
            if dimensions != 1:
                raise UsageError(
                    f"the column {name!r} has {dimensions} dimensions, and a mean takes one number per "
                    "sample. Add one, or give the metrics that read it: batches(..., metrics=[...])"
                )
            self._metrics.append(Mean(name))
        if not self._metrics:
            raise UsageError(
                f"the columns {', '.join(self.kinds)} are ragged or text and have no mean. Add a column with "
                "one number per sample, or give the metrics that read them: batches(..., metrics=[...])"
            )

    @property
    def rows(self) -> tuple[str, ...]:
        return tuple(self.kinds)

    def dataset(self) -> Samples:
        return self._samples

    def collate(self, samples: Any) -> Any:
        return (self._collate or default_collate)(samples)

    def build_model(self, device: torch.device) -> nn.Module:
        return self.model

    def forward(self, model: nn.Module, batch: Any) -> Any:
        raise DualevalError("the caller's own loop computes its batches")

    def observe(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        raise DualevalError("the caller's own loop computes its batches")

    def metrics(self) -> Sequence[Metric | RowMetric]:
        return self._metrics

    def sources(self) -> Sequence[Any]:
        return () if self._collate is None else (self._collate,)

    def fingerprint(self) -> dict[str, Any]:
        return {"columns": self.kinds}

    def unknown(self) -> list[str]:
        """A warning about changes that a later run in the same folder cannot detect."""
        unknown = ["the loop's own source"]
        unknown += [] if self.given_model is not None else ["the weights (give batches(..., model=model))"]
        unknown += [] if self._samples.is_hashed else [f"the contents of the data set ({self._samples.kind})"]
        return [
            f"a later run in this folder cannot see whether {' or '.join(unknown)} changed since: it "
            "computes two finished batches again, and compares"
        ]


def _check_asked(dataset: Any, run: Run, collate: Any, metrics: Any, model: Any) -> None:
    """Check what ``Session.batches`` was given, before anything is read."""
    check_samples(dataset)
    _check_left_out(run.options)
    run.precision.check(run.backend.device)
    kind = "a function of a list of samples, or None for torch's default_collate"
    check_kind("collate", collate, collate is None or callable(collate), kind)
    kind = "an nn.Module, or None"
    check_kind("model", model, model is None or isinstance(model, nn.Module), kind)
    if model is not None:
        check_initialized(model)
    if model is not None and is_sharded(model) and run.backend.world.size > 1:
        raise UsageError(
            "the model is sharded by fully_shard: each forward of one rank waits for all other ranks, "
            "and ranks have different numbers of batches in your own loop. Let "
            "dualeval.evaluate(model=..., data=...) compute them: it has all ranks compute together."
        )
    if run.options.schedule == LOCKSTEP:
        raise UsageError(
            "schedule 'lockstep': in your own loop each rank computes at its own pace. Let "
            "dualeval.evaluate(model=..., data=...) compute, or leave schedule out."
        )
    kind = "a list of metrics (docs/metrics.md), or None for the mean of every column"
    check_kind("metrics", metrics, metrics is None or isinstance(metrics, list | tuple), kind)


# By option, what the caller's loop can do instead.
_OWN: Mapping[str, str] = {
    "precision": "write autocast yourself, as torch.autocast(...) around the forward, or cast the model and "
    "its inputs, as model.to(torch.bfloat16)",
    "layout": "bring the model and its inputs into a layout yourself, as "
    "model.to(memory_format=torch.channels_last)",
    "optimize": "do that yourself, as with torch.compile(model) or "
    "torch.fx.experimental.optimization.fuse(model)",
    "shard": "shard the model yourself, with torch.distributed.fsdp.fully_shard",
}


def _check_left_out(options: RunOptions) -> None:
    """Check that no option asks for what only the caller can do, who computes the forward."""
    of_process = [name for name, precision in PRECISIONS.items() if not precision.is_half]
    for name, instead in _OWN.items():
        if (value := getattr(options, name)) not in (*of_process, AUTO, None):
            raise UsageError(f"{name} {value!r}: in your own loop {instead}. Leave {name} out.")


def column_of(name: str, values: Any, samples: range) -> Column:
    column = _as_column(name, values)
    count = 0 if isinstance(column, Tensor) and column.ndim == 0 else len(column)
    if count != len(samples):
        size = f"{count} rows" if isinstance(column, Ragged) or column.ndim else "one number"
        raise UsageError(
            f"the column {name!r} has {size} for the batch of {named(samples)}, expected {len(samples)}: "
            "one per sample, in order (a loss with reduction='none')"
        )
    # Copied, for the caller may write into it again.
    parts = [
        part.detach().to(_HOST, copy=True, memory_format=torch.contiguous_format) for part in parts_of(column)
    ]
    return cast(Column, host_columns({name: of_parts(type(column), parts)}, samples)[name])


def _as_column(name: str, values: Any) -> Column:
    """A value that was passed to ``add``, as a column on its device."""
    refuse_masked(f"the column {name!r} has", values)
    if isinstance(values, np.ndarray) and values.dtype.kind == "U":
        values = values.tolist()
    if isinstance(values, (list, tuple)) and any(map(_is_row, values)):
        values = as_column(name, values)
    if isinstance(values, Ragged):
        return values if values.values.dtype not in _HALF else Ragged(values.values.float(), values.lengths)
    try:
        column = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"the column {name!r} is a {type(values).__name__}, expected a tensor, an array or a list of "
            "numbers, one per sample; or, if rows differ in length, dualeval.Ragged(values, lengths), a "
            f"list of tensors or a list of str: {error}"
        ) from error
    return column.float() if column.dtype in _HALF else column


def _is_row(entry: Any) -> bool:
    """Whether an entry of a list is a row, whose length may differ from the others'."""
    return isinstance(entry, str) or (isinstance(entry, Tensor) and entry.ndim > 0)


def named(samples: range) -> str:
    return f"samples {samples.start} to {samples.stop - 1}"


def _kind_for_all(column: Column) -> list[Any]:
    """The properties of a column that all batches of a loop share on all ranks, in plain values.

    They are its dtype, its number of dimensions (for a ragged column, that of all values together), and
    whether it is ragged or text.
    """
    form, dtype, row_shape = kind_of(column)
    return [str(dtype), 1 + len(row_shape), *([] if form == "plain" else [form])]


def _kinds_listed(kinds: Mapping[str, Sequence[Any]]) -> str:
    return ", ".join(
        f"{name}: {' '.join([*form, dtype.removeprefix('torch.')])}"
        for name, (dtype, _, *form) in kinds.items()
    )


@contextmanager
def rank_0s_buffers(callers_model: nn.Module | None, run: Run) -> Iterator[None]:
    """Until the loop ends, a caller's model computes alike on all ranks, and without collectives."""
    if callers_model is None or not run.guest:
        yield
        return
    snapshot, model = CallersModels(), unwrapped(callers_model)
    snapshot.remember_buffers(model.modules())
    wrapper = callers_model if isinstance(callers_model, nn.parallel.DistributedDataParallel) else None
    broadcasts = wrapper is not None and wrapper.broadcast_buffers
    try:
        if wrapper is not None:
            # Ranks have different numbers of batches: one would wait for a forward that never comes.
            wrapper.broadcast_buffers = False
        run.note_all(snapshot.share_buffers(model, run.backend, run.control))
        yield
    finally:
        if wrapper is not None:
            wrapper.broadcast_buffers = broadcasts
        snapshot.put_back()
