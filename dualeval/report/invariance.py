"""How a diagnosis of batch shapes is shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from dualeval.report.table import make_console

_LABEL_WIDTH = 16
# Of a table that a file takes.
_WIDTH = 120
# Modules that are named of one shape; --json has all.
_NAMED = 3
_NO_LICENCE = (
    "A diagnosis, no licence: where all rows are equal here, other samples, another machine or another "
    "version may differ. The batch size stays in the job's identity."
)


def print_invariance(found: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a diagnosis of batch shapes.

    Args:
        found: as ``Diagnosis.to_json`` gives it.
        console: where; None takes standard output.
    """
    console = console or make_console(_WIDTH)

    def line(text: str, style: str | None = None) -> None:
        console.print(text, soft_wrap=True, highlight=False, markup=False, style=style)

    for label, text in _facts(found):
        line(f"{label:<{_LABEL_WIDTH}}{text}")
    for setting in found["settings"]:
        line("")
        line(_heading(setting))
        if setting["problem"] is not None:
            line(f"  not tried: {setting['problem']}")
            continue
        console.print(_table(setting, found["last_batch"]))
        for note in setting["notes"]:
            line(f"note: {note}", style="yellow")
    line("")
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


def _heading(setting: Mapping[str, Any]) -> str:
    known = setting["setting"]
    name = ", ".join(str(known[key]) for key in ("precision", "layout") if known.get(key) is not None)
    return f"{name} (this job)" if known["of_job"] else name


def _table(setting: Mapping[str, Any], last: int | None) -> Table:
    table = Table("shape", "rows that differ", "largest difference", "made by")
    for shape in setting["shapes"]:
        is_own = shape is setting["shapes"][-1]
        behind = " (again)" if is_own else " (last batch)" if shape["shape"] == last else ""
        differ = f"{shape['rows_differ']} of {shape['rows']}" if shape["rows_differ"] else "none"
        table.add_row(f"{shape['shape']}{behind}", differ, _largest(shape), _made_by(shape))
    return table


def _largest(shape: Mapping[str, Any]) -> str:
    """The largest difference of the column that differs most: the outputs and the loss before all others."""
    columns = {name: column for name, column in shape["columns"].items() if column["largest"] is not None}
    if not columns:
        return ", ".join(shape["columns"])
    first = sorted(columns, key=lambda name: (not name.startswith("output"), name != "loss"))[0]
    return f"{first} {columns[first]['largest']:.2g}"


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
