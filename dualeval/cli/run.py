"""``dualeval run``: evaluate a model."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from dualeval.cli import options
from dualeval.cli.options import PATH, Words, grouped
from dualeval.cli.task_flags import TaskCommand, config_flag, flags_of, job_flags, jobs_of, task_flags
from dualeval.engine.session import Session
from dualeval.engine.values.options import NEW_FOLDER, RunOptions, SessionOptions
from dualeval.errors import EXIT_DONE, UsageError
from dualeval.launch import examine
from dualeval.launch.launchers import BACKENDS, LAUNCHERS, may_start_ranks
from dualeval.options.choices import SCHEDULES
from dualeval.options.evaluation import DATA, LAUNCH, MODEL, RUN
from dualeval.options.fields import Given, fields_of
from dualeval.options.job import Job, is_several, owners_of, start_of
from dualeval.process.signals import numbers_of
from dualeval.process.speech import say
from dualeval.process.status_line import LINE, doing
from dualeval.result import json_text
from dualeval.world import World

if TYPE_CHECKING:
    from dualeval.data.cache import DataCache
    from dualeval.engine.job.run_state import Show
    from dualeval.report.loggers.loggers import Target
    from dualeval.result import Result
    from dualeval.tasks import Task


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """How this invocation runs and shows a job: nothing that its result depends on."""

    session: SessionOptions
    out: Path | None
    reference: Path | None
    # Of `RunOptions`.
    run: Mapping[str, Any]
    targets: Sequence[Target]
    progress: bool
    as_json: bool
    report: bool
    # I/N; and this command, for `dualeval finish`.
    share: str | None
    command: Mapping[str, Any]
    started: float


# Options that are not part of a job, by what they belong to.
_OF_SESSION = (
    *("backend", "launcher", "allow_shared_gpu", "mix_machines", "debug"),
    *("heartbeat_timeout", "forward_timeout", "stop_signals"),
)
_OF_RUN = ("schedule", "replay", "fresh", "mix_machines")


def _checked(flags: Mapping[str, Any], options_class: type, names: Sequence[str]) -> dict[str, Any]:
    """The options of a class that the command has, checked."""
    values = {}
    for field in fields_of(options_class):
        value = flags[field.name] if field.name in names else None
        value = value.value if isinstance(value, Given) else value
        if value is not None:
            field.check(value)
            values[field.name] = value
    return values


@click.command(cls=TaskCommand, groups=(MODEL, DATA), last=(RUN, LAUNCH))
@task_flags
@job_flags("metric", "limit", "sample", "seed", "cluster", "keep", "by", "bins")
@config_flag
@job_flags(
    "batch_size", "precision", "keep_batchnorm_fp32", "layout", "optimize", "shard", "offload", "on_error"
)
@flags_of(RunOptions, "schedule", "replay")
@grouped("--nproc", group=LAUNCH, type=int, metavar="N", help="Start N processes on this machine.")
@job_flags("device", "workers")
@grouped(
    "--backend", group=LAUNCH, type=Words(BACKENDS), help=f"{', '.join(BACKENDS)}.  [default: by launcher]"
)
@grouped(
    "--launcher", group=LAUNCH, type=Words(LAUNCHERS), help="Launcher of the ranks.  [default: detected]"
)
@options.ALLOW_SHARED_GPU
@flags_of(RunOptions, "mix_machines")
@flags_of(SessionOptions, "heartbeat_timeout", "forward_timeout", "stop_signals")
@grouped("--out", group=RUN, type=PATH, metavar="DIR", help="Output folder; an unfinished run resumes there.")
@grouped("--share", group=RUN, metavar="I/N", help="Only share I of N; 'dualeval finish' joins them.")
@grouped(
    "--reference", group=RUN, type=PATH, metavar="RUN", help="Compare predictions with a finished run's."
)
@flags_of(RunOptions, "fresh")
@grouped(
    "--logger",
    "loggers",
    group=RUN,
    multiple=True,
    metavar="KIND:WHERE",
    help="Log to tensorboard, wandb, mlflow or jsonl.",
)
@grouped("--report", group=RUN, is_flag=True, help="Also write a page to look at, report.html.")
@grouped("--progress/--no-progress", group=RUN, default=True, help="Show the progress.")
@grouped("--json", "as_json", group=RUN, is_flag=True, help="Print result.json, and nothing else.")
@grouped("--debug", group=RUN, is_flag=True, help="Show the whole traceback of an error.")
@grouped("--dry-run", group=RUN, is_flag=True, help="Check and print the job; evaluate nothing.")
@click.pass_context
def run(context: click.Context, /, **flags: Any) -> None:
    """Evaluate a model; without options the embedded job: 10,000 real images.

    \b
    dualeval run --model resnet18 --weights ckpt.pt --data /data/imagenet/val
    dualeval run --task mine.py:Mine -T threshold=0.5 --nproc 2
    torchrun --nproc-per-node 8 -m dualeval run     horovodrun -np 8 dualeval run
    srun -N2 --ntasks-per-node 4 dualeval run       mpirun -np 8 dualeval run
    """
    jobs, invocation = prepared(context, flags)
    context.exit((_try_out if flags["dry_run"] else evaluate)(jobs, invocation))


def prepared(
    context: click.Context, flags: dict[str, Any], *, checks_paths: bool = True
) -> tuple[list[tuple[str | None, Job]], Invocation]:
    """Read the flags of ``run``, and check them as far as no rank has to be joined for it.

    Returns the jobs with their names, as ``Job.read_all`` does, and how to run them. Where the flags ask for
    ranks, it starts these and ends with their exit code.
    """
    started = perf_counter()
    nproc = flags["nproc"]
    detection = examine(os.environ, flags["launcher"])
    world = detection.place
    of_file = start_of(flags["config"])
    for name in ("out", "reference"):
        flags[name] = of_file.get(name) if flags[name] is None else flags[name]
    # The ranks that it starts read the same file.
    if nproc is None and may_start_ranks(world):
        nproc = of_file.get("nproc")
    jobs = jobs_of(flags)
    invocation = Invocation(
        session=SessionOptions(**_checked(flags, SessionOptions, _OF_SESSION)),
        run=_checked(flags, RunOptions, _OF_RUN),
        targets=_targets(flags["loggers"], of_file.get("logger", ()), Path(flags["config"] or "").parent),
        started=started,
        command={"words": _of_run(context.obj), "folder": str(Path.cwd())},
        **{name: flags[name] for name in ("out", "reference", "progress", "as_json", "report", "share")},
    )
    if invocation.share is not None:
        _check_share(invocation, jobs)
    numbers_of(invocation.session.stop_signals)
    for _, job in jobs:
        job.check_schedule(invocation.run.get("schedule", SCHEDULES[0]))
        # Under a launcher a path may be missing on one node alone, which all ranks have to hear. Of several
        # models a path may be a pattern, or that of a model that fails while the others go on.
        is_alone = checks_paths and world.size == 1 and not is_several(jobs)
        if is_alone and (check_paths := getattr(job.options, "check_paths", None)):
            check_paths()
    if world.is_main:
        for note in detection.notes:
            click.echo(f"dualeval: note: {note}", err=True)
    if nproc is not None:
        context.exit(_start_ranks(nproc, world, jobs[0][1], invocation, context.obj))
    return jobs, invocation


def _targets(flags: Sequence[str], of_file: Sequence[str], folder: Path) -> Sequence[Target]:
    """Where the result is logged: by the flags, else by the job file, whose folder it counts from."""
    if not flags and not of_file:
        return ()
    from dualeval.report.loggers.loggers import counted_from, targets_of

    return targets_of(flags or [counted_from(text, folder) for text in of_file], None, "--logger")


def _check_share(invocation: Invocation, jobs: Sequence[tuple[str | None, Job]]) -> None:
    from dualeval.engine.folder.layout import Share

    share = f"--share {Share.of_text(invocation.share or '')}"
    if invocation.out is None:
        raise UsageError(f"{share}: give --out DIR, a folder that all shares see.")
    if is_several(jobs):
        raise UsageError(f"{share}: there are several models, but a share has one. Give each its own --out.")
    if invocation.as_json:
        raise UsageError(
            f"{share}: a share has no result, so --json has nothing to print: give it to 'dualeval finish'."
        )


def _of_run(words: Sequence[str] | None) -> Sequence[str]:
    """The options of a command line of ``run``."""
    typed = [*(words or ())]
    return typed[typed.index("run") + 1 :] if "run" in typed else []


def is_flag(name: str) -> bool:
    """Whether ``dualeval run`` has a flag of this name, perhaps for one of the built-in tasks only."""
    of_run = any(name in parameter.opts for parameter in run.params)
    return of_run or bool(owners_of(name.lstrip("-").replace("-", "_")))


def _try_out(jobs: Sequence[tuple[str | None, Job]], invocation: Invocation) -> int:
    """The run, stopped before its loop; prints the options as they would be used. Returns the exit code."""
    session = session_of(jobs[0][1], invocation)

    def try_one(job: Job) -> dict[str, Any]:
        return session.try_out(task_of(job, invocation, session), **_asked(job, invocation, session))

    def try_all(session: Session) -> tuple[int, dict[str, Any]]:
        if not is_several(jobs):
            return EXIT_DONE, try_one(jobs[0][1])
        from dualeval.cli.several import try_out

        return try_out(jobs, session, try_one)

    code, tried = options.work_in_session(session, try_all, itemgetter(0))
    if tried is not None and session.world.is_main:
        click.echo(json_text(tried[1]), nl=False)
    return code


def _start_ranks(nproc: int, world: World, job: Job, invocation: Invocation, arguments: Sequence[str]) -> int:
    """Start this same command, less --nproc, as ``nproc`` ranks of torchrun's or horovodrun's kind."""
    from dualeval.world.local_ranks import last_rank, start_ranks

    LINE.speak(speaks=False)
    last = last_rank(nproc, world, invocation.session.backend)
    main_file = Path(__file__).resolve().parent.parent / "__main__.py"
    # Said, not left to be found: variables of another launcher may be left over in the shell.
    command = [sys.executable, str(main_file), *without_start(arguments), "--launcher", last.launcher]
    return start_ranks(
        command,
        last,
        backend=invocation.session.backend,
        device=job.device,
        allow_shared_gpu=invocation.session.allow_shared_gpu,
        stop_signals=numbers_of(invocation.session.stop_signals),
        takes_signals=True,
    )


def without_start(arguments: Sequence[str], names: Sequence[str] = ("--nproc", "--launcher")) -> list[str]:
    """The words of a command without those that say how it is started."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        name, has_value, _ = word.partition("=")
        if name not in names:
            kept.append(word)
        elif not has_value:
            next(words, None)
    return kept


