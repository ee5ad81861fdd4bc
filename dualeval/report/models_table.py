"""The table of several models that one run has evaluated: on the screen, as CSV and Markdown."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dualeval.messages import csv_cell, printable
from dualeval.report.table import make_console, print_line, shown_numbers
from dualeval.result import Result

DONE, FAILED, NOT_DONE = "done", "failed", "not done"
_DIGESTS = ("metrics_digest", "samples_digest")
# Of the screen: the name, the speed and the status of each model, and a metric with its interval.
_OTHER_COLUMNS, _METRIC_WIDTH = 40, 20
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|~])")


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """What has become of one model."""

    name: str
    # `DONE`, `FAILED` or `NOT_DONE`.
    status: str = NOT_DONE
    result: Result | None = None
    # Why it has failed, or is not compared with the others.
    reason: str | None = None
    # What a run of it alone would end with; None where it is not done.
    exit_code: int | None = None
    folder: str | None = None
    # Of a training.
    step: int | None = None

    @property
    def summary(self) -> str:
        """The status, with the first line of the reason."""
        lines = (self.reason or "").strip().splitlines()
        return f"{self.status}: {lines[0]}" if lines else self.status


class ModelsTable:
    """The table of several models, in the order in which they are evaluated."""

    def __init__(self, rows: Sequence[ModelRow]) -> None:
        self.rows = tuple(rows)
        results = [row.result for row in rows if row.result is not None]
        # The names of all metrics that are numbers.
        self.metrics = tuple(
            dict.fromkeys(
                name
                for result in results
                for name, value in result.metrics.items()
                if value is None or isinstance(value, int | float)
            )
        )
        self.same_samples = len({json.dumps([each.data, each.part], sort_keys=True) for each in results}) < 2
        # By metric, the names of the models with its best value; nothing where neither direction is better,
        # where fewer than two have one, and where the models have seen different samples.
        self.best = {name: best for name in self.metrics if (best := self._best(name))}

    def _best(self, metric: str) -> list[str]:
        values = {
            row.name: value
            for row in self.rows
            if row.reason is None and (value := number_of(row.result, metric)) is not None
        }
        directions = {
            row.result.directions.get(metric)
            for row in self.rows
            if row.result is not None and metric in row.result.metrics
        }
        if len(values) < 2 or not self.same_samples or directions not in ({"higher"}, {"lower"}):
            return []
        wanted = (max if directions == {"higher"} else min)(values.values())
        return [name for name, value in values.items() if value == wanted]

    def cell(self, row: ModelRow, metric: str) -> tuple[str, str]:
        """A metric of a model, and its 95 % interval, as texts; empty where there is none."""
        value = number_of(row.result, metric)
        if row.result is None or metric not in row.result.metrics:
            return "", ""
        if value is None:
            return "none", ""
        ends = row.result.intervals.get(metric, ())
        first, *shown = shown_numbers(value, *ends, unit=row.result.units.get(metric))
        return first, " to ".join(shown)

    def is_best(self, row: ModelRow, metric: str) -> bool:
        """Whether a model has the best value of a metric."""
        return row.name in self.best.get(metric, ())

    # -- files -------------------------------------------------------------------------------------

    def to_csv(self) -> str:
        """As CSV: a line of headings, and numbers with all their digits."""
        ranged = {name for row in self.rows if row.result is not None for name in row.result.intervals}
        columns = [
            part
            for name in self.metrics
            for part in (name, *((f"{name}_low", f"{name}_high") if name in ranged else ()))
        ]
        behind = ("samples_per_s", "evaluated", "failed", *_DIGESTS, "folder", "reason")
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        has_steps = any(row.step is not None for row in self.rows)
        writer.writerow(["model", "status", *(["step"] if has_steps else []), *columns, *behind])
        for row in self.rows:
            values: list[Any] = [row.name, row.status, *([row.step] if has_steps else [])]
            for name in self.metrics:
                ends = () if row.result is None else row.result.intervals.get(name, ())
                values += [number_of(row.result, name), *((ends or ("", "")) if name in ranged else ())]
            if (result := row.result) is None:
                values += ["", "", "", "", ""]
            else:
                counts = result.samples
                values += [result.samples_per_s, counts["evaluated"], counts["failed"]]
                values += result.digests.values()
            values += [row.folder or "", row.reason or ""]
            writer.writerow([csv_cell(value) if isinstance(value, str) else value for value in values])
        return text.getvalue()

    def to_markdown(self) -> str:
        """As a table of Markdown; the best values are bold."""
        head = ["model", *self.metrics, "samples/s", "status"]
        lines = [[_markdown(text) for text in head], ["---", *["---:"] * (len(self.metrics) + 1), "---"]]
        for row in self.rows:
            line = [_markdown(row.name)]
            for name in self.metrics:
                value, interval = map(_markdown, self.cell(row, name))
                value = f"**{value}**" if self.is_best(row, name) else value
                line.append(f"{value} ({interval})" if interval else value)
            lines.append([*line, _speed(row), _markdown(row.summary)])
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def to_json(self, *, whole: bool) -> dict[str, Any]:
        """As plain JSON values, with the list ``models``."""
        models = []
        for row in self.rows:
            entry: dict[str, Any] = {
                "name": row.name,
                "status": row.status,
                "exit_code": row.exit_code,
                "reason": row.reason,
                "folder": row.folder,
            }
            result = row.result
            if whole:
                entry["result"] = None if result is None else json.loads(result.to_json())
            elif result is not None:
                entry |= {
                    "metrics": result.metrics,
                    "intervals": result.intervals,
                    "samples": result.samples,
                    "samples_per_s": result.samples_per_s,
                    "fingerprint": result.fingerprint,
                    **result.digests,
                }
            models.append(entry)
        return {"models": models, "best": self.best}

    # -- screen ------------------------------------------------------------------------------------

    def print(self, console: Console | None = None) -> None:
        """Print as many metrics as there is room for; a star marks the best value of each."""
        console = console or make_console()
        room = max(1, (console.width - _OTHER_COLUMNS) // _METRIC_WIDTH)
        metrics = self.metrics[:room]
        table = Table("model", *map(escape, metrics), "samples/s", "status")
        for row in self.rows:
            cells = []
            for name in metrics:
                value, interval = self.cell(row, name)
                star = " *" if self.is_best(row, name) else ""
                cells.append(Text(f"{value}{star}" + (f"\n{interval}" if interval else "")))
            table.add_row(Text(printable(row.name)), *cells, _speed(row), row.status)
        console.print(table)
        for line in self._notes(len(metrics)):
            print_line(console, line)

    def _notes(self, shown: int) -> list[str]:
        lines = [f"{row.name}: {row.summary}" for row in self.rows if row.reason is not None]
        if len(self.metrics) > shown:
            lines.append(f"{len(self.metrics) - shown} more metrics are in the files.")
        if any(name in self.best for name in self.metrics[:shown]):
            lines.append("* the best value; below each value its 95 % interval")
        if not self.same_samples:
            lines.append("The models have seen different samples: no best value is marked.")
        names: dict[str, list[str]] = {}
        for row in self.rows:
            for warning in () if row.result is None else row.result.warnings:
                names.setdefault(warning, []).append(row.name)
        return [*lines, *(f"warning: {', '.join(who)}: {warning}" for warning, who in names.items())]


def number_of(result: Result | None, metric: str) -> float | None:
    """A metric's value, where it is a number."""
    value = None if result is None else result.metrics.get(metric)
    return value if isinstance(value, int | float) else None


def _speed(row: ModelRow) -> str:
    return "" if row.result is None else f"{row.result.samples_per_s:,.0f}"


def _markdown(text: str) -> str:
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))
