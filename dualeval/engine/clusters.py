"""Samples that go together: the column that says so, and the intervals that allow for it, in the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dualeval.columns import Column, Rows, Text, described
from dualeval.engine.measured import rough_warnings
from dualeval.errors import UsageError
from dualeval.metrics import Measured
from dualeval.metrics.clusters import ClusterIntervals, cluster_intervals
from dualeval.metrics.intervals import Ends
from dualeval.wording import did_you_mean

# An interval may miss its value by what rounding leaves.
_ROUNDING = 2.0**-40
_NUMBERED = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_cluster(name: str, columns: Mapping[str, Column]) -> None:
    """Check that a batch has the column, and that its entries can be told apart."""
    if name not in columns:
        raise UsageError(
            f"--cluster {name!r}: there is no such column. The columns are {', '.join(columns)}. Name one of "
            "them. Of the data are those that --keep names, without it all small ones (docs/slices.md)."
            f"{did_you_mean(name, columns)}"
        )
    column = columns[name]
    told_apart = isinstance(column, Text)
    if isinstance(column, Tensor):
        told_apart = column.ndim == 1 and column.dtype in _NUMBERED
    if not told_apart:
        raise UsageError(
            f"--cluster {name!r}: the column is {described(column)}. Expected integers, bools or text, one "
            "entry a sample."
        )


def columns_wanted(name: str, measured: Sequence[Measured], kept: Sequence[str]) -> list[str]:
    """The columns from which intervals by clusters follow, of those that are kept."""
    scores = [score for part in measured for score in part.scores.values()]
    wanted = dict.fromkeys((name, *(column for score in scores for column in score.columns)))
    return [column for column in wanted if column in kept]


def find_clusters(name: str, measured: Sequence[Measured], rows: Mapping[str, Rows]) -> ClusterIntervals:
    """The intervals by clusters of all that metrics have measured."""
    values = {key: value for part in measured for key, value in part.values.items()}
    units = {key: unit for part in measured for key, unit in part.units.items()}
    scores = {key: score for part in measured for key, score in part.scores.items()}
    absent = {key: [each for each in score.columns if each not in rows] for key, score in scores.items()}
    known = {key: score for key, score in scores.items() if not absent[key]}
    found = cluster_intervals(name, rows, values, known, units)
    without = [
        f"no interval of {key} by {name}: the run has not kept the column {columns[0]!r}"
        for key, columns in absent.items()
        if columns
    ]
    apart = [key for key, ends in found.intervals.items() if not _holds(ends, values[key])]
    without += [
        f"no interval of {key} by {name}: its score gives another value than its metric" for key in apart
    ]
    return replace(
        found,
        intervals={key: ends for key, ends in found.intervals.items() if key not in apart},
        rough={key: why for key, why in found.rough.items() if key not in apart},
        warnings=(*found.warnings, *without),
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
                if column is not None and not (isinstance(column, Tensor) and column.numel() == len(column)):
                    raise UsageError(
                        f"the score of {key!r} reads the column {name!r}, which is {described(column)}. "
                        "Expected one number a sample."
                    )


def with_clusters(
    fields: Mapping[str, Any], name: str | None, found: ClusterIntervals | None
) -> tuple[dict[str, Any], list[str]]:
    """The fields of a result with intervals by clusters in place of those of independent samples."""
    if name is None or found is None:
        return dict(fields), rough_warnings(fields["rough"])
    without = [
        f"no interval of {key} by {name}: its metric does not say how the value follows from each sample"
        for key in fields["intervals"]
        if key not in fields["scores"]
    ]
    new = {
        **fields,
        "intervals": found.intervals,
        "rough": found.rough,
        "naive_intervals": fields["intervals"],
        "clusters": {"column": name, "count": found.count},
    }
    return new, [*found.warnings, *without, *rough_warnings(found.rough)]
