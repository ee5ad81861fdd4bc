"""The job's model computes some of its samples in batches of any shape, and compares their rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dualeval.columns.ragged import Column, NumpyRows, Ragged, each_part, kind_of, to_rows
from dualeval.engine.job.evaluation import unreadable
from dualeval.engine.model.compute import Compute, copy_sharing_tensors
from dualeval.engine.model.preparation import prepare, why_preparation_failed
from dualeval.engine.samples.feed import Feed, Reader
from dualeval.engine.samples.subset import postprocessed
from dualeval.engine.values.nests import tensors_in
from dualeval.engine.values.options import RunOptions
from dualeval.engine.values.row_comparison import Difference, differing_rows
from dualeval.options.evaluation import precision_of
from dualeval.tasks import Dataset, Task

_OUTPUT = "output"


@dataclass(frozen=True, kw_only=True)
class ShapeDiagnosis:
    """The rows in batches of one shape, beside the same rows in the job's batch."""

    shape: int
    # Number of rows that were compared, and how many of them have another bit in a column or an output.
    rows: int
    rows_differ: int
    # The largest absolute difference of finite floats, for each column or output that differs; else None.
    columns: Mapping[str, float | None]
    # The kinds of the modules that cause it, by name: other outputs for the same inputs; in their order.
    modules: Mapping[str, str] = field(default_factory=dict)
    # Number of modules that differ as a consequence.
    after: int = 0
    # In words, where no module causes it; None where nothing differs.
    cause: str | None = None


def batches_of(shape: int, rows: int) -> list[range]:
    """Batches of one shape that have all rows; the last may begin among those of the one before."""
    batches = [range(first, first + shape) for first in range(0, rows - shape + 1, shape)]
    return batches if batches[-1].stop == rows else [*batches, range(rows - shape, rows)]


class Batches:
    """The job's first samples in batches of any shape, on the device."""

    def __init__(
        self, task: Task, dataset: Dataset, options: RunOptions, device: torch.device, rows: int
    ) -> None:
        self.dataset = dataset
        self.rows = rows
        self._device = device
        self._stops = options.on_error == "stop"
        self._reader = Reader(dataset, task, fill=not self._stops)

    def data(self, samples: range) -> Any:
        """Collate some of the samples, as the task does; None where none of them can be read."""
        [(data, failed)] = Feed(self._reader, [samples], workers=0, device=self._device)
        if failed and (self._stops or (data is None and len(samples) == self.rows)):
            raise unreadable(self.dataset, failed[0], skips=not self._stops)
        return data


class _WithOutputs:
    """A task's forward and observe, whose columns have the model's outputs beside them, a row a sample."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.samples = 0

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return self._task.forward(model, batch)

    def observe(self, outputs: Any, batch: Any) -> Any:
        columns: Any = self._task.observe(outputs, batch)
        if not isinstance(columns, Mapping):
            return columns
        return {
            **columns,
            **{
                f"{_OUTPUT}{path}": tensor
                for path, tensor in tensors_in(outputs)
                if tensor.ndim and len(tensor) == self.samples and tensor.layout is torch.strided
            },
        }


class Computed:
    """A copy of a model, prepared as the options say; compares rows with those of the job's batch."""

    def __init__(
        self, task: Task, model: nn.Module, batches: Batches, options: RunOptions, device: torch.device
    ) -> None:
        self.notes: list[str] = []
        self.model = prepare(copy_sharing_tensors(model), options, note=self.notes.append)
        self._task, self._batches = task, batches
        self._beside = _WithOutputs(task)
        self._compute = Compute(
            cast(Task, self._beside),
            self.model,
            device,
            precision_of(options),
            1,
            explain=partial(why_preparation_failed, options=options),
        )
        # The rows in the job's own batch, with which all others are compared.
        self.job = self.columns(range(batches.rows))

    def columns(self, samples: range) -> dict[str, NumpyRows]:
        """The columns that the job keeps of a batch, or all, and the model's outputs; none without data."""
        data = self._batches.data(samples)
        if data is None:
            return {}
        self._beside.samples = len(samples)
        made = self._compute.start(data)()
        outputs = {name: column for name, column in made.items() if _is_output(name)}
        observed = {name: column for name, column in made.items() if name not in outputs}
        columns = postprocessed(self._task, self._batches.dataset, observed, samples)
        kept = [name for name in self._task.rows or columns if name in columns]
        return {
            **{name: _rows(columns[name]) for name in kept},
            **{name: _rows(column) for name, column in outputs.items()},
        }

    def compare(self, shape: int) -> tuple[ShapeDiagnosis, list[range]]:
        """Compute all rows in batches of a shape; returns what differs, and the batches in which it does."""
        differing, compared = (np.zeros(self._batches.rows, np.bool_) for _ in range(2))
        columns: dict[str, ColumnRows] = {}
        batches = []
        for samples in batches_of(shape, self._batches.rows):
            wrong = False
            own_columns = self.columns(samples)
            compared[samples.start : samples.stop] |= bool(own_columns)
            for name, values in own_columns.items():
                rows = columns.setdefault(name, ColumnRows(name)).add(values, self.job.get(name), samples)
                differing[rows] = True
                wrong |= bool(len(rows))
            if wrong:
                batches.append(samples)
        diagnosis = ShapeDiagnosis(
            shape=shape,
            rows=int(compared.sum()),
            rows_differ=int(differing.sum()),
            columns={name: column.largest for name, column in columns.items() if column.differs},
        )
        return diagnosis, batches


