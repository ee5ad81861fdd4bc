"""Slices: the metrics of each group of samples, computed from the rows like those of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import compress, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dualeval.columns.ragged import NumpyRows, RaggedRows, to_column
from dualeval.engine.folder.row_windows import WINDOW_ROWS, MappedColumns, copied
from dualeval.engine.folder.stored_rows import RowSource
from dualeval.engine.job.evaluation import Evaluation
from dualeval.engine.scoring.rescoring import check_column_of_clusters
from dualeval.engine.values.measured import check_cluster, clustered_fields, columns_of, plain, update
from dualeval.errors import UsageError, text_of
from dualeval.messages import counted, did_you_mean
from dualeval.metrics import Measured, Metric, RowMetric, is_of_rows, keeps_rows, per_batch, split_by_kind
from dualeval.metrics.scores import score_from
from dualeval.options.choices import columns_of_groups, shown_bins
from dualeval.result import Result

# A column with more different numbers than these is cut into bins.
MOST_VALUES = 12
_MOST_GROUPS = 1000
# Smaller groups get no statement: for fewer, intervals and bounds have not been shown to cover.
FEW_SAMPLES, FEW_CLUSTERS = 30, 5
_MISSING, _EMPTY = "(missing)", "(empty)"
_NUMBERS = ("i", "u", "f")
# Significant digits of a quartile.
_DIGITS = 6

# A value for each sample: numbers, bools, or texts (None if missing).
Keys = npt.NDArray[Any] | Sequence[str | None]


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Samples by the values of one or several columns."""

    # The number of each sample's group.
    places: npt.NDArray[np.int64]
    # Each group's value by column, and its name.
    values: Sequence[Mapping[str, Any]]
    names: Sequence[str]

    def members(self) -> list[npt.NDArray[np.int64]]:
        """The samples of each group, in their order."""
        order = np.argsort(self.places, kind="stable")
        ends = np.cumsum(np.bincount(self.places, minlength=len(self.names)))[:-1]
        return np.split(order, ends)


def groups_of(by: str, keys: Mapping[str, Keys], bins: Sequence[float] = ()) -> Groups:
    """Group samples by a column, or by a cross of several.

    Args:
        by: a column's name, or several with ``*`` between.
        keys: by column, a value of each sample.
        bins: where a column of numbers is cut. In a cross, they cut the columns with over 12 different
            values; if there is none, all numeric ones. Without bins, such columns are cut into quartiles.
    """
    names = columns_of_groups([by])
    cut = _cut(names, keys) if bins else ()
    groups = (_of_column(name, keys[name], bins if name in cut else ()) for name in names)
    crossed = reduce(_crossed, groups)
    if len(crossed.names) > _MOST_GROUPS:
        raise UsageError(
            f"--by {by}: there are {len(crossed.names):,} groups, expected {_MOST_GROUPS:,} at most. Name a "
            "column with fewer values."
        )
    return crossed


def _cut(names: Sequence[str], keys: Mapping[str, Keys]) -> Sequence[str]:
    """The columns that bins cut."""
    numbers = [name for name in names if kind_of_keys(keys[name]) in _NUMBERS]
    wide = [name for name in numbers if len(_distinct(np.asarray(keys[name]))) > MOST_VALUES]
    return numbers if len(numbers) == 1 else wide or numbers


def kind_of_keys(keys: Keys) -> str:
    """numpy's kind of a column: "b", "i", "u" or "f"; "" for texts."""
    return keys.dtype.kind if isinstance(keys, np.ndarray) else ""


def bins_without_use(by: Sequence[str], bins: Sequence[float], kinds: Mapping[str, str]) -> str | None:
    """The error if bins cut no column, by the columns' kinds; None if they cut one."""
    names = columns_of_groups(by)
    if not bins or any(kinds[name] in _NUMBERS for name in names):
        return None
    held = ", ".join(f"{name} holds {'true and false' if kinds[name] == 'b' else 'texts'}" for name in names)
    return (
        f"--bins {shown_bins(bins)} cuts columns of numbers, and none is named: {held}. Leave --bins out. If "
        "a word such as n/a means a missing number, leave its cell empty and evaluate again."
    )


def _distinct(keys: npt.NDArray[Any]) -> npt.NDArray[Any]:
    values = np.unique(keys)
    is_number: npt.NDArray[np.bool_] = values == values  # NaN is not equal to itself
    numbers: npt.NDArray[Any] = values[is_number]
    return numbers


