"""``dualeval watch``: evaluate each checkpoint of a training, while that goes on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dualeval.cli import options
from dualeval.cli.options import PATH, GroupedOption
from dualeval.cli.run import evaluate_job, of_one_model, prepared, run, session_of, task_of
from dualeval.cli.several import exit_code_of
from dualeval.cli.task_flags import TaskCommand
from dualeval.data.cache import DataCache
from dualeval.engine.end.process import say
from dualeval.errors import UsageError
from dualeval.options.evaluation import DATA, LAUNCH, MODEL, RUN
from dualeval.options.plugins import BUILT_IN
from dualeval.process_start import unwritten
from dualeval.report.models_table import ModelRow, ModelsTable
from dualeval.tools.watch.checkpoints import LEADERBOARD, Board, Checkpoints
from dualeval.tools.watch.watching import Wanted, Watching

if TYPE_CHECKING:
    from dualeval.engine.session import Session
    from dualeval.result import Result

_WATCH = "Watch"
# Of ``dualeval run``: what a watcher has otherwise, or not at all.
_NOT_OF_RUN = ("out", "share", "fresh", "dry_run", "as_json")
_OF_TASK = "of_task_"
# What the option is until there is a checkpoint: all else is checked with it.
_STAND_IN = {"weights": "random:0"}


def _flag(*declared: str, **named: Any) -> GroupedOption:
    return GroupedOption(declared, group=_WATCH, **named)


_FLAGS: list[click.Parameter] = [
    click.Argument(["checkpoints"], metavar="CKPTS", nargs=-1, required=True),
    _flag("--out", type=PATH, required=True, metavar="DIR", help="Folder of the runs, one a checkpoint."),
    _flag(
        "--settle",
        type=float,
        default=10.0,
        metavar="S",
        help="Complete: unchanged for S seconds.  [default: 10]",
    ),
    _flag("--marker", metavar="NAME", help="Complete: NAME in its folder, or FILE.NAME beside FILE."),
    _flag("--as", "option", default="weights", metavar="NAME", help="Option that it is.  [default: weights]"),
    _flag("--newest", "newest_first", is_flag=True, help="The newest first."),
    _flag("--every", type=click.IntRange(min=1), metavar="K", help="Only steps that K divides."),
    _flag("--until-step", type=click.IntRange(min=0), metavar="N", help="No later steps; end at step N."),
    _flag("--stop-file", type=PATH, metavar="FILE", help="End when FILE is there, and all is evaluated."),
    _flag("--best", type=PATH, metavar="LINK", help="Keep a link to the best checkpoint."),
    _flag("--best-by", metavar="METRIC", help="What ranks them.  [default: the first metric]"),
    _flag("--top", type=click.IntRange(min=1), default=10, metavar="K", help="Rows shown.  [default: 10]"),
]


@click.command(
    "watch",
    cls=TaskCommand,
    params=[*(each for each in run.params if each.name not in _NOT_OF_RUN), *_FLAGS],
    groups=(_WATCH, MODEL, DATA),
    last=(RUN, LAUNCH),
)
@click.pass_context
def watch(context: click.Context, /, **flags: Any) -> None:
    """Evaluate each checkpoint in CKPTS once, as a training writes them.

    CKPTS is a folder, or a pattern in quotes. A checkpoint takes the place of --weights; where the task reads
    whole folders of transformers, of --model (--as model). The other options are those of 'dualeval run',
    without --fresh, --dry-run and --json.

    \b
    dualeval watch ckpts --out runs/watch --model resnet18 --data /data/val --until-step 90
    torchrun --nproc-per-node 8 -m dualeval watch ckpts --out runs/watch ...
    """
    own = {each.name: flags.pop(each.name or "") for each in _FLAGS}
    option, out, settle_s = own["option"], own["out"], own["settle"]
    where = _where(own["checkpoints"], out)
    if not 0.1 <= settle_s < math.inf:
        raise UsageError(f"--settle {settle_s:g}: expected seconds, 0.1 or more, such as 10")
    flag = f"{_OF_TASK}{option}"
    if flag not in flags:
        raise UsageError(
            f"--as {option}: the task has no option of this name. 'dualeval watch --help' lists them."
        )
    if flags[flag] is not None:
        raise UsageError(f"--{option} {flags[flag]}: each checkpoint takes its place. Leave it out.")
    given = dict.fromkeys(_NOT_OF_RUN) | flags | {"out": out, flag: _STAND_IN.get(option, where)}
    jobs, asked = prepared(context, given, checks_paths=option in _STAND_IN)
    name, job = jobs[0]
    if name is not None:
        raise UsageError(
            "[[models]] belongs to 'dualeval run': a watcher has one model, and its checkpoints."
        )
    cache, said, in_hand = DataCache(), set[str](), ""

    def note(sentence: str) -> None:
        # The same of each checkpoint, but for its path.
        if (of_each := sentence.replace(in_hand, "")) not in said:
            said.add(of_each)
            say(f"dualeval: note: {sentence}")

    def evaluate(path: str, folder: Path, fresh: bool) -> Result:
        nonlocal in_hand
        in_hand = str(Path(path).absolute())
        kind = type(getattr(job.options, option))
        of_one = replace(job, options=replace(job.options, **{option: kind(in_hand)}))
        invocation = of_one_model(asked, folder)
        invocation = replace(invocation, run={**invocation.run, "fresh": fresh})
        return evaluate_job(of_one, invocation, session, cache=cache, name=folder.name)

    def work(opened: Session) -> list[ModelRow]:
        if option in _STAND_IN and job.kind.origin == BUILT_IN:
            # Wrong data is refused before anything is waited for.
            task_of(job, asked, opened, cache).dataset()
        return watching.run()

    session = session_of(job, asked, note)
    watching = Watching(
        session=session,
        checkpoints=Checkpoints(where, settle_s=settle_s, marker=own["marker"]),
        wanted=Wanted(**{each.name: own[each.name] for each in fields(Wanted)}),
        board=Board(out, metric=own["best_by"], link=own["best"]),
        targets=asked.targets,
        job={**job.to_json(), option: str(Path(where).absolute())},
        evaluate=evaluate,
    )
    code, rows = options.work_in_session(session, work, exit_code_of)
    if rows is not None and session.world.is_main:
        _show(watching.board, own["top"])
    context.exit(code)


def _where(given: Sequence[str], out: Path) -> str:
    """The folder or pattern of checkpoints."""
    folder = Path(given[0])
    if len(given) > 1 or folder.is_file():
        found = "a file" if len(given) == 1 else f"{len(given)} paths"
        raise UsageError(
            f"CKPTS is {found}, expected a folder or a pattern: put it in quotes, as 'ckpts/*.pt'"
        )
    if folder.resolve() in (out.resolve(), *out.resolve().parents):
        raise UsageError(f"--out {out} lies in {folder}, where the checkpoints are. Give a folder beside it.")
    return given[0]


def _show(board: Board, count: int) -> None:
    """Show the best checkpoints and all that are not ranked, and where all are."""
    _, rows = board.ranked()
    if rows:
        ModelsTable([*rows[:count], *(row for row in rows[count:] if row.reason is not None)]).print()
        click.echo(f"files  {board.folder}: {LEADERBOARD}, and a folder for each checkpoint")
    else:
        say("dualeval: note: there was no checkpoint to evaluate")
    if problem := unwritten():
        say(f"dualeval: note: standard output cannot be written ({problem.strerror}); see {board.folder}")
