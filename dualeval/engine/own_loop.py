"""OwnLoop: a loop of the caller's own, counted, saved and resumed as the engine's is."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dualeval.columns import Column, Ragged, as_column, host_columns, of_parts, parts_of, to_rows
from dualeval.engine import numerics
from dualeval.engine.agreement import agree
from dualeval.engine.evaluation import Evaluation, evaluation_of, plan_of
from dualeval.engine.evaluation_mode import training_note
from dualeval.engine.feed import FailedSample
from dualeval.engine.finish import finish, let_go
from dualeval.engine.guest import Snapshot, version_of
from dualeval.engine.loop import Loop, read_alone
from dualeval.engine.opened import open_rows
from dualeval.engine.options import RunOptions
from dualeval.engine.own_task import LoopKind, LoopTask
from dualeval.engine.parts import drawn
from dualeval.engine.proving import prove, stored_batches
from dualeval.engine.run_state import Run
from dualeval.engine.samples import Samples, check_samples, wrap
from dualeval.engine.sharding.detect import is_sharded
from dualeval.errors import UsageError
from dualeval.metrics import Metric, RowMetric
from dualeval.options.choices import AUTO, DYNAMIC, LOCKSTEP, check_kind
from dualeval.result import Result

_HOST = torch.device("cpu")
_HALF = (torch.float16, torch.bfloat16)
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
        check_samples(dataset)
        _check_left_out(run.options)
        numerics.check_precision(run.options.precision, run.backend.device)
        kind = "a function of a list of samples, or None for torch's default_collate"
        check_kind("collate", collate, collate is None or callable(collate), kind)
        kind = "an nn.Module, or None"
        check_kind("model", model, model is None or isinstance(model, nn.Module), kind)
        if model is not None and is_sharded(model) and run.backend.world.size > 1:
            raise UsageError(
                "the model is sharded by fully_shard: each forward of one rank waits for all other ranks, "
                "and ranks have different numbers of batches in your own loop. Let "
                "dualeval.evaluate(model=..., data=...) compute them: it has all ranks compute together."
            )
        if run.options.schedule == LOCKSTEP:
            raise UsageError(
                "schedule 'lockstep': in your own loop each rank computes when it likes. Let "
                "dualeval.evaluate(model=..., data=...) compute, or leave schedule out."
            )
        kind = "a list of metrics (docs/metrics.md), or None for the mean of every column"
        check_kind("metrics", metrics, metrics is None or isinstance(metrics, list | tuple), kind)
        self._run = run
        run.device, run.workers = _HOST, run.options.workers or 0
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
        self._in_hand: tuple[Any, range, list[tuple[Tensor, int]]] | None = None
        self._added: Columns | None = None
        self._first: tuple[int, Columns] | None = None
        self._done = 0
        self._share = 0
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
        given, samples, versions = self._in_hand
        if self._added is not None:
            raise UsageError(f"the batch of {_named(samples)} was added before: add each batch once")
        if not any(batch is part for part in _parts(given)):
            raise UsageError(
                f"add was given a {type(batch).__name__} that is not the current batch, of "
                f"{_named(samples)}: give the loop's last batch, or a part of it, unchanged: {_USAGE}"
            )
        if any(version_of(tensor) != version for tensor, version in versions):
            raise UsageError(
                f"the batch of {_named(samples)} was changed in place before it was added: compute on a "
                "copy, as in inputs = inputs.clone()"
            )
        if not columns:
            raise UsageError(f"add was given no column for the batch of {_named(samples)}: {_USAGE}")
        added = {name: _column(name, values, samples) for name, values in columns.items()}
        names = self._task.kinds or added
        if list(names) != list(added) and set(names) != set(added):
            raise UsageError(
                f"the batch of {_named(samples)} was added with the columns {', '.join(added)}, and others "
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
                share = self._share or self._plan.num_samples
                raise UsageError(
                    f"the loop was left before its end: {share - self._done} of the {share} samples of this "
                    "rank are missing. Let the loop "
                    "come to its end (no break) before you call result()."
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
            self._rank_0s_buffers(),
        ):
            self._compare_samples()
            run.note_all([*settings.notes, *training_note(task.model)])
            yield from self._learn_columns()
            evaluation = evaluation_of(task, task.dataset(), task.model, run, task.rows)
            run.note_all([*evaluation.warnings, *(task.unknown() if run.options.out is not None else [])])
            opened = open_rows(evaluation, agree(evaluation))
            stored = stored_batches(evaluation, opened)
            again = {}
            for samples in [batch.samples for batch in stored]:
                columns, failed = yield from self._compute_alone(evaluation, samples)
                again[samples] = {name: to_rows(column) for name, column in columns.items()}, failed
            proven = prove(evaluation, opened, stored, again.__getitem__)
            self._result = proven.earlier
            if self._result is not None:
                let_go(evaluation, opened)
            else:
                loop = Loop(evaluation, opened)
                yield from self._counted(evaluation, loop)
                notes = [*evaluation.warnings, *settings.notes, *settings.check_after_loop()]
                self._finish = partial(finish, evaluation, opened, loop, proven, notes)
            self._is_through = True
            # What the caller does until it asks for the result is no part of the run.
            run.control.progress.step("idle")

    def _counted(self, evaluation: Evaluation, loop: Loop) -> Generator[Any, None, None]:
        """Hand out this rank's batches, and count what is added of each."""
        world, dynamic = self._run.backend.world, self._run.options.schedule == DYNAMIC
        mine = loop.remaining if dynamic else loop.remaining[world.rank :: world.size]
        self._share = self._plan.samples_in(mine)
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

    @contextmanager
    def _rank_0s_buffers(self) -> Iterator[None]:
        """Have a guest's model compute alike on all ranks, and without a collective, until the loop ends."""
        given = self._task.given_model
        if given is None or not self._run.guest:
            yield
            return
        snapshot = Snapshot()
        snapshot.remember_buffers(self._task.model)
        wrapper = given if isinstance(given, nn.parallel.DistributedDataParallel) else None
        broadcasts = wrapper is not None and wrapper.broadcast_buffers
        try:
            if wrapper is not None:
                # Ranks have different numbers of batches: one would wait for a forward that never comes.
                wrapper.broadcast_buffers = False
            run = self._run
            run.note_all(snapshot.share_buffers(self._task.model, run.backend, run.control))
            yield
        finally:
            if wrapper is not None:
                wrapper.broadcast_buffers = broadcasts
            snapshot.put_back()

    def _compare_samples(self) -> None:
        """Compare a few samples over the ranks: who has shared the data out before would share it again."""
        world = self._run.backend.world
        if world.size == 1:
            return
        self._run.control.meet()
        everyone = self._run.backend.all_gather_json(self._task.dataset().probe())
        for rank, probe in enumerate(everyone):
            for own, other in zip(everyone[0], probe, strict=False):
                if own is not None and other is not None and own != other:
                    raise UsageError(
                        f"rank {rank} has other samples in its data set than rank 0. Give every rank the "
                        "whole data set, without a sampler, a shard or a Subset of its own: the session "
                        "divides it"
                    )

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
        known = [(rank, kinds) for rank, kinds in enumerate(everyone) if kinds]
        if not known:
            raise UsageError("no sample could be read in the first batch of any chunk")
        first_rank, first = known[0]
        for rank, others in known:
            if sorted(others) != sorted(first):
                raise UsageError(
                    f"rank {rank} has added other columns than rank {first_rank} ({_listed(others)}; "
                    f"{_listed(first)}): add the same columns, of the same dtype, on every rank"
                )
        self._task.kinds = {
            name: LoopKind(getattr(torch, dtype), ndim, form) for name, dtype, ndim, form in first
        }
        self._task.make_metrics()
        if self._first is not None:
            self._first = self._first[0], {name: own[name] for name in self._task.kinds}

    def _compute_alone(
        self, evaluation: Evaluation, samples: range
    ) -> Generator[Any, None, tuple[Columns, tuple[FailedSample, ...]]]:
        """Read one batch by itself and have it computed; without columns where no sample could be read."""
        [(data, failed)] = read_alone(evaluation, samples)
        if data is None:
            return {}, failed
        self._run.control.progress.step("forward")
        columns = yield from self._hand_out(data, samples)
        self._run.control.progress.step("setup")
        return columns, failed

    def _hand_out(self, data: Any, samples: range) -> Generator[Any, None, Columns]:
        tensors = [part for part in tree_leaves(_parts(data)) if isinstance(part, Tensor)]
        versions = [(tensor, version_of(tensor)) for tensor in tensors]
        self._in_hand, self._added = (data, samples, versions), None
        yield data
        added = self._take_added()
        if added is None:
            raise UsageError(
                f"the batch of {_named(samples)} was not added: call add(batch, ...) for every batch, before "
                f"the next one: {_USAGE}"
            )
        return added

    def _take_added(self) -> Columns | None:
        added, self._in_hand, self._added = self._added, None, None
        return added


