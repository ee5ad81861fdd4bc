"""``dualeval show``: the samples of a finished run to look at, and its figures by class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dualeval.cli.grouped import PATH
from dualeval.errors import UsageError
from dualeval.wording import printable

if TYPE_CHECKING:
    from dualeval.comparison.worst import By, JudgedRows, Sample

_WORST = 10
_LARGE = 1e4
_LONGEST = 60  # letters of an answer


@click.command()
@click.argument("run", type=PATH)
@click.option(
    "--worst", metavar="N", type=click.IntRange(1), help=f"How many of each list.  [default: {_WORST}]"
)
@click.option("--class", "name", metavar="NAME", help="Only samples of this class, by name or number.")
@click.option(
    "--flips-against",
    "other",
    type=PATH,
    metavar="RUN",
    help="Instead: the samples that are right in that run and wrong in this one, and the other way.",
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
    from dualeval.comparison.worst import JudgedRows

    rows = JudgedRows.open(run)
    classes = None if name is None else rows.classes_called(name)
    if per_class:
        _print_classes(rows, classes)
    if not per_class or worst is not None or other is not None:
        _print_samples(rows, worst or _WORST, classes, other)


def _print_samples(rows: JudgedRows, count: int, classes: Sequence[int] | None, other: Path | None) -> None:
    lists = _lists(rows) if other is None else _flips(rows, other)
    if not lists:
        raise UsageError(
            f"{rows.folder} has no column that says which samples are right, or how bad each is: nothing is "
            "worse than anything else. 'dualeval export' writes the rows."
        )
    for title, by, among in lists:
        chosen = rows.worst(by, count, among=among, classes=classes)
        click.echo(f"{title}: {len(chosen.places):,} of {chosen.of:,}")
        _print_table(rows, rows.samples(chosen.places))
    if (folder := _folder_of_ids(rows)) is not None:
        click.echo(f"files are below {printable(str(folder))}")


def _lists(rows: JudgedRows) -> list[tuple[str, By, Any]]:
    found: list[tuple[str, By, Any]] = []
    if rows.judges:
        title = "most confident mistakes" if rows.has_confidence else "mistakes"
        found.append((title, "mistake", None))
    if rows.measure is not None:
        found.append((f"{'highest' if rows.measure.high else 'lowest'} {rows.measure.name}", "loss", None))
    return found


def _flips(rows: JudgedRows, other: Path) -> list[tuple[str, By, Any]]:
    from dualeval.comparison.compared import compare
    from dualeval.comparison.worst import flips_of

    comparison = compare(other, rows.folder)
    flips = flips_of(comparison)
    if flips is None:
        raise UsageError(
            f"{other} and {rows.folder} have no metric in common that is right or wrong of each sample: "
            f"there are no flips. Type 'dualeval compare {other} {rows.folder}' for their means."
        )
    click.echo(comparison.said_of(printable(str(rows.folder))))
    changes = ("right there, wrong here", flips.lost), ("wrong there, right here", flips.gained)
    return [(title, "any", rows.with_ids(ids)) for title, ids in changes]


def _folder_of_ids(rows: JudgedRows) -> Path | None:
    """The folder below which ids are paths of files; None where they are none."""
    job = rows.result.job
    first = next(iter(rows.rows.at([0])), None)
    for name in (job.get("image_root"), job.get("data")):
        if first is not None and isinstance(name, str) and Path(name, first[1]["id"]).is_file():
            return Path(name)
    return None


def _print_table(rows: JudgedRows, samples: Sequence[Sample]) -> None:
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
            f"{rows.folder} has no metric by class. Evaluate with --metric precision_recall, or confusion."
        )
    _print(head, lines if classes is None else [lines[index] for index in classes if index < len(lines)])


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
