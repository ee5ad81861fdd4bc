"""How a diagnosis of batch shapes is shown."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from rich.table import Table

from dualeval.report.table import labelled, make_console, print_line
from dualeval.tools.invariance.computed import ShapeDiagnosis
from dualeval.tools.invariance.diagnosis import Diagnosis
from dualeval.wording import listed

# Of a table that a file takes.
_WIDTH = 120
# Modules that are named of one shape.
_NAMED = 3
_NO_LICENCE = (
    "A diagnosis, no licence: where all rows are equal here, other samples, another machine or another "
    "version may differ. The batch size stays in the job's identity."
)


def print_invariance(found: Diagnosis) -> None:
    """Print a diagnosis of batch shapes."""
    console = make_console(_WIDTH)
    line = partial(print_line, console)
    for label, text in _facts(found):
        line(labelled(label, text))
    line("")
    console.print(_table(found))
    for note in found.notes:
        line(f"note: {note}", style="yellow")
    line(_NO_LICENCE)


def _facts(found: Diagnosis) -> Iterator[tuple[str, str]]:
    yield from found.description.items()
    last = found.last_batch
    ragged = "" if last is None else f"; the last batch of {found.samples:,} samples has {last}"
    yield "batch size", f"{found.options.batch_size}{ragged}"
    yield "computed in", f"{found.options.precision}, {found.options.layout}"
    yield "rows", f"{found.rows} samples, the job's first batch, each compared with itself in that batch"
    machine = found.machine
    threads = ", one thread a kernel" if machine["device"] == "cpu" else ""
    yield (
        "machine",
        f"{machine['model']}, {machine['cpu_capability']}, torch {machine['versions']['torch']}{threads}",
    )


def _table(found: Diagnosis) -> Table:
    """A line for shapes that follow each other and say the same."""
    table = Table("shapes", "rows that differ", "largest difference", "made by")
    groups: list[tuple[list[str], list[ShapeDiagnosis]]] = []
    for shape in found.shapes:
        is_own = shape is found.shapes[-1]
        behind = " (again)" if is_own else " (last batch)" if shape.shape == found.last_batch else ""
        if not groups or _said(groups[-1][1][0]) != _said(shape):
            groups.append(([], []))
        groups[-1][0].append(f"{shape.shape}{behind}")
        groups[-1][1].append(shape)
    for names, shapes in groups:
        name, amount = max((_amount(shape) for shape in shapes), key=lambda found: found[1])
        largest = name if amount < 0 else f"{name} {amount:.2g}"
        table.add_row(", ".join(names), _differ(shapes[0]), largest, _made_by(shapes[0]))
    return table


def _said(shape: ShapeDiagnosis) -> tuple[str, str, str]:
    return _differ(shape), _amount(shape)[0], _made_by(shape)


def _differ(shape: ShapeDiagnosis) -> str:
    return f"{shape.rows_differ} of {shape.rows}" if shape.rows_differ else "none"


def _amount(shape: ShapeDiagnosis) -> tuple[str, float]:
    """The column that counts most, the outputs and the loss before all others, and its largest difference.

    All columns and -1 where none is of floats.
    """
    largest = {name: amount for name, amount in shape.columns.items() if amount is not None}
    if not largest:
        return ", ".join(shape.columns), -1.0
    first = min(largest, key=lambda name: (not name.startswith("output"), name != "loss"))
    return first, largest[first]


def _made_by(shape: ShapeDiagnosis) -> str:
    if not shape.modules:
        return shape.cause or ""
    named = [f"{name or 'the model itself'} ({kind})" for name, kind in shape.modules.items()]
    after = f"; {shape.after} after it" if shape.after else ""
    return f"{listed(named, _NAMED)}{after}"
