"""compare: two finished runs over the same samples, metric by metric."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from dualeval.comparison import statistics
from dualeval.comparison.estimates import NO_AVERAGE, Estimate, Flips, clusters_of, differences_of
from dualeval.comparison.groups import Group, WorstGate, groups_of_pairs, notes_of_failed, worst_gate
from dualeval.comparison.pairing import ComparedRun, Pairs, open_run, pair
from dualeval.engine.scoring.slices import bins_without_use
from dualeval.engine.values.differences import option_differences
from dualeval.engine.values.measured import rough_warnings
from dualeval.engine.values.row_comparison import PREDICTION_COLUMNS, same_entries
from dualeval.errors import UsageError
from dualeval.messages import counted, csv_cell
from dualeval.options.choices import check_groups

# Ids of flipped samples in JSON; --flips writes all.
_LISTED = 10
_UNDECIDED, _SAME = "no difference shown", "the same on every sample"
# Begins the name of a gate that is about each group.
_WORST = "worst:"
_Key = TypeVar("_Key")


@dataclass(frozen=True, kw_only=True)
class MetricComparison:
    """One metric in both runs, over the pairs."""

    # Its value in A.
    a: float
    b: float
    # B minus A.
    difference: float
    # 95 % confidence interval of the difference.
    interval: tuple[float, float]
    # Two-sided p-value of "there is no difference".
    p: float
    # The same, adjusted for the number of metrics compared.
    p_holm: float
    # That of McNemar's exact test, where each sample's score is 0 or 1; else None.
    p_exact: float | None
    test: str
    # Number of pairs.
    samples: int
    # Number of clusters of these; None where samples are taken to be independent.
    clusters: int | None
    # As in `Result.units`.
    unit: str | None
    # "higher" or "lower" is better; None where neither is.
    direction: str | None
    # "B is better", "B is worse", "B is higher", "B is lower", "no difference shown" or "the same on every
    # sample".
    verdict: str
    # Why interval and test may err more often than they say: few samples decide; else None.
    rough: str | None
    # The smallest difference that would be found with 80 % power; None where it is unknown.
    detectable: float | None
    # The samples that changed, where each sample's score is 0 or 1 and independent; else None.
    flips: Flips | None

    @property
    def shown(self) -> str:
        """The verdict, and whether it is rough: "B is better (rough)"."""
        is_rough = self.rough and self.verdict not in (_UNDECIDED, _SAME)
        return f"{self.verdict} (rough)" if is_rough else self.verdict


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Whether B may be worse than A by no more than a margin, with 95 % confidence."""

    metric: str
    # In the metric's own unit.
    margin: float
    # The largest loss from A to B that the samples allow, a one-sided 95 % bound; negative where B is better.
    bound: float
    # The bound is not above the margin.
    passed: bool
    # Why the bound may be too small: few samples decide; None where it holds.
    rough: str | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs over the same samples; B against A."""

    # `folder`, `metrics_digest` and `samples_digest` of the first run.
    a: dict[str, Any]
    b: dict[str, Any]
    # Number of samples that both have evaluated.
    pairs: int
    # Number of samples left out because they failed `in_a`, `in_b` or `in_both`.
    failed: dict[str, int]
    # Number of pairs with the same prediction; None where the runs keep none.
    agreement: int | None
    # By name, those that were compared.
    metrics: dict[str, MetricComparison]
    # By name, why a metric was not.
    not_compared: dict[str, str]
    # In the order given.
    gates: list[Gate] = field(default_factory=list)
    # By what `by` names, its groups in order.
    slices: dict[str, list[Group[MetricComparison]]] = field(default_factory=dict)
    # Those of groups, in the order given.
    worst_gates: list[WorstGate] = field(default_factory=list)
    # The column whose equal entries mark dependent samples; None where all are independent.
    cluster: str | None = None
    # By name, the options of both runs where they are not the same.
    differs_in: dict[str, list[Any]] = field(default_factory=dict)
    # What a reader of the numbers should know.
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether all gates have passed."""
        return all(gate.passed for gate in self.gates) and all(gate.passed for gate in self.worst_gates)

    @property
    def sentence(self) -> str:
        """What was found, in a line: "B is better in loss; undecided: top1 (20 flips)"."""
        return self.said_of("B")

    def said_of(self, b: str) -> str:
        """As ``sentence``, with another name for B."""
        by_verdict: dict[str, list[str]] = {}
        for name, metric in self.metrics.items():
            changed = 0 if metric.flips is None else len(metric.flips.lost) + len(metric.flips.gained)
            label = f"{name} ({counted(changed, 'flip')})" if changed else name
            rough = metric.shown.removeprefix(metric.verdict)
            by_verdict.setdefault(metric.verdict, []).append(
                label if metric.verdict == _UNDECIDED else name + rough
            )
        undecided = ", ".join(by_verdict.pop(_UNDECIDED, []))
        same = ", ".join(by_verdict.pop(_SAME, []))
        # "better in loss, top1", "higher in tokens".
        shown = [f"{verdict[len('B is ') :]} in {', '.join(names)}" for verdict, names in by_verdict.items()]
        clauses = [f"{b} is {'; '.join(shown)}"] if shown else []
        clauses += [f"{'undecided' if shown else 'no difference shown'}: {undecided}"] if undecided else []
        clauses += [f"{_SAME}: {same}"] if same else []
        clauses += [f"gate {gate.metric} NOT passed" for gate in self.gates if not gate.passed]
        clauses += [
            f"gate {_WORST}{gate.metric} by {gate.by} NOT passed"
            for gate in self.worst_gates
            if not gate.passed
        ]
        sentence = "; ".join(clauses)
        return sentence if shown else sentence[:1].upper() + sentence[1:]

    def __str__(self) -> str:
        """What ``dualeval compare`` prints."""
        from dualeval.report.comparison import as_text

        return as_text(self)

    def to_json(self) -> dict[str, Any]:
        """Plain values; of flipped samples the counts and the first ids."""
        content = asdict(self)
        for metrics in (content, *(group for groups in content["slices"].values() for group in groups)):
            for metric in metrics["metrics"].values():
                metric["interval"] = list(metric["interval"])
                if metric["flips"] is not None:
                    metric["flips"] = _flips_as_json(**metric["flips"])
        for gate, worst in zip(content["worst_gates"], self.worst_gates, strict=True):
            gate["passed"] = worst.passed
        return {"schema_version": 1, "sentence": self.sentence, **content, "passed": self.passed}

    def write_flips(self, path: Path) -> None:
        """Write all flipped samples as CSV: metric, change ("lost" or "gained"), id."""
        try:
            with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(["metric", "change", "id"])
                for name, metric in self.metrics.items():
                    if metric.flips is not None:
                        for change in ("lost", "gained"):
                            ids = getattr(metric.flips, change)
                            writer.writerows([csv_cell(name), change, csv_cell(one)] for one in ids)
        except OSError as error:
            raise UsageError(
                f"{path} cannot be written ({error.strerror or error}). Name a file in a folder of your own."
            ) from error


