"""What the page of a finished run says: plain values, read from its result and its rows.

The pictures of a sample are what ``task.show(row)`` returns (``things.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from dualeval.comparison.compared import Comparison, compare
from dualeval.comparison.worst import Chosen, JudgedRows, Sample, flips_of, highest
from dualeval.errors import UsageError, with_type
from dualeval.report.comparison import shown_difference
from dualeval.report.loggers.confusions import Confusion, confusions_of, figures_of
from dualeval.report.page.rows import columns_of, rows_of
from dualeval.report.page.runs import Runs
from dualeval.report.page.things import Shown, others_than, things_of
from dualeval.report.table import shown_options
from dualeval.result import JOB, Result, TimedStage, class_names, described_part

# Of a page: cards by reason.
_CARDS, _LOSSES = 60, 30
# By class these come first, as far as they are there.
_FIRST = ("support", "recall", "precision", "f1", "iou", "dice", "accuracy", "ap", "ap50", "ar")
# Between a column of a table and the run from which the difference is.
VERSUS = " vs "
# How metrics end that are curves.
CURVES = "precision_by_recall"


_Difference: TypeAlias = tuple[float, str, str]


@dataclass(frozen=True, kw_only=True)
class Headline:
    """A metric with its 95 % interval."""

    name: str
    value: float | None
    low: float | None
    high: float | None
    unit: str | None
    # "higher" or "lower" is better; None where neither is.
    direction: str | None
    # Why the interval may cover less than 95 %.
    rough: str | None
    # By the other run's name, the difference from it and its interval, as they are shown.
    differences: Mapping[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class OtherShown:
    """What another run says of a sample."""

    run: str
    prediction: str | None
    correct: bool | None
    confidence: float | None
    loss: float | None
    # What there is to see and is not the same in this run.
    shown: tuple[Shown, ...]


@dataclass(frozen=True, kw_only=True)
class SampleShown:
    """One sample's card."""

    id: str
    row: int  # its number in the file
    index: int
    target: str | None
    prediction: str | None
    correct: bool | None
    confidence: float | None
    loss: float | None
    # Keys of the page's `reasons`.
    reasons: tuple[str, ...]
    columns: Mapping[str, str]  # columns of the data, and further scores, as texts
    facets: Mapping[str, tuple[str, ...]]  # by what one looks for samples: groups, and what the task says
    shown: tuple[Shown, ...]
    others: tuple[OtherShown, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Against:
    """The comparison with one other run."""

    name: str
    verdict: str
    rows: Sequence[Mapping[str, Any]]  # one a metric: name, a, b, difference, texts of it, p, verdict
    lost: int | None
    gained: int | None
    notes: Sequence[str]
    # By grouping, label and metric, the difference in a group; and as it is shown, with its interval.
    slices: Mapping[str, Mapping[str, Mapping[str, _Difference]]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PageContent:
    """All that a page says."""

    name: str  # of the run
    title: str
    about: Sequence[tuple[str, str]]
    headlines: Sequence[Headline]
    against: Sequence[Against]
    warnings: Sequence[str]
    samples: Sequence[SampleShown]
    samples_total: int
    # In words why samples are shown: of "asked", "mistake", "loss", and "lost:0", "gained:0", "worse:0",
    # "better:0", where 0 is the number of the run compared with.
    reasons: Mapping[str, str]
    legend: str
    # By name: of layers, and of what they show.
    colours: Mapping[str, str]
    rows: Mapping[str, Any]  # of `rows.rows_of`, or `AllRows.head`
    worst_by: str | None  # what the reason "loss" goes by
    cut: str | None  # in a sentence how many samples of each reason are shown
    class_columns: Sequence[str]
    class_rows: Sequence[Sequence[Any]]  # by class: name, support, recall, precision, f1, ...
    confusion_names: Sequence[str]
    confusion: Sequence[tuple[int, int, int]]  # target, prediction, count; empty without
    calibration: Sequence[Mapping[str, float]]  # bins: low, high, count, accuracy, confidence; empty without
    # By metric and overlap, precision at 101 values of recall, 0 to 1.
    curves: Mapping[str, Any]
    slices: Mapping[str, Sequence[Mapping[str, Any]]]  # Result.slices
    seconds: Sequence[Mapping[str, Any]]  # one a rank: rank, and its seconds by part
    limited_by: str  # one sentence
    provenance: Sequence[tuple[str, str]]  # label, text to copy: command, job file, versions, digests


def build(
    runs: Runs,
    task: Any = None,
    *,
    command: str | None = None,
    notes: Sequence[str] = (),
    paths: bool = False,
    table: Mapping[str, Any] | None = None,
    sample: str | None = None,
) -> PageContent:
    """Read what the page of a finished run says; each run that it is compared with is A, and this one is B.

    Without a ``task``, which has ``show(row)``, samples have nothing but their rows. ``command`` is what one
    types to run it again, and ``notes`` stand beside the result's warnings. With ``paths`` the provenance has
    the run's folder. ``table`` is the page's if it is served, and the ``sample`` of this id has a card before
    all others.
    """
    rows, others = runs.rows, runs.others
    result, folder = rows.result, rows.folder
    comparisons = {name: compare(other.folder, folder) for name, other in others.items()}
    asked = [] if sample is None else [rows.place_of(sample)]
    chosen, reasons, cut = _chosen(runs, comparisons, asked)
    confusions = confusions_of(result, folder)
    confusion = next(iter(confusions.values()), None)
    columns, by_class = _classes_beside(classes_of(result, confusions), others)
    model = result.description.get("model", "")
    return PageContent(
        name=runs.name,
        title=f"{folder.absolute().name}: {model or result.job.get('task', 'run')}",
        about=_about(result),
        headlines=_headlines(result, comparisons),
        against=[
            _against(comparison, runs.name, other, _of_groups(result, others[other].folder, folder))
            for other, comparison in comparisons.items()
        ],
        warnings=[*result.warnings, *notes],
        samples=samples_shown(runs, task, chosen),
        samples_total=result.samples["evaluated"],
        reasons=reasons,
        legend="" if task is None else task.legend,
        colours={} if task is None else task.colours([each[0] for each in by_class]),
        rows=rows_of(columns_of(runs), rows, [*comparisons.values()]) if table is None else table,
        worst_by=None if rows.measure is None else rows.measure.name,
        cut=cut,
        class_columns=columns,
        class_rows=by_class,
        confusion_names=[confusion.name(index) for index in range(confusion.classes)] if confusion else [],
        confusion=[(target, guess, count) for target, guess, count in confusion.entries] if confusion else [],
        calibration=rows.calibration(),
        curves={name: value for name, value in result.metrics.items() if _are_curves(name, value)},
        slices=result.slices,
        seconds=[{"rank": rank, **seconds} for rank, seconds in enumerate(result.timing.get("ranks", ()))],
        limited_by=limited_by(result.timing),
        provenance=_provenance(result, folder, command, paths=paths),
    )


def _are_curves(name: str, value: Any) -> bool:
    """Whether a value is AveragePrecision's, and no other metric's of such a name."""
    curves = value.values() if name.endswith(CURVES) and isinstance(value, Mapping) else []
    return len(curves) > 0 and all(
        isinstance(each, list) and len(each) > 1 and all(isinstance(at, float) for at in each)
        for each in curves
    )


def _about(result: Result) -> list[tuple[str, str]]:
    part = result.part or {"kind": "all", "samples": result.samples["total"], "of": result.samples["total"]}
    failed = result.samples["failed"]
    samples = described_part(part) + (f"; {failed:,} could not be read" if failed else "")
    at = result.finished_at
    finished = [("finished", f"{at[:16].replace('T', ' ')} UTC")] if at else []
    clusters = result.clusters
    clustered = [("clusters", f"{clusters['count']:,} by {clusters['column']}")] if clusters else []
    task = [("task", str(result.job["task"]))] if result.job.get("task") else []
    return [*task, *result.description.items(), ("samples", samples), *clustered, *finished]


def _headlines(result: Result, comparisons: Mapping[str, Comparison]) -> list[Headline]:
    return [
        Headline(
            name=name,
            value=value,
            low=ends[0],
            high=ends[1],
            unit=result.units.get(name),
            direction=result.directions.get(name),
            rough=result.rough.get(name),
            differences={
                other: shown_difference(comparison.metrics[name])
                for other, comparison in comparisons.items()
                if name in comparison.metrics
            },
        )
        for name, value in result.metrics.items()
        if value is None or isinstance(value, int | float)
        for ends in [result.intervals.get(name) or (None, None)]
    ]


def _of_groups(result: Result, a: Path, b: Path) -> dict[str, dict[str, dict[str, _Difference]]]:
    """The differences in each group of the run, by metrics that have a number of each sample."""
    if not result.slices:
        return {}
    metrics, bins = [*result.scores], result.job.get("bins") or ()
    try:
        groups = compare(a, b, metrics=metrics, by=[*result.slices], bins=bins).slices
    except UsageError:  # the other run has no such column, or no such metric
        return {}
    return {
        by: {
            group.label: {
                name: (metric.difference, *shown_difference(metric)) for name, metric in group.metrics.items()
            }
            for group in of
            if not group.small
        }
        for by, of in groups.items()
    }


def _against(comparison: Comparison, run: str, other: str, slices: Mapping[str, Any]) -> Against:
    flips = flips_of(comparison)
    by_reason: dict[str, list[str]] = {}
    for name, reason in comparison.not_compared.items():
        by_reason.setdefault(reason, []).append(name)
    reasons = [f"Not compared: {', '.join(names)} ({reason})" for reason, names in by_reason.items()]
    if comparison.differs_in:
        reasons.insert(0, f"The runs differ in {shown_options(comparison.differs_in)}")
    return Against(
        name=other,
        verdict=comparison.said_of(run),
        rows=[
            {
                **{each: getattr(metric, each) for each in ("a", "b", "difference", "unit")},
                "texts": shown_difference(metric),
                "verdict": metric.shown,
                "name": name,
                "p": metric.p_holm,
            }
            for name, metric in comparison.metrics.items()
        ],
        lost=None if flips is None else len(flips.lost),
        gained=None if flips is None else len(flips.gained),
        notes=[*comparison.notes, *reasons],
        slices=slices,
    )


# -- samples -------------------------------------------------------------------------------------------


def _chosen(
    runs: Runs, comparisons: Mapping[str, Comparison], asked: Sequence[int]
) -> tuple[dict[int, list[str]], dict[str, str], str | None]:
    """The places of the samples that are shown, with the reasons of each; these in words; what is shown."""
    rows = runs.rows
    wanted = []
    for number, (other, comparison) in enumerate(comparisons.items()):
        wanted += [(listed, f":{number}") for listed in rows.lists(comparison, (other, runs.name))]
    wanted += [(listed, "") for listed in rows.lists()]
    places: dict[int, list[str]] = {place: ["asked"] for place in asked}
    reasons = {"asked": "the sample that was asked for"}
    shown = []

    def add(reason: str, title: str, worst: Chosen) -> None:
        reasons[reason] = title
        for place in worst.places:
            places.setdefault(place, []).append(reason)
        if worst.of:
            some = f"{len(worst.places):,} of " if worst.of > len(worst.places) else "all "
            shown.append(f"{title} ({some}{worst.of:,})")

    for listed, behind in wanted:
        most = _LOSSES if listed.reason == "loss" else _CARDS
        add(listed.reason + behind, listed.title, rows.worst(listed, most))
    for number, (other, comparison) in enumerate(comparisons.items()):
        # Where no sample is right or wrong, none flips.
        if flips_of(comparison) is None and (worse := rows.changed(runs.others[other])) is not None:
            add(f"worse:{number}", f"worse in {runs.name} than in {other}", highest(worse, _LOSSES))
            add(f"better:{number}", f"better in {runs.name} than in {other}", highest(-worse, _LOSSES))
    total = rows.result.samples["evaluated"]
    is_cut = len(places) < total and shown
    cut = f"The page shows {len(places):,} of {total:,} samples: {'; '.join(shown)}." if is_cut else None
    return places, reasons, cut


def samples_shown(runs: Runs, task: Any, chosen: Mapping[int, Sequence[str]]) -> list[SampleShown]:
    """The cards of the samples at these places, with the reasons for each."""
    samples = runs.rows.samples([*chosen])
    of_others = [_same_samples(other, samples) for other in runs.others.values()]
    return [
        _sample_shown(
            runs.rows, place, sample, tuple(why), task, dict(zip(runs.others, of_sample, strict=True))
        )
        for sample, (place, why), *of_sample in zip(samples, chosen.items(), *of_others, strict=True)
    ]


def _same_samples(other: JudgedRows, samples: Sequence[Sample]) -> list[Sample | None]:
    """What another run says of each sample; None of one that it lacks or could not read."""
    import pyarrow

    places = other.places_of(pyarrow.array([str(sample.row["id"]) for sample in samples]))
    places[~other.evaluated(places)] = -1
    found = iter(other.samples(places[places >= 0].tolist()))
    return [next(found) if place >= 0 else None for place in places.tolist()]


def _sample_shown(
    rows: JudgedRows,
    place: int,
    sample: Sample,
    reasons: tuple[str, ...],
    task: Any,
    others: Mapping[str, Sample | None],
) -> SampleShown:
    row = sample.row
    shown = things_of(task, row)
    return SampleShown(
        id=str(row["id"]),
        row=place,
        index=int(row["index"]),
        target=sample.target,
        prediction=sample.prediction,
        correct=sample.correct,
        confidence=sample.confidence,
        loss=sample.loss,
        reasons=reasons,
        columns={
            name: f"{row[name]:.6g}" if isinstance(row[name], float) else str(row[name])
            for name in rows.further
            if row[name] is not None and row[name] == row[name]  # no NaN
        },
        facets=_facets(rows, row, task),
        shown=shown,
        others=tuple(
            OtherShown(
                run=run,
                **{name: getattr(other, name) for name in ("prediction", "correct", "confidence", "loss")},
                # Its own place in that run's data says nothing of this run's.
                shown=others_than(shown, things_of(task, {**other.row, "index": row["index"]})),
            )
            for run, other in others.items()
            if other is not None
        ),
    )


def _facets(rows: JudgedRows, row: Mapping[str, Any], task: Any) -> dict[str, tuple[str, ...]]:
    """By what a page's samples are looked for: groups of the run, and what the task says of the row."""
    facets: dict[str, list[str]] = {}
    for by, label in rows.slices_of(row):
        facets.setdefault(by, []).append(label)
    try:
        for by, labels in ({} if task is None else task.facets(row)).items():
            labels = [labels] if isinstance(labels, str) else labels
            facets.setdefault(str(by), []).extend(map(str, labels))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - as of `show`
        facets["facets failed"] = [with_type(error)]
    return {by: tuple(dict.fromkeys(labels)) for by, labels in facets.items()}


# -- classes, seconds, provenance ----------------------------------------------------------------------


def classes_of(result: Result, confusions: Mapping[str, Confusion]) -> tuple[list[str], list[list[Any]]]:
    """The figures of each class: the columns' names, "class" first, and a row a class."""
    names, tables = class_names(result), figures_of(result, confusions).values()
    count = max((len(values) for table in tables for values in table.values()), default=0)
    lists = {name: values for table in tables for name, values in table.items() if len(values) == count}
    columns = [*(name for name in _FIRST if name in lists), *(name for name in lists if name not in _FIRST)]
    known = [*names, *[None] * count]
    rows = [
        [str(index) if known[index] is None else known[index], *(lists[name][index] for name in columns)]
        for index in range(count)
    ]
    return ["class", *columns] if columns else [], rows


def _classes_beside(
    own: tuple[list[str], list[list[Any]]], others: Mapping[str, JudgedRows]
) -> tuple[list[str], list[list[Any]]]:
    """The table of the classes, with the differences from other runs' figures of classes of these names."""
    columns, rows = own
    for run, other in others.items():
        theirs, of_classes = classes_of(other.result, confusions_of(other.result, other.folder))
        # Classes may share a name: of equal lists each has its own.
        names, there = [row[0] for row in rows], [each[0] for each in of_classes]
        keys = [*range(len(names))] if names == there else names
        of_keys = zip(keys if names == there else there, of_classes, strict=True)
        by_name = {key: dict(zip(theirs, each, strict=True)) for key, each in of_keys}
        compared = [name for name in columns if name in _FIRST and name != "support" and name in theirs]
        known = [dict(zip(columns, row, strict=True)) for row in rows]
        columns = [*columns, *(f"{name}{VERSUS}{run}" for name in compared)]
        rows = [
            [*row, *(_difference(of[name], by_name.get(key, {}).get(name)) for name in compared)]
            for row, of, key in zip(rows, known, keys, strict=True)
        ]
    return columns, rows


def _difference(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


def limited_by(timing: Mapping[str, Any]) -> str:
    """Say in a sentence what took the most time."""
    ranks = timing.get("ranks") or ()
    sums = {stage: sum(rank.get(stage, 0.0) for rank in ranks) for stage in TimedStage}
    whole = sum(rank.get("evaluate", 0.0) for rank in ranks) + sums[TimedStage.MEET] + sums[TimedStage.REDUCE]
    if whole <= 0:
        return ""
    largest = max(sums, key=lambda stage: sums[stage])
    text = f"The largest part of the {timing['evaluate_s']:.2f} s of evaluation went into {largest.words}"
    text += f" ({100 * sums[largest] / whole:.0f} %)"
    if timing["setup_s"] > timing["evaluate_s"]:
        text += f"; preparation took longer, {timing['setup_s']:.2f} of {timing['total_s']:.2f} s in all"
    if limit := timing.get("limited_by"):
        text += f". The run {limit['text']}"
    return f"{text}."


def _provenance(result: Result, folder: Path, command: str | None, *, paths: bool) -> list[tuple[str, str]]:
    entries = {
        "command to reproduce": command,
        "folder": str(folder.absolute()) if paths else None,
        "job file": str((folder / JOB).absolute()) if paths else None,
        "metrics_digest": result.metrics_digest,
        "samples_digest": result.samples_digest,
        "job fingerprint": result.fingerprint,
        "data fingerprint": result.data.get("fingerprint"),
        "contents fingerprint": result.data.get("contents"),
        "weights fingerprint": result.weights.get("fingerprint"),
        "versions": ", ".join(f"{name} {version}" for name, version in result.versions.items()),
        "ranks": ", ".join(f"{name} {value}" for name, value in result.world.items()),
        "machine": ", ".join(
            str(result.device[name]) for name in ("device", "model", "bits") if name in result.device
        ),
        "finished at": result.finished_at,
    }
    return [(label, str(text)) for label, text in entries.items() if text]
