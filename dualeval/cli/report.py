"""``dualeval report``: a page of a finished run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from dualeval.cli.grouped import PATH


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
    from dualeval.engine.rescoring import check_finished
    from dualeval.report.page.writing import check_installed, write_report
    from dualeval.result import JOB
    from dualeval.tasks.stored import task_of_run

    check_installed()
    check_finished(run)
    task, problem = task_of_run(run / JOB)
    page = write_report(run, task, against=against, out=out, problem=problem)
    click.echo(f"the report is in {page}")