def evaluate(jobs: Sequence[tuple[str | None, Job]], invocation: Invocation) -> int:
    """Evaluate as one rank; returns the exit code, the same on every rank."""
    job = jobs[0][1]
    session = session_of(job, invocation)
    if is_several(jobs):
        from dualeval.cli.several import Models, exit_code_of

        # The seconds before it are the first one's.
        starts = iter([invocation.started])
        models = Models(
            jobs,
            out=invocation.out,
            targets=invocation.targets,
            as_json=invocation.as_json,
            evaluate=lambda job, out, cache: evaluate_job(
                job, of_one_model(invocation, out, next(starts, None)), session, cache=cache
            ),
        )
        code, rows = options.work_in_session(session, models.evaluate, exit_code_of)
        if rows is None and (closing := models.closing):
            _note(closing)
        return code
    if invocation.share is not None:
        work = partial(_evaluate_share, job, invocation, invocation.share)
        return options.work_in_session(session, work)[0]
    return options.evaluate_and_show(
        session,
        lambda session: evaluate_job(job, invocation, session),
        as_json=invocation.as_json,
        targets=invocation.targets,
    )


def _note(sentence: str) -> None:
    say(f"dualeval: note: {sentence}")


def session_of(job: Job, invocation: Invocation, note: Callable[[str], None] = _note) -> Session:
    # The session says each once: of several models most have the same to say.
    return Session(**{**vars(invocation.session), "device": job.device, "note": note})


