"""Whether a finished run's files agree: result.json, predictions.parquet, and the metrics of these rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from dualeval.engine.differences import differences
from dualeval.engine.rescoring import check_columns, recompute, with_measured
from dualeval.engine.samples_digest import digest_of
from dualeval.engine.stored_rows import StoredRows
from dualeval.errors import DualevalError
from dualeval.metrics import Metric, RowMetric
from dualeval.result import PREDICTIONS, RESULT, Result, checksum_of, stated_result

# Of one kind of difference; a file cut in half differs in every row.
_NAMED_AT_MOST = 20
_LONGEST_SHOWN = 120
_FIELDS_OF_INTERVALS = ("intervals", "rough", "naive_intervals", "clusters", "whole_set_intervals")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was checked."""

    # What was looked at.
    name: str
    # What holds where nothing differs.
    says: str
    # A sentence for each thing that differs; none where all is right.
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
    for name, recorded in result.files.items():
        yield _file_check(folder / name, recorded)
    try:
        rows = StoredRows(folder / PREDICTIONS)
        failed, checks = _sample_checks(rows, result)
    except DualevalError as error:
        yield Check(name="rows", says="they can be read", differences=(str(error),))
        return
    yield from checks
    check_columns(rows, metrics)
    try:
        measured = recompute(rows, metrics)
    except (DualevalError, ArithmeticError, LookupError, RuntimeError, ValueError) as error:
        # Such as a class beyond the number of classes: values that no run has written.
        said = f"the metrics cannot be computed from these rows: {type(error).__name__}: {error}"
        yield Check(name="metrics", says="they can be computed", differences=(said,))
        return
    found = replace(with_measured(result, measured, rows), failed=[{"id": name} for name in failed])
    yield _metrics_check(result, found)
    yield Check(
        name="metrics_digest",
        says=f"{digest}, from the rows too",
        differences=_differences("metrics_digest", digest, found.metrics_digest),
    )


def _file_check(path: Path, recorded: Mapping[str, Any]) -> Check:
    """Check a file against what result.json says of it."""
    if not path.is_file():
        return Check(name=path.name, says="it is there", differences=(f"{path} is missing",))
    found = checksum_of(path)
    differing = (_differences(name, value, found.get(name), "the file") for name, value in recorded.items())
    return Check(
        name=path.name,
        says=f"{found['bytes']:,} bytes, whose sha256 is that in {RESULT}",
        differences=tuple(chain.from_iterable(differing)),
    )


def _sample_checks(rows: StoredRows, result: Result) -> tuple[list[str], list[Check]]:
    """Check the rows' number, their ids in order, and which are empty; returns the ids of these too."""
    failed, count = list[str](), 0
    for window in rows.windows(rows.names, with_ids=True):
        failed += [window.ids[place] for place in np.flatnonzero(~window.evaluated).tolist()]
        count += len(window.ids)
    found = {"total": count, "evaluated": count - len(failed), "failed": len(failed)}
    stated = [entry["id"] for entry in result.failed]
    checks = [
        Check(
            name="samples",
            says=f"{count:,} rows, {count - len(failed):,} of them evaluated",
            differences=_differences("samples", result.samples, found),
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


def _metrics_check(result: Result, found: Result) -> Check:
    differing: list[str] = []
    # Version 2, which had no samples_digest, made intervals by clusters in another way.
    known_intervals = not (result.clusters and result.samples_digest is None)
    intervals = _FIELDS_OF_INTERVALS if known_intervals else ("naive_intervals", "clusters")
    for field in ("metrics", *intervals, "nonfinite", "units", "directions"):
        of_field = "" if field == "metrics" else f"{field}."
        one, other = asdict(result)[field], asdict(found)[field]
        # A run of an earlier version has written no directions, and units of percent alone.
        known = (*one, *other) if field not in ("units", "directions") or result.directions else one
        for name in dict.fromkeys(known):
            differing += _differences(f"{of_field}{name}", one.get(name), other.get(name))
    return Check(
        name="metrics",
        says=f"{len(found.metrics)} values, {len(found.intervals)} intervals: the rows give the same bits",
        differences=tuple(differing),
    )


def _differences(name: str, stated: Any, found: Any, source: str = "the rows") -> tuple[str, ...]:
    """Where two nests of JSON values differ, as sentences: what result.json has, and what was found."""
    found = [
        f"{place}: {_shown(one)} in {RESULT}, {_shown(other)} from {source}"
        for place, one, other in differences(stated, found, name)
    ]
    more = len(found) - _NAMED_AT_MOST
    return (*found[:_NAMED_AT_MOST], *([f"and {more} more of these"] if more > 0 else []))


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"{len(value)} values"
    text = json.dumps(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
