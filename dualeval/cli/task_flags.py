"""Flags of a job: those of every run, and those of the task that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from dualeval.cli.options import GroupedCommand, flag_for, grouped, with_flags
from dualeval.errors import DualevalError, UsageError
from dualeval.options.evaluation import MODEL, RUN
from dualeval.options.fields import fields_of
from dualeval.options.job import COMMON, Job, asked_task, refuse_foreign, texts_of
from dualeval.options.plugins import DEFAULT_TASK, TASK_GROUP, TaskKind, entry_points_of, task_kind
from dualeval.tasks.options import TASKS

_OF_TASK = "of_task_"
# Options of every run that only 'dualeval run' has: they divide the model over its ranks.
_OF_DIVIDED_MODELS = ("shard", "offload")
_TASK = "dualeval.task"


class TaskCommand(GroupedCommand):
    """A command whose flags are those of every run and those of the task that is asked for."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Find out first which task it is: on the command line, or in the job file."""
        kind, is_asked = self._asked(ctx, args)
        ctx.meta[_TASK] = _Flags(kind=kind, is_asked=is_asked, flags=self._flags_of(kind))
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name.lstrip("-").replace("-", "_")
            refuse_foreign(name, kind.name)
            if name in _OF_DIVIDED_MODELS:
                raise _takes_whole_models(f"dualeval {self.name}", error.option_name) from error
            raise

    def _asked(self, ctx: click.Context, args: list[str]) -> tuple[TaskKind, bool]:
        parser = super().make_parser(ctx)
        parser.ignore_unknown_options = True
        try:
            values, _, _ = parser.parse_args(list(args))
        except click.UsageError:
            values = {}  # said when all flags are known
        config, task = values.get("config"), values.get("task")
        try:
            asked = asked_task(None if config is None else Path(config), task)
            return task_kind(asked), task is not None or config is not None
        except DualevalError:
            if not ctx.resilient_parsing:
                raise
            return task_kind(DEFAULT_TASK), False  # the shell wants completions

    def _flags_of(self, kind: TaskKind) -> list[click.Parameter]:
        """A flag for each option of the task, but where the run has one of that name."""
        used = {name for parameter in self.params for name in parameter.opts}
        group = f"Options of {kind.name}"
        return [
            flag_for(replace(field, group=field.group or group), name=f"{_OF_TASK}{field.name}")
            for field in kind.fields
            if field.is_settable and field.flag not in used
        ]

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The flags of every run, and those of the task."""
        task = ctx.meta.get(_TASK)
        params = super().get_params(ctx)
        return params if task is None else [*params[:_BEFORE_TASK], *task.flags, *params[_BEFORE_TASK:]]

    def shown_params(self, context: click.Context) -> list[click.Parameter]:
        """The flags of the task that is asked for; else those of every run, and what any task has."""
        task = context.meta.get(_TASK)
        params = self.get_params(context)
        if task is None:
            return params
        if task.is_asked:
            return params[: _BEFORE_TASK + len(task.flags)]
        return [each for each in params if each not in task.flags or each.name in _ALWAYS_SHOWN]

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Say what the task is; without one what the command does."""
        task = ctx.meta.get(_TASK)
        if task is None or not task.is_asked:
            super().format_help_text(ctx, formatter)
            return
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(f"{task.kind.name}: {task.kind.summary}")

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Say where the options that are left out are shown."""
        task = ctx.meta.get(_TASK)
        if task is None:
            return
        text = f"Default: {task.kind.name}. Options: 'dualeval {self.name} --task NAME --help'."
        if task.is_asked:
            text = f"Options of every task: 'dualeval {self.name} --help'. Metrics: 'dualeval list metrics'."
        formatter.write_paragraph()
        formatter.write_text(text)


@dataclass(frozen=True, kw_only=True)
class _Flags:
    """The task of a command line, whether it is named there, and its flags."""

    kind: TaskKind
    is_asked: bool
    flags: list[click.Parameter]


def flags_of(options_class: type, *names: str) -> Callable[[Any], Any]:
    """The flags of some fields of a dataclass of options, in this order, as a decorator of a command."""
    by_name = {field.name: field for field in fields_of(options_class)}
    return with_flags(*(flag_for(by_name[name]) for name in names))


# Those of a job.
job_flags = partial(flags_of, Job)
config_flag = grouped(
    "--config",
    group=RUN,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Job file (TOML); flags override it.",
)


def whole_job_of(flags: Mapping[str, Any], command: str) -> Job:
    """The job that the flags of a command ask for, whose process has all of the model."""
    job = Job.read(*_given_options(flags))
    if job.shard is not None:
        raise _takes_whole_models(command, f"--config {flags['config']}: shard")
    return job


def _takes_whole_models(command: str, what: str) -> UsageError:
    return UsageError(
        f"{what} belongs to 'dualeval run', and '{command}' looks at models that are whole on each rank. "
        "Leave it out: a divided model has the numbers of the whole one, and 'dualeval run --shard fsdp' "
        "shows its speed."
    )


def jobs_of(flags: Mapping[str, Any]) -> list[tuple[str | None, Job]]:
    """The jobs that the flags of a command ask for, as ``Job.read_all`` gives them."""
    return Job.read_all(*_given_options(flags))


def _given_options(flags: Mapping[str, Any]) -> tuple[Path | None, Mapping[str, Any], Mapping[str, str]]:
    common = {name: flags.get(name) for name in ("task", *COMMON)}
    of_task = {name[len(_OF_TASK) :]: value for name, value in flags.items() if name.startswith(_OF_TASK)}
    return flags["config"], {**of_task, **common}, texts_of(flags["options"])


# How many flags stand before those of the task, --help not counted: those of ``task_flags``.
_BEFORE_TASK = 2
_ALWAYS_SHOWN = tuple(f"{_OF_TASK}{name}" for name in ("model", "weights", "data"))


class TaskName(click.ParamType):  # type: ignore[type-arg, unused-ignore]  # generic from click 8.4 on
    """The name of a task; the shell completes names, and files of one's own."""

    name = "task"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "NAME"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        names = [*TASKS, *entry_points_of(TASK_GROUP)]
        items = [CompletionItem(name) for name in names if name.startswith(incomplete)]
        return items or [CompletionItem(incomplete, type="file")]


def task_flags(command: Any) -> Any:
    """The flags that say which task it is, and any option of it, as a decorator of a command."""
    options = grouped(
        "-T", "options", group=MODEL, multiple=True, metavar="NAME=VALUE", help="Any option of the task."
    )
    about = "A task's name, package.mod:Class or file.py:Class."
    return grouped("--task", group=MODEL, type=TaskName(), help=about)(options(command))
