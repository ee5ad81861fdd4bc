"""A caller's own loop as a task: what it may ask for, its data set, its columns, their metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from dualeval.columns import Column, Ragged, as_column, host_columns, kind_of, of_parts, parts_of
from dualeval.engine import numerics
from dualeval.engine.guest import unwrapped
from dualeval.engine.options import RunOptions
from dualeval.engine.samples import Samples, check_samples
from dualeval.engine.sharding.fsdp import is_sharded
from dualeval.errors import DualevalError, UsageError
from dualeval.metrics import Metric, RowMetric
from dualeval.metrics.by_name import check_metrics
from dualeval.metrics.means import Mean
from dualeval.options.choices import AUTO, LOCKSTEP, check_kind
from dualeval.tasks import Dataset, Task

if TYPE_CHECKING:
    from dualeval.engine.run_state import Run

_HOST = torch.device("cpu")
_HALF = (torch.float16, torch.bfloat16)


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

    def compare_samples(self, run: Run) -> None:
        """Compare a few samples over the ranks: who has shared the data out before would share it again."""
        if run.backend.world.size == 1:
            return
        run.control.meet()
        everyone = run.backend.all_gather_json(self._samples.probe())
        for rank, probe in enumerate(everyone):
            for own, other in zip(everyone[0], probe, strict=False):
                if own is not None and other is not None and own != other:
                    raise UsageError(
                        f"rank {rank} has other samples in its data set than rank 0. Give every rank the "
                        "whole data set, without a sampler, a shard or a Subset of its own: the session "
                        "divides it"
                    )

    def learn(self, everyone: Sequence[Sequence[Any]]) -> None:
        """Learn the columns from each rank's, as ``LoopKind.plain``: none of one that could read nothing."""
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
        self.kinds = {name: LoopKind(getattr(torch, dtype), ndim, form) for name, dtype, ndim, form in first}
        self._make_metrics()

    def _make_metrics(self) -> None:
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


def check_asked(dataset: Any, run: Run, collate: Any, metrics: Any, model: Any) -> None:
    """Check what ``Session.batches`` was given, before anything is read."""
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


# By option, what the caller's own loop does in its place.
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
    """Check that nothing is asked for that only the caller can do: the forward is the caller's own."""
    for name, instead in _OWN.items():
        if (given := getattr(options, name)) not in ("fp32", "tf32", AUTO, None):
            raise UsageError(f"{name} {given!r}: in your own loop {instead}. Leave {name} out.")


def column_of(name: str, values: Any, samples: range) -> Column:
    column = _as_column(name, values)
    count = 0 if isinstance(column, Tensor) and column.ndim == 0 else len(column)
    if count != len(samples):
        found = f"{count} rows" if isinstance(column, Ragged) or column.ndim else "one number"
        raise UsageError(
            f"the column {name!r} has {found} for the batch of {named(samples)}, expected "
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


def named(samples: range) -> str:
    return f"samples {samples.start} to {samples.stop - 1}"


def _listed(kinds: Sequence[Sequence[Any]]) -> str:
    return ", ".join(
        f"{name}: {dtype}" if form == "plain" else f"{name}: {form} {dtype}" for name, dtype, _, form in kinds
    )
