"""``dualeval slice``: the metrics of a finished run by group, from its rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from dualeval.cli import options
from dualeval.cli.grouped import PATH
from dualeval.errors import UsageError
from dualeval.options.choices import check_groups
from dualeval.result import JOB, json_text


@click.command("slice")
@click.argument("run", type=PATH)
@options.BY
@options.BINS
@options.METRIC
@options.CLUSTER
@options.ONLY_JSON
def slice_run(
    run: Path,
    by: Sequence[str],
    bins: tuple[float, ...] | None,
    metric: Sequence[str],
    cluster: str | None,
    as_json: bool,
) -> None:
    """Compute the metrics of a finished RUN by group, from its rows.

    \b
    dualeval slice runs/r18 --by scanner
    dualeval slice runs/r18 --by age*sex --bins 40,60

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
    slicing = Slicing(
        by=by,
        bins=bins or (),
        metrics=metrics,
        cluster=cluster or result.clusters.get("column"),
    )
    found = slicing.of_rows(result, rows)
    for note in found.warnings[len(result.warnings) :]:
        click.echo(f"dualeval: note: {note}", err=True)
    if as_json:
        click.echo(json_text({"schema_version": 1, "run": str(run), "slices": found.slices}), nl=False)
    else:
        print_slices(found, make_console())
