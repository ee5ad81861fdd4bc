"""``dualeval init``: a file to start an evaluation of one's own from."""

from __future__ import annotations

from pathlib import Path

import click

from dualeval.cli.options import PATH
from dualeval.errors import UsageError
from dualeval.options.plugins import task_kind
from dualeval.tasks.options import TASKS

_TEXT = '''\
# {file}
# {task} with a model of your own. Change what the functions return, then type one of:
#     python {file}
#     dualeval run --task {file}:task --nproc 2
from pathlib import Path

import dualeval
from dualeval.tasks import {name}


def net():
    """Your model with its weights; each process calls this once."""
{imports}

{model}


def task(data: Path = Path("{data}")):
    """Your data, and options as in docs/{task}.md; an argument is also a flag: --data."""
    return {name}(model=net, data=data{more})


if __name__ == "__main__":
    print(dualeval.evaluate(task, out="runs/{stem}"))
'''


@click.command()
@click.argument("task", type=click.Choice(list(TASKS)), metavar="TASK")
@click.argument("file", type=PATH, required=False)
def init(task: str, file: Path | None) -> None:
    """Write a file to start an evaluation of your own from: your model, in a task that is built in.

    \b
    dualeval init image-classification
    dualeval init text-classification reviews.py

    TASK is a name of 'dualeval list tasks'. Without FILE the file has the name of the task. A file that is
    there is never overwritten.
    """
    path = file or Path(f"{task.replace('-', '_')}.py")
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise UsageError(
            f"{path}: expected the name of a Python file, of letters, digits and _, such as mine.py"
        )
    text = text_for(task, path)
    try:
        with path.open("x", encoding="utf-8") as new:
            new.write(text)
    except FileExistsError as error:
        raise UsageError(f"{path} exists, and is not overwritten: give another FILE.") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    click.echo(f"wrote {path}. Change it, then type: python {path}")


def text_for(task: str, path: Path) -> str:
    """The file for a task."""
    source = task_kind(task).source
    if not hasattr(source, "start"):
        raise UsageError(f"there is no file to start {task} from: its options class has no 'start'")
    start: dict[str, str] = dict(source.start)
    for name in ("imports", "model"):
        start[name] = "\n".join(f"    {each}" for each in start[name].split("; "))
    kind = source.__name__.removesuffix("Options")
    return _TEXT.format(**start, file=path.name, stem=path.stem, task=task, name=kind)
