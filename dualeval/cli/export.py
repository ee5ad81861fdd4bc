"""``dualeval export``: a finished run's result, logged in trackers of experiments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from dualeval.cli.grouped import PATH
from dualeval.engine.folder.shares import refuse_unfinished
from dualeval.report.loggers import check_installed, targets_of


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
    refuse_unfinished(run)
    from dualeval.report.loggers.log import export_result, stored_result

    def note(said: str) -> None:
        click.echo(f"dualeval: {said}", err=True)

    for sentence in export_result(stored_result(run), run, targets, step, note):
        click.echo(sentence)
