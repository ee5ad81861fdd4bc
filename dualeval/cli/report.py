"""``dualeval report``: a page of a finished run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from dualeval.cli.grouped import PATH
from dualeval.errors import UsageError


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
