"""Evaluation: what is evaluated, known once the model is built, and the same for each batch.

Its columns include the kept columns of the user's data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from dualeval.columns.ragged import Column, Text, kind_text, parts_of
from dualeval.engine.control.progress import Stage
from dualeval.engine.folder.row_windows import EVALUATED
from dualeval.engine.job.run_state import Run
from dualeval.engine.samples.feed import FailedSample, Feed, Reader
from dualeval.engine.samples.samples import HuggingFaceSamples
from dualeval.engine.samples.subset import name_of
from dualeval.engine.values.measured import kept_columns
from dualeval.engine.values.options import RunOptions
from dualeval.engine.values.plan import EvalPlan
from dualeval.errors import UsageError
from dualeval.messages import did_you_mean
from dualeval.metrics import Metric, RowMetric, split_by_kind
from dualeval.metrics.by_name import chosen_metrics
from dualeval.metrics.classification import NonfiniteWarning, TieWarning
from dualeval.metrics.confusion import Confusion
from dualeval.metrics.mistakes import pair_among
from dualeval.options.choices import NO_COLUMN, columns_of_groups
from dualeval.tasks import Dataset, Task
from dualeval.user_code.origin import keep_own_code

if TYPE_CHECKING:
    from dualeval.columns.of_data import KeptColumns

_NO_METRICS = (
    "there are no metrics, so the result has no numbers. Let metrics() or metrics= give some, such as "
    "[dualeval.metrics.Mean('loss')] of a column 'loss'"
)
# Columns that predictions.parquet and the journal add to every run's.
RESERVED = ("id", "index", EVALUATED)
# Metrics that only warn and give no number.
_ONLY_WARN = (NonfiniteWarning.name, TieWarning.name)
# Columns of tasks whose targets and predictions are one number a sample.
_SCALAR = {"rank", "answer", "squared_error"}
# Most samples whose targets and predictions are kept in memory for a look at the result: 50 MB.
_LOOKED_AT = 1 << 22
_AT_ONCE = 1 << 14


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is evaluated, by which run."""

    task: Task
    dataset: Dataset
    # The task's, on the device.
    model: nn.Module
    # The division of the data set.
    plan: EvalPlan
    # The run that evaluates it.
    run: Run
    # The task's metrics of the ledger; empty until its columns are known.
    metrics: Sequence[Metric] = ()
    # The task's metrics over all rows; likewise.
    row_metrics: Sequence[RowMetric] = ()
    # The columns of each sample's row.
    columns: Sequence[str] = ()
    # The columns that are kept: in the journal or, if nothing is written, in memory.
    kept: Sequence[str] = ()
    # The columns that come from the user's data; None if there are none.
    data: DataColumns | None = None
    # The column that says which samples belong together; None if all are independent.
    cluster: str | None = None

    @property
    def measures(self) -> list[Metric | RowMetric]:
        """The metrics that give numbers: some only warn."""
        metrics: list[Metric | RowMetric] = [*self.metrics, *self.row_metrics]
        return [metric for metric in metrics if metric.name not in _ONLY_WARN]

    @property
    def added(self) -> DataColumns | None:
        """The data's columns that are added to each batch; None if none is kept."""
        return self.data if self.data is not None and self.data.names[0] in self.kept else None

    def with_data(self, columns: Mapping[str, Any], samples: range) -> Mapping[str, Any]:
        """The columns of a batch, with the data's columns for its samples."""
        return columns if self.added is None else {**columns, **self.added.of(samples)}

    @property
    def warnings(self) -> list[str]:
        """Warnings for the result."""
        kept = _kept_of(getattr(self.dataset, "whole", self.dataset))
        splits = () if kept is None else kept.train_beside_test()
        sentences = [
            f"the column {name} of the data has {rows}, and all parts are evaluated: --by {name} gives "
            "metrics of each; for one part alone give --data a table of its rows"
            for name, rows in splits
            if name not in columns_of_groups(self.run.options.by)
        ]
        return sentences if self.measures else [_NO_METRICS, *sentences]


