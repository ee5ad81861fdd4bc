"""What a metric is: samples to integers to values, or the rows of all samples to values."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeGuard

import torch
from torch import Tensor

from dualeval.errors import UsageError
from dualeval.messages import nearest
from dualeval.metrics.scores import Score
from dualeval.options.choices import check_kind

DIRECTIONS = ("higher", "lower")

# Plain JSON, without NaN and infinities: these are not JSON, and are written as None plus counts.
Value: TypeAlias = "float | int | str | list[Value] | dict[str, Value] | None"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a metric says about the samples in its ledger; equal ledgers give equal bits.

    Attributes:
        values: the metric's values by key; None where there is no finite value.
        intervals: 95 % intervals (low, high) by key, for the keys that have one.
        rough: by key, why an interval may cover less than 95 %; a key without one covers.
        nonfinite: by key, how many samples were ``nan``, ``pos_inf`` and ``neg_inf``; only keys with any.
        units: by key, "fraction" for values of 0 to 1, which are shown in percent; "percent" for values of 0
            to 100; any other text is shown behind the value. A key without one is a plain number.
        directions: by key, whether "higher" or "lower" is better; a key without one is neither.
        scores: by key, how the value follows from a number of each sample; a key without one has no such.
        warnings: what a reader of the values should know, a sentence each.
        work: what the values took, as counts; no part of the metrics or their digest.
    """

    values: dict[str, Value]
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    rough: dict[str, str] = field(default_factory=dict)
    nonfinite: dict[str, dict[str, int]] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    directions: dict[str, str] = field(default_factory=dict)
    scores: dict[str, Score] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    work: dict[str, int] = field(default_factory=dict)


