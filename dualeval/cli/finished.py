"""Commands that read finished runs: verify, report, slice, export, show and compare."""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from dualeval.cli import options
from dualeval.cli.options import BINS, BY, PATH
from dualeval.cli.stored_row import in_words
from dualeval.errors import EXIT_DONE, EXIT_FAILED, EXIT_GATE, UsageError
from dualeval.messages import printable, printable_lines
from dualeval.options.choices import check_groups
from dualeval.report.loggers.loggers import check_installed, targets_of
from dualeval.result import JOB, REPORT, SAMPLE_REPORT, json_text

if TYPE_CHECKING:
    from dualeval.comparison.worst import JudgedRows, Sample


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
    from dualeval.engine.folder.finished import check_finished
    from dualeval.engine.scoring import rescoring
    from dualeval.tasks.stored import metrics_of_run

    check_finished(run)
    metrics = metrics_of_run(run / JOB)
    checks = []
    for check in rescoring.verify(run, metrics):
        checks.append(check)
        if not as_json:
            lines = [f"differs  {check.name}: {difference}" for difference in check.differences]
            click.echo(printable_lines("\n".join(lines or [f"ok       {check.name}: {check.says}"])))
    differing = [check.name for check in checks if check.differences]
    if as_json:
        content = {"verified": not differing, "checks": [asdict(check) for check in checks]}
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
@click.option("--out", type=PATH, metavar="FILE", help="File of the page.  [default: RUN/report.html]")
@click.option("--paths", is_flag=True, help="Name folders of this machine, as commands need them.")
@click.option(
    "--serve", is_flag=True, help="Write no file: show all rows in a browser of this machine, until Ctrl-C."
)
@click.option(
    "--port", type=click.IntRange(1, 65535), metavar="N", help="With --serve.  [default: a free one]"
)
def report(
    run: Path, against: Sequence[Path], out: Path | None, paths: bool, serve: bool, port: int | None
) -> None:
    """Write one HTML file that shows a finished run: figures, samples, classes, comparison.

    \b
    dualeval report runs/b
    dualeval report runs/b --against runs/a --out b.html
    dualeval report runs/b --serve

    The file asks for nothing else: it can be sent as it is. RUN is an output folder.
    """
    if out is not None and (out.suffix.lower() != ".html" or out.is_dir()):
        raise UsageError(f"--out {out}: expected the name of a file that ends in .html")
    if serve and (out is not None or paths):
        raise UsageError("--serve writes no file, and names folders: leave out --out and --paths.")
    if port is not None and not serve:
        raise UsageError(f"--port {port} is for a page that is served: also give --serve.")
    if serve:
        _serve(run, against, port or 0)
        return
    from dualeval.report.page.page import content_of, write_page
    from dualeval.report.page.runs import Runs

    task, problem = _task_of(run)
    page = out or run / REPORT
    write_page(content_of(Runs.open(run, against), task, problem=problem, paths=paths), page)
    click.echo(f"the report is in {page}")