def _check_left_out(options: RunOptions) -> None:
    """Check that nothing is asked for that only the caller can do: the forward is the caller's own."""
    if numerics.PRECISIONS[options.precision] is not None:
        raise UsageError(
            f"precision {options.precision!r}: in your own loop write autocast yourself, "
            "as torch.autocast(...) around the forward. Leave precision out."
        )
    if options.precision in numerics.CASTS:
        raise UsageError(
            f"precision {options.precision!r}: in your own loop cast the model and its inputs yourself, "
            f"as model.to(torch.{str(numerics.CASTS[options.precision])[6:]}). Leave precision out."
        )
    if options.layout != AUTO:
        raise UsageError(
            f"layout {options.layout!r}: in your own loop bring the model and its inputs into a layout "
            "yourself, as model.to(memory_format=torch.channels_last). Leave layout out."
        )
    if options.optimize is not None:
        raise UsageError(
            f"optimize {options.optimize!r}: in your own loop do that yourself, as with torch.compile(model) "
            "or torch.fx.experimental.optimization.fuse(model). Leave optimize out."
        )
    if options.shard is not None:
        raise UsageError(
            f"shard {options.shard!r}: in your own loop shard the model yourself, with "
            "torch.distributed.fsdp.fully_shard. Leave shard out."
        )


