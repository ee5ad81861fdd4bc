"""``dualeval bench``: how fast a job is with each mode, number of processes, precision and batch size."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from dualeval.cli.options import PATH, grouped
from dualeval.cli.task_flags import TaskCommand, config_flag, job_flags, task_flags, whole_job_of
from dualeval.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, UsageError
from dualeval.options.choices import CAST, PRECISIONS, check_choice
from dualeval.options.evaluation import DATA, LAUNCH, MODEL, RUN
from dualeval.options.job import COMMON, Job, start_of
from dualeval.options.plugins import DEFAULT_TASK
from dualeval.tools.bench.cell import OWN_COMMAND, run_cell
from dualeval.tools.bench.cells import prepare
from dualeval.tools.bench.page import MEASURED, check_plots, draw, page
from dualeval.tools.bench.plan import DATAPARALLEL, MODES, CellStart
from dualeval.tools.trials import (
    FAILED,
    Interrupted,
    Interrupts,
    check_no_rank,
    counts_of,
    new_folder,
    words_of,
)
from dualeval.whole_files import write_text

_MEASURE = "Measure"
_measured = partial(grouped, group=_MEASURE)
_WORDS: dict[str, Any] = {"callback": words_of, "metavar": "WORDS"}
_COUNTS: dict[str, Any] = {"callback": counts_of, "metavar": "N,N"}
_COUNT: dict[str, Any] = {"type": click.IntRange(min=1), "metavar": "N"}
_PAGE = "bench.md"
# Flags that decide nothing with --train.
_OF_EVALUATION = ("metric", "cluster", "on_error", "keep_batchnorm_fp32", "layout", "optimize")


@click.command(cls=TaskCommand, groups=(MODEL, DATA), last=(_MEASURE, RUN, LAUNCH))
@task_flags
@job_flags("metric", "limit", "sample", "seed", "cluster")
@_measured("--mode", **_WORDS, help=f"Some of {', '.join(MODES)}.  [default: all]")
@_measured(
    "--processes", **_COUNTS, help="Numbers of processes.  [default: 1, 2, one per GPU or core (4 at most)]"
)
@_measured("--precision", **_WORDS, help=f"Some of {', '.join(PRECISIONS)}.  [default: fp32]")
@_measured("--batch-size", **_COUNTS, help="Samples per batch of each process.  [default: 64]")
@_measured("--train", is_flag=True, help="Time training steps in place of evaluations.")
@_measured("--rounds", **_COUNT, default=5, help="Starts of each cell.  [default: 5]")
@_measured(
    "--min-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=3.0,
    metavar="S",
    help="Measured in each start, at least.  [default: 3]",
)
@_measured("--warmup", **_COUNT, default=2, help="Batches per process before it is measured.  [default: 2]")
@_measured("--cores-per-process", **_COUNT, help="Cores of each process.  [default: cores / most processes]")
@_measured(
    "--timeout-s",
    type=click.FloatRange(min=1),
    default=600.0,
    metavar="S",
    help="Time limit of each start.  [default: 600]",
)
@_measured("--plots/--no-plots", default=True, help="Draw speed-up against processes.")
@config_flag
@job_flags("keep_batchnorm_fp32", "layout", "optimize", "on_error", "device", "workers")
@grouped(
    "--out", group=RUN, type=PATH, metavar="DIR", help="A new or empty folder.  [default: runs/bench-TIME]"
)
@grouped("--dry-run", group=RUN, is_flag=True, help="Check the job, list the cells; measure nothing.")
@click.option("--cell", hidden=True)
@click.option("--launcher", hidden=True)
@click.pass_context
def bench(context: click.Context, /, **flags: Any) -> None:
    """Measure images/s, speed-up and memory of a job by mode, processes, precision and batch size.

    \b
    dualeval bench
    dualeval bench --model resnet50 --weights random:0 --data DIR --processes 1,2,4,8 --batch-size 64,256
    dualeval bench --precision fp32,amp-bf16 --mode single,torch
    dualeval bench --train --model resnet18 --weights random:0 --data DIR

    Options of the job are those of 'dualeval run'. Type it once, not under a launcher: it starts the
    processes itself.
    """
    if flags["cell"] is not None:
        start = CellStart(**json.loads(flags["cell"]))
        job = whole_job_of(
            {**flags, "batch_size": start.batch_size, "precision": start.precision}, "dualeval bench"
        )
        context.exit(run_cell(job, start, flags["launcher"], [*OWN_COMMAND, *context.obj]))
    if unused := start_of(flags["config"]):
        click.echo(
            f"dualeval: note: {' and '.join(sorted(unused))} in {flags['config']}: no meaning for 'dualeval "
            "bench', which takes --out and --processes",
            err=True,
        )
    for mode in flags["mode"] or ():
        check_choice("--mode", mode, MODES)
    for precision in flags["precision"] or ():
        check_choice("--precision", precision, PRECISIONS)
    if (flags["mode"], flags["processes"]) == ([DATAPARALLEL], [1]):
        raise UsageError(
            f"--mode {DATAPARALLEL} --processes 1: it splits a batch over several GPUs, so there is nothing "
            "to measure. Give --processes 2 or more."
        )
    if flags["plots"]:
        check_plots()
    check_no_rank(
        flags["launcher"],
        "'dualeval bench' starts its processes itself. Type it by itself, without a launcher before it.",
    )
    job = whole_job_of(
        {**flags, **{name: (flags[name] or [None])[0] for name in ("batch_size", "precision")}},
        "dualeval bench",
    )
    for size in flags["batch_size"] or ():
        COMMON["batch_size"].check(size)
    if flags["train"]:
        _check_training(job, flags)
    for precision in flags["precision"] or [job.precision]:
        replace(job, precision=precision)  # checks what goes with it
    folder, when = new_folder(flags["out"], "bench")
    with Interrupts() as interrupts:
        try:
            cells = prepare(flags, job, folder, when, interrupts, context.obj)
        except Interrupted as error:
            click.echo(f"dualeval: interrupted by {error}; nothing was measured", err=True)
            context.exit(EXIT_STOPPED)
        if flags["dry_run"]:
            for cell in cells.cells:
                click.echo(f"{cell['label']}{'' if cell['reason'] is None else ': ' + cell['reason']}")
            return
        report = cells.run()
    context.exit(_finish(report, folder, plots=flags["plots"]))


def _check_training(job: Job, flags: Mapping[str, Any]) -> None:
    """Check that the job is one whose training steps can be timed."""
    if job.task != DEFAULT_TASK:
        raise UsageError(
            f"--train times --task {DEFAULT_TASK}, and the task is {job.task}. Leave out --train."
        )
    if of_evaluation := [name for name in _OF_EVALUATION if flags[name]]:
        words = ", ".join(f"--{name.replace('_', '-')}" for name in of_evaluation)
        raise UsageError(
            f"{words}: no meaning with --train, which has no metrics, skips no sample and trains the model "
            "as it is built. Leave it out."
        )
    for precision in flags["precision"] or [job.precision]:
        if precision in CAST:
            raise UsageError(
                f"--train --precision {precision}: a training keeps its weights in float32, as the steps of "
                f"an optimiser are lost in half precision. Give --precision amp-{precision}, or leave out "
                "--train."
            )


def _finish(report: Mapping[str, Any], folder: Path, *, plots: bool) -> int:
    """Write and show what was measured; returns the exit code."""
    pictures = draw(report, folder) if plots else []
    text = page(report, pictures)
    write_text(folder / _PAGE, text)
    click.echo(f"\n{text}\n{folder / _PAGE}")
    if report["interrupted"]:
        return EXIT_STOPPED
    outcomes = {cell["outcome"] for cell in report["cells"]}
    return EXIT_DONE if MEASURED in outcomes and FAILED not in outcomes else EXIT_FAILED