def _flips_as_json(lost: Sequence[str], gained: Sequence[str]) -> dict[str, Any]:
    first = {"first_lost": list(lost[:_LISTED]), "first_gained": list(gained[:_LISTED])}
    return {"lost": len(lost), "gained": len(gained), **first}


def compare(
    a: str | Path,
    b: str | Path,
    *,
    metrics: Sequence[str] = (),
    gates: Mapping[str, float] | None = None,
    cluster: str | None = None,
    trust_ids: bool = False,
    by: Sequence[str] = (),
    bins: Sequence[float] = (),
    skip_small: bool = False,
) -> Comparison:
    """Compare two finished runs over the same samples, pair by pair, from their rows.

    Args:
        a: output folder of the first run, the one to compare with.
        b: of the second.
        metrics: names of those to compare, with those of gates; empty for all that both runs have.
        gates: by metric, how much worse than A B may be, in the metric's own unit; by "worst:METRIC", how
            much worse in any group of ``by``.
        cluster: a column of the rows; samples with equal entries depend on each other. None: that of the
            runs' results, if there is one.
        trust_ids: equal ids are equal samples, whatever the fingerprints of the data say.
        by: columns of the rows, or crosses of them with ``*``, by whose values pairs are compared, too.
        bins: where columns of numbers are cut for that, as of ``dualeval.evaluate``.
        skip_small: leave groups out of gates that are too small for a statement; they do not pass else.

    Returns:
        differences B - A with intervals and tests.

    Raises:
        UsageError: the runs are over different data or not finished, no metric can be compared, or a gate is
            of a metric that cannot be.
        DualevalError: a file is damaged.
    """
    runs = open_run(a), open_run(b)
    asked = gates or {}
    of_groups = {name[len(_WORST) :]: each for name, each in asked.items() if name.startswith(_WORST)}
    wanted = {name: each for name, each in asked.items() if not name.startswith(_WORST)}
    check_groups(by, bins)
    _check_gates(runs, asked)
    if skip_small and not of_groups:
        raise UsageError(
            f"--skip-small leaves small groups out of gates, and no gate is about groups: give --gate "
            f"{_WORST}METRIC=MARGIN, too."
        )
    if of_groups and not by:
        raise UsageError(f"--gate {_WORST}{next(iter(of_groups))} is about groups: give --by COLUMN, too.")
    chosen = list(dict.fromkeys((*metrics, *wanted, *of_groups))) if metrics else None
    for name in metrics:
        if not any(name in run.result.metrics for run in runs):
            raise UsageError(
                f"--metric {name}: neither run has it. {runs[0].folder} has {', '.join(runs[0].compared)}."
            )
    pairs = pair(*runs, trust_ids=trust_ids)
    column = cluster or _cluster_column(runs)
    clusters = None if column is None else clusters_of(pairs, column)
    differences, not_compared = differences_of(pairs, clusters, chosen)
    for typed in asked:
        if (name := typed.removeprefix(_WORST)) not in differences:
            raise UsageError(f"--gate {typed}: it cannot be compared: {not_compared[name]}")
    if not differences:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in not_compared.items())
        raise UsageError(f"{a} and {b} have no metric that can be compared: {reasons}")
    groups = {each: groups_of_pairs(pairs, each, bins, clusters, chosen) for each in dict.fromkeys(by)}
    if (unused := bins_without_use(by, bins, runs[1].rows.kinds | runs[0].rows.kinds)) is not None:
        raise UsageError(unused)
    directions = runs[0].result.directions
    return Comparison(
        a={"folder": str(runs[0].folder), **runs[0].result.digests},
        b={"folder": str(runs[1].folder), **runs[1].result.digests},
        pairs=len(pairs),
        failed={"in_a": pairs.failed_a, "in_b": pairs.failed_b, "in_both": pairs.failed_both},
        agreement=_agreement(pairs),
        metrics=_compared(runs, differences, lambda name: name),
        not_compared=not_compared,
        gates=[_gate(runs, name, margin, differences[name].difference) for name, margin in wanted.items()],
        slices={each: _of_groups(runs, grouped) for each, grouped in groups.items()},
        worst_gates=[
            worst_gate(grouped, name, each, margin, directions[name], skips_small=skip_small)
            for name, margin in of_groups.items()
            for each, grouped in groups.items()
        ],
        cluster=column,
        differs_in=option_differences(runs[0].result, runs[1].result),
        notes=[*_notes(pairs, differences), *notes_of_failed(groups)],
    )


