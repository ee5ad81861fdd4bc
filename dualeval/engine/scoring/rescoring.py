"""Metrics of a finished run, computed again from its rows without model or data; and checks of its files."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dualeval.columns.ragged import NumpyRows, to_column
from dualeval.engine.folder.finished import finished_run
from dualeval.engine.folder.row_windows import MappedColumns, copied
from dualeval.engine.folder.stored_rows import RowSource, StoredRows
from dualeval.engine.identity.job import metric_fingerprint
from dualeval.engine.samples.subset import digest_of, whole_set_intervals
from dualeval.engine.values.differences import differences
from dualeval.engine.values.measured import (
    check_cluster,
    check_declarations,
    clustered_fields,
    measure,
    rough_warnings,
    update,
)
from dualeval.errors import DualevalError, UsageError, with_type
from dualeval.messages import did_you_mean
from dualeval.metrics import Measured, Metric, RowMetric, keeps_rows, per_batch, split_by_kind
from dualeval.metrics.by_name import as_metrics
from dualeval.result import (
    INTERVAL_FORMULAS,
    JOB,
    PREDICTIONS,
    RESULT,
    Result,
    checksum_of,
    read_job,
    stated_result,
)

# Most differences of one kind that are listed: a file cut in half differs in every row.
_NAMED_AT_MOST = 20
_LONGEST_SHOWN = 120
_FIELDS_OF_INTERVALS = ("intervals", "rough", "naive_intervals", "clusters", "whole_set_intervals")


def rescore(
    folder: str | Path, *, metrics: Sequence[Metric | RowMetric], cluster: str | None = None
) -> Result:
    """Compute metrics from the rows of a finished run, without a forward; nothing is written.

    A metric that the run has computed gives the same bits. The rest of the result is the run's.

    Args:
        folder: the run's output folder.
        metrics: metrics to compute.
        cluster: a column whose equal entries mark samples that are not independent; None for the run's.

    Raises:
        UsageError: the folder holds no finished run, no metric is given, or the run has not kept a column
            that is needed.
        DualevalError: result.json or predictions.parquet is damaged.
    """
    folder = Path(folder)
    result, rows = finished_run(folder)
    if not metrics:
        raise UsageError("no metric was given: there is nothing to compute")
    metrics = as_metrics(metrics)
    measured = _recompute(rows, metrics)
    names = [metric.name for metric in metrics]
    return replace(
        _with_measured(result, measured, rows, cluster),
        job={**result.job, "metric": names, "rows_of": str(folder.absolute())},
        folder=str(folder.absolute()),
        # The run's slices are those of its own metrics.
        slices={},
    )


def _with_measured(
    result: Result, measured: Sequence[Measured], rows: StoredRows, cluster: str | None = None
) -> Result:
    """A run's result with other metrics instead of its own."""
    cluster = cluster or result.clusters.get("column")
    if cluster is not None:
        check_column_of_clusters(rows, cluster)
    fields, of_clusters = clustered_fields(measured, cluster, rows.names, partial(_columns_of_clusters, rows))
    of_metrics = [sentence for part in measured for sentence in part.warnings]
    warnings = [*_not_of_intervals(result), *of_metrics, *of_clusters]
    return replace(
        result,
        **fields,
        interval_formulas=INTERVAL_FORMULAS,
        whole_set_intervals=whole_set_intervals(result.part, result.samples["evaluated"], fields),
        warnings=list(dict.fromkeys(warnings)),
    )


def _not_of_intervals(result: Result) -> Iterator[str]:
    """A run's warnings, without those about its intervals, which are replaced."""
    of_rough = rough_warnings(result.rough)
    by = f" by {result.clusters.get('column')}: "
    for sentence in result.warnings:
        if sentence not in of_rough and not (sentence.startswith("no interval of ") and by in sentence):
            yield sentence


def _columns_of_clusters(rows: RowSource, names: Sequence[str]) -> dict[str, NumpyRows]:
    """Whole columns for intervals by clusters; the first one says which samples make a cluster."""
    with MappedColumns(None) as mapped:
        for window in rows.windows(names):
            mapped.append(window.columns)
        columns = mapped.columns()
    check_cluster(names[0], {names[0]: to_column(copied(columns[names[0]][:1]))})
    return columns


def check_column_of_clusters(rows: RowSource, name: str) -> None:
    """Check that rows have a column."""
    if name not in rows.names:
        raise UsageError(
            f"--cluster {name!r}: {rows.path} has no such column. The columns are {', '.join(rows.names)}. "
            f"A run keeps the column that its own --cluster names.{did_you_mean(name, rows.names)}"
        )


