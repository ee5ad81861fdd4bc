"""The columns that metrics read, and what metrics measure: checked, as plain JSON values.

For clustered samples, with intervals that allow for the clusters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from dualeval.columns.ragged import Column, NumpyRows, Text, kind_text
from dualeval.errors import UsageError
from dualeval.messages import did_you_mean
from dualeval.metrics import DIRECTIONS, Measured, Metric, RowMetric, keeps_rows, per_batch
from dualeval.metrics.intervals import Ends
from dualeval.metrics.scores import Score

if TYPE_CHECKING:
    from dualeval.metrics.clusters import ClusterIntervals

Values = TypeVar("Values")
# Fields of ``Measured`` and of ``Result``.
_SAID_BY_KEY = ("intervals", "rough", "nonfinite", "units", "directions", "scores")
# An interval may miss its value by a rounding error.
_ROUNDING = 2.0**-40
_NUMBERED = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class _Declared(dict[str, Values]):
    """The columns of one metric, by name."""

    metric: str

    def __missing__(self, name: str) -> Values:
        raise UsageError(
            f"metric {self.metric!r} reads column {name!r}, which is not among its columns "
            f"({', '.join(self)}). Add {name!r} to the metric's 'columns'."
        )


def kept_columns(
    rows: Sequence[str], metrics: Sequence[Metric], row_metrics: Sequence[RowMetric]
) -> tuple[str, ...]:
    """The columns that journal and predictions.parquet hold: the ``rows`` of a task, then what metrics read.

    Columns of metrics with ``keeps_rows = False`` are left out. The same on every rank.
    """
    check_declarations([*metrics, *row_metrics])
    # A row metric has only the rows: its columns are always kept.
    reading: list[Metric | RowMetric] = [*filter(keeps_rows, metrics), *row_metrics]
    read = (name for metric in reading for name in metric.columns)
    return tuple(dict.fromkeys((*rows, *read)))


def check_declarations(metrics: Sequence[Metric | RowMetric]) -> None:
    """Check that metrics say which columns they read."""
    for metric in metrics:
        declared = getattr(metric, "columns", None)
        named = isinstance(declared, (tuple, list)) and all(isinstance(name, str) for name in declared)
        if not named or not declared:
            raise UsageError(
                f"metric {metric.name!r} ({type(metric).__name__}) has columns = {declared!r}, expected a "
                "tuple with the names of the columns that it reads, such as columns = ('loss',)"
            )


def columns_of(metric: Metric | RowMetric, columns: Mapping[str, Values]) -> Mapping[str, Values]:
    """The columns that a metric has declared; it is a ``UsageError`` if it reads any other."""
    read = _Declared[Values]()
    read.metric = metric.name
    for name in metric.columns:
        if name not in columns:
            raise UsageError(
                f"metric {metric.name!r} reads column {name!r}, which the task does not make. Its columns: "
                f"{', '.join(columns)}."
            )
        read[name] = columns[name]
    return read


def update(metric: Metric, slots: Tensor, columns: Mapping[str, Column], batches: Sequence[int]) -> None:
    """Add the samples of consecutive batches to a metric, one batch at a time if it asks for that."""
    read = columns_of(metric, columns)
    if not per_batch(metric):
        metric.update(slots, read)
        return
    start = 0
    for count in batches:
        if count:
            part = {name: values[start : start + count] for name, values in read.items()}
            metric.update(slots, columns_of(metric, part))
        start += count


def _is_pair(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    return all(end is None or isinstance(end, (int, float)) for end in value)


def _is_counts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(count, int) for count in value.values())


_VALUE = "a number, a text, a list or dict of them, or None"
# For the fields of ``Measured`` with entries by key: an entry's type, or a check of it, and its description.
_EXPECTED: dict[str, tuple[type | Callable[[Any], bool], str]] = {
    "intervals": (_is_pair, "a pair of numbers"),
    "rough": (str, "a text"),
    "nonfinite": (_is_counts, "a dict of whole numbers"),
    "units": (str, "a text"),
    "directions": (DIRECTIONS.__contains__, " or ".join(DIRECTIONS)),
    "scores": (Score, "a dualeval.metrics.Score"),
    "work": (int, "a whole number"),
}


def plain(metric: str, measured: Measured) -> Measured:
    """A metric's measurements as plain JSON values; numpy's numbers become Python's.

    JSON has no NaN and no infinities: they become None, and a warning says so.
    """
    if not isinstance(measured, Measured):
        raise UsageError(
            f"metric {metric!r} returned a {type(measured).__name__}, expected dualeval.Measured(values=...)"
        )
    lost: list[str] = []
    fields = dict[str, dict[str, Any]]()
    for name in ("values", *_EXPECTED):
        nest = getattr(measured, name)
        fields[name] = {} if type(nest) is dict and not nest else _field(metric, name, nest, lost)
    for name in ("intervals", "units", "directions", "scores", "rough"):
        known = measured.intervals if name == "rough" else measured.values
        for key in fields[name]:
            if key not in known:
                raise UsageError(f"metric {metric!r} gave {name} for {key!r}, and no value of that name")
    # Drop intervals with a missing end.
    fields["intervals"] = {key: tuple(ends) for key, ends in fields["intervals"].items() if None not in ends}
    sentences = measured.warnings
    if not isinstance(sentences, (tuple, list)) or not all(isinstance(each, str) for each in sentences):
        raise _unexpected(metric, "warnings", sentences, "a tuple of texts")
    checked = replace(measured, **fields, warnings=(*sentences, *lost))
    try:
        # Written as for the digest and result.json.
        json.dumps(asdict(checked), sort_keys=True, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"metric {metric!r} gave a text that is not Unicode (half a surrogate pair): {error.object!a}"
        ) from error
    return checked


def _field(metric: str, field: str, nest: Any, lost: list[str]) -> dict[str, Any]:
    """A field with entries by key, checked; in errors, keys of ``values`` appear without the field's name."""
    entries: dict[str, Any] | None = None
    if type(nest) is dict:
        with suppress(TypeError, ValueError):  # most are plain already, and JSON's own code is faster
            entries = json.loads(json.dumps(nest, allow_nan=False))
    if entries is None or entries != nest:  # also with tuples, or keys that are no text
        entries = _mapping(metric, field, nest, lost, at_top=field == "values")
    elif field == "values":
        return entries
    fits, expected = _EXPECTED.get(field, (lambda value: not isinstance(value, Score), _VALUE))
    for key, value in entries.items():
        if not (isinstance(value, fits) if isinstance(fits, type) else fits(value)):
            raise _unexpected(metric, f"{field}.{key}", nest[key], expected)
    return entries