def _parts(batch: Any) -> list[Any]:
    """A batch and what it is made of: a loop may unpack it at once."""
    if isinstance(batch, Mapping):
        return [batch, *batch.values()]
    return [batch, *batch] if isinstance(batch, list | tuple) else [batch]


def _column(name: str, values: Any, samples: range) -> Column:
    column = _as_column(name, values)
    count = 0 if isinstance(column, Tensor) and column.ndim == 0 else len(column)
    if count != len(samples):
        found = f"{count} rows" if isinstance(column, Ragged) or column.ndim else "one number"
        raise UsageError(
            f"the column {name!r} has {found} for the batch of {_named(samples)}, expected "
            f"{len(samples)}: one a sample, in order (a loss with reduction='none')"
        )
    # The caller may write into it again.
    parts = [
        part.detach().to(_HOST, copy=True, memory_format=torch.contiguous_format) for part in parts_of(column)
    ]
    return cast(Column, host_columns({name: of_parts(type(column), parts)}, samples)[name])


def _as_column(name: str, values: Any) -> Column:
    """What ``add`` was given as a column, on its device."""
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
            "numbers, one a sample; or, where rows differ in length, dualeval.Ragged(values, lengths), a "
            f"list of tensors or a list of str: {error}"
        ) from error
    return column.float() if column.dtype in _HALF else column


def _is_row(entry: Any) -> bool:
    """Whether an entry of a list is a row that may have another length than the others."""
    return isinstance(entry, str) or (isinstance(entry, Tensor) and entry.ndim > 0)


def _named(samples: range) -> str:
    return f"samples {samples.start} to {samples.stop - 1}"


def _listed(kinds: Sequence[Sequence[Any]]) -> str:
    return ", ".join(
        f"{name}: {dtype}" if form == "plain" else f"{name}: {form} {dtype}" for name, dtype, _, form in kinds
    )
