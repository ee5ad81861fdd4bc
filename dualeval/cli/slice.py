"""``dualeval slice``: the metrics of a finished run by group, from its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dualeval.cli import options
from dualeval.cli.grouped import PATH
from dualeval.errors import UsageError
from dualeval.options.choices import check_groups, columns_of_groups
from dualeval.result import JOB, json_text

if TYPE_CHECKING:
    from dualeval.engine.slices import Keys
    from dualeval.engine.stored_rows import StoredRows


@click.command("slice")
@click.argument("run", type=PATH)
@options.BY
@options.BINS
@click.option(
    "--table", type=PATH, metavar="FILE", help="A table with the column id, whose columns --by may name."
)
@options.METRIC
@options.CLUSTER
@options.ONLY_JSON
@click.pass_context
def slice_run(
    context: click.Context,
    run: Path,
    by: Sequence[str],
    bins: tuple[float, ...] | None,
    table: Path | None,
    metric: Sequence[str],
    cluster: str | None,
    as_json: bool,
) -> None:
    """Compute the metrics of a finished RUN by group, from its rows.

    \b
    dualeval slice runs/r18 --by scanner
    dualeval slice runs/r18 --by age*sex --bins 40,60 --table patients.csv

    RUN is the output folder of a run and is not changed.
    """
    if not by:
        raise UsageError("--by is missing: name a column, as in 'dualeval slice RUN --by scanner'")
    check_groups(by, bins or (), sign="--")
    from dualeval.engine.rescoring import check_columns, check_finished, finished_run
    from dualeval.engine.slices import Slicing
    from dualeval.report.table import make_console, print_slices
    from dualeval.tasks.stored import metrics_of_run

    check_finished(run)
    metrics = metrics_of_run(run / JOB, metric)
    result, rows = finished_run(run)
    check_columns(rows, metrics)
    keys, notes = ({}, []) if table is None else _keys_of(table, rows, columns_of_groups(by))
    slicing = Slicing(
        by=by,
        bins=bins or (),
        metrics=metrics,
        cluster=cluster or result.clusters.get("column"),
    )
    found = slicing.of_rows(result, rows, keys)
    for note in (*notes, *found.warnings[len(result.warnings) :]):
        click.echo(f"dualeval: note: {note}", err=True)
    if as_json:
        click.echo(json_text({"schema_version": 1, "run": str(run), "slices": found.slices}), nl=False)
    else:
        print_slices(found, make_console())


def _keys_of(path: Path, rows: StoredRows, by: Sequence[str]) -> tuple[Mapping[str, Keys], list[str]]:
    """The columns of a table that ``by`` names, an entry a row of the run; and what is to be said of it."""
    import numpy as np

    from dualeval.engine.slices import keys_by_id
    from dualeval.tasks.stored import table_of_ids

    ids, columns = table_of_ids(path, by)
    own = rows.whole("id").to_pylist()
    places = {name: place for place, name in enumerate(ids)}
    found = np.array([places.get(name, -1) for name in own], np.int64)
    if not (found >= 0).any():
        raise UsageError(
            f"--table {path}: none of its {len(ids):,} ids is in {rows.path}, whose first one is {own[0]!r}."
        )
    without = int((found < 0).sum())
    notes = [f"--table {path} has no row for {without:,} of {len(own):,} samples"] if without else []
    return keys_by_id(columns, found), notes
