"""Options, and what they do, that commands with a result have in common."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dualeval.errors import DualevalError
from dualeval.process_start import unwritten

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


def show(result: Result, *, as_json: bool, kept: Path | None) -> None:
    """Show a result on standard output, as a table or as the text of result.json.

    Args:
        result: what is shown.
        as_json: as the text of result.json.
        kept: the file that holds it; None where there is none.

    Raises:
        DualevalError: standard output cannot be written, and the result is kept nowhere.
    """
    from dualeval.report.table import print_result

    if as_json:
        click.echo(result.to_json(), nl=False)
    else:
        print_result(result)
    problem = unwritten()
    if problem is None:
        return
    said = f"standard output cannot be written ({problem.strerror})"
    if kept is None:
        raise DualevalError(f"{said}, and the result is kept nowhere else: give --out DIR.")
    click.echo(f"dualeval: note: {said}; the result is in {kept}", err=True)
