"""``dualeval show``: the samples of a finished run to look at, and its figures by class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dualeval.cli.options import PATH
from dualeval.errors import UsageError
from dualeval.wording import printable

if TYPE_CHECKING:
    from dualeval.comparison.worst import JudgedRows, Sample

_WORST = 10
_LARGE = 1e4
_LONGEST = 60  # letters of an answer


@click.command()
@click.argument("run", type=PATH)
@click.option("--worst", metavar="N", type=click.IntRange(1), help=f"Samples a list.  [default: {_WORST}]")
@click.option("--class", "name", metavar="NAME", help="Only samples of this class, by name or number.")
@click.option(
    "--flips-against",
    "other",
    type=PATH,
    metavar="RUN",
    help="Instead: the samples that are right in that run and wrong in this one, and the other way round.",
)
@click.option("--per-class", is_flag=True, help="The metrics of each class.")
def show(run: Path, worst: int | None, name: str | None, other: Path | None, per_class: bool) -> None:
    """Show the samples of a finished run that deserve a look.

    \b
    dualeval show runs/a --worst 20 --class cat
    dualeval show runs/b --flips-against runs/a
    dualeval show runs/a --per-class

    Without a flag: the most confident mistakes and the highest losses. RUN is an output folder, which is
    not changed.
    """
    from dualeval.comparison.compared import compare
    from dualeval.comparison.worst import JudgedRows

    rows = JudgedRows.open(run)
    classes = None if name is None else rows.classes_called(name)
    if per_class:
        _print_classes(rows, classes)
        if worst is None and other is None:
            return
    comparison = None if other is None else compare(other, run)
    lists = rows.lists(comparison)
    if not lists:
        raise UsageError(
            f"{run} has no metric that says of each sample whether it is right, or how bad it is: there is "
            "nothing to list. 'dualeval export' writes all rows."
        )
    if comparison is not None:
        click.echo(printable(comparison.said_of(str(run))))
    for listed in lists:
        chosen = rows.worst(listed, worst or _WORST, classes)
        click.echo(f"{listed.title}: {len(chosen.places):,} of {chosen.of:,}")
        _print_samples(rows, rows.samples(chosen.places))
    if (folder := _folder_of_ids(rows)) is not None:
        click.echo(f"files are below {printable(folder)}")


def _folder_of_ids(rows: JudgedRows) -> str | None:
    """The folder below which ids are paths of files; None where they are none."""
    folders = [rows.result.job.get(name) for name in ("image_root", "data")]
    names = [row["id"] for _, row in rows.rows.at([0])]
    return next((each for each in folders if each and names and Path(each, names[0]).is_file()), None)


def _print_samples(rows: JudgedRows, samples: Sequence[Sample]) -> None:
    columns: dict[str, list[Any]] = {
        "id": [sample.row["id"] for sample in samples],
        "target": [_cut(sample.target) for sample in samples],
        "prediction": [_cut(sample.prediction) for sample in samples],
        "confidence": [sample.confidence for sample in samples],
        "" if rows.measure is None else rows.measure.name: [sample.loss for sample in samples],
    }
    # What no sample has, as the target of a question, is no column.
    there = {name: values for name, values in columns.items() if any(each is not None for each in values)}
    _print([*there], [*zip(*there.values(), strict=True)])


def _print_classes(rows: JudgedRows, classes: Sequence[int] | None) -> None:
    from dualeval.report.page.content import classes_of

    head, lines = classes_of(rows.result, rows.folder)
    if not head:
        raise UsageError(
            f"{rows.folder} has no metric by class."
            + (" Evaluate with --metric precision_recall, or confusion." if rows.has_classes else "")
        )
    _print(head, [line for index, line in enumerate(lines) if classes is None or index in classes])


def _print(head: Sequence[str], lines: Sequence[Sequence[Any]]) -> None:
    """Print a table whose texts come from strangers; its lines are whole, to be copied."""
    from rich.cells import cell_len

    cells = [[printable(_shown(value)) for value in line] for line in [head, *lines]]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        padded = (cell + " " * (width - cell_len(cell)) for cell, width in zip(line, widths, strict=True))
        click.echo("  ".join(padded).rstrip())
    click.echo()


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < _LARGE else f"{value:.4e}"
    return "" if value is None else str(value)


def _cut(text: str | None) -> str | None:
    return f"{text[:_LONGEST]}..." if text is not None and len(text) > _LONGEST else text
