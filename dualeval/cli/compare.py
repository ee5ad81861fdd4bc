"""``dualeval compare``: two finished runs over the same samples, pair by pair."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from dualeval.cli.options import BINS, BY, PATH
from dualeval.errors import EXIT_DONE, EXIT_GATE, UsageError
from dualeval.result import json_text


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
