"""Options, and what they do, that commands with a result have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from dualeval.result import Result

METRIC = click.option(
    "--metric", multiple=True, help="Metric to compute; give it again for more.  [default: all]"
)
FRESH = click.option(
    "--fresh", is_flag=True, help="Start over in --out: remove an earlier run's files first."
)
AS_JSON = click.option(
    "--json", "as_json", is_flag=True, help="Print result.json, and nothing else, on standard output."
)


def show(result: Result, *, as_json: bool) -> None:
    """Show a result on standard output, as a table or as the text of result.json."""
    from dualeval.report.table import print_result

    if as_json:
        click.echo(result.to_json(), nl=False)
    else:
        print_result(result)