def _of_column(name: str, keys: Keys, edges: Sequence[float]) -> Groups:
    if not isinstance(keys, np.ndarray):
        return _of_texts(name, keys)
    if keys.ndim != 1:
        raise UsageError(f"--by {name}: it has several values per sample, expected one")
    is_there = ~np.isnan(keys) if keys.dtype.kind == "f" else np.ones(len(keys), np.bool_)
    distinct = _distinct(keys)
    if edges or len(distinct) > MOST_VALUES:
        if not edges:
            edges = _quartiles(keys[is_there], distinct)
        places = np.searchsorted(edges, keys, side="right")
        names = values = _between(edges)
    else:
        places = np.searchsorted(distinct, keys)
        values = distinct.tolist()
        names = [str(value).lower() if keys.dtype.kind == "b" else _number_text(value) for value in values]
    places = np.where(is_there, places, len(names))
    return _present(name, places, [*values, None], [*names, _MISSING])


def _quartiles(keys: npt.NDArray[Any], distinct: npt.NDArray[Any]) -> list[float]:
    """The edges that cut numbers into four parts, or fewer if most are equal; in few digits if possible."""
    # Not by np.quantile, which converts whole numbers to float64.
    quartiles = np.sort(keys)[np.ceil(np.array([0.25, 0.5, 0.75]) * (len(keys) - 1)).astype(np.int64)]
    edges: list[float] = np.unique(quartiles[quartiles > distinct[0]]).tolist() or distinct[1:2].tolist()
    if keys.dtype.kind != "f":
        return edges
    short = [float(f"{edge:.{_DIGITS}g}") for edge in edges]
    is_apart = all(low < high for low, high in pairwise([float(distinct[0]), *short]))
    return short if is_apart and short[-1] <= distinct[-1] else edges


def _between(edges: Sequence[float]) -> list[str]:
    ends = [_number_text(edge) for edge in edges]
    inner = [f"{low} to <{high}" for low, high in pairwise(ends)]
    return [f"<{ends[0]}", *inner, f"{ends[-1]} or more"]


def is_of(value: Any, group: Any) -> bool:
    """Whether a sample with one value belongs to the group with the other value, as in ``Groups``."""
    if group is None or value is None or not isinstance(group, str) or isinstance(value, str):
        return value == group or (group is None and value != value)
    # In the form that ``_between`` writes.
    ends = re.fullmatch(r"(?:(\S+) (?:or more|to ))?(?:<(\S+))?", group)
    return ends is not None and float(ends[1] or -math.inf) <= value < float(ends[2] or math.inf)


def _number_text(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))


def _of_texts(name: str, texts: Sequence[str | None]) -> Groups:
    distinct = {*texts}
    values = [*sorted(text for text in distinct if text is not None), *({None} & distinct)]
    places = {value: place for place, value in enumerate(values)}
    return Groups(
        places=np.array([places[text] for text in texts], np.int64),
        values=[{name: value} for value in values],
        names=[_MISSING if value is None else value or _EMPTY for value in values],
    )


def _present(name: str, places: Any, values: Sequence[Any], names: Sequence[str]) -> Groups:
    """Groups of one column, without empty ones."""
    present, numbers = np.unique(places, return_inverse=True)
    return Groups(
        places=numbers.reshape(-1),
        values=[{name: values[place]} for place in present],
        names=[names[place] for place in present],
    )


def _crossed(one: Groups, other: Groups) -> Groups:
    count = len(other.names)
    present, numbers = np.unique(one.places * count + other.places, return_inverse=True)
    pairs = [divmod(int(place), count) for place in present]
    return Groups(
        places=numbers.reshape(-1),
        values=[{**one.values[first], **other.values[second]} for first, second in pairs],
        names=[f"{one.names[first]} * {other.names[second]}" for first, second in pairs],
    )


def too_small(samples: int, clusters: int | None) -> str | None:
    """Why a group is too small for a statement; None if it is large enough."""
    if samples < FEW_SAMPLES:
        return f"only {counted(samples, 'sample')}: too few for a statement"
    if clusters is not None and clusters < FEW_CLUSTERS:
        return f"only {counted(clusters, 'cluster')}: too few for a statement"
    return None


def _measured_of(
    metric: Metric | RowMetric, columns: Mapping[str, NumpyRows], places: npt.NDArray[np.int64]
) -> Measured:
    """A metric's measurement of some rows of mapped columns."""
    of_ledger, of_rows = split_by_kind([metric])
    for row_metric in of_rows:
        part = {name: columns[name][places] for name in metric.columns}
        return plain(metric.name, row_metric.compute(columns_of(metric, part)))
    [ledger_metric] = of_ledger
    ledger = torch.zeros(ledger_metric.size, dtype=torch.int64)
    for start in range(0, len(places), WINDOW_ROWS):
        window = places[start : start + WINDOW_ROWS]
        of_window = {name: to_column(columns[name][window]) for name in metric.columns}
        update(ledger_metric, ledger, of_window, [len(window)])
    return plain(metric.name, ledger_metric.compute(ledger))