def plan_of(dataset: Dataset, run: Run) -> EvalPlan:
    """The division of a data set."""
    count, limit = len(dataset), run.options.limit
    if count == 0:
        raise UsageError("the data set is empty: nothing to evaluate")
    return EvalPlan(
        num_samples=count if limit is None else min(limit, count), batch_size=run.options.batch_size
    )


def evaluation_of(
    task: Task, dataset: Dataset, model: nn.Module, run: Run, rows: Sequence[str]
) -> Evaluation:
    """Choose the metrics of a task whose rows have these columns, and what is kept of the rows."""
    options, plan = run.options, plan_of(dataset, run)
    task.check_batches(plan.batch_size, plan.num_samples)
    chosen = chosen_metrics(options.metric, task.metrics(), (*rows, *task.on_request))
    metrics, row_metrics = split_by_kind(chosen)
    cluster = options.cluster or task.cluster
    row_columns = kept_columns(rows, metrics, row_metrics)
    step = partial(run.control.progress.step, Stage.SETUP)
    data, notes = _data_columns_of(task, dataset, options, (*row_columns, *task.on_request), step)
    run.note_all(notes)
    columns = tuple(dict.fromkeys((*row_columns, *(data.names if data else ()), *filter(None, [cluster]))))
    _check_by(task, options.by, columns)
    _check_names(chosen, columns)
    if task.on_request:
        task.requested = {name for metric in chosen for name in metric.columns}
    # If nothing is written, only columns that are read again are kept.
    wants_rows = options.out, cluster, options.reference, options.by or None
    keeps_all = any(each is not None for each in wants_rows)
    read = [name for metric in row_metrics for name in metric.columns]
    # For a look at the result: one number a sample, unless a confusion matrix has counted them.
    counted = any(isinstance(metric, Confusion) for metric in metrics)
    if {*columns} & _SCALAR and not counted and plan.num_samples <= _LOOKED_AT:
        read += pair_among(columns)
    return Evaluation(
        task=task,
        dataset=dataset,
        model=model,
        plan=plan,
        run=run,
        metrics=metrics,
        row_metrics=row_metrics,
        columns=columns,
        kept=columns if keeps_all else tuple(dict.fromkeys(read)),
        data=data,
        cluster=cluster,
    )


def _check_names(metrics: Sequence[Metric | RowMetric], kept: Sequence[str]) -> None:
    """Check the names of metrics and kept columns, before anything is computed."""
    names = [metric.name for metric in metrics]
    for metric in metrics:
        size = getattr(metric, "size", 1)
        if (
            not isinstance(metric.name, str)
            or not isinstance(size, int)
            or isinstance(size, bool)
            or size < 1
        ):
            raise UsageError(
                f"the metric {type(metric).__name__} has name {metric.name!r} and size {size!r}, expected a "
                "text and a whole number of at least 1"
            )
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two metrics are called {name!r}. Give each a name of its own.")
    for name in kept:
        if name in RESERVED:
            raise UsageError(
                f"the column {name!r} has a name that is taken. predictions.parquet already has "
                f"{', '.join(RESERVED[:2])}, the journal {EVALUATED}: give the column another name."
            )


@dataclass(frozen=True, kw_only=True)
class DataColumns:
    """The columns of the data that the rows of a run keep."""

    names: tuple[str, ...]
    # Returns the columns of consecutive samples, each in the type that all of its values share.
    read: Callable[[range], Mapping[str, Any]]

    def of(self, samples: range) -> dict[str, Column]:
        """The columns of consecutive samples."""
        values = self.read(samples)
        return {
            name: Text(values[name]) if isinstance(values[name], list) else torch.from_numpy(values[name])
            for name in self.names
        }

    def digests(self, count: int, step: Callable[[], None]) -> dict[str, str]:
        """sha256, in hex, over the values of the first ``count`` samples, by column."""
        hashes = {name: hashlib.sha256() for name in self.names}
        for first in range(0, count, _AT_ONCE):
            for name, column in self.of(range(first, min(first + _AT_ONCE, count))).items():
                hashes[name].update(kind_text(column).encode())
                for part in parts_of(column):
                    hashes[name].update(np.ascontiguousarray(part.numpy()).data)
            step()
        return {name: digest.hexdigest() for name, digest in hashes.items()}


