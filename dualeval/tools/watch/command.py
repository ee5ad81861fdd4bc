"""``dualeval watch``: evaluate each checkpoint of a training, while that goes on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import click

from dualeval.atomic_files import write_text
from dualeval.cli import options
from dualeval.cli.options import PATH, GroupedOption
from dualeval.cli.run import evaluate_job, of_one_model, prepared, run, session_of, task_of
from dualeval.cli.several import exit_code_of
from dualeval.cli.task_flags import TaskCommand
from dualeval.data.cache import DataCache
from dualeval.engine.control.progress import Stage
from dualeval.engine.folder.lease import gone
from dualeval.engine.values.differences import differences, listing
from dualeval.engine.values.options import or_remove
from dualeval.errors import DualevalError, UsageError, text_of
from dualeval.messages import counted, listed, printable
from dualeval.options.evaluation import DATA, LAUNCH, MODEL, RUN
from dualeval.options.plugins import BUILT_IN
from dualeval.process.speech import say
from dualeval.process.start import unwritten
from dualeval.report.models_table import DONE, ModelRow, ModelsTable, number_of
from dualeval.result import json_text, read_fields
from dualeval.tools.watch.checkpoints import LEADERBOARD, Board, Checkpoint, Checkpoints, step_of

if TYPE_CHECKING:
    from dualeval.engine.session import Session
    from dualeval.report.loggers.loggers import Target
    from dualeval.result import Result


# What the runs of a folder have in common; a watcher with other options is refused there.
WATCH = "watch.json"
# Between two looks, where checkpoints take longer to settle.
_LOOK_EVERY_S = 2.0
# Checkpoints that wait where it is said that the training is faster, and twice as many each time after that.
_WAITING = 3
# Without anything to do, until it is said what is waited for.
_SILENT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which checkpoints are to be evaluated, and until when."""

    newest_first: bool = False
    every: int | None = None
    until_step: int | None = None
    stop_file: Path | None = None

    def fits(self, step: int | None) -> bool:
        """Whether the checkpoint of a step is to be evaluated."""
        if step is None:
            return self.every is None and self.until_step is None
        return step % (self.every or 1) == 0 and (self.until_step is None or step <= self.until_step)

    def has_ended(self, steps: Sequence[int | None]) -> bool:
        """Whether no further checkpoint is waited for, where those of these steps have come."""
        until = self.until_step
        reached = until is not None and any(step is not None and step >= until for step in steps)
        return reached or (self.stop_file is not None and self.stop_file.exists())


