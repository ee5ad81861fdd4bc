"""``dualeval score``: metrics of what is there already: a run's rows, or a file of answers; no model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from dualeval.atomic_files import write_text
from dualeval.cli import options
from dualeval.cli.options import PATH, GroupedCommand, Words, flag_for, grouped, with_flags
from dualeval.errors import EXIT_DONE, LaunchError, UsageError
from dualeval.launch import examine
from dualeval.options.fields import Given, as_json
from dualeval.options.job import COMMON
from dualeval.options.plugins import made_task, scored_kind
from dualeval.result import JOB, PREDICTIONS, RESULT, STATUS
from dualeval.tasks.options import scored

# The kinds of evaluation whose answers can be had as a file.
TASKS = tuple(scored())
# By task, and those of all.
_OF_TASK = {
    name: [each for each in scored_kind(name).fields if each.name not in COMMON.keys() - {"limit"}]
    for name in TASKS
}
_FIELDS = {field.name: field for fields in _OF_TASK.values() for field in fields}
_GROUP = "A file of answers"


@click.command(cls=GroupedCommand, groups=(_GROUP,))
@click.argument("run", required=not TASKS, type=PATH)
@grouped(
    "--task",
    group=_GROUP,
    type=Words(TASKS),
    help=f"Kind of evaluation: {', '.join(TASKS)}.  [default: {next(iter(TASKS), None)}]",
)
@with_flags(*(flag_for(replace(field, group=_GROUP)) for field in _FIELDS.values()))
@options.METRIC
@options.CLUSTER
@click.option(
    "--out", type=PATH, help="Output folder.  [default: a new one in runs/; with RUN nothing is written]"
)
@click.option("--fresh", is_flag=True, help="Start over in --out: remove an earlier run's files first.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print result.json, and nothing else, on standard output."
)
@click.pass_context
def score(context: click.Context, /, run: Path | None, **flags: Any) -> None:
    """Compute metrics of a finished RUN, or score a file of answers; no model is run.

    \b
    dualeval score runs/r18 --metric top3
    dualeval score --data dev-v1.1.json --predictions predictions.json --out scores
    dualeval score --task lm-eval --tasks gsm8k --answers answers.jsonl

    RUN is the output folder of a run and is not changed. The run's metrics, or those of --metric, get the
    same bits as in a run. Answers are scored like the official scripts of SQuAD, or by the harness.
    """
    flags = {name: value.value if isinstance(value, Given) else value for name, value in flags.items()}
    place = examine(os.environ, None).place
    if place.size > 1:
        raise LaunchError(
            f"'dualeval score' is one process, but {place.launcher} has started {place.size}. Type it by "
            "itself."
        )
    if run is not None:
        _score_rows(context, run, flags)
        return
    if flags["task"] not in (None, *TASKS):
        raise UsageError(f"--task {flags['task']!r}: expected one of {', '.join(TASKS)}.")
    own = {field.name: field for field in _OF_TASK[flags["task"] or TASKS[0]]}
    asked = _asked(flags)
    for name in asked:
        if name not in own:
            other = next(task for task, fields in _OF_TASK.items() if _FIELDS[name] in fields)
            raise UsageError(f"{_FIELDS[name].flag} belongs to --task {other}: give it too, or leave it out.")
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in own and own[name].is_required and name not in asked:
            raise click.MissingParameter(ctx=context, param=parameter)
    _score_answers(context, flags)


def _asked(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a file of answers that were typed."""
    return {name: flags[name] for name in _FIELDS if flags[name] not in (None, ())}


def _score_rows(context: click.Context, run: Path, flags: Mapping[str, Any]) -> None:
    from dualeval.engine.folder.finished import check_finished
    from dualeval.engine.scoring.rescoring import rescore
    from dualeval.tasks.stored import metrics_of_run

    asked = _asked(flags)
    names = [name for name in ("task", *asked, "fresh") if name in asked or flags[name]]
    foreign = [f"--{name.replace('_', '-')}" for name in names]
    if foreign:
        raise UsageError(
            f"{', '.join(foreign)} belongs to a file of answers, and {run} was given as a run whose rows are "
            "scored. Leave out one of the two."
        )
    out: Path | None = flags["out"]
    files = [name for name in (RESULT, JOB, STATUS, PREDICTIONS) if out is not None and (out / name).exists()]
    if files:
        raise UsageError(f"--out {out} holds a {files[0]} already. Give the name of a new folder.")
    check_finished(run)
    metrics = metrics_of_run(run / JOB, flags["metric"])
    result = rescore(run, metrics=metrics, cluster=flags["cluster"])
    if out is not None:
        result = replace(result, folder=str(out.absolute()), files={})
        try:
            out.mkdir(parents=True, exist_ok=True)
            write_text(out / RESULT, result.to_json())
        except OSError as error:
            raise UsageError(
                f"--out {out} cannot be written ({error.strerror or error}). Give a folder of your own."
            ) from error
    if not flags["as_json"]:
        click.echo(f"recomputed from the rows of {run}; no forward")
    options.show(result, as_json=flags["as_json"], kept=None if out is None else out / RESULT)
    context.exit(EXIT_DONE)


def _score_answers(context: click.Context, flags: Mapping[str, Any]) -> None:
    from dualeval.engine.session import Session
    from dualeval.engine.values.options import NEW_FOLDER

    _keep_apart(flags)
    kind = scored_kind(flags["task"] or TASKS[0])
    chosen = kind.options_class(**_asked(flags), metric=flags["metric"])
    task = made_task(kind, chosen)
    code = options.evaluate_and_show(
        Session(launcher="none"),
        lambda session: session.evaluate(
            task,
            out=flags["out"] or NEW_FOLDER,
            fresh=flags["fresh"],
            cluster=flags["cluster"],
            job={"task": kind.name, **as_json(chosen)},
            last=True,
            puts_back=False,
        ),
        as_json=flags["as_json"],
    )
    context.exit(code)


def _keep_apart(flags: Mapping[str, Any]) -> None:
    """Refuse an output folder that holds what is to be read: --fresh would remove it."""
    out = flags["out"]
    for name in _FIELDS:
        path = flags[name]
        if out is not None and isinstance(path, Path) and path.resolve().parent == out.resolve():
            raise UsageError(
                f"--{name.replace('_', '-')} {flags[name]} lies in the output folder {out}. Give another "
                "--out."
            )