def _mapping(metric: str, where: str, nest: Any, lost: list[str], *, at_top: bool = False) -> dict[str, Any]:
    if not isinstance(nest, Mapping):
        raise _unexpected(metric, where, nest, "a dict")
    for key in nest:
        if not isinstance(key, str):
            raise UsageError(f"metric {metric!r}: {where} has the key {key!r}, expected a text")
    return {
        key: _plain(metric, key if at_top else f"{where}.{key}", value, lost) for key, value in nest.items()
    }


def _plain(metric: str, where: str, value: Any, lost: list[str]) -> Any:
    """A value as in JSON; adds a sentence to ``lost`` for each number that is not finite."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        lost.append(
            f"metric {metric!r} gave {value} for {where}, which is null in the result: give None "
            "where there is no finite value"
        )
        return None
    if isinstance(value, Mapping):
        return _mapping(metric, where, value, lost)
    if isinstance(value, (list, tuple)):
        return [_plain(metric, f"{where}[{place}]", entry, lost) for place, entry in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str, Score)):
        return value
    hint = "; a tensor of one number becomes one by .item()" if isinstance(value, Tensor) else ""
    raise _unexpected(metric, where, value, _VALUE + hint)


def _unexpected(metric: str, where: str, value: Any, expected: str) -> UsageError:
    shown = repr(value) if isinstance(value, str) else f"a {type(value).__name__}"
    return UsageError(f"metric {metric!r} gave {shown} for {where}, expected {expected}")


def fields_of_result(measured: Sequence[Measured]) -> dict[str, Any]:
    """The metrics' measurements as those fields of a ``Result`` that have entries by key."""
    merged: dict[str, dict[str, Any]] = {
        "metrics": _merged(part.values for part in measured),
        **{name: _merged(getattr(part, name) for part in measured) for name in _SAID_BY_KEY},
    }
    merged["scores"] = {key: score.to_json() for key, score in merged["scores"].items()}
    return merged


def rough_warnings(rough: Mapping[str, str]) -> list[str]:
    """A sentence for each reason why intervals may cover less than 95 %."""
    reasons = dict.fromkeys(rough.values())
    named = {why: ", ".join(key for key in rough if rough[key] == why) for why in reasons}
    return [f"the interval of {keys} is rough: {why}" for why, keys in named.items()]


