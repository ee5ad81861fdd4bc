"""Record: what is logged of a result, in the plain values that every tracker takes."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from dualeval.result import Result

# Of more classes than these each figure is in the table alone: a tracker draws a chart of every scalar.
_CHARTED_CLASSES = 100


@dataclass(frozen=True, kw_only=True)
class Table:
    """Figures of each class: names of the columns, and a row a class."""

    columns: list[str]
    rows: list[list[Any]]


@dataclass(frozen=True, kw_only=True)
class Record:
    """What is logged of a result."""

    # The same for the same result and step, and no other: what was logged already is found by it.
    key: str
    # Of the result, for people.
    name: str
    # Of a training; None where there is none.
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
    # PNG files as base64, by name.
    pictures: dict[str, str]
    # The job and where it ran, flat, by dotted names.
    params: dict[str, Any]
    # The content of result.json.
    result: dict[str, Any]

    def to_json(self) -> str:
        """The record as text, for another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Record:
        """The record of a text."""
        content = json.loads(text)
        tables = {name: Table(**table) for name, table in content.pop("tables").items()}
        return cls(tables=tables, **content)

    def png(self, name: str) -> bytes:
        """A picture's file."""
        return base64.b64decode(self.pictures[name])


def record_of(result: Result, folder: Path | None, step: int | None) -> Record:
    """Make the record of a result."""
    from dualeval.report.loggers.confusions import confusions_of, figures_of
    from dualeval.report.loggers.picture import draw_confusion

    names = [*(result.labels.get("classes") or ())]
    confusions = confusions_of(result, folder, names)
    tables = {name: _table(columns, names) for name, columns in figures_of(result, confusions).items()}
    finished = result.finished_at or datetime.now(timezone.utc).isoformat()
    return Record(
        key=_key(result, step),
        name=result.fingerprint[:8] if folder is None else folder.name,
        step=step,
        time=datetime.fromisoformat(finished).timestamp(),
        scalars={**_metrics(result), **_of_run(result), **_of_classes(tables)},
        units=_units(result),
        tables=tables,
        pictures={
            name: base64.b64encode(draw_confusion(confusion, _title(name, result))).decode()
            for name, confusion in confusions.items()
        },
        params=dict(_flat("", _job(result))),
        result=json.loads(result.to_json()),
    )


def _key(result: Result, step: int | None) -> str:
    # Of two runs of one job that end within a second the seconds that they took differ.
    facts = [result.fingerprint, result.metrics_digest, result.finished_at, result.timing, step]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _title(name: str, result: Result) -> str:
    model = result.description.get("model")
    what = name.removesuffix("_matrix").replace("_", " ").capitalize()
    return what if model is None else f"{what}: {model}"


def _metrics(result: Result) -> dict[str, float]:
    """Each number among the metrics, with the ends of its intervals."""
    from dualeval.report.loggers.confusions import is_confusion

    found: dict[str, float] = {}
    for name, value in result.metrics.items():
        if is_confusion(value):
            continue
        parts = value.items() if isinstance(value, dict) else [(None, value)]
        for part, number in parts:
            if is_number(number):
                found[name if part is None else f"{name}/{part}"] = number
    for suffix, intervals in (("", result.intervals), ("_whole_set", result.whole_set_intervals)):
        for name, (low, high) in intervals.items():
            found |= {f"{name}{suffix}_low": low, f"{name}{suffix}_high": high}
    return found


def _units(result: Result) -> dict[str, str]:
    units = dict(result.units)
    for name, unit in result.units.items():
        for suffix, intervals in (("", result.intervals), ("_whole_set", result.whole_set_intervals)):
            if name in intervals:
                units |= {f"{name}{suffix}_low": unit, f"{name}{suffix}_high": unit}
    return units


def _of_run(result: Result) -> dict[str, float]:
    return {
        "run/samples_evaluated": result.samples["evaluated"],
        "run/samples_failed": result.samples["failed"],
        "run/samples_per_s": result.samples_per_s,
        "run/evaluate_s": result.timing["evaluate_s"],
        "run/total_s": result.timing["total_s"],
        **_of_reference(result.reference),
    }


def _of_reference(found: Mapping[str, Any]) -> dict[str, float]:
    """How far the predictions are from those of another run, where one was named."""
    loss = found.get("loss") or {}
    figures = {"agreement": found.get("agreement"), "largest_loss_difference": loss.get("largest")}
    return {f"reference/{name}": value for name, value in figures.items() if value is not None}


def _table(columns: Mapping[str, Sequence[Any]], names: Sequence[str | None]) -> Table:
    count = max(map(len, columns.values()))
    known = [*names, *[None] * (count - len(names))]
    rows = [[index, known[index], *(values[index] for values in columns.values())] for index in range(count)]
    return Table(columns=["class", "name", *columns], rows=rows)


def _of_classes(tables: Mapping[str, Table]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, table in tables.items():
        if len(table.rows) > _CHARTED_CLASSES:
            continue
        for index, label, *values in table.rows:
            called = f"{index}" if label is None else f"{index} {label}"
            for column, value in zip(table.columns[2:], values, strict=True):
                if is_number(value):
                    found[f"{name}/{column}/{called}"] = value
    return found


def _job(result: Result) -> dict[str, Any]:
    return {
        "job": result.job,
        "world": result.world,
        "device": result.device,
        "versions": result.versions,
        "data": {name: result.data.get(name) for name in ("fingerprint", "contents", "samples")},
        "weights": result.weights,
        "part": result.part,
        "fingerprint": result.fingerprint,
        **result.digests,
        "homogeneous": result.homogeneous,
        "deterministic": result.deterministic,
        "folder": result.folder,
        "finished_at": result.finished_at,
    }


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