def _serve(run: Path, against: Sequence[Path], port: int) -> None:
    from dualeval.report.page.page import check_installed

    check_installed()
    from dualeval.report.page.runs import Runs
    from dualeval.report.page.server import PageServer, ServedPage

    with PageServer(port) as server:
        task, problem = _task_of(run)
        server.page = ServedPage(Runs.open(run, against), task, problem=problem)
        click.echo(f"the report is at {server.address}\nCtrl-C ends it.")
        # That is how one leaves it: nothing is cut short.
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def _task_of(run: Path) -> tuple[Any, str]:
    """The task of a run whose page is made, which shows its samples; or None, and why."""
    from dualeval.engine.folder.finished import check_finished
    from dualeval.engine.job.agreement import contents_now
    from dualeval.report.page.page import check_installed
    from dualeval.result import read_job
    from dualeval.tasks.stored import task_of_run

    check_installed()
    check_finished(run)
    task, problem = task_of_run(run / JOB)
    job = {} if task is None else read_job(run)["job"]
    # The contents of drawn samples are those of these alone.
    if (
        task is not None
        and "sample" not in job
        and len(task.dataset()) >= job["samples"]
        and contents_now(task.dataset(), job["samples"]) != job["contents"]
    ):
        task, problem = None, f"files of the data of {run} have changed since: none of them is shown."
    if problem:
        click.echo(f"dualeval: note: {printable(problem)}", err=True)
    return task, problem


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
    from dualeval.engine.folder.finished import check_finished, finished_run
    from dualeval.engine.scoring.rescoring import check_columns
    from dualeval.engine.scoring.slices import Slicing
    from dualeval.report.table import make_console, print_slices
    from dualeval.tasks.stored import metrics_of_run

    check_finished(run)
    metrics = metrics_of_run(run / JOB, metric)
    result, rows = finished_run(run)
    check_columns(rows, metrics)
    slicing = Slicing(
        by=by, bins=bins or (), metrics=metrics, cluster=cluster or result.clusters.get("column")
    )
    sliced = slicing.of_rows(result, rows)
    for note in sliced.warnings[len(result.warnings) :]:
        click.echo(f"dualeval: note: {note}", err=True)
    if as_json:
        click.echo(json_text({"schema_version": 1, "run": str(run), "slices": sliced.slices}), nl=False)
    else:
        print_slices(sliced, make_console())


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
@click.option("--step", type=int, metavar="N", help="Training step of this result, such as the epoch.")
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
    from dualeval.engine.folder.layout import refuse_unfinished
    from dualeval.report.loggers.log import export_result, stored_result

    refuse_unfinished(run)

    def note(sentence: str) -> None:
        click.echo(f"dualeval: {sentence}", err=True)

    for sentence in export_result(stored_result(run), run, targets, step, note):
        click.echo(sentence)


_WORST = 10
_LARGE = 1e4
_LONGEST = 60  # letters of an answer
_VALUES = 2000  # of a list that is shown whole, as logits are


@click.command()
@click.argument("run", type=PATH)
@click.argument("sample", required=False)
@click.option("--worst", metavar="N", type=click.IntRange(1), help=f"Samples per list.  [default: {_WORST}]")
@click.option("--class", "name", metavar="NAME", help="Only samples of this class, by name or number.")
@click.option(
    "--flips-against",
    "other",
    type=PATH,
    metavar="RUN",
    help="Instead: the samples that are right in that run and wrong in this one, and vice versa.",
)
@click.option("--against", type=PATH, multiple=True, metavar="RUN", help="With SAMPLE: what these runs say.")
@click.option("--metric", metavar="NAME", help="List by this metric's number of each sample.")
@click.option("--per-class", is_flag=True, help="The metrics of each class.")
@click.option(
    "--html", is_flag=True, help=f"With SAMPLE: write RUN/{SAMPLE_REPORT} with its card, and open it."
)
def show(
    run: Path,
    sample: str | None,
    worst: int | None,
    name: str | None,
    other: Path | None,
    against: Sequence[Path],
    metric: str | None,
    per_class: bool,
    html: bool,
) -> None:
    """Show the samples of a finished run that deserve a look, or all that is known of the one of an id.

    \b
    dualeval show runs/a --worst 20 --class cat
    dualeval show runs/b val/cat/7.jpg --against runs/a
    dualeval show runs/b val/cat/7.jpg --html
    dualeval show runs/b --flips-against runs/a
    dualeval show runs/a --per-class

    Without a flag: the most confident mistakes and the highest losses. RUN is an output folder, of which
    nothing is changed but the page of --html.
    """
    from dualeval.comparison.compared import compare as compare_runs
    from dualeval.comparison.worst import JudgedRows, highest

    if html and (sample is None or metric is not None):
        raise UsageError("--html shows one sample, with all metrics: dualeval show RUN ID --html")
    rows = JudgedRows.open(run, metric)
    if sample is not None:
        if per_class or any(each is not None for each in (worst, name, other)):
            raise UsageError(f"show {run} {sample} shows one sample: leave out the options of lists.")
        if html:
            _open_sample(sample, run, against)
        else:
            _print_sample(sample, rows, [JudgedRows.open(each, metric) for each in against])
        return
    if against:
        raise UsageError("--against shows one sample in several runs: name it, as in dualeval show RUN ID.")
    classes = None if name is None else rows.classes_called(name)
    if per_class:
        _print_classes(rows, classes)
        if worst is None and other is None and metric is None:
            return
    comparison = (
        None if other is None else compare_runs(other, run, metrics=() if metric is None else (metric,))
    )
    lists = rows.lists(comparison, (str(other), str(run)))
    chosen_of = {listed.title: rows.worst(listed, worst or _WORST, classes) for listed in lists}
    if other is not None and not lists and classes is None:
        # Where no sample is right or wrong, none flips.
        worse = rows.changed(JudgedRows.open(other, metric))
        if worse is not None:
            chosen_of = {
                f"{how} in {run} than in {other}": highest(sign * worse, worst or _WORST)
                for how, sign in (("worse", 1), ("better", -1))
            }
    if not chosen_of:
        raise UsageError(
            f"{run} has no metric that says for each sample whether it is right, or how bad it is: there is "
            "nothing to list. 'dualeval export' writes all rows."
        )
    if comparison is not None:
        click.echo(printable(comparison.said_of(str(run))))
    for title, chosen in chosen_of.items():
        click.echo(f"{printable(title)}: {len(chosen.places):,} of {chosen.of:,}")
        _print_samples(rows, rows.samples(chosen.places))
    if (folder := _folder_of_ids(rows)) is not None:
        click.echo(f"files are below {printable(folder)}")