class ColumnRows:
    """The rows of one column, or output of the model, that differ from those of the job's batch."""

    def __init__(self, name: str) -> None:
        self._is_output = _is_output(name)
        self._apart: Difference | None = None
        self.differs = False

    def add(self, rows: NumpyRows, job: NumpyRows | None, samples: range) -> npt.NDArray[np.intp]:
        """Compare rows with the same ones of the job's batch; returns the numbers of those that differ.

        A row of an output may be another sample's, as of sequences that collate has sorted: one that is
        anywhere among the job's is no other. Outputs of another shape, as of shorter sequences, are left to
        the columns that the task makes of them.
        """
        wrong = np.arange(len(samples))
        if job is not None and kind_of(rows) == kind_of(job):
            wrong = differing_rows(rows, job[samples.start : samples.stop])
            there = wrong + samples.start
            if self._is_output:
                wrong, there = _missing(rows, job, wrong)
            self._apart = self._apart or Difference.of(rows)
            if len(wrong):
                self._apart.measure(rows[wrong], job[there], str)
        elif job is not None and self._is_output:
            wrong = wrong[:0]
        self.differs |= bool(len(wrong))
        return wrong + samples.start

    @property
    def largest(self) -> float | None:
        """The largest absolute difference of finite floats; None where there is none."""
        return None if self._apart is None or self._apart.largest_at is None else self._apart.largest


def _missing(
    rows: NumpyRows, job: NumpyRows, wrong: npt.NDArray[np.intp]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Those of some rows that are nowhere among the job's, and the row there that is nearest to each."""
    pairs = []
    for place in wrong.tolist():
        row = np.repeat(rows[place : place + 1], len(job), axis=0)
        if len(differing_rows(row, job)) == len(job):
            nearest = 0
            if row.dtype.kind == "f":
                with np.errstate(invalid="ignore"):
                    apart = np.abs(row.astype(np.float64) - job).reshape(len(job), -1)
                nearest = int(np.nan_to_num(apart, nan=np.inf).max(axis=1).argmin())
            pairs.append((place, nearest))
    places, there = np.array(pairs, np.intp).reshape(-1, 2).T
    return places, there


def _rows(column: Column) -> NumpyRows:
    """A column in numpy, which has no bfloat16: float32 holds each of its values."""
    if isinstance(column, Ragged):
        return to_rows(each_part(_without_bfloat16, column))
    return to_rows(_without_bfloat16(column))


def _without_bfloat16(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def _is_output(name: str) -> bool:
    return name.startswith(_OUTPUT) and name[len(_OUTPUT) : len(_OUTPUT) + 1] in ("", ".", "[")
