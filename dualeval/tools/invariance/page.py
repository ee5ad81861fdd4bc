"""How a diagnosis of batch shapes is shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from dualeval.report.table import labelled, make_console, print_line

# Of a table that a file takes.
_WIDTH = 120
# Modules that are named of one shape; --json has all.
_NAMED = 3
_NO_LICENCE = (
    "A diagnosis, no licence: where all rows are equal here, other samples, another machine or another "
    "version may differ. The batch size stays in the job's identity."
)


def print_invariance(found: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a diagnosis of batch shapes."""
    console = console or make_console(_WIDTH)
    line = partial(print_line, console)
    for label, text in _facts(found):
        line(labelled(label, text))
    for setting in found["settings"]:
        if setting["problem"] is not None:
            continue
        line("")
        line(_heading(setting))
        console.print(_table(setting, found["last_batch"]))
        for note in setting["notes"]:
            line(f"note: {note}", style="yellow")
    line("")
    for reason, names in _not_tried(found["settings"]).items():
        line(labelled("not tried", f"{'; '.join(names)}: {reason}"))
    for note in found["notes"]:
        line(f"note: {note}", style="yellow")
    line(_NO_LICENCE)


def _facts(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield from found["description"].items()
    last = found["last_batch"]
    ragged = "" if last is None else f"; the last batch of {found['samples']:,} samples has {last}"
    yield "batch size", f"{found['batch_size']}{ragged}"
    yield "rows", f"{found['rows']} samples, the job's first batch, each compared with itself in that batch"
    machine = found["machine"]
    threads = ", one thread a kernel" if machine["device"] == "cpu" else ""
    yield (
        "machine",
        f"{machine['model']}, {machine['cpu_capability']}, torch {machine['versions']['torch']}{threads}",
    )


def _not_tried(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The settings that were not tried, by the reason."""
    found: dict[str, list[str]] = {}
    for setting in settings:
        if setting["problem"] is not None:
            found.setdefault(setting["problem"], []).append(_heading(setting))
    return found


def _heading(setting: Mapping[str, Any]) -> str:
    known = setting["setting"]
    name = f"{known['precision']}, {known['layout']}"
    return f"{name} (this job)" if known["of_job"] else name


def _table(setting: Mapping[str, Any], last: int | None) -> Table:
    """A line for shapes that follow each other and say the same."""
    table = Table("shapes", "rows that differ", "largest difference", "made by")
    groups: list[tuple[list[str], list[Mapping[str, Any]]]] = []
    for shape in setting["shapes"]:
        is_own = shape is setting["shapes"][-1]
        behind = " (again)" if is_own else " (last batch)" if shape["shape"] == last else ""
        if not groups or _said(groups[-1][1][0]) != _said(shape):
            groups.append(([], []))
        groups[-1][0].append(f"{shape['shape']}{behind}")
        groups[-1][1].append(shape)
    for names, shapes in groups:
        largest = max(shapes, key=lambda shape: _amount(shape)[1])
        table.add_row(", ".join(names), _differ(shapes[0]), _largest(largest), _made_by(shapes[0]))
    return table


def _said(shape: Mapping[str, Any]) -> tuple[str, str, str]:
    return _differ(shape), _amount(shape)[0], _made_by(shape)


def _differ(shape: Mapping[str, Any]) -> str:
    return f"{shape['rows_differ']} of {shape['rows']}" if shape["rows_differ"] else "none"


def _largest(shape: Mapping[str, Any]) -> str:
    name, amount = _amount(shape)
    return name if amount < 0 else f"{name} {amount:.2g}"


def _amount(shape: Mapping[str, Any]) -> tuple[str, float]:
    """The column that counts most, the outputs and the loss before all others, and its largest difference.

    All columns and -1 where none is of floats.
    """
    columns = {name: column for name, column in shape["columns"].items() if column["largest"] is not None}
    if not columns:
        return ", ".join(shape["columns"]), -1.0
    first = sorted(columns, key=lambda name: (not name.startswith("output"), name != "loss"))[0]
    return first, columns[first]["largest"]


def _made_by(shape: Mapping[str, Any]) -> str:
    if not shape["rows_differ"]:
        return ""
    if shape["cause"] != "modules":
        return str(shape["cause"] or "")
    named = [
        f"{module['name'] or 'the model itself'} ({module['kind']})" for module in shape["modules"][:_NAMED]
    ]
    more = len(shape["modules"]) - _NAMED
    after = f"; {shape['after']} after it" if shape["after"] else ""
    return ", ".join(named) + (f" and {more} more" if more > 0 else "") + after