def _open_sample(name: str, run: Path, against: Sequence[Path]) -> None:
    """Write the page with a sample's card, and print its address; on a terminal, a browser opens it."""
    from dualeval.report.page.page import content_of, write_page
    from dualeval.report.page.runs import Runs
    from dualeval.report.page.things import seen

    task, problem = _task_of(run)
    content = content_of(Runs.open(run, against), task, problem=problem, sample=name)
    # Of its own name: the run's page may have more in it, such as a comparison.
    write_page(content, run / SAMPLE_REPORT)
    # As the page calls it: without the folders of an absolute path.
    called = quote(seen(content.samples[0].id), safe="")
    address = f"{(run / SAMPLE_REPORT).absolute().as_uri()}#sample={called}"
    click.echo(address)
    if sys.stdout.isatty():
        webbrowser.open(address)


def _print_sample(name: str, rows: JudgedRows, others: Sequence[JudgedRows]) -> None:
    """All that runs know of a sample, a line a column."""
    found: list[dict[str, Any]] = []
    for each in (rows, *others):
        [known] = each.samples([each.place_of(name)])
        judged = {"target": known.target, "prediction": known.prediction, "right": known.correct}
        # A column of the data keeps its name.
        there = {
            f"{column} (of the run)" if column in each.data_names else column: value
            for column, value in judged.items()
            if value is not None
        }
        found.append({**in_words(known.row, each), **there})
    # A row alone is not cut.
    cut = _cut if others else (lambda text: text)
    lines = [
        [column, *(None if row.get(column) is None else cut(_cell_text(row.get(column))) for row in found)]
        for column in dict.fromkeys(column for row in found for column in row)
    ]
    _print(["", *(str(each.folder) for each in (rows, *others))], lines)


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
    # A value that no sample has, such as a question's target, gets no column.
    there = {name: values for name, values in columns.items() if any(each is not None for each in values)}
    _print([*there], [*zip(*there.values(), strict=True)])


def _print_classes(rows: JudgedRows, classes: Sequence[int] | None) -> None:
    from dualeval.report.loggers.confusions import confusions_of
    from dualeval.report.page.content import classes_of

    head, lines = classes_of(rows.result, confusions_of(rows.result, rows.folder))
    if not head:
        raise UsageError(
            f"{rows.folder} has no metric by class."
            + (" Evaluate with --metric precision_recall, or confusion." if rows.has_classes else "")
        )
    _print(head, [line for index, line in enumerate(lines) if classes is None or index in classes])


