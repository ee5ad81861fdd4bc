"""A model in one setting: computes some of a job's samples in batches of any shape, compares their rows."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dualeval.columns import Column, Ragged, Rows, each_part, kind_of, to_rows
from dualeval.engine.compute import Compute
from dualeval.engine.feed import Feed, Reader
from dualeval.engine.loop import unreadable
from dualeval.engine.nests import tensors_in
from dualeval.engine.options import RunOptions
from dualeval.engine.parts import postprocessed
from dualeval.engine.preparation import prepare, why_preparation_failed
from dualeval.engine.row_comparison import Difference, differing_rows
from dualeval.tasks import Dataset, Task
from dualeval.tools.invariance.findings import ColumnDifference, ShapeDiagnosis
from dualeval.tools.invariance.settings import copy_if_possible

_OUTPUT = "output"


def batches_of(shape: int, rows: int) -> list[range]:
    """Batches of one shape that have all rows; the last may begin among those of the one before."""
    found = [range(first, first + shape) for first in range(0, rows - shape + 1, shape)]
    return found if found[-1].stop == rows else [*found, range(rows - shape, rows)]


class _HeldSamples:
    """The first samples of a data set, read once; ready batches are read as they are asked for."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._samples: dict[int, Any] = {}
        if hasattr(dataset, "placeholder"):
            self.placeholder = dataset.placeholder

    def __len__(self) -> int:
        return len(self._dataset)

    def id(self, index: int) -> str:
        return self._dataset.id(index)

    def fingerprint(self, count: int) -> str:
        return self._dataset.fingerprint(count)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        if any(index not in self._samples for index in indices):
            read = self._dataset.__getitems__(indices)
            if not isinstance(read, list) or len(read) != len(indices):
                return read
            self._samples.update(zip(indices, read, strict=True))
        # A collate may take entries out of its samples.
        return [
            copy.copy(sample) if isinstance(sample, dict | list) else sample
            for sample in (self._samples[index] for index in indices)
        ]


class Batches:
    """The job's first samples in batches of any shape, on the device."""

    def __init__(
        self, task: Task, dataset: Dataset, options: RunOptions, device: torch.device, rows: int
    ) -> None:
        self.dataset = dataset
        self.rows = rows
        self._device = device
        self._stops = options.on_error == "stop"
        self._reader = Reader(_HeldSamples(dataset), task, fill=not self._stops)

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
    """A model in one setting: computes batches, and compares their rows with those of the job's batch."""

    def __init__(
        self, task: Task, model: nn.Module, batches: Batches, options: RunOptions, device: torch.device
    ) -> None:
        self.notes: list[str] = []
        own = copy_if_possible(model)
        self.model = prepare(model if own is None else own, options, device, note=self.notes.append)
        self._task, self._batches = task, batches
        self._beside = _WithOutputs(task)
        self._compute = Compute(
            cast(Task, self._beside),
            self.model,
            device,
            options.precision,
            1,
            explain=partial(why_preparation_failed, options=options),
        )
        # The rows in the job's own batch, with which all others are compared.
        self.job = self.columns(range(batches.rows))

    def columns(self, samples: range) -> dict[str, Rows]:
        """The columns that the job keeps of a batch, or all, and the model's outputs; none without data."""
        data = self._batches.data(samples)
        if data is None:
            return {}
        self._beside.samples = len(samples)
        made = self._compute.start(data)()
        outputs = {name: column for name, column in made.items() if _is_output(name)}
        observed = {name: column for name, column in made.items() if name not in outputs}
        found = postprocessed(self._task, self._batches.dataset, observed, samples)
        kept = [name for name in self._task.rows or found if name in found]
        return {
            **{name: _rows(found[name]) for name in kept},
            **{name: _rows(column) for name, column in outputs.items()},
        }

    def compare(self, shape: int) -> tuple[ShapeDiagnosis, list[range]]:
        """Compute all rows in batches of a shape; returns what differs, and the batches in which it does."""
        differing, compared = (np.zeros(self._batches.rows, np.bool_) for _ in range(2))
        columns: dict[str, ColumnRows] = {}
        found = []
        for samples in batches_of(shape, self._batches.rows):
            wrong = False
            own_columns = self.columns(samples)
            compared[samples.start : samples.stop] |= bool(own_columns)
            for name, own in own_columns.items():
                rows = columns.setdefault(name, ColumnRows.of(name)).add(own, self.job.get(name), samples)
                differing[rows] = True
                wrong |= bool(len(rows))
            if wrong:
                found.append(samples)
        diagnosis = ShapeDiagnosis(
            shape=shape,
            rows=int(compared.sum()),
            rows_differ=int(differing.sum()),
            columns={
                name: column.difference(self._batches.dataset)
                for name, column in columns.items()
                if column.rows
            },
        )
        return diagnosis, found


