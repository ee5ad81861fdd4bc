"""A caller's own loop as a task: its data set, its columns, their metrics."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

from dualeval.engine.guest import unwrapped
from dualeval.engine.identity.values import Values
from dualeval.errors import DualevalError, UsageError
from dualeval.metrics import Metric, RowMetric
from dualeval.metrics.columns import mean_of
from dualeval.tasks import Task

# Whose contents say which data set it is.
_HASHED = (Tensor, np.ndarray, list, tuple, range, TensorDataset)


class LoopTask(Task):
    """What the engine asks of a task, as far as a caller's own loop has it.

    Args:
        dataset: as for ``OwnLoop``; likewise ``collate``, ``metrics`` and ``model``.

    Attributes:
        given_model: as given; it may be wrapped for training on several processes.
        model: what is inside of it; one without modules where there is none.
        kinds: by column, dtype and number of dimensions; known when the first batch is.
    """

    name = "loop"
    decodes = False
    concurrent = False

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any] | None,
        metrics: Sequence[Metric | RowMetric] | None,
        model: nn.Module | None,
    ) -> None:
        self._samples = Samples(dataset)
        self._collate = collate
        self._given = metrics
        self._metrics: list[Metric] = []
        self._row_metrics: list[RowMetric] = []
        self.given_model = model
        self.model = nn.Module().eval() if model is None else unwrapped(model)
        self.kinds: dict[str, tuple[torch.dtype, int]] = {}

    def make_metrics(self) -> None:
        """Make the metrics of the columns that are known now."""
        given = self._given
        if given is not None:
            for metric in given:
                if not hasattr(metric, "columns"):
                    raise UsageError(
                        f"metrics has {metric!r}, which is no metric: give objects (docs/metrics.md, 'A "
                        "metric of your own'), or leave metrics out for the mean of every column"
                    )
            self._metrics = [metric for metric in given if _has_ledger(metric)]
            self._row_metrics = [metric for metric in given if _reads_rows(metric)]
            return
        for name, (dtype, ndim) in self.kinds.items():
            if ndim != 1:
                raise UsageError(
                    f"the column {name!r} has {ndim} dimensions, and a mean takes one number a sample. Add "
                    "one, or give the metrics that read it: batches(..., metrics=[...])"
                )
            self._metrics.append(mean_of(name, dtype))

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

    def metrics(self) -> Sequence[Metric]:
        return self._metrics

    def row_metrics(self) -> Sequence[RowMetric]:
        return self._row_metrics

    def sources(self) -> Sequence[Any]:
        return () if self._collate is None else (self._collate,)

    def fingerprint(self) -> dict[str, Any]:
        return {"columns": {name: [str(dtype), ndim] for name, (dtype, ndim) in self.kinds.items()}}

    def unknown(self) -> list[str]:
        """What a reader should know of what a later run in the same folder is compared with."""
        unknown = ["the loop's own source"]
        unknown += [] if self.given_model is not None else ["the weights (give batches(..., model=model))"]
        unknown += [] if self._samples.is_hashed else [f"the contents of the data set ({self._samples.kind})"]
        return [
            f"a later run in this folder cannot see whether {' or '.join(unknown)} changed since: it "
            "computes one finished batch again, and compares"
        ]


def _has_ledger(metric: Metric | RowMetric) -> TypeGuard[Metric]:
    return hasattr(metric, "update")


def _reads_rows(metric: Metric | RowMetric) -> TypeGuard[RowMetric]:
    return not _has_ledger(metric)


class Samples:
    """A caller's data set as the engine reads it; the id of a sample is its index."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self.is_hashed = isinstance(data, _HASHED)
        self.kind = type(data).__name__

    def __len__(self) -> int:
        return len(self._data)

    def id(self, index: int) -> str:
        return str(index)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        many = getattr(self._data, "__getitems__", None)
        return [self._data[index] for index in indices] if many is None else list(many(list(indices)))

    def probe(self) -> list[str | None]:
        """Hashes of a few samples; None of one that cannot be hashed, or is another at each reading."""
        return [self._hash(index) for index in sorted({0, len(self) // 2, len(self) - 1})]

    def _hash(self, index: int) -> str | None:
        try:
            first, again = (Values().digest(self.__getitems__([index])).hex() for _ in range(2))
        except Exception:  # noqa: BLE001 - what is wrong with a sample is said when it is evaluated
            return None
        return first if first == again else None

    def fingerprint(self, count: int) -> str:
        contents = ""
        if self.is_hashed:
            data = self._data.tensors if isinstance(self._data, TensorDataset) else self._data
            contents = Values().digest(data).hex()
        said = f"{type(self._data).__module__}.{self.kind} {len(self)} {count} {contents}"
        return hashlib.sha256(said.encode()).hexdigest()