def _data_columns_of(
    task: Task, dataset: Dataset, options: RunOptions, used: Collection[str], step: Callable[[], None]
) -> tuple[DataColumns | None, list[str]]:
    """Choose the data's columns to keep beside those ``used``; returns them, and notes for the user."""
    asked = [name for name in options.keep if name != NO_COLUMN]
    also = (*columns_of_groups(options.by), *filter(None, [options.cluster]))
    whole: Any = getattr(dataset, "whole", dataset)
    if isinstance(whole, HuggingFaceSamples):
        whole.read_columns((*options.keep, *also) if options.keep else ())
    there = _read(dataset, range(min(1, len(dataset)))) if callable(getattr(dataset, "columns", None)) else {}
    kept = _kept_of(whole)
    left_out = {} if kept is None else kept.left_out
    if not there and not left_out and not asked:
        return None, []
    used = {*used, *RESERVED, *_names_of_texts(task, used)}
    for name in asked:
        _check(name, there, left_out, used)
    wanted = {*asked, *also} if options.keep else {*there}
    names = tuple(name for name in there if name in wanted and name not in used)
    in_rows = {name: "the rows have a column of this name" for name in there if name in used}
    notes = [
        f"the column {name} of the data is not kept: {why}" for name, why in {**left_out, **in_rows}.items()
    ]
    if not names:
        return None, [] if options.keep else notes
    # The column types of a user's own data set are known once all values have been read.
    read: Any = getattr(dataset, "columns", None)
    if kept is None:
        read = _whole(dataset, names, options, step).of
    return DataColumns(names=names, read=read), [] if options.keep else notes


def _kept_of(dataset: Any) -> KeptColumns | None:
    """The columns that a data set of dualeval's own has read beside the task's."""
    if (kept := getattr(dataset, "kept", None)) is None:
        return None
    from dualeval.columns.of_data import KeptColumns

    return kept if isinstance(kept, KeptColumns) else None


def _check(name: str, there: Mapping[str, Any], left_out: Mapping[str, str], used: Collection[str]) -> None:
    from dualeval.columns.of_data import NOT_NAMED

    if (why := left_out.get(name, NOT_NAMED)) != NOT_NAMED:
        # The task was made in Python without this name.
        hint = f"Give keep=({name!r},) to the task, too" if why.startswith("it has") else "Leave it out"
        raise UsageError(f"--keep {name}: the column cannot be kept: {why}. {hint}.")
    if name not in there:
        has = f"it has {', '.join((*there, *left_out))}" if there or left_out else "it has none of its own"
        raise UsageError(f"--keep {name}: the data has no such column; {has}.")
    if name in used:
        raise UsageError(
            f"--keep {name}: the rows have a column of this name, which is not the data's. Rename the data's."
        )


def _names_of_texts(task: Task, rows: Collection[str]) -> tuple[str, ...]:
    """The columns of text that a task makes of its rows."""
    # The user's method may fail without rows; the first batch tries it with real ones.
    with suppress(Exception):
        return tuple(task.texts({name: np.empty(0, np.int64) for name in rows}, 0))
    return ()


def _whole(
    dataset: Dataset, names: Sequence[str], options: RunOptions, step: Callable[[], None]
) -> KeptColumns:
    """Columns of all evaluated samples, by the rules for columns of tables."""
    from dualeval.columns.of_data import FurtherColumns

    count = len(dataset) if options.limit is None else min(options.limit, len(dataset))
    further = FurtherColumns(names, keep=names)
    for first in range(0, count, _AT_ONCE):
        samples = range(first, min(first + _AT_ONCE, count))
        columns = _read(dataset, samples)
        if absent := [name for name in names if name not in columns]:
            raise UsageError(
                f"columns(indices) of {_kind(dataset)} gives no {absent[0]!r} for samples {first} to "
                f"{samples.stop - 1}: give the same columns for all samples"
            )
        further.take(columns)
        step()
    kept = further.kept()
    for name, why in kept.left_out.items():
        raise UsageError(
            f"{_kind(dataset)}.columns(indices): the column {name!r} cannot be kept: {why}. Expected one "
            "text, number or bool per sample: mend it, or leave it out of what columns() returns."
        )
    return kept