def _merged(mappings: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {key: value for each in mappings for key, value in each.items()}


def measure(
    ledger: Iterable[tuple[Metric, Tensor]],
    row_metrics: Sequence[RowMetric],
    columns: Mapping[str, NumpyRows],
) -> list[Measured]:
    """What all samples give: by metrics with their slots of the ledger, then by row metrics."""
    measured = [plain(metric.name, metric.compute(slots)) for metric, slots in ledger]
    measured += [plain(metric.name, metric.compute(columns_of(metric, columns))) for metric in row_metrics]
    check_keys(measured)
    return measured


def check_keys(measured: Iterable[Measured]) -> None:
    """Check that no two metrics give a value of the same name."""
    seen: set[str] = set()
    for part in measured:
        for key in part.values:
            if key in seen:
                raise UsageError(
                    f"two metrics give a value called {key!r}, and only one could be in the result. Rename "
                    "one."
                )
            seen.add(key)


def check_cluster(name: str, columns: Mapping[str, Column]) -> None:
    """Check that a batch has the column, and that its entries can identify clusters."""
    if name not in columns:
        raise UsageError(
            f"--cluster {name!r}: there is no such column. The columns are {', '.join(columns)}. Name one of "
            "them. Columns of the data are those that --keep names, by default all small ones "
            f"(docs/slices.md).{did_you_mean(name, columns)}"
        )
    column = columns[name]
    told_apart = isinstance(column, Text)
    if isinstance(column, Tensor):
        told_apart = column.ndim == 1 and column.dtype in _NUMBERED
    if not told_apart:
        raise UsageError(
            f"--cluster {name!r}: the column is {kind_text(column)}. Expected integers, bools or text, one "
            "entry per sample."
        )


def clustered_fields(
    measured: Sequence[Measured],
    cluster: str | None,
    kept: Sequence[str],
    read: Callable[[Sequence[str]], Mapping[str, NumpyRows]],
) -> tuple[dict[str, Any], list[str]]:
    """The fields of a result, and warnings; for a column of clusters, ``read`` gives some kept columns."""
    by_clusters = None
    if cluster is not None:
        scores = [score for part in measured for score in part.scores.values()]
        wanted = dict.fromkeys((cluster, *(column for score in scores for column in score.columns)))
        by_clusters = find_clusters(cluster, measured, read([column for column in wanted if column in kept]))
    return with_clusters(fields_of_result(measured), cluster, by_clusters)


def find_clusters(name: str, measured: Sequence[Measured], rows: Mapping[str, NumpyRows]) -> ClusterIntervals:
    """The intervals by clusters for all values that metrics have measured."""
    from dualeval.metrics.clusters import cluster_intervals

    values = {key: value for part in measured for key, value in part.values.items()}
    units = {key: unit for part in measured for key, unit in part.units.items()}
    scores = {key: score for part in measured for key, score in part.scores.items()}
    absent = {key: [each for each in score.columns if each not in rows] for key, score in scores.items()}
    known = {key: score for key, score in scores.items() if not absent[key]}
    by_clusters = cluster_intervals(name, rows, values, known, units)
    without = [
        f"no interval of {key} by {name}: the run has not kept the column {columns[0]!r}"
        for key, columns in absent.items()
        if columns
    ]
    apart = [key for key, ends in by_clusters.intervals.items() if not _holds(ends, values[key])]
    without += [
        f"no interval of {key} by {name}: its score gives another value than its metric" for key in apart
    ]
    return replace(
        by_clusters,
        intervals={key: ends for key, ends in by_clusters.intervals.items() if key not in apart},
        rough={key: why for key, why in by_clusters.rough.items() if key not in apart},
        warnings=(*by_clusters.warnings, *without),
    )


def _holds(ends: Ends, value: Any) -> bool:
    slack = _ROUNDING * max(map(abs, ends))
    return bool(ends[0] - slack <= value <= ends[1] + slack)


def check_scores(measured: Sequence[Measured], columns: Mapping[str, Column]) -> None:
    """Check that the columns of metrics' scores hold a number a sample."""
    for part in measured:
        for key, score in part.scores.items():
            for name in score.columns:
                column = columns.get(name)
                if name == score.where and isinstance(column, Text):
                    continue
                if column is not None and not (isinstance(column, Tensor) and column.numel() == len(column)):
                    raise UsageError(
                        f"the score of {key!r} reads the column {name!r}, which is {kind_text(column)}. "
                        "Expected one number per sample."
                    )


def with_clusters(
    fields: Mapping[str, Any], name: str | None, by_clusters: ClusterIntervals | None
) -> tuple[dict[str, Any], list[str]]:
    """The fields of a result, with intervals by clusters in place of those for independent samples."""
    if name is None or by_clusters is None:
        rough = {**_without_wrong(fields, fields["intervals"]), **fields["rough"]}
        return {**fields, "rough": rough}, rough_warnings(rough)
    keys = ", ".join(key for key in fields["intervals"] if key not in fields["scores"])
    why = "its metric does not say how the value follows from each sample"
    without = [f"no interval of {keys} by {name}: {why}"] if keys else []
    rough = {**_without_wrong(fields, by_clusters.intervals), **by_clusters.rough}
    new = {
        **fields,
        "intervals": by_clusters.intervals,
        "rough": rough,
        "naive_intervals": fields["intervals"],
        "clusters": {"column": name, "count": by_clusters.count},
    }
    return new, [*by_clusters.warnings, *without, *rough_warnings(rough)]


def _without_wrong(fields: Mapping[str, Any], intervals: Mapping[str, Ends]) -> dict[str, str]:
    """Why a loss's interval is rough if no sample is wrong: few wrong samples make up most of a loss."""
    all_right = 1.0 in (fields["metrics"].get(name) for name in ("top1", "accuracy"))
    why = "all samples are right, so nothing is known of the loss of wrong ones"
    return {"loss": why} if all_right and "loss" in intervals else {}
