"""``dualeval requests``: what a task asks a model, written to a file for another program to answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dualeval.cli.options import PATH, GroupedCommand, Words, flag_for, grouped, with_flags
from dualeval.errors import UsageError
from dualeval.options.fields import Given, fields_of
from dualeval.tasks.options import requested

TASKS = requested()
_FIELDS = {field.name: field for kind in TASKS.values() for field in fields_of(kind)}
_OF_FIGURES = ("metric", "bootstrap_iters")
_OUT = "Run"


@click.command(cls=GroupedCommand, groups=(), last=(_OUT,))
@grouped("--task", group=_OUT, type=Words(tuple(TASKS)), help=f"{', '.join(TASKS)} (default).")
@with_flags(*(flag_for(field) for name, field in _FIELDS.items() if name not in _OF_FIGURES))
@grouped("--out", group=_OUT, type=PATH, required=True, metavar="FILE", help="The file to write.")
def requests(task: str | None, out: Path, **flags: Any) -> None:
    """Write the requests of a task, a JSON object a line, for another program to answer.

    \b
    dualeval requests --task lm-eval --tasks gsm8k --out requests.jsonl

    An answer is such a line with answer added: 'dualeval score' scores them.
    """
    kind = TASKS[task or next(iter(TASKS))]
    values = {name: value.value if isinstance(value, Given) else value for name, value in flags.items()}
    values = {name: value for name, value in values.items() if value not in (None, ())}
    if "tasks" not in values:
        raise UsageError("dualeval requests needs --tasks A,B (tasks, groups and tags).")
    count = kind(**values).write(out)
    click.echo(f"wrote {count:,} requests to {out}")
