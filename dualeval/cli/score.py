"""``dualeval score``: score answers that are there already, without a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from dualeval.cli import options
from dualeval.errors import EXIT_DONE, LaunchError, UsageError
from dualeval.launch import examine
from dualeval.world import World

_JOB = ("task", "data", "predictions", "null_odds")
# The kinds of evaluation whose answers can be had as a file.
TASKS = ("question-answering",)


@click.command()
@click.option("--task", default=TASKS[0], help=f"Kind of evaluation: {', '.join(TASKS)}.")
@click.option("--data", required=True, type=click.Path(path_type=Path), help="Questions: JSON file of SQuAD.")
@click.option(
    "--predictions",
    required=True,
    type=click.Path(path_type=Path),
    help="Answers: JSON object, question id to text.",
)
@click.option(
    "--null-odds",
    type=click.Path(path_type=Path),
    help="How little each question is believed to have an answer: JSON object; adds the best thresholds.",
)
@options.METRIC
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Output folder.  [default: a new one in runs/]",
)
@options.FRESH
@options.AS_JSON
@click.pass_context
def score(context: click.Context, /, **flags: Any) -> None:
    """Score a file of answers against a file of questions, as the official scripts do.

    \b
    dualeval score --data dev-v1.1.json --predictions predictions.json --out scores
    """
    from dualeval.backends import connect
    from dualeval.engine.control import open_control_plane
    from dualeval.engine.evaluator import Evaluator
    from dualeval.tasks.given_answers import GivenAnswers

    if flags["task"] not in TASKS:
        raise UsageError(f"--task {flags['task']!r}: expected one of {', '.join(TASKS)}.")
    found = examine(os.environ, None).place
    if found.size > 1:
        raise LaunchError(
            f"'dualeval score' is one process, but {found.launcher} has started {found.size}. Type it by "
            "itself."
        )
    _keep_apart(flags)
    task = GivenAnswers(
        data=flags["data"],
        predictions=flags["predictions"],
        null_odds=flags["null_odds"],
        metrics=flags["metric"],
    )
    job = {name: None if value is None else str(value) for name, value in flags.items() if name in _JOB}
    with connect(None, World.alone(), "cpu") as backend, open_control_plane(backend) as control:
        result = Evaluator(
            task,
            backend,
            control,
            out=flags["out"],
            fresh=flags["fresh"],
            note=lambda sentence: click.echo(f"dualeval: note: {sentence}", err=True),
            job={**job, "metric": list(flags["metric"])},
        ).run()
    options.show(result, as_json=flags["as_json"])
    context.exit(EXIT_DONE)


def _keep_apart(flags: Mapping[str, Any]) -> None:
    """Refuse an output folder that holds what is to be read: --fresh would remove it."""
    out = flags["out"]
    for name in ("data", "predictions", "null_odds"):
        if out is not None and flags[name] is not None and flags[name].resolve().parent == out.resolve():
            raise UsageError(
                f"--{name.replace('_', '-')} {flags[name]} lies in the output folder {out}. Give another "
                "--out."
            )