@dataclass(kw_only=True)
class Watching:
    """One watcher, on every rank; what it knows of checkpoints is rank 0's."""

    session: Session
    checkpoints: Checkpoints
    wanted: Wanted
    board: Board
    targets: Sequence[Target]
    # The options that all runs of the folder have.
    job: dict[str, Any]
    # Evaluates a checkpoint, by its path, into a folder, whose earlier files may be removed first.
    evaluate: Callable[[str, Path, bool], Result]
    _looked_at: float = float("-inf")
    # Names of those that waited at the last look, and how many do when it is said that they are too many.
    _waiting: set[str] = field(default_factory=set)
    _too_many: int = _WAITING
    # When an evaluation has ended, or the watcher begun; and how long the last one took.
    _busy_at: float = 0.0
    _took: float = 0.0

    def run(self) -> list[ModelRow]:
        """Evaluate what comes, until there is an end; a collective. Returns a row for each on rank 0."""
        session, self._busy_at = self.session, monotonic()
        if session.world.is_main:
            self._open()
        session.control.meet()
        try:
            while message := session.idle_until(self._next, progress=self._progress()):
                checkpoint, start = Checkpoint(**message["checkpoint"]), monotonic()
                folder = self.board.folder / checkpoint.name
                work = partial(self.evaluate, checkpoint.path, folder, message["fresh"])
                result, failure = session.attempt(work, progress=self._progress())
                self._busy_at = monotonic()
                self._took = self._busy_at - start
                if session.world.is_main:
                    self._finish(checkpoint, result, failure)
            if session.world.is_main and self.board.rows and not self._took:
                session.note("no new checkpoint came, and nothing was evaluated: the results are unchanged")
        except OSError as error:
            # Of a link and of a file that is put in its place, it is the second.
            path = error.filename2 or error.filename or self.board.folder
            raise DualevalError(
                f"{path} cannot be written: {error.strerror or error}. Checkpoints that are evaluated have "
                "their results: make room, or make it writable, and type the same command again."
            ) from error
        finally:
            self.board.let_go()
        return [*self.board.rows.values()]

    def _progress(self) -> str:
        done = sum(row.status == DONE for row in self.board.rows.values())
        return f"{counted(done, 'checkpoint')} evaluated so far."

    def _open(self) -> None:
        path, job = self.board.folder / WATCH, json.loads(json.dumps(self.job))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                write_text(path, json_text(job))
            there = read_fields(path, {}, "Remove it, if the options are the same, or give another --out.")
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error}. Give another --out.") from error
        if other := differences(there, job):
            raise UsageError(
                f"{path.parent} is the folder of a watcher with other options "
                f"({listing(other, 'there', 'here')}): its results could not be compared with these. Give "
                "another --out."
            )
        self.board.load()

    # -- on rank 0 ---------------------------------------------------------------------------------

    def _next(self) -> dict[str, Any] | None:
        """The checkpoint to evaluate; None where there is none yet, an empty dict at the end."""
        if monotonic() - self._looked_at < min(_LOOK_EVERY_S, self.checkpoints.settle_s):
            return None
        if not (self.board.folder / WATCH).exists():
            raise DualevalError(gone(self.board.folder, WATCH))
        complete = self.checkpoints.complete()
        self._looked_at = monotonic()
        wanted = [each for each in complete if self.wanted.fits(each.step)]
        open_ = [each for each in wanted if not self._is_settled(each)]
        unsettled, unmarked = (
            [name for name in names if self.wanted.fits(step_of(name))]
            for names in (self.checkpoints.unsettled, self.checkpoints.unmarked)
        )
        paths = {each.name: each.path for each in complete}
        self.board.write(paths)
        for name in sorted(self._waiting - {*paths, *unsettled, *unmarked, *self.board.rows}):
            self.session.note(f"{printable(name)} is gone, and was not evaluated")
        self._waiting = {each.name for each in open_}
        self._note_pace([each.since for each in wanted])
        for checkpoint in reversed(open_) if self.wanted.newest_first else open_:
            fresh = self.board.begin(checkpoint, self.session.control.check)
            if fresh is not None:
                return {"checkpoint": vars(checkpoint), "fresh": fresh}
        steps = [*(each.step for each in complete), *(row.step for row in self.board.rows.values())]
        if not open_ and not unsettled and self.wanted.has_ended(steps):
            if unmarked:
                self.session.note(f"not evaluated, as their marker is missing: {_named(unmarked)}")
            return {}
        if monotonic() - self._busy_at > _SILENT_S:
            self._note_waiting([*(each.name for each in open_), *unsettled, *unmarked])
        return None

    def _is_settled(self, checkpoint: Checkpoint) -> bool:
        if not self.board.is_settled(checkpoint):
            return False
        if self.board.changed(checkpoint):
            self.board.set_aside(checkpoint)
            self.session.note(
                f"{printable(checkpoint.name)} has changed since it was evaluated, but is not evaluated "
                "again: save each checkpoint under a name of its own"
            )
        return True

    def _note_waiting(self, names: Sequence[str]) -> None:
        """Say what is waited for, once while nothing changes."""
        where = Path(self.checkpoints.where)
        there = "" if names or self.board.rows or where.exists() else ", which does not exist yet"
        more = f" Not complete, or evaluated by another watcher: {_named(names)}" if names else ""
        self.session.note(f"waits for checkpoints in {where}{there}. {self._progress()}{more}")

    def _finish(self, checkpoint: Checkpoint, result: Result | None, failure: DualevalError | None) -> None:
        """Write and say what a checkpoint has come to, and let others have it."""
        self.session.control.progress.step(Stage.IDLE)
        name = printable(checkpoint.name)
        if failure is not None:
            self.board.fail(checkpoint, failure)
            say(f"dualeval: error: {name}: {text_of(failure)}")
        self.board.is_settled(checkpoint)
        self.board.let_go()
        if result is None:
            return
        metric, rows = self.board.ranked()
        names = [row.name for row in rows if row.reason is None]
        if apart := [row for row in rows if row.result is not None and row.reason is not None]:
            self.session.note(f"{_named(row.name for row in apart)}: {apart[0].reason}")
        if metric is not None and number_of(result, metric) is not None:
            place = names.index(checkpoint.name)
            number, ends = ModelsTable(rows).cell(rows[place], metric)
            interval = f" ({ends})" if ends else ""
            say(f"dualeval: {name}: {metric} {number}{interval}, place {place + 1} of {len(names)}")
        if self.targets:
            from dualeval.report.loggers.log import log_result

            log_result(result, self.targets, checkpoint.step, self.session.note)

    def _note_pace(self, times: Sequence[float]) -> None:
        """Say where checkpoints, which came at these times, come faster than they are evaluated."""
        waiting, first = len(self._waiting), min(times, default=0.0)
        # When those of the first look were written nobody knows.
        came = sorted(time for time in times if time > first)
        if waiting < self._too_many or len(came) < _WAITING:
            return
        every = (came[-1] - came[0]) / (len(came) - 1)
        if self._took > every:
            self._too_many = 2 * waiting
            self.session.note(
                f"the training is faster than its evaluation: a checkpoint comes every {every:.1f} s, an "
                f"evaluation takes {self._took:.1f} s, and {waiting} wait. --every K evaluates fewer, "
                "--newest the newest first; a second watcher on the same folders, or more ranks, share the "
                "work"
            )