def _print(head: Sequence[str], lines: Sequence[Sequence[Any]]) -> None:
    """Print a table whose texts come from strangers; its lines are whole, to be copied."""
    from rich.cells import cell_len

    cells = [[printable(_cell_text(value)) for value in line] for line in [head, *lines]]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        padded = (cell + " " * (width - cell_len(cell)) for cell, width in zip(line, widths, strict=True))
        click.echo("  ".join(padded).rstrip())
    click.echo()


def _cell_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < _LARGE else f"{value:.4e}"
    if isinstance(value, list) and len(value) > _VALUES:
        return f"[{', '.join(map(str, value[:8]))}, ...] ({len(value):,} values)"
    return "" if value is None else str(value)


def _cut(text: str | None) -> str | None:
    return f"{text[:_LONGEST]}..." if text is not None and len(text) > _LONGEST else text


@click.command()
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME",
    help="Metric to compare; give it again for more.  [default: all that both have]",
)
@click.option(
    "--gate",
    "gates",
    multiple=True,
    metavar="METRIC=MARGIN",
    help="B may be worse by at most this, in the metric's own unit (top1=0.002, exact_match=0.2), with 95 % "
    "confidence; give it again for more. With --by: worst:METRIC, in any group. Exit code 3 if one does not "
    "pass.",
)
@BY
@BINS
@click.option("--skip-small", is_flag=True, help="Leave small groups out of gates; else they do not pass.")
@click.option("--flips", type=PATH, help="Write the ids of all flipped samples here, as CSV.")
@click.option("--cluster", metavar="COLUMN", help="Samples with equal entries here depend on each other.")
@click.option("--trust-ids", is_flag=True, help="Equal ids are equal samples, whatever the fingerprints say.")
@click.option("--markdown", is_flag=True, help="Print Markdown.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else.")
@click.pass_context
def compare(
    context: click.Context,
    a: Path,
    b: Path,
    metrics: Sequence[str],
    gates: Sequence[str],
    by: Sequence[str],
    bins: tuple[float, ...] | None,
    skip_small: bool,
    flips: Path | None,
    cluster: str | None,
    trust_ids: bool,
    markdown: bool,
    as_json: bool,
) -> None:
    """Compare two finished runs over the same samples: is B better or worse than A?

    \b
    dualeval compare runs/a runs/b
    dualeval compare runs/fp32 runs/bf16 --gate top1=0.002
    dualeval compare runs/a runs/b --by scanner --gate worst:top1=0.01

    A and B are output folders, which are not changed.
    """
    if markdown and as_json:
        raise UsageError("--markdown and --json were both given: choose one")
    margins = _margins(gates)
    from dualeval.comparison.compared import compare as compare_runs
    from dualeval.report.comparison import as_markdown, print_comparison

    comparison = compare_runs(
        a,
        b,
        metrics=metrics,
        gates=margins,
        cluster=cluster,
        trust_ids=trust_ids,
        by=by,
        bins=bins or (),
        skip_small=skip_small,
    )
    if flips is not None:
        comparison.write_flips(flips)
    if as_json:
        click.echo(json_text(comparison.to_json()), nl=False)
    elif markdown:
        click.echo(as_markdown(comparison), nl=False)
    else:
        print_comparison(comparison)
    context.exit(EXIT_DONE if comparison.passed else EXIT_GATE)


def _margins(gates: Sequence[str]) -> dict[str, float]:
    margins: dict[str, float] = {}
    for text in gates:
        name, _, number = text.rpartition("=")
        try:
            margin = float(number)
        except ValueError:
            margin = None
        if not name or margin is None:
            raise UsageError(f"--gate {text!r}: expected METRIC=MARGIN, such as top1=0.002")
        if name in margins:
            raise UsageError(f"--gate {name} was given twice")
        margins[name] = margin
    return margins