class Metric(Protocol):
    """Samples to integers to values; merging two states is adding their ledgers.

    Its class and its attributes tell one metric from another; where they tell too much or too little, it has
    a method ``fingerprint()`` that returns plain values, as JSON has them. So has a ``RowMetric``. What else
    has source that decides the values a method ``sources()`` returns: functions, classes and modules.

    A run keeps the columns that its metrics read, so that they can be computed again without a forward. A
    metric whose numbers nobody will want again has an attribute ``keeps_rows = False``.

    ``update`` gets the samples of many batches at once. A metric that rounds within ``update``, so that the
    way in which samples are grouped shows in its bits, has an attribute ``per_batch = True``: each of its
    updates gets the samples of one batch, and these are the same at every number of processes.
    """

    @property
    def name(self) -> str:
        """The name by which the metric is asked for."""
        ...

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the metric reads; it gets no others."""
        ...

    @property
    def size(self) -> int:
        """How many int64 slots of the ledger the metric owns."""
        ...

    def update(self, ledger: Tensor, columns: Mapping[str, Any]) -> None:
        """Add samples to the ledger, in place.

        Afterwards the slots are small enough that 2**30 such ledgers add up without overflow.

        Args:
            ledger: the metric's own slots, int64 of shape (size,), contiguous, on the CPU.
            columns: the metric's own by name, on the CPU: tensors, first dimension samples, or
                ``dualeval.Ragged`` and ``dualeval.Text``. Failed samples are already left out.
        """
        ...

    def compute(self, ledger: Tensor) -> Measured:
        """Turn the slots of any sum of updated ledgers into values; the ledger is untouched."""
        ...


class RowMetric(Protocol):
    """A metric of all samples together, such as one that has to put them in order.

    Computed once, on rank 0. Its columns lie in files that are mapped, and so take no memory of the process;
    where nothing is written (``out=None``) they lie in memory.

    Attributes:
        name: the name by which the metric is asked for.
        columns: the columns that it reads.
    """

    @property
    def name(self) -> str: ...

    @property
    def columns(self) -> tuple[str, ...]: ...

    def compute(self, columns: Mapping[str, Any]) -> Measured:
        """Turn the rows of all evaluated samples, in data-set order, into values.

        Args:
            columns: the metric's own by name, read-only: arrays, first dimension samples. A ragged column is
                a sequence of arrays, one of text a sequence of str, with ``values`` (of all samples, one
                behind the other) and ``offsets`` (where each sample's begin and the last one's end).
        """
        ...


def is_of_rows(metric: Metric | RowMetric) -> TypeGuard[RowMetric]:
    """Whether it is a metric of all rows, without a ledger."""
    return not hasattr(metric, "update")


def split_by_kind(metrics: Iterable[Metric | RowMetric]) -> tuple[tuple[Metric, ...], tuple[RowMetric, ...]]:
    """The metrics with a ledger, and those of all rows, each in their order."""
    every = tuple(metrics)
    of_rows = tuple(metric for metric in every if is_of_rows(metric))
    return tuple(metric for metric in every if _has_ledger(metric)), of_rows


def _has_ledger(metric: Metric | RowMetric) -> TypeGuard[Metric]:
    return not is_of_rows(metric)


DEFAULT = "default"


def called(
    text: str, metrics: Sequence[Metric | RowMetric], *, by_value: bool = True
) -> Sequence[Metric | RowMetric]:
    """Those of a task's default metrics that a text names; none where it names none.

    "default" names all, and the name of a metric, or of one of the values that it gives, that one. A metric
    of a user's own is not asked for its values: it may divide by a count, of which there is none yet.
    """
    if text == DEFAULT:
        return metrics
    return [metric for metric in metrics if metric.name == text][:1] or [
        metric for metric in metrics if by_value and text in _values_of(metric)
    ][:1]


def chosen(names: Sequence[str], metrics: Sequence[Metric | RowMetric]) -> list[Metric | RowMetric]:
    """Those metrics that the names name, in their own order; all without names."""
    asked = set[str]()
    for name in names:
        if not (found := called(name, metrics)):
            known = [metric.name for metric in metrics]
            raise UsageError(
                f"there is no metric {name!r} here.{nearest(name, known)} Metrics: {', '.join(known)}"
            )
        asked.update(metric.name for metric in found)
    return [metric for metric in metrics if not names or metric.name in asked]


def by_names(
    asked: Sequence[Any],
    default: Sequence[Metric | RowMetric],
    made: Callable[[str], Metric | RowMetric],
    *,
    by_value: bool = True,
) -> list[Metric | RowMetric]:
    """What texts name, each metric once, and metrics as they are; ``made`` makes what is no default one."""
    chosen, texts = list[Metric | RowMetric](), set[str]()
    for each in asked:
        if not isinstance(each, str):
            chosen.append(each)
            continue
        named = called(each, default, by_value=by_value) or [made(each)]
        chosen += [metric for metric in named if metric.name not in texts]
        texts.update(metric.name for metric in named)
    return chosen


def _values_of(metric: Metric | RowMetric) -> Collection[str]:
    """The names of the values that a metric gives; one of rows says them as ``keys``, or is not asked."""
    if _has_ledger(metric):
        return metric.compute(torch.zeros(metric.size, dtype=torch.int64)).values
    keys: Collection[str] = getattr(metric, "keys", ())
    return keys


def keeps_rows(metric: Metric | RowMetric) -> bool:
    """Whether a run keeps the columns that a metric reads; it does where the metric does not say no."""
    return bool(getattr(metric, "keeps_rows", True))


def per_batch(metric: Metric | RowMetric) -> bool:
    """Whether each update of a metric gets the samples of one batch alone."""
    return bool(getattr(metric, "per_batch", False))


def direction(higher_is_better: bool) -> str:
    """As ``Measured.directions`` has it."""
    return "higher" if higher_is_better else "lower"


class Described:
    """A metric with one value."""

    def __init__(self, name: str, unit: str | None, higher_is_better: bool | None) -> None:
        check_kind("name", name, isinstance(name, str) and bool(name), "a text")
        check_kind("unit", unit, unit is None or isinstance(unit, str), "a text, or None")
        known = higher_is_better is None or isinstance(higher_is_better, bool)
        check_kind("higher_is_better", higher_is_better, known, "True, False or None")
        self.name = name
        self.unit = unit
        self.higher_is_better = higher_is_better

    @property
    def score(self) -> Score | None:
        """How the value follows from a number of each sample; None where it does not."""
        return None

    def measured(
        self,
        value: Value,
        interval: tuple[float, float] | None = None,
        *,
        nonfinite: Mapping[str, int] | None = None,
        unit: str | None = None,
        rough: str | None = None,
        warnings: Iterable[str] = (),
    ) -> Measured:
        """The value under the metric's name."""
        unit, score = self.unit or unit, self.score
        known = interval is not None and all(map(math.isfinite, interval))
        return Measured(
            values={self.name: value},
            intervals={self.name: interval} if interval is not None and known else {},
            rough={self.name: rough} if rough is not None and known else {},
            nonfinite={self.name: dict(nonfinite)} if nonfinite else {},
            units={} if unit is None else {self.name: unit},
            directions={} if self.higher_is_better is None else {self.name: direction(self.higher_is_better)},
            scores={} if score is None else {self.name: score},
            warnings=tuple(warnings),
        )