def _recompute(rows: RowSource, metrics: Sequence[Metric | RowMetric]) -> list[Measured]:
    """Compute metrics from rows; samples that could not be read are left out, as in the run.

    Memory holds one window of rows; the columns of row metrics are mapped from a temporary file.
    """
    check_columns(rows, metrics)
    of_ledger, row_metrics = split_by_kind(metrics)
    ledgers = [torch.zeros(metric.size, dtype=torch.int64) for metric in of_ledger]
    names = list(dict.fromkeys(name for metric in metrics for name in metric.columns))
    kept = {name for metric in row_metrics for name in metric.columns}
    batch = _batch_size(rows) if any(map(per_batch, of_ledger)) else 1
    with MappedColumns(None) as mapped:
        for window in rows.windows(names, multiple_of=batch):
            mapped.append({name: window.columns[name] for name in names if name in kept})
            if window.evaluated.any():
                columns = {name: to_column(values) for name, values in window.columns.items()}
                batches = np.add.reduceat(
                    window.evaluated, np.arange(0, len(window.evaluated), batch), dtype=np.int64
                )
                for metric, ledger in zip(of_ledger, ledgers, strict=True):
                    update(metric, ledger, columns, batches.tolist())
        whole = mapped.columns()
    return measure(zip(of_ledger, ledgers, strict=True), row_metrics, whole)


def _batch_size(rows: RowSource) -> int:
    """The batch size of the run that has written the rows."""
    job = rows.path.parent / JOB
    try:
        return int(read_job(job.parent)["job"]["batch_size"])
    except (OSError, LookupError, TypeError) as error:
        raise DualevalError(
            f"{job} cannot be read ({type(error).__name__}: {error}). It says how the samples were divided "
            "into batches, which a metric of batches has to know."
        ) from error


def check_columns(rows: RowSource, metrics: Sequence[Metric | RowMetric]) -> None:
    """Check that metrics say which columns they read, and that the rows have them."""
    check_declarations(metrics)
    absent = [(metric, name) for metric in metrics for name in metric.columns if name not in rows.names]
    if not absent:
        return
    metric, name = absent[0]
    sentence = f"metric {metric.name!r} reads column {name!r}, which {rows.path} does not have"
    if not keeps_rows(metric):
        raise UsageError(f"{sentence}: it says keeps_rows = False, and is computed in a run only.")
    raise UsageError(
        f"{sentence} (its columns: {', '.join(rows.names)}). A run keeps what its task and its metrics read: "
        f"evaluate again with this metric: dualeval run ... --metric "
        f"{shlex.quote(getattr(metric, 'spelled', metric.name))} --out {rows.path.parent} --fresh"
    )


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was checked."""

    # The file or the value that was checked.
    name: str
    # A sentence that is true if nothing differs.
    says: str
    # A sentence for each difference.
    differences: tuple[str, ...] = ()


def verify(folder: Path, metrics: Sequence[Metric | RowMetric]) -> Iterator[Check]:
    """Check a finished run's files against each other, and its metrics against its rows."""
    try:
        content = json.loads((folder / RESULT).read_text("utf-8"))
        result, digest = stated_result(content)
    except (ValueError, DualevalError) as error:
        raise DualevalError(f"{folder / RESULT} is damaged: {error}") from error
    yield Check(
        name=RESULT,
        says="its metrics fit its metrics_digest",
        differences=_differences("metrics_digest", digest, result.metrics_digest, "its metrics"),
    )
    files = [_file_check(folder / name, recorded) for name, recorded in result.files.items()]
    yield from files
    try:
        rows = StoredRows(folder / PREDICTIONS)
        failed, checks = _sample_checks(rows, result)
    except DualevalError as error:
        yield Check(name="rows", says="they can be read", differences=(str(error),))
        return
    yield from checks
    check_columns(rows, metrics)
    try:
        measured = _recompute(rows, metrics)
    except (DualevalError, ArithmeticError, LookupError, RuntimeError, ValueError) as error:
        # The rows hold values that no run has written, such as a class beyond the number of classes.
        problem = f"the metrics cannot be computed from these rows: {with_type(error)}"
        yield Check(name="metrics", says="they can be computed", differences=(problem,))
        return
    again = replace(_with_measured(result, measured, rows), failed=[{"id": name} for name in failed])
    if files and not any(check.differences for check in files):
        notes = [sentence for sentence in again.warnings if "formula has changed" in sentence]
        if result.interval_formulas < INTERVAL_FORMULAS:
            floored = {key for part in measured for key, of in part.scores.items() if of.least is not None}
            earlier = _with_earlier_intervals(again, result, floored)
            if earlier != again:
                notes.append(
                    "intervals were computed by earlier formulas: today some are wider, those of losses "
                    "begin at 0 or above, or other ones are rough"
                )
            again = earlier
        for key in _changed(folder, metrics, measured):
            if (stated := result.metrics.get(key)) != again.metrics[key]:
                now = _json_of(again.metrics[key])
                notes.append(f"{key}: {_json_of(stated)} in {RESULT}, now {now}: its formula has changed")
                again.metrics[key] = stated
                again.nonfinite.pop(key, None)
                again.nonfinite.update({name: of for name, of in result.nonfinite.items() if name == key})
        if notes:
            yield Check(name="formulas", says=f"no file is damaged; {'; '.join(notes)}")
    yield _metrics_check(result, again)
    yield Check(
        name="metrics_digest",
        says=f"{digest}, from the rows too",
        differences=_differences("metrics_digest", digest, again.metrics_digest),
    )