@dataclass
class ColumnRows:
    """The rows of one column, or output of the model, that differ from those of the job's batch."""

    # Whether it is an output of the model, and no column that the task observes.
    is_output: bool = False
    rows: set[int] = field(default_factory=set)
    # How far these are apart, at samples by their numbers.
    apart: Difference | None = None

    @classmethod
    def of(cls, name: str) -> ColumnRows:
        """Of a column of this name."""
        return cls(is_output=_is_output(name))

    def add(self, own: Rows, job: Rows | None, samples: range) -> npt.NDArray[np.intp]:
        """Compare rows with the same ones of the job's batch; returns the numbers of those that differ.

        A row of an output may be another sample's, as of sequences that collate has sorted: one that is
        anywhere among the job's is no other. Outputs of another shape, as of shorter sequences, are left to
        the columns that the task makes of them.
        """
        wrong = np.arange(len(samples))
        if job is not None and kind_of(own) == kind_of(job):
            wrong = differing_rows(own, job[samples.start : samples.stop])
            there = wrong + samples.start
            if self.is_output:
                wrong, there = _missing(own, job, wrong)
            self.apart = self.apart or Difference.of(own)
            if len(wrong):
                self.apart.measure(own[wrong], job[there], lambda row: str(samples[int(wrong[row])]))
        elif job is not None and self.is_output:
            wrong = wrong[:0]
        found: npt.NDArray[np.intp] = wrong + samples.start
        self.rows.update(found.tolist())
        return found

    def difference(self, dataset: Dataset) -> ColumnDifference:
        if self.apart is None or self.apart.largest_at is None:
            return ColumnDifference(rows_differ=len(self.rows))
        at = dataset.id(int(self.apart.largest_at))
        return ColumnDifference(rows_differ=len(self.rows), largest=self.apart.largest, largest_at=at)


def _missing(
    own: Rows, job: Rows, wrong: npt.NDArray[np.intp]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Those of some rows that are nowhere among the job's, and the row there that is nearest to each."""
    found = []
    for place in wrong.tolist():
        row = np.repeat(own[place : place + 1], len(job), axis=0)
        if len(differing_rows(row, job)) == len(job):
            nearest = 0
            if row.dtype.kind == "f":
                with np.errstate(invalid="ignore"):
                    apart = np.abs(row.astype(np.float64) - job).reshape(len(job), -1)
                nearest = int(np.nan_to_num(apart, nan=np.inf).max(axis=1).argmin())
            found.append((place, nearest))
    places, there = np.array(found, np.intp).reshape(-1, 2).T
    return places, there


def _rows(column: Column) -> Rows:
    """A column in numpy, which has no bfloat16: float32 holds each of its values."""
    if isinstance(column, Ragged):
        return to_rows(each_part(_without_bfloat16, column))
    return to_rows(_without_bfloat16(column))


def _without_bfloat16(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def _is_output(name: str) -> bool:
    return name.startswith(_OUTPUT) and name[len(_OUTPUT) : len(_OUTPUT) + 1] in ("", ".", "[")
