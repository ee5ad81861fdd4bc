"""``dualeval list``: the tasks, metrics and models that are here, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import click

from dualeval.errors import DualevalError, text_of
from dualeval.options.plugins import (
    BUILT_IN,
    METRIC_GROUP,
    TASK_GROUP,
    TaskKind,
    entry_points_of,
    load_plugin,
    origin_of,
    summary_of,
    task_kind,
)
from dualeval.tasks.options import TASKS

_MOST_OF_LINE = 70


# Like 'dualeval' alone: without a command the help is shown, which is not an error.
@click.group("list", invoke_without_command=True)
@click.pass_context
def list_names(context: click.Context) -> None:
    """List tasks, metrics or models, with one line each.

    \b
    dualeval list tasks
    dualeval list metrics
    dualeval list models
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@list_names.command("tasks")
def list_tasks() -> None:
    """The tasks that --task takes by name, and what each wants."""
    _show((name, kind if isinstance(kind, str) else _wants(kind)) for name, kind in _kinds())
    click.echo("Yours: --task package.module:Class or --task file.py:Class (docs/command-line.md).")


def _wants(kind: TaskKind) -> str:
    """The options without which a task evaluates nothing of one's own, and what it is."""
    wanted = [field for field in kind.fields if field.is_required or field.name in ("model", "data")]
    flags = " ".join(f"{field.flag} {field.metavar}" for field in wanted)
    summary = _line(kind.summary, kind.origin)
    return f"{flags}: {summary}" if flags else summary


def _kinds() -> Iterator[tuple[str, TaskKind | str]]:
    """The tasks by name; of one that cannot be imported, what is wrong with it."""
    for name in TASKS:
        yield name, task_kind(name)
    for name, entry in entry_points_of(TASK_GROUP).items():
        if name in TASKS:
            _note(f"the task {name} of {origin_of(entry)} has a built-in task's name: it is not used")
            continue
        try:
            yield name, task_kind(name)
        except DualevalError as error:
            yield name, _broken(error, origin_of(entry))


@list_names.command("metrics")
def list_metrics() -> None:
    """The metrics that --metric takes by name, by task."""
    for task, kind in _kinds():
        if isinstance(kind, TaskKind):
            known: Mapping[str, str] = getattr(kind.source, "known_metrics", dict)()
            click.echo(f"{task} ({kind.origin}):{'' if known else ' what its metrics() returns'}")
            _show(known.items(), indent="  ")
    rows = []
    for name, entry in entry_points_of(METRIC_GROUP).items():
        try:
            rows.append((name, _line(summary_of(load_plugin(entry)), origin_of(entry))))
        except DualevalError as error:
            rows.append((name, _broken(error, origin_of(entry))))
    if rows:
        click.echo("of packages, for any task that has their columns:")
        _show(rows, indent="  ")
    click.echo("A task of your own has the metrics that its metrics() returns, by name.")


@list_names.command("models")
def list_models() -> None:
    """The models that --model of image-classification takes by name."""
    from dualeval.models import classifiers, published

    builtin = [(classifiers.EMBEDDED, f"The network of the embedded job ({BUILT_IN})")]
    _show([*builtin, *((name, _of_model(name)) for name in published.torchvision_names())])
    click.echo("Other sources (docs/models.md):")
    _show(((f"--model {kind}", text) for kind, text in classifiers.KINDS.items()), indent="  ")


def _of_model(name: str) -> str:
    from dualeval.models import published

    entries = ", ".join(entry.name for entry in published.entries_of(name))
    return f"weights {entries} (torchvision)" if entries else "(torchvision)"


def _broken(error: DualevalError, origin: str) -> str:
    """What the list says of a plug-in that cannot be imported; a note says it whole."""
    text = text_of(error)
    _note(text)
    first = text.splitlines()[0]
    _, cannot, why = first.partition("cannot be imported")
    return f"{cannot + why or first} ({origin})"


def _note(sentence: str) -> None:
    click.echo(f"dualeval: note: {sentence}", err=True)


def _line(summary: str, origin: str) -> str:
    """The first sentence of a summary, and where it comes from."""
    line = summary.partition(". ")[0].rstrip(".")
    short = line if len(line) <= _MOST_OF_LINE else f"{line[: _MOST_OF_LINE - 3]}..."
    return f"{short} ({origin})".lstrip()


def _show(rows: Iterable[tuple[str, str]], indent: str = "") -> None:
    shown = list(rows)
    width = max((len(name) for name, _ in shown), default=0)
    for name, text in shown:
        click.echo(f"{indent}{name:<{width}}  {text}".rstrip())