@dataclass(frozen=True, kw_only=True)
class Slicing:
    """Metrics by group."""

    by: Sequence[str]
    bins: Sequence[float] = ()
    metrics: Sequence[Metric | RowMetric]
    # The column that says which samples belong together; None if there is none.
    cluster: str | None = None
    # Called for every window and group.
    step: Callable[[], None] = lambda: None

    def of_rows(self, result: Result, rows: RowSource) -> Result:
        """The result with its slices."""
        if self.cluster is not None:
            check_column_of_clusters(rows, self.cluster)
        names = columns_of_groups(self.by)
        texts: dict[str, list[str | None]] = {name: [] for name in names if name not in rows.names}
        wanted = self._wanted(result, rows.names)
        there = []
        with MappedColumns(None) as mapped:
            for window in rows.windows(None if texts else wanted or rows.names[:1]):
                for name, of_column in texts.items():
                    if name not in window.texts:
                        known = [*rows.names, *window.texts]
                        raise UsageError(
                            f"--by {name}: {rows.path} has no such column. The columns are "
                            f"{', '.join(known)}. A run keeps those of its data that --keep names."
                            f"{did_you_mean(name, known)}"
                        )
                    of_column += compress(window.texts[name], window.evaluated)
                mapped.append({name: window.columns[name] for name in wanted})
                there.append(window.evaluated)
                self.step()
            columns = mapped.columns()
        if self.cluster is not None:
            check_cluster(self.cluster, {self.cluster: to_column(copied(columns[self.cluster][:1]))})
        keys: dict[str, Keys] = {
            name: texts[name] if name in texts else _keys(name, columns[name]) for name in names
        }
        kinds = {name: kind_of_keys(values) for name, values in keys.items()}
        if (unused := bins_without_use(self.by, self.bins, kinds)) is not None:
            raise UsageError(unused)
        slices = {}
        for by in dict.fromkeys(self.by):
            groups = groups_of(by, keys, self.bins)
            members = zip(groups.values, groups.names, groups.members(), strict=True)
            slices[by] = [self._group(columns, value, label, places) for value, label, places in members]
        unsliced = [metric.name for metric in self.metrics if metric not in self._sliced]
        without = ", ".join(name for name in unsliced if name in result.metrics)
        warning = f"no slices of {without}: their columns are not kept, or they need whole batches"
        return replace(result, slices=slices, warnings=[*result.warnings, *([warning] if without else [])])

    def _wanted(self, result: Result, kept: Sequence[str]) -> list[str]:
        """The columns that slices are computed from."""
        scores = [score_from(score) for score in result.scores.values()]
        wanted = [name for metric in self._sliced for name in metric.columns]
        wanted += [name for score in scores for name in score.columns]
        wanted += [*columns_of_groups(self.by), *filter(None, [self.cluster])]
        return [name for name in dict.fromkeys(wanted) if name in kept]

    @property
    def _sliced(self) -> list[Metric | RowMetric]:
        return [
            metric
            for metric in self.metrics
            if is_of_rows(metric) or (keeps_rows(metric) and not per_batch(metric))
        ]

    def _group(
        self,
        columns: Mapping[str, NumpyRows],
        value: Mapping[str, Any],
        label: str,
        places: npt.NDArray[np.int64],
    ) -> dict[str, Any]:
        self.step()
        measured: list[Measured] = []
        rough: dict[str, str] = {}
        for metric in self._sliced:
            try:
                measured.append(_measured_of(metric, columns, places))
            except Exception as error:  # noqa: BLE001 - of a metric that needs more samples, or all classes
                measured.append(Measured(values={metric.name: None}))
                rough[metric.name] = f"cannot be computed of this group: {text_of(error)}"

        def read(names: Sequence[str]) -> dict[str, NumpyRows]:
            return {name: columns[name][places] for name in names}

        fields, _ = clustered_fields(measured, self.cluster, [*columns], read)
        count = fields.get("clusters", {}).get("count")
        numbers = {
            name: number
            for name, number in fields["metrics"].items()
            if number is None or (isinstance(number, (int, float)) and not isinstance(number, bool))
        }
        return {
            "group": dict(value),
            "label": label,
            "samples": len(places),
            "clusters": count,
            "metrics": numbers,
            "intervals": {name: [*ends] for name, ends in fields["intervals"].items() if name in numbers},
            "rough": {**fields["rough"], **rough},
            "small": too_small(len(places), count),
        }


def slicing_of(evaluation: Evaluation, step: Callable[[], None]) -> Slicing | None:
    """The slicing that a run's options ask for; None if they ask for none."""
    options = evaluation.run.options
    if not options.by:
        return None
    return Slicing(
        by=options.by, bins=options.bins, metrics=evaluation.measures, cluster=evaluation.cluster, step=step
    )


def _keys(name: str, rows: NumpyRows) -> Keys:
    """The values of a column, by which samples are grouped."""
    if not isinstance(rows, RaggedRows):
        return rows
    if rows.form != "text":
        raise UsageError(f"--by {name}: it has several values per sample, expected one")
    texts: list[str | None] = rows.tolist()
    return texts
