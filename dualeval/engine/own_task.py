"""A caller's own loop as a task: its data set, its columns, their metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from dualeval.columns import Column, kind_of
from dualeval.engine.guest import unwrapped
from dualeval.engine.samples import Samples
from dualeval.errors import DualevalError, UsageError
from dualeval.metrics import Metric, RowMetric
from dualeval.metrics.by_name import check_metrics
from dualeval.metrics.means import Mean
from dualeval.tasks import Dataset, Task


@dataclass(frozen=True)
class LoopKind:
    """What is the same of a column in all batches of a loop, on all ranks."""

    dtype: torch.dtype
    # Its dimensions; of a ragged column those of all samples' values together.
    ndim: int
    # "plain", "ragged" or "text".
    form: str = "plain"

    @classmethod
    def of(cls, column: Column) -> LoopKind:
        form, dtype, row_shape = kind_of(column)
        return cls(dtype, 1 + len(row_shape), form)

    def plain(self, name: str) -> list[Any]:
        """What other ranks are sent."""
        return [name, str(self.dtype).removeprefix("torch."), self.ndim, self.form]


class LoopTask(Task):
    """What the engine asks of a task, as far as a caller's own loop has it."""

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
        # As given; it may be wrapped for training on several processes.
        self.given_model = model
        # What is inside of it; one without modules where there is none.
        self.model = nn.Module().eval() if model is None else unwrapped(model)
        # By column; known when the first batch is.
        self.kinds: dict[str, LoopKind] = {}

    def make_metrics(self) -> None:
        """Make the metrics of the columns that are known now."""
        given = self._given
        if given is not None:
            check_metrics(given)
            self._metrics = list(given)
            return
        for name, kind in self.kinds.items():
            if kind.form != "plain":
                continue  # kept in predictions.parquet
            if kind.ndim != 1:
                raise UsageError(
                    f"the column {name!r} has {kind.ndim} dimensions, and a mean takes one number a sample. "
                    "Add one, or give the metrics that read it: batches(..., metrics=[...])"
                )
            self._metrics.append(Mean(name))
        if not self._metrics:
            raise UsageError(
                f"the columns {', '.join(self.kinds)} are ragged or text, which have no mean. Add a column "
                "with one number a sample, or give the metrics that read them: batches(..., metrics=[...])"
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
        return {
            "columns": {
                name: [str(kind.dtype), kind.ndim, *([] if kind.form == "plain" else [kind.form])]
                for name, kind in self.kinds.items()
            }
        }

    def unknown(self) -> list[str]:
        """What a reader should know of what a later run in the same folder is compared with."""
        unknown = ["the loop's own source"]
        unknown += [] if self.given_model is not None else ["the weights (give batches(..., model=model))"]
        unknown += [] if self._samples.is_hashed else [f"the contents of the data set ({self._samples.kind})"]
        return [
            f"a later run in this folder cannot see whether {' or '.join(unknown)} changed since: it "
            "computes two finished batches again, and compares"
        ]
