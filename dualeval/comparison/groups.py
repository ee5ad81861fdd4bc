"""Two runs compared group by group, and gates that no group may miss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from dualeval.comparison.estimates import Estimate, differences_of
from dualeval.comparison.pairing import Pairs, at_rows
from dualeval.comparison.statistics import LEVEL, Difference, largest_loss
from dualeval.engine.scoring.slices import Keys, groups_of, too_small
from dualeval.errors import UsageError
from dualeval.messages import counted, did_you_mean
from dualeval.options.choices import columns_of_groups

# Groups that a note names.
_NAMED = 5
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
    # Number of its samples that failed `in_a` or `in_b` only, and are no pairs.
    failed: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_small(self) -> bool:
        """Whether it is small by itself, and not because its samples failed in one run."""
        failed = sum(self.failed.values())
        clusters = None if failed else self.clusters
        return self.small is not None and too_small(self.samples + failed, clusters) is not None


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
    # Why the bound may be too small; None where it holds.
    rough: str | None = None


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
    """Estimate the differences of each group; groups are those of all samples that A or B has evaluated."""
    keys = {name: _keys(pairs, name) for name in columns_of_groups([by])}
    grouping = groups_of(by, keys, bins)
    ends = np.cumsum([len(pairs), pairs.failed_b])
    groups = []
    for value, label, members in zip(grouping.values, grouping.names, grouping.members(), strict=True):
        of_pairs, in_b, in_a = np.split(members, np.searchsorted(members, ends))
        failed = {"in_a": len(in_a), "in_b": len(in_b)}
        groups.append(_group(pairs, value, label, of_pairs, failed, clusters, chosen))
    return groups


def _group(
    pairs: Pairs,
    value: Mapping[str, Any],
    label: str,
    places: npt.NDArray[np.int64],
    failed: Mapping[str, int],
    clusters: npt.NDArray[np.int64] | None,
    chosen: Sequence[str] | None,
) -> Group[Estimate]:
    numbers = None if clusters is None else clusters[places]
    count = None if numbers is None else len(np.unique(numbers))
    small = too_small(len(places), count)
    if len(places):
        of_group = replace(pairs, rows_a=pairs.rows_a[places], rows_b=pairs.rows_b[places])
        estimates, not_compared = differences_of(of_group, numbers, chosen)
    else:
        runs = " or ".join(run for run, name in (("A", "in_a"), ("B", "in_b")) if failed[name])
        small = f"none of its {counted(sum(failed.values()), 'sample')} was evaluated in {runs}"
        names = (*pairs.a.compared, *pairs.b.compared) if chosen is None else chosen
        estimates, not_compared = {}, dict.fromkeys(names, small)
    return Group(
        group=value,
        label=label,
        samples=len(places),
        clusters=count,
        metrics=estimates,
        not_compared=not_compared,
        small=small,
        failed=failed,
    )


def notes_of_failed(groups: Mapping[str, Sequence[Group[Any]]]) -> list[str]:
    """How many samples of each group failed in one run only."""
    notes = []
    for by, of_by in groups.items():
        counts = [
            f"{group.label} {failed:,} of {group.samples + sum(group.failed.values()):,} in {run}"
            for group in of_by
            for run, failed in (("A", group.failed["in_a"]), ("B", group.failed["in_b"]))
            if failed
        ]
        if counts:
            more = f", and {len(counts) - _NAMED:,} more" if len(counts) > _NAMED else ""
            notes.append(f"Failed in one run only, by {by}: {', '.join(counts[:_NAMED])}{more}.")
    return notes


def _keys(pairs: Pairs, name: str) -> Keys:
    """A column of the pairs, then of the samples that failed in B only, and of those in A only.

    It is of the run that has it; of both it has to be the same in the pairs.
    """
    import pyarrow

    whole = [pairs.a.rows.whole(name), pairs.b.rows.whole(name)]
    there = [column for column in whole if column is not None]
    if not there:
        raise UsageError(
            f"--by {name}: neither run has this column. {pairs.a.rows.path} has "
            f"{', '.join(pairs.a.rows.names)}.{did_you_mean(name, pairs.a.rows.kinds)}"
        )
    if any(pyarrow.types.is_nested(column.type) for column in there):
        raise UsageError(f"--by {name}: it has several values per sample, expected one")
    keys, further = [], []
    for run, column, rows, alone in (
        (pairs.a, whole[0], pairs.rows_a, pairs.only_a),
        (pairs.b, whole[1], pairs.rows_b, pairs.only_b),
    ):
        if column is not None:
            keys.append(_plain(at_rows(column, rows)))
            further.append(_plain(at_rows(column, alone)))
        elif len(alone):
            raise UsageError(
                f"--by {name}: {run.folder} has no such column, and {counted(len(alone), 'sample')} that the "
                f"other run could not read may be of any group. Evaluate {run.folder} again with --keep "
                f"{name}."
            )
    if len(keys) == 2 and not _are_equal(*keys):
        raise UsageError(f"--by {name}: it is not the same in both runs")
    if isinstance(keys[0], np.ndarray):
        return np.concatenate([keys[0], *further])
    return [*keys[0], *(text for part in further for text in part)]


def _plain(column: Any) -> Any:
    import pyarrow

    return column.to_pylist() if pyarrow.types.is_large_string(column.type) else np.asarray(column)


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
    judged = [group for group in groups if not (skips_small and group.is_small)]
    problems = [
        group.small or (None if metric in group.metrics else group.not_compared[metric]) for group in judged
    ]
    differences = {
        place: group.metrics[metric].difference
        for place, group in enumerate(judged)
        if problems[place] is None
    }
    bounds = bounds_by_holm(differences, margin, direction)
    return WorstGate(
        metric=metric,
        by=by,
        margin=margin,
        groups=[
            GroupBound(
                label=group.label,
                samples=group.samples,
                bound=bounds.get(place),
                passed=bounds.get(place, math.inf) <= margin,
                problem=problems[place],
                rough=differences[place].rough if place in differences else None,
            )
            for place, group in enumerate(judged)
        ],
        skipped=[group.label for group in groups if skips_small and group.is_small],
    )


def bounds_by_holm(differences: Mapping[int, Difference], margin: float, direction: str) -> dict[int, float]:
    """The largest loss of each group; in 95 % all of those are right that are within the margin.

    Holm's steps, with bounds in place of p-values: of n groups each is asked at the level 5 % / n; those that
    are within the margin are shown, and of the n' others each is asked at 5 % / n', until none is.
    """
    bounds: dict[int, float] = {}
    remaining = list(differences)
    while remaining:
        tail = LEVEL / len(remaining)
        losses = {place: largest_loss(differences[place], tail, direction) for place in remaining}
        within = {place: bound for place, bound in losses.items() if bound <= margin}
        bounds |= within or losses
        remaining = [place for place in remaining if place not in within] if within else []
    return bounds