def of_one_model(invocation: Invocation, out: Path, started: float | None = None) -> Invocation:
    """The invocation for one of several models, which may be the one that the others are compared with."""
    reference = invocation.reference
    if reference is not None and reference.resolve() == out.resolve():
        reference = None
    return replace(invocation, out=out, reference=reference, started=started or perf_counter())


def evaluate_job(
    job: Job, invocation: Invocation, session: Session, cache: DataCache | None = None, name: str = ""
) -> Result:
    """Evaluate a job in an open session; its name is shown with the progress."""
    task = task_of(job, invocation, session, cache)
    asked = _asked(job, invocation, session) | {"started": invocation.started, "puts_back": False}
    with _progress(invocation, session, name) as show:
        return session.evaluate(task, **asked, show=show, report=invocation.report, last=True)


def _evaluate_share(job: Job, invocation: Invocation, share: str, session: Session) -> None:
    task = task_of(job, invocation, session)
    asked = _asked(job, invocation, session) | {"started": invocation.started, "puts_back": False}
    with _progress(invocation, session) as show:
        session.evaluate_share(task, share, **asked, show=show, command=invocation.command)


@contextmanager
def _progress(invocation: Invocation, session: Session, name: str = "") -> Iterator[Show | None]:
    """What shows the progress of an evaluation, on rank 0 where it is wanted."""
    if not (invocation.progress and session.world.is_main):
        yield None
        return
    from dualeval.process.speech import show_until_end
    from dualeval.process.status_line import on_screen
    from dualeval.report.progress import ProgressDisplay

    stream = sys.stderr if invocation.as_json else sys.stdout
    shown = ProgressDisplay(stream, as_bar=on_screen(stream), name=name)
    show_until_end(shown.close)
    try:
        yield shown
    finally:
        shown.close()


def _asked(job: Job, invocation: Invocation, session: Session) -> dict[str, Any]:
    """What the session is asked for: options of a run, and those that the result shows."""
    return {
        **job.run_options,
        **invocation.run,
        "out": NEW_FOLDER if invocation.out is None else invocation.out,
        "reference": invocation.reference,
        "job": {**job.to_json(), "device": job.device or session.backend.device.type},
    }


def task_of(job: Job, invocation: Invocation, session: Session, cache: DataCache | None = None) -> Task:
    """The task, when one rank a node has fetched what its options ask for."""
    if session.world.is_main and invocation.targets:
        from dualeval.report.loggers.loggers import check_installed

        check_installed(invocation.targets, "--logger")
    if fetch := getattr(job.options, "fetch", None):
        if session.world.local_rank == 0:
            fetch()
        session.control.meet()
    with doing("setting up the task"):
        return job.make_task(cache)