def _with_earlier_intervals(again: Result, result: Result, floored: Collection[str]) -> Result:
    """The recomputed result, with stored intervals of earlier formulas that lie within the new ones.

    By formulas 2 only intervals of ``floored`` metrics differ: they may begin below the least value.
    """
    is_first = result.interval_formulas == 1
    fields: dict[str, Any] = {}
    for name in ("intervals", "naive_intervals", "whole_set_intervals"):
        then = getattr(result, name)
        fields[name] = {
            key: tuple(then[key])
            if key in then
            and (key in floored or (is_first and low <= then[key][0]))
            and then[key][0] <= then[key][1]
            and (then[key][1] == high or (is_first and then[key][1] <= high))
            else (low, high)
            for key, (low, high) in getattr(again, name).items()
        }
    return replace(again, rough=result.rough, **fields)


def _changed(
    folder: Path, metrics: Sequence[Metric | RowMetric], measured: Sequence[Measured]
) -> Iterator[str]:
    """The names of values whose metrics have changed since the run."""
    then = read_job(folder)["job"].get("metric_options", {})
    of_ledger, of_rows = split_by_kind(metrics)
    in_order: list[Metric | RowMetric] = [*of_ledger, *of_rows]
    for metric, part in zip(in_order, measured, strict=True):
        was, now = then.get(metric.name), metric_fingerprint(metric)
        # Intervals alone follow from ``least``.
        if was is not None and {**now, "least": was.get("least")} != {**was, "least": was.get("least")}:
            yield from part.values


def _file_check(path: Path, recorded: Mapping[str, Any]) -> Check:
    """Check a file against its record in result.json."""
    if not path.is_file():
        return Check(name=path.name, says="it is there", differences=(f"{path} is missing",))
    facts = checksum_of(path)
    differing = (_differences(name, value, facts.get(name), "the file") for name, value in recorded.items())
    return Check(
        name=path.name,
        says=f"{facts['bytes']:,} bytes, whose sha256 is that in {RESULT}",
        differences=tuple(chain.from_iterable(differing)),
    )


def _sample_checks(rows: StoredRows, result: Result) -> tuple[list[str], list[Check]]:
    """Check the number of rows, their ids in order, and the empty rows; also returns the empty rows' ids."""
    failed, count = list[str](), 0
    for window in rows.windows(rows.names, with_ids=True):
        failed += [window.ids[place] for place in np.flatnonzero(~window.evaluated).tolist()]
        count += len(window.ids)
    counts = {"total": count, "evaluated": count - len(failed), "failed": len(failed)}
    stated = [entry["id"] for entry in result.failed]
    checks = [
        Check(
            name="samples",
            says=f"{count:,} rows, {count - len(failed):,} of them evaluated",
            differences=_differences("samples", result.samples, counts),
        ),
        Check(
            name="failed samples",
            says=f"{len(failed)}, whose rows are empty" if failed else "none",
            differences=_differences("failed", stated, failed),
        ),
    ]
    if result.samples_digest is not None:
        ids = (name for window in rows.windows(rows.names[:1], with_ids=True) for name in window.ids)
        differing = _differences("samples_digest", result.samples_digest, digest_of(count, ids))
        says = f"{result.samples_digest}, from the rows' ids in order"
        checks.append(Check(name="samples_digest", says=says, differences=differing))
    return failed, checks


def _metrics_check(result: Result, again: Result) -> Check:
    differing: list[str] = []
    # Version 2, which had no samples_digest, computed intervals by clusters in another way.
    known_intervals = not (result.clusters and result.samples_digest is None)
    intervals = _FIELDS_OF_INTERVALS if known_intervals else ("naive_intervals", "clusters")
    for field in ("metrics", *intervals, "nonfinite", "units", "directions"):
        of_field = "" if field == "metrics" else f"{field}."
        one, other = asdict(result)[field], asdict(again)[field]
        # Runs of earlier versions have no directions, and units only for percentages.
        known = (*one, *other) if field not in ("units", "directions") or result.directions else one
        for name in dict.fromkeys(known):
            differing += _differences(f"{of_field}{name}", one.get(name), other.get(name))
    return Check(
        name="metrics",
        says=f"{len(again.metrics)} values, {len(again.intervals)} intervals: the rows give the same bits",
        differences=tuple(differing),
    )


def _differences(name: str, stated: Any, again: Any, source: str = "the rows") -> tuple[str, ...]:
    """Differences of two nests of JSON values, as sentences: the value in result.json, and the one found."""
    sentences = [
        f"{place}: {_json_of(one)} in {RESULT}, {_json_of(other)} from {source}"
        for place, one, other in differences(stated, again, name)
    ]
    more = len(sentences) - _NAMED_AT_MOST
    return (*sentences[:_NAMED_AT_MOST], *([f"and {more} more of these"] if more > 0 else []))


def _json_of(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"{len(value)} values"
    text = json.dumps(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