def _check_gates(runs: tuple[ComparedRun, ComparedRun], gates: Mapping[str, float]) -> None:
    for typed, margin in gates.items():
        name = typed.removeprefix(_WORST)
        if not (math.isfinite(margin) and margin >= 0):
            raise UsageError(
                f"--gate {typed}={margin}: expected a margin of 0 or more, such as {typed}=0.002"
            )
        for run in runs:
            if run.result.units.get(name) == "fraction" and margin >= 1:
                raise UsageError(
                    f"--gate {typed}={margin:g}: {name} lies between 0 and 1, so that no run would fail. For "
                    f"{margin:g} percentage points give {typed}={margin / 100:g}"
                )
            if name not in run.compared:
                known = name in run.result.metrics
                reason = f"{name} is {NO_AVERAGE}" if known else f"{run.folder} has no such metric"
                raise UsageError(
                    f"--gate {typed}: {reason}, and cannot be compared; {run.folder} has "
                    f"{', '.join(run.compared)}."
                )
            if name not in run.result.directions:
                raise UsageError(
                    f"--gate {typed}: {run.folder} does not say whether higher or lower is better. Give the "
                    "metric higher_is_better=True or False, and evaluate again."
                )


def _cluster_column(runs: tuple[ComparedRun, ComparedRun]) -> str | None:
    """The column by which the runs' own intervals take clusters."""
    named: Sequence[Mapping[str, Any]] = [run.result.clusters for run in runs]
    columns = list(dict.fromkeys(clusters["column"] for clusters in named if "column" in clusters))
    if len(columns) > 1:
        raise UsageError(
            f"the runs have clusters of different columns, {columns[0]!r} and {columns[1]!r}: choose one by "
            "--cluster COLUMN"
        )
    return columns[0] if columns else None


