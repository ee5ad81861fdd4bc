"""What is logged of a result, in the plain values that every tracker takes."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

from PIL import Image

from dualeval.report.loggers.confusions import (
    MOST_DRAWN,
    Confusion,
    confusions_of,
    draw_confusion,
    figures_of,
    is_confusion,
)
from dualeval.report.loggers.loggers import is_installed
from dualeval.result import Result, class_names

# Of more classes than these each figure is in the table alone: a tracker draws a chart of every scalar.
_CHARTED_CLASSES = 100
# Fields of result.json that tell runs apart.
JOB = (
    *("job", "world", "device", "versions", "data", "weights", "part", "fingerprint", "metrics_digest"),
    *("samples_digest", "homogeneous", "deterministic", "folder", "finished_at"),
)
_OF_DATA = ("fingerprint", "contents", "samples")


@dataclass(frozen=True, kw_only=True)
class Table:
    """Figures of each class: names of the columns, and a row a class."""

    columns: list[str]
    rows: list[list[Any]]


@dataclass(frozen=True, kw_only=True)
class LogEntry:
    """What is logged of a result."""

    # The same for the same result and step, and no other: what was logged already is found by it.
    key: str
    # Of the result, for people.
    name: str
    # The training step; None outside of a training.
    step: int | None
    # When the run came to its end, seconds since 1970.
    time: float
    # By name: metrics, the ends of their intervals (`top1_low`, `top1_high`), figures of classes
    # (`per_class/f1/3 Dress`) and of the run (`run/samples_per_s`).
    scalars: dict[str, float]
    # Of the scalars that have one.
    units: dict[str, str]
    # Figures of each class, by name.
    tables: dict[str, Table]
    # Confusion matrices, by name.
    confusions: dict[str, Confusion]
    # The job and where it ran, flat, by dotted names.
    params: dict[str, Any]
    # The content of result.json.
    result: dict[str, Any]

    @cached_property
    def pictures(self) -> dict[str, bytes]:
        """The confusion matrices as PNG files, by name; none where matplotlib is not there."""
        if not is_installed("matplotlib"):
            return {}
        model = self.result["description"].get("model")
        behind = "" if model is None else f": {model}"
        return {
            name: draw_confusion(
                confusion, f"{name.removesuffix('_matrix').replace('_', ' ').capitalize()}{behind}"
            )
            for name, confusion in self.confusions.items()
            if confusion.classes <= MOST_DRAWN
        }


def entry_of(result: Result, folder: Path | None, step: int | None) -> LogEntry:
    """Make the entry of a result."""
    names, confusions = class_names(result), confusions_of(result, folder)
    tables = {name: _table(columns, names) for name, columns in figures_of(result, confusions).items()}
    finished = result.finished_at or datetime.now(timezone.utc).isoformat()
    intervals, units = _of_intervals(result)
    content = json.loads(result.to_json())
    job = {name: content[name] for name in JOB}
    job["data"] = {name: result.data.get(name) for name in _OF_DATA}
    return LogEntry(
        key=_key_of(result, step),
        name=result.fingerprint[:8] if folder is None else folder.name,
        step=step,
        time=datetime.fromisoformat(finished).timestamp(),
        scalars={**_metrics(result), **intervals, **_of_run(result), **_of_classes(tables)},
        units={**result.units, **units},
        tables=tables,
        confusions=confusions,
        params=dict(_flat("", job)),
        result=content,
    )


def _key_of(result: Result, step: int | None) -> str:
    # Of two runs of one job that end within a second the seconds that they took differ.
    facts = [result.fingerprint, result.metrics_digest, result.finished_at, result.timing, step]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _metrics(result: Result) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in result.metrics.items():
        if is_number(value):
            found[name] = value
        elif isinstance(value, dict) and not is_confusion(value):
            found |= {f"{name}/{part}": number for part, number in value.items() if is_number(number)}
    return found


def _of_intervals(result: Result) -> tuple[dict[str, float], dict[str, str]]:
    """The ends of the intervals, and their units."""
    ends = {
        (name, f"{name}{suffix}_{which}"): end
        for suffix, intervals in (("", result.intervals), ("_whole_set", result.whole_set_intervals))
        for name, pair in intervals.items()
        for which, end in zip(("low", "high"), pair, strict=True)
    }
    units = {key: result.units[name] for name, key in ends if name in result.units}
    return {key: end for (_, key), end in ends.items()}, units


def _of_run(result: Result) -> dict[str, float]:
    figures = {
        "run/samples_evaluated": result.samples["evaluated"],
        "run/samples_failed": result.samples["failed"],
        "run/samples_per_s": result.samples_per_s,
        "run/evaluate_s": result.timing["evaluate_s"],
        "run/total_s": result.timing["total_s"],
        # How far the predictions are from those of another run, where one was named.
        "reference/agreement": result.reference.get("agreement"),
        "reference/largest_loss_difference": (result.reference.get("loss") or {}).get("largest"),
    }
    return {name: value for name, value in figures.items() if value is not None}


def _table(columns: Mapping[str, Sequence[Any]], names: Sequence[str | None]) -> Table:
    count = max(map(len, columns.values()))
    known = [*names, *[None] * (count - len(names))]
    rows = [[index, known[index], *(values[index] for values in columns.values())] for index in range(count)]
    return Table(columns=["class", "name", *columns], rows=rows)


def _of_classes(tables: Mapping[str, Table]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, table in tables.items():
        for index, label, *values in table.rows if len(table.rows) <= _CHARTED_CLASSES else ():
            called = f"{index}" if label is None else f"{index} {label}"
            for column, value in zip(table.columns[2:], values, strict=True):
                if is_number(value):
                    found[f"{name}/{column}/{called}"] = value
    return found


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Plain values by dotted names; lists as JSON, and nothing for None."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{name}.", value)
        elif value is not None:
            is_plain = isinstance(value, bool | int | float | str)
            yield f"{prefix}{name}", value if is_plain else json.dumps(value, ensure_ascii=False)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is one that a chart can show."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def opened(png: bytes) -> Image.Image:
    """A picture of `LogEntry.pictures`."""
    return Image.open(io.BytesIO(png))
