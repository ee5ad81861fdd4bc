"""Evaluation: what is evaluated, known once the model is built, and the same for each batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from dualeval.engine import trial
from dualeval.engine.columns import kept_columns
from dualeval.engine.data_columns import DataColumns, check_by, data_columns_of
from dualeval.engine.plan import EvalPlan
from dualeval.engine.run_state import Run
from dualeval.errors import UsageError
from dualeval.metrics import Metric, RowMetric, split_by_kind
from dualeval.metrics.by_name import chosen_metrics
from dualeval.metrics.classification import NonfiniteWarning
from dualeval.tasks import Dataset, Task

_NO_METRICS = (
    "there are no metrics, so the result has no numbers. Let metrics() or metrics= give some, as "
    "[dualeval.metrics.Mean('loss')] of a column 'loss'"
)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is evaluated, by which run."""

    task: Task
    dataset: Dataset
    # The task's, on the device.
    model: nn.Module
    # The division of the data set.
    plan: EvalPlan
    # Where it runs, and how.
    run: Run
    # The task's, of the ledger; none while its columns are not known yet.
    metrics: Sequence[Metric] = ()
    # The task's, of all rows together; likewise.
    row_metrics: Sequence[RowMetric] = ()
    # The columns of each sample's row.
    columns: Sequence[str] = ()
    # Those of them that are kept: in the journal, or, where nothing is written, in memory.
    kept: Sequence[str] = ()
    # Those of them that are the user's data's; None where there are none.
    data: DataColumns | None = None
    # The one of them that says which samples go together; None where all are independent.
    cluster: str | None = None

    @property
    def measures(self) -> list[Metric | RowMetric]:
        """The metrics that give numbers: one only warns."""
        given: list[Metric | RowMetric] = [*self.metrics, *self.row_metrics]
        return [metric for metric in given if metric.name != NonfiniteWarning.name]

    @property
    def added(self) -> DataColumns | None:
        """The columns of the data that a batch gets; None where none is kept."""
        return self.data if self.data is not None and self.data.names[0] in self.kept else None

    def with_data(self, columns: Mapping[str, Any], samples: range) -> Mapping[str, Any]:
        """The columns of a batch, and those of the data of its samples."""
        return columns if self.added is None else {**columns, **self.added.of(samples)}

    @property
    def warnings(self) -> list[str]:
        """What the result says of it."""
        return [] if self.measures else [_NO_METRICS]


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
    own = kept_columns(rows, metrics, row_metrics)
    step = partial(run.control.progress.step, "setup")
    data, notes = data_columns_of(task, dataset, options, (*own, *task.on_request), step)
    run.note_all(notes)
    columns = tuple(dict.fromkeys((*own, *(data.names if data else ()), *filter(None, [cluster]))))
    check_by(task, options.by, columns)
    trial.check_names(chosen, columns)
    if task.on_request:
        task.requested = {name for metric in chosen for name in metric.columns}
    # What nobody reads again is not kept where nothing is written.
    wants_rows = options.out, cluster, options.reference, options.by or None
    keeps_all = any(each is not None for each in wants_rows)
    of_rows = tuple(dict.fromkeys(name for metric in row_metrics for name in metric.columns))
    return Evaluation(
        task=task,
        dataset=dataset,
        model=model,
        plan=plan,
        run=run,
        metrics=metrics,
        row_metrics=row_metrics,
        columns=columns,
        kept=columns if keeps_all else of_rows,
        data=data,
        cluster=cluster,
    )