def _read(dataset: Dataset, samples: range) -> dict[str, list[Any]]:
    """A data set's columns for some of its samples, as Python values."""
    reply = dataset.columns(samples)  # type: ignore[attr-defined]
    if not isinstance(reply, Mapping) or not all(isinstance(name, str) for name in reply):
        raise UsageError(
            f"{_kind(dataset)}.columns(indices) returned a {type(reply).__name__}, expected a dict of values "
            "by the names of columns, which are texts, one value per sample. Mend it, or give it another "
            "name."
        )
    columns = {}
    for name, values in reply.items():
        plain = values.tolist() if isinstance(values, (np.ndarray, Tensor)) else values
        if not isinstance(plain, Sequence) or isinstance(plain, str) or len(plain) != len(samples):
            entries = f" of {len(plain)} entries" if isinstance(plain, Sequence) else ""
            raise UsageError(
                f"{_kind(dataset)}.columns(indices): the column {name!r} is a "
                f"{type(values).__name__}{entries} for {len(samples)} samples, expected one text, number or "
                "bool per sample, in a list, array or tensor"
            )
        columns[name] = [
            value.item() if isinstance(value, (np.generic, Tensor)) else value for value in plain
        ]
    return columns


def _kind(dataset: Dataset) -> str:
    whole: Any = getattr(dataset, "whole", dataset)
    return type(getattr(whole, "wrapped", whole)).__name__


def _check_by(task: Task, by: Sequence[str], columns: Sequence[str]) -> None:
    """Check, before anything is evaluated, that the rows have the columns of groups."""
    known = [*columns, *(_names_of_texts(task, columns) if by else ())]
    for name in columns_of_groups(by):
        if name not in known:
            raise UsageError(
                f"--by {name}: there is no such column. The columns are {', '.join(known)}."
                f"{did_you_mean(name, known)}"
            )


# -- batches that are read by themselves, outside of the loop, as the loop would read them -------------

_Columns = TypeVar("_Columns")


def read_alone(
    evaluation: Evaluation,
    *several: range,
    step: Callable[[int], object] = lambda place: None,
    notes: list[str] | None = None,
) -> list[tuple[Any, tuple[FailedSample, ...]]]:
    """Read some batches by themselves, as the loop would: their data on the device, and failed samples."""
    # In a worker process if the loop uses any: what a data set opens here may not survive a fork.
    workers = min(evaluation.run.workers, 1)
    feed = Feed(reader_of(evaluation), several, workers=workers, device=evaluation.run.device)
    try:
        reading, batches = iter(feed), []
        for place in range(len(several)):
            step(place)
            batches.append(next(reading))
    finally:
        feed.close()
    if notes is not None:
        notes += feed.notes
    failed = [sample for _, samples in batches for sample in samples]
    if failed and evaluation.run.options.on_error == "stop":
        raise unreadable(evaluation.dataset, failed[0])
    return batches


def compute_alone(
    evaluation: Evaluation, samples: range, compute: Callable[[Any, range], _Columns]
) -> tuple[_Columns | None, tuple[FailedSample, ...]]:
    """Read one batch by itself and have it computed, by the engine or by a caller's own loop.

    Returns the result of ``compute``, None if no sample could be read, and the samples that failed.
    """
    [(data, failed)] = read_alone(evaluation, samples)
    return None if data is None else compute(data, samples), failed


def reader_of(evaluation: Evaluation) -> Reader:
    fill = evaluation.run.options.on_error == "skip"
    cores = evaluation.run.readers_cores
    return Reader(evaluation.dataset, evaluation.task, fill=fill, cores=cores)


def unreadable(dataset: Dataset, sample: FailedSample, *, skips: bool = False) -> UsageError:
    """The error about a sample that cannot be read."""
    text = f"sample {name_of(dataset, sample.index)} cannot be read: {sample.error}. "
    if skips:
        return UsageError(
            f"none of the first samples can be read, so nothing is left out: {text}Fix the data."
        )
    refusal = UsageError(
        f"{text}Repair or remove it, or run with --on-error skip to leave such samples out and list them. "
        "(That is another job: then give another --out, too.)"
    )
    keep_own_code(refusal, sample.own_code)
    return refusal
