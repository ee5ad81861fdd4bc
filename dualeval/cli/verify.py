"""``dualeval verify``: whether a finished run's files agree, down to the last bit of each metric."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from dualeval.cli.grouped import PATH
from dualeval.errors import EXIT_DONE, EXIT_FAILED
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
    from dualeval.engine import rescoring
    from dualeval.tasks.stored import metrics_of_run

    rescoring.check_finished(run)
    own = metrics_of_run(run / JOB)
    found = []
    for check in rescoring.verify(run, own):
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