def _agreement(pairs: Pairs) -> int | None:
    """The number of pairs whose predictions are equal."""
    import pyarrow

    for name in PREDICTION_COLUMNS:
        columns = pairs.columns(name)
        if columns and not pyarrow.types.is_nested(columns[0].type) and columns[0].type == columns[1].type:
            # Of tasks that predict nothing in words all texts are empty.
            if all(
                pyarrow.types.is_large_string(each.type) and {*each.unique().to_pylist()} <= {"", None}
                for each in columns
            ):
                continue
            return int(same_entries(*columns).sum())
    return None


def _of_groups(
    runs: tuple[ComparedRun, ComparedRun], groups: Sequence[Group[Estimate]]
) -> list[Group[MetricComparison]]:
    """Groups with p-values that are adjusted for all of them and their metrics."""
    every = {(at, name): each for at, group in enumerate(groups) for name, each in group.metrics.items()}
    compared = _compared(runs, every, lambda key: key[1])
    return [
        replace(group, metrics={name: compared[at, name] for name in group.metrics})  # type: ignore[misc]
        for at, group in enumerate(groups)
    ]


def _compared(
    runs: tuple[ComparedRun, ComparedRun], estimates: Mapping[_Key, Estimate], named: Callable[[_Key], str]
) -> dict[_Key, MetricComparison]:
    p_values = {key: estimate.difference.p_value() for key, estimate in estimates.items()}
    adjusted = statistics.holm(p_values)
    metrics = {}
    for key, estimate in estimates.items():
        name, difference = named(key), estimate.difference
        direction = runs[0].result.directions.get(name)
        metrics[key] = MetricComparison(
            a=estimate.a,
            b=estimate.b,
            difference=difference.value,
            interval=difference.bounds(statistics.LEVEL / 2),
            p=p_values[key],
            p_holm=adjusted[key],
            p_exact=difference.p_exact() if isinstance(difference, statistics.ProportionDifference) else None,
            test=difference.test,
            samples=estimate.samples,
            clusters=estimate.clusters,
            unit=runs[0].result.units.get(name),
            direction=direction,
            verdict=_verdict(difference, adjusted[key], direction),
            rough=difference.rough,
            detectable=difference.detectable(),
            flips=estimate.flips,
        )
    return metrics


def _verdict(difference: statistics.Difference, p_value: float, direction: str | None) -> str:
    if difference.is_zero:
        return _SAME
    if p_value >= statistics.LEVEL:
        return _UNDECIDED
    higher = difference.value > 0
    if direction is None:
        return f"B is {'higher' if higher else 'lower'}"
    return f"B is {'better' if higher == (direction == 'higher') else 'worse'}"


def _gate(
    runs: tuple[ComparedRun, ComparedRun], name: str, margin: float, difference: statistics.Difference
) -> Gate:
    bound = statistics.largest_loss(difference, statistics.LEVEL, runs[0].result.directions[name])
    return Gate(metric=name, margin=margin, bound=bound, passed=bound <= margin, rough=difference.rough)


def _notes(pairs: Pairs, estimates: Mapping[str, Estimate]) -> list[str]:
    notes = [
        f"{run.folder} gives other numbers each time it is evaluated (deterministic: false in its result): a "
        "difference may come from one evaluation alone."
        for run in (pairs.a, pairs.b)
        if run.result.deterministic is False
    ]
    notes += pairs.notes
    failed = {"in A only": pairs.failed_a, "in B only": pairs.failed_b, "in both": pairs.failed_both}
    if any(failed.values()):
        counts = ", ".join(f"{count:,} {where}" for where, count in failed.items() if count)
        notes.append(f"Failed samples are left out: {counts}.")
    rough = {name: why for name, each in estimates.items() if (why := each.difference.rough) is not None}
    return [*notes, *(f"{sentence[:1].upper()}{sentence[1:]}." for sentence in rough_warnings(rough))]
