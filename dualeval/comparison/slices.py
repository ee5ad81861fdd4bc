"""Two runs compared group by group, and gates that no group may miss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from dualeval.comparison.estimates import Estimate, differences_of
from dualeval.comparison.pairing import Pairs, taken
from dualeval.comparison.statistics import LEVEL, Difference
from dualeval.engine.slices import Keys, groups_of, too_small
from dualeval.errors import UsageError
from dualeval.options.choices import columns_of_groups

# An `Estimate`, or what is said of it.
_Compared = TypeVar("_Compared")


@dataclass(frozen=True, kw_only=True)
class Group(Generic[_Compared]):
    """The pairs of one group."""

    # Its value by column, and its name.
    group: Mapping[str, Any]
    label: str
    # Number of pairs, and of clusters of these; None where samples are independent.
    samples: int
    clusters: int | None
    # By name, what was found.
    metrics: dict[str, _Compared]
    # By name, why a metric was not compared.
    not_compared: Mapping[str, str]
    # Why nothing is said of it; None where something can be.
    small: str | None


@dataclass(frozen=True, kw_only=True)
class GroupBound:
    """Whether B is worse in one group by no more than a margin."""

    label: str
    samples: int
    # The largest loss that the group's samples allow, at the level of its step; None where none is known.
    bound: float | None
    passed: bool
    # Why it has no bound.
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class WorstGate:
    """Whether B is worse in no group by more than a margin, with 95 % confidence for all groups together."""

    metric: str
    by: str
    margin: float
    groups: Sequence[GroupBound]
    # Names of groups that were left out because they are too small.
    skipped: Sequence[str]

    @property
    def passed(self) -> bool:
        """Whether it is shown for every group, and there is one."""
        return bool(self.groups) and all(group.passed for group in self.groups)


def groups_of_pairs(
    pairs: Pairs,
    by: str,
    bins: Sequence[float],
    clusters: npt.NDArray[np.int64] | None,
    chosen: Sequence[str] | None,
) -> list[Group[Estimate]]:
    """Estimate the differences of each group."""
    found = groups_of(by, {name: _keys(pairs, name) for name in columns_of_groups([by])}, bins)
    groups = []
    for value, label, places in zip(found.values, found.labels, found.members(), strict=True):
        of_group = replace(pairs, rows_a=pairs.rows_a[places], rows_b=pairs.rows_b[places])
        own = None if clusters is None else clusters[places]
        estimates, not_compared = differences_of(of_group, own, chosen)
        count = None if own is None else len(np.unique(own))
        groups.append(
            Group(
                group=value,
                label=label,
                samples=len(places),
                clusters=count,
                metrics=estimates,
                not_compared=not_compared,
                small=too_small(len(places), count),
            )
        )
    return groups


def _keys(pairs: Pairs, name: str) -> Keys:
    """A column of the pairs, of the run that has it; of both it has to be the same."""
    import pyarrow

    columns = [
        taken(column, rows)
        for column, rows in (
            (pairs.a.rows.whole(name), pairs.rows_a),
            (pairs.b.rows.whole(name), pairs.rows_b),
        )
        if column is not None
    ]
    if not columns:
        raise UsageError(
            f"--by {name}: neither run has this column. {pairs.a.rows.path} has "
            f"{', '.join(pairs.a.rows.names)}."
        )
    if any(pyarrow.types.is_nested(column.type) for column in columns):
        raise UsageError(f"--by {name}: it has several values a sample, expected one")
    keys = [
        column.to_pylist() if pyarrow.types.is_large_string(column.type) else np.asarray(column)
        for column in columns
    ]
    if len(keys) == 2 and not _are_equal(*keys):
        raise UsageError(f"--by {name}: it is not the same in both runs")
    found: Keys = keys[0]
    return found


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, list) or isinstance(other, list):
        return bool(one == other)
    # NaN is not equal to itself.
    return bool(((one == other) | ((one != one) & (other != other))).all())


def worst_gate(
    groups: Sequence[Group[Estimate]],
    metric: str,
    by: str,
    margin: float,
    direction: str,
    *,
    skips_small: bool,
) -> WorstGate:
    """Judge each group by a one-sided bound, with Holm's correction over the groups.

    A group that is too small, or has no bound, does not pass: the gate asks for evidence.
    """
    judged = [group for group in groups if group.small is None or not skips_small]
    problems = [
        group.small or (None if metric in group.metrics else group.not_compared[metric]) for group in judged
    ]
    bounds = bounds_by_holm(
        {
            place: group.metrics[metric].difference
            for place, group in enumerate(judged)
            if problems[place] is None
        },
        margin,
        direction,
    )
    return WorstGate(
        metric=metric,
        by=by,
        margin=margin,
        groups=[
            GroupBound(
                label=group.label,
                samples=group.samples,
                bound=bounds.get(place),
                passed=place in bounds and bounds[place] <= margin,
                problem=problems[place],
            )
            for place, group in enumerate(judged)
        ],
        skipped=[group.label for group in groups if group.small is not None and skips_small],
    )


def bounds_by_holm(differences: Mapping[int, Difference], margin: float, direction: str) -> dict[int, float]:
    """The largest loss of each group; in 95 % all of those are right that are within the margin.

    Holm's steps, with bounds in place of p-values: of n groups each is asked at the level 5 % / n; those that
    are within the margin are shown, and of the n' others each is asked at 5 % / n', until none is.
    """
    bounds: dict[int, float] = {}
    remaining = list(differences)
    while remaining:
        found = {place: _bound(differences[place], LEVEL / len(remaining), direction) for place in remaining}
        within = {place: bound for place, bound in found.items() if bound <= margin}
        bounds |= within or found
        remaining = [place for place in remaining if place not in within] if within else []
    return bounds


def _bound(difference: Difference, tail: float, direction: str) -> float:
    low, high = difference.bounds(tail)
    return -low if direction == "higher" else high