def _named(names: Iterable[str]) -> str:
    return listed(map(printable, names))


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
    _flag("--out", type=PATH, required=True, metavar="DIR", help="Folder of the runs, one per checkpoint."),
    _flag(
        "--settle",
        type=float,
        default=10.0,
        metavar="S",
        help="Complete: unchanged for S seconds.  [default: 10]",
    ),
    _flag("--marker", metavar="NAME", help="Complete: NAME in its folder, or FILE.NAME beside FILE."),
    _flag(
        "--as",
        "option",
        default="weights",
        metavar="NAME",
        help="Option that takes each checkpoint.  [default: weights]",
    ),
    _flag("--newest", "newest_first", is_flag=True, help="The newest first."),
    _flag("--every", type=click.IntRange(min=1), metavar="K", help="Only steps divisible by K."),
    _flag("--until-step", type=click.IntRange(min=0), metavar="N", help="No later steps; end at step N."),
    _flag("--stop-file", type=PATH, metavar="FILE", help="End when FILE exists and all is evaluated."),
    _flag("--best", type=PATH, metavar="LINK", help="Keep a link to the best checkpoint."),
    _flag("--best-by", metavar="METRIC", help="Metric that ranks checkpoints.  [default: the first metric]"),
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
    values = {each.name: flags.pop(each.name or "") for each in _FLAGS}
    option, out, settle_s = values["option"], values["out"], values["settle"]
    where = _where(values["checkpoints"], out)
    if not 0.1 <= settle_s < math.inf:
        raise UsageError(f"--settle {settle_s:g}: expected seconds, 0.1 or more, such as 10")
    flag = f"{_OF_TASK}{option}"
    if flag not in flags:
        raise UsageError(
            f"--as {option}: the task has no option of this name. 'dualeval watch --help' lists them."
        )
    if flags[flag] is not None:
        raise UsageError(f"--{option} {flags[flag]}: each checkpoint replaces it. Leave it out.")
    run_flags = dict.fromkeys(_NOT_OF_RUN) | flags | {"out": out, flag: _STAND_IN.get(option, where)}
    jobs, asked = prepared(context, run_flags, checks_paths=option in _STAND_IN)
    name, job = jobs[0]
    if name is not None:
        raise UsageError("[[models]] belongs to 'dualeval run': a watcher has one model and its checkpoints.")
    cache, noted, in_hand = DataCache(), set[str](), ""

    def note(sentence: str) -> None:
        # The same of each checkpoint, but for its path.
        if (of_each := sentence.replace(in_hand, "")) not in noted:
            noted.add(of_each)
            say(f"dualeval: note: {sentence}")

    def evaluate(path: str, folder: Path, fresh: bool) -> Result:
        nonlocal in_hand
        in_hand = str(Path(path).absolute())
        kind = type(getattr(job.options, option))
        of_one = replace(job, options=replace(job.options, **{option: kind(in_hand)}))
        invocation = of_one_model(asked, folder)
        more = {"fresh": fresh, "start_over": or_remove(folder)}
        invocation = replace(invocation, run={**invocation.run, **more})
        return evaluate_job(of_one, invocation, session, cache=cache, name=folder.name)

    def work(opened: Session) -> list[ModelRow]:
        if option in _STAND_IN and job.kind.origin == BUILT_IN:
            # Wrong data is refused before anything is waited for.
            task_of(job, asked, opened, cache).dataset()
        return watching.run()

    session = session_of(job, asked, note)
    watching = Watching(
        session=session,
        checkpoints=Checkpoints(where, settle_s=settle_s, marker=values["marker"]),
        wanted=Wanted(**{each.name: values[each.name] for each in fields(Wanted)}),
        board=Board(out, metric=values["best_by"], link=values["best"]),
        targets=asked.targets,
        job={**job.to_json(), option: str(Path(where).absolute())},
        evaluate=evaluate,
    )
    code, rows = options.work_in_session(session, work, exit_code_of)
    if rows is not None and session.world.is_main:
        _show(watching.board, values["top"])
    context.exit(code)


def _where(paths: Sequence[str], out: Path) -> str:
    """The folder or pattern of checkpoints."""
    folder = Path(paths[0])
    if len(paths) > 1 or folder.is_file():
        what = "a file" if len(paths) == 1 else f"{len(paths)} paths"
        raise UsageError(
            f"CKPTS is {what}, expected a folder or a pattern: put it in quotes, as 'ckpts/*.pt'"
        )
    if folder.resolve() in (out.resolve(), *out.resolve().parents):
        raise UsageError(f"--out {out} lies in {folder}, where the checkpoints are. Give a folder beside it.")
    return paths[0]


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
