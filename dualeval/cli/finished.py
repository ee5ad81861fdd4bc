"""Commands that read a finished run: ``dualeval verify``, ``report``, ``slice`` and ``export``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from dualeval.cli import options
from dualeval.cli.options import PATH
from dualeval.errors import EXIT_DONE, EXIT_FAILED, UsageError
from dualeval.options.choices import check_groups
from dualeval.report.loggers import check_installed, targets_of
from dualeval.result import JOB, json_text
from dualeval.wording import printable_lines


@click.command()
@click.argument("run", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Print only the checks, as JSON.")
@click.pass_context
def verify(context: click.Context, run: Path, as_json: bool) -> None:
    """Compute all metrics of a finished run again, and compare them with result.json.

    \b
    dualeval verify runs/r18

    RUN is the output folder of the run and is not changed. Exit code 1 if something differs.
    """
    from dualeval.engine import verification
    from dualeval.engine.rescoring import check_finished
    from dualeval.tasks.stored import metrics_of_run

    check_finished(run)
    own = metrics_of_run(run / JOB)
    found = []
    for check in verification.verify(run, own):
        found.append(check)
        if not as_json:
            lines = [f"differs  {check.name}: {difference}" for difference in check.differences]
            click.echo(printable_lines("\n".join(lines or [f"ok       {check.name}: {check.says}"])))
    differing = [check.name for check in found if check.differences]
    if as_json:
        content = {"verified": not differing, "checks": [asdict(check) for check in found]}
        click.echo(json_text(content), nl=False)
    else:
        click.echo(f"not verified: {', '.join(differing)}" if differing else "verified")
    context.exit(EXIT_FAILED if differing else EXIT_DONE)


@click.command()
@click.argument("run", type=PATH)
@click.option(
    "--against",
    type=PATH,
    multiple=True,
    metavar="RUN",
    help="Another finished run over the same samples, to compare with; give it again for more.",
)
@click.option("--out", type=PATH, metavar="FILE", help="Where the page goes.  [default: RUN/report.html]")
def report(run: Path, against: Sequence[Path], out: Path | None) -> None:
    """Write one HTML file that shows a finished run: figures, samples, classes, comparison.

    \b
    dualeval report runs/b
    dualeval report runs/b --against runs/a --out b.html

    The file asks for nothing else: it can be sent as it is. RUN is an output folder.
    """
    if out is not None and (out.suffix.lower() != ".html" or out.is_dir()):
        raise UsageError(f"--out {out}: expected the name of a file that ends in .html")
    from dualeval.engine.rescoring import check_finished
    from dualeval.engine.samples_digest import contents_now
    from dualeval.report.page import check_installed, write_report
    from dualeval.result import JOB
    from dualeval.tasks.stored import task_of_run

    check_installed()
    check_finished(run)
    task, problem = task_of_run(run / JOB)
    job = json.loads((run / JOB).read_text("utf-8")).get("job", {})
    # The contents of drawn samples are those of these alone.
    if (
        task is not None
        and "sample" not in job
        and len(task.dataset()) >= job["samples"]
        and contents_now(task.dataset(), job["samples"]) != job["contents"]
    ):
        task, problem = None, f"files of the data of {run} have changed since: nothing of them is shown."
    page = write_report(run, task, against=against, out=out, problem=problem)
    click.echo(f"the report is in {page}")


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


@click.command()
@click.argument("run", type=PATH)
@click.option(
    "--to",
    "texts",
    multiple=True,
    required=True,
    metavar="KIND:WHERE",
    help="tensorboard:DIR, wandb:PROJECT, mlflow:URI or jsonl:FILE; give it again for more.",
)
@click.option("--step", type=int, metavar="N", help="Step of a training that it is, such as the epoch.")
def export(run: Path, texts: Sequence[str], step: int | None) -> None:
    """Log a finished run in trackers of experiments.

    \b
    dualeval export runs/r18 --to tensorboard:tb --to jsonl:results.jsonl
    dualeval export runs/epoch-3 --to wandb:cifar#first --step 3

    RUN is the output folder of a run, or of 'dualeval score --out', and is not changed. What a tracker has
    already is not logged again. Exit code 1 if a tracker fails.
    """
    targets = targets_of(texts, step, "--to")
    check_installed(targets, "--to")
    from dualeval.engine.folder.shares import refuse_unfinished
    from dualeval.report.loggers.log import export_result, stored_result

    refuse_unfinished(run)

    def note(said: str) -> None:
        click.echo(f"dualeval: {said}", err=True)

    for sentence in export_result(stored_result(run), run, targets, step, note):
        click.echo(sentence)
