"""``dualeval run``: evaluate a model."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from dualeval.cli import options
from dualeval.cli.grouped import PATH, Words, grouped
from dualeval.cli.task_flags import TaskCommand, config_flag, job_flags, jobs_of, task_flags
from dualeval.engine.end.process import say
from dualeval.engine.end.signals import numbers_of
from dualeval.engine.options import check_timeout
from dualeval.engine.session import Session
from dualeval.errors import EXIT_DONE
from dualeval.launch import examine
from dualeval.launch.cores import own_cores, share_of_cores
from dualeval.launch.launchers import BACKENDS, LAUNCHERS
from dualeval.launch.starts import may_start_ranks
from dualeval.options.choices import SCHEDULES, check_choice, check_sharding
from dualeval.options.job import DATA, LAUNCH, MODEL, RUN, Job, owners_of, start_of
from dualeval.options.several import is_several
from dualeval.process_start import DEFAULT_SIGNALS
from dualeval.report.loggers.targets import Target, check_installed, counted_from, targets_of
from dualeval.result import json_text
from dualeval.wording import printable_lines
from dualeval.world import World

if TYPE_CHECKING:
    from dualeval.data.cache import DataCache
    from dualeval.result import Result


@dataclass(frozen=True, kw_only=True)
class _Invocation:
    """How this invocation runs and shows a job: nothing that its result depends on."""

    out: Path | None
    reference: Path | None
    fresh: bool
    replay: bool
    mix_machines: bool
    backend: str | None
    allow_shared_gpu: bool
    progress: bool
    as_json: bool
    schedule: str
    heartbeat_timeout: float
    forward_timeout: float
    stop_signals: tuple[str, ...]
    loggers: tuple[str, ...]
    report: bool
    debug: bool
    started: float

    def __post_init__(self) -> None:
        check_choice("--schedule", self.schedule, SCHEDULES)
        check_timeout("--heartbeat-timeout", self.heartbeat_timeout)
        check_timeout("--forward-timeout", self.forward_timeout)
        numbers_of(self.stop_signals)
        _ = self.targets

    @property
    def targets(self) -> list[Target]:
        """Where the result is logged."""
        return targets_of(self.loggers, None, "--logger")


@click.command(cls=TaskCommand, groups=(MODEL, DATA), last=(RUN, LAUNCH))
@task_flags
@job_flags("metric", "limit", "sample", "seed", "cluster", "keep", "by", "bins")
@config_flag
@job_flags(
    "batch_size", "precision", "keep_batchnorm_fp32", "layout", "optimize", "shard", "offload", "on_error"
)
@grouped(
    "--schedule",
    group=RUN,
    type=Words(SCHEDULES, "WORD"),
    default=SCHEDULES[0],
    help="static (default); dynamic (by load); lockstep.",
)
@grouped(
    "--replay/--no-replay",
    group=RUN,
    default=True,
    help="Before resuming, check two finished batches.",
)
@grouped("--nproc", group=LAUNCH, type=int, metavar="N", help="Start N processes on this machine.")
@job_flags("device", "workers")
@grouped(
    "--backend",
    group=LAUNCH,
    type=Words(BACKENDS, "NAME"),
    help=f"{', '.join(BACKENDS)}.  [default: by launcher]",
)
@grouped(
    "--launcher",
    group=LAUNCH,
    type=Words(tuple(LAUNCHERS), "NAME"),
    help="Launcher of the ranks.  [default: detected]",
)
@options.ALLOW_SHARED_GPU
@grouped("--mix-machines", group=LAUNCH, is_flag=True, help="Let devices or versions differ between ranks.")
@grouped(
    "--heartbeat-timeout",
    group=LAUNCH,
    type=float,
    metavar="S",
    default=60.0,
    help="Seconds until a rank counts as hung.  [default: 60]",
)
@grouped(
    "--forward-timeout",
    group=LAUNCH,
    type=float,
    metavar="S",
    default=1800.0,
    help="Seconds to compute one batch.  [default: 1800]",
)
@grouped(
    "--stop-signals",
    group=LAUNCH,
    metavar="NAMES",
    default=",".join(DEFAULT_SIGNALS),
    help="Save and exit.  [default: " + ",".join(DEFAULT_SIGNALS) + "]",
)
@grouped(
    "--out",
    group=RUN,
    type=PATH,
    metavar="DIR",
    help="Output folder; an unfinished run resumes there.",
)
@grouped(
    "--reference",
    group=RUN,
    type=PATH,
    metavar="RUN",
    help="Compare predictions with a finished run's.",
)
@grouped("--fresh", group=RUN, is_flag=True, help="Remove an earlier run's files from --out first.")
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
    started = perf_counter()
    launcher, nproc, dry_run = flags["launcher"], flags["nproc"], flags["dry_run"]
    detection = examine(os.environ, launcher)
    world = detection.place
    of_file = start_of(flags["config"])
    for name in ("out", "reference"):
        flags[name] = of_file.get(name) if flags[name] is None else flags[name]
    if not flags["loggers"]:
        folder = Path(flags["config"] or "").parent
        flags["loggers"] = tuple(counted_from(text, folder) for text in of_file.get("logger", ()))
    # The ranks that it starts read the same file.
    if nproc is None and may_start_ranks(world):
        nproc = of_file.get("nproc")
    flags["stop_signals"] = tuple(flags["stop_signals"].split(","))
    of_invocation = _Invocation.__dataclass_fields__.keys() & flags.keys()
    invocation = _Invocation(started=started, **{name: flags[name] for name in of_invocation})
    jobs = jobs_of(flags)
    job = jobs[0][1]
    for _, each in jobs:
        check_sharding(
            shard=each.shard,
            offload=each.offload,
            optimize=each.optimize,
            schedule=invocation.schedule,
            dashes=True,
        )
        # Under a launcher a path may be missing on one node alone, which all ranks have to hear. Of several
        # models a path may be a pattern, or that of a model that fails while the others go on.
        is_alone = world.size == 1 and not is_several(jobs)
        if is_alone and (check_paths := getattr(each.options, "check_paths", None)):
            check_paths()
    if dry_run:
        context.exit(_print_dry_run(jobs, invocation, world, nproc) if world.is_main else EXIT_DONE)
    if world.is_main:
        for note in detection.notes:
            click.echo(f"dualeval: note: {note}", err=True)
    if nproc is not None:
        context.exit(_start_ranks(nproc, world, job, invocation, context.obj))
    context.exit(_evaluate(jobs, invocation, launcher))


def is_flag(name: str) -> bool:
    """Whether ``dualeval run`` has a flag of this name, perhaps for one of the built-in tasks only."""
    own = any(name in parameter.opts for parameter in run.params)
    return own or bool(owners_of(name.lstrip("-").replace("-", "_")))


def _print_dry_run(
    jobs: Sequence[tuple[str | None, Job]], invocation: _Invocation, world: World, nproc: int | None
) -> int:
    """Check one job or several, and print their options; returns the exit code."""
    if is_several(jobs):
        from dualeval.cli.several import dry_run

        code, found = dry_run(jobs, lambda job: _dry_run(job, invocation, world, nproc))
    else:
        code, found = EXIT_DONE, _dry_run(jobs[0][1], invocation, world, nproc)
    click.echo(json_text(found), nl=False)
    return code


def _dry_run(job: Job, invocation: _Invocation, world: World, nproc: int | None) -> dict[str, Any]:
    """Check a job as far as one process can, and return its options as they would be used."""
    import torch

    from dualeval.backends import check_mesh, choose_backend
    from dualeval.engine import numerics
    from dualeval.engine.building import automatic_workers, check_methods
    from dualeval.engine.evaluation_mode import set_evaluation_mode
    from dualeval.engine.folder.layout import check_path
    from dualeval.engine.reference import Reference
    from dualeval.engine.samples import as_dataset
    from dualeval.engine.sharding.parameters import check_device
    from dualeval.engine.trial import check_names
    from dualeval.metrics.by_name import chosen_metrics
    from dualeval.world.devices import device_here
    from dualeval.world.local_ranks import last_rank

    # What every rank would find here.
    last = world if nproc is None else last_rank(nproc, world, invocation.backend)
    backend = choose_backend(invocation.backend, last)
    device = device_here(job.device, nproc or 1, last, allow_shared_gpu=invocation.allow_shared_gpu)
    numerics.check_precision(job.precision, device)
    if job.shard is not None:
        check_mesh(backend)
        check_device(job.offload, device)
    if invocation.out is not None:
        check_path(invocation.out)
    if invocation.reference is not None:
        Reference.open(invocation.reference)
    check_installed(invocation.targets, "--logger")
    if fetch := getattr(job.options, "fetch", None):
        fetch()
    task = job.make_task()
    check_methods(task)
    # Whether weights fit the model, and the model the data, does not depend on the device.
    cpu = torch.device("cpu")
    with numerics.settings("fp32", cpu), numerics.autocast(job.precision, cpu):
        # Of a model that is divided no process has to hold all of it.
        model = task.build_model(cpu) if job.shard is None else task.build_late(cpu)
    dataset = as_dataset(task.dataset())
    samples = min(job.limit or job.sample or len(dataset), len(dataset))
    task.check_batches(job.batch_size, samples)
    if task.rows is not None:
        # Else its metrics are known when its columns are, which takes a forward.
        columns = (*task.rows, *task.on_request)
        check_names(chosen_metrics(job.metric_of_run, task.metrics(), columns), task.rows)
    if world.is_main:
        for sentence in [*task.notes(), *task.data_warnings(), *set_evaluation_mode(model)]:
            click.echo(f"dualeval: note: {printable_lines(sentence)}", err=True)
    workers = job.workers
    if workers is None:
        own = own_cores()
        cores = share_of_cores(own, [own] * last.local_size)
        workers = automatic_workers(task, dataset, cores)
    return {**_as_used(job, device.type, workers), **task.options()}


def _as_used(job: Job, device: str, workers: int | None) -> dict[str, Any]:
    """The options as given, with what this machine decides where they are left open."""
    return {**job.to_json(), "device": job.device or device, "workers": workers}


def _start_ranks(
    nproc: int, world: World, job: Job, invocation: _Invocation, arguments: Sequence[str]
) -> int:
    """Start this same command, less --nproc, as ``nproc`` ranks of torchrun's or horovodrun's kind."""
    from dualeval.world.local_ranks import last_rank, start_ranks

    last = last_rank(nproc, world, invocation.backend)
    main_file = Path(__file__).resolve().parent.parent / "__main__.py"
    # Said, not left to be found: variables of another launcher may be left over in the shell.
    command = [sys.executable, str(main_file), *_without_start(arguments), "--launcher", last.launcher]
    return start_ranks(
        command,
        last,
        backend=invocation.backend,
        device=job.device,
        allow_shared_gpu=invocation.allow_shared_gpu,
        stop_signals=numbers_of(invocation.stop_signals),
        takes_signals=True,
    )


def _without_start(arguments: Sequence[str]) -> list[str]:
    """The words of a command without those that say how it is started."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        name, has_value, _ = word.partition("=")
        if name not in ("--nproc", "--launcher"):
            kept.append(word)
        elif not has_value:
            next(words, None)
    return kept


def _evaluate(jobs: Sequence[tuple[str | None, Job]], invocation: _Invocation, launcher: str | None) -> int:
    """Evaluate as one rank; returns the exit code, the same on every rank."""
    job = jobs[0][1]
    said: set[str] = set()

    def note_once(sentence: str) -> None:
        # Of several models most have the same to say.
        if sentence not in said:
            said.add(sentence)
            say(f"dualeval: note: {sentence}")

    session = Session(
        backend=invocation.backend,
        device=job.device,
        note=note_once,
        launcher=launcher,
        allow_shared_gpu=invocation.allow_shared_gpu,
        mix_machines=invocation.mix_machines,
        heartbeat_timeout=invocation.heartbeat_timeout,
        forward_timeout=invocation.forward_timeout,
        stop_signals=invocation.stop_signals,
        debug=invocation.debug,
    )
    if is_several(jobs):
        from dualeval.cli.several import Models, exit_code_of

        # The seconds before it are the first one's.
        starts = iter([invocation.started])
        models = Models(
            jobs,
            out=invocation.out,
            targets=invocation.targets,
            as_json=invocation.as_json,
            evaluate=lambda job, out, cache: _run_engine(
                job, _of_one_model(invocation, out, next(starts, None)), session, cache=cache
            ),
        )
        ended = options.work_in_session(session, models.evaluate, exit_code_of)
        if ended[1] is None and (closing := models.closing):
            say(f"dualeval: note: {closing}")
        return ended[0]
    return options.evaluate_and_show(
        session,
        lambda session: _run_engine(job, invocation, session),
        as_json=invocation.as_json,
        targets=invocation.targets,
    )


def _of_one_model(invocation: _Invocation, out: Path, started: float | None) -> _Invocation:
    """The invocation for one of several models, which may be the one that the others are compared with."""
    reference = invocation.reference
    if reference is not None and reference.resolve() == out.resolve():
        reference = None
    return replace(invocation, out=out, reference=reference, started=started or perf_counter())


def _run_engine(
    job: Job, invocation: _Invocation, session: Session, cache: DataCache | None = None
) -> Result:
    from dualeval.engine.end.process import show_until_end
    from dualeval.engine.options import NEW_FOLDER
    from dualeval.report.progress import Progress
    from dualeval.report.screen import on_screen

    if session.world.is_main:
        check_installed(invocation.targets, "--logger")
    _fetch(job, session)
    task = job.make_task(cache)
    stream = sys.stderr if invocation.as_json else sys.stdout
    shows = invocation.progress and session.world.is_main
    shown = Progress(stream, as_bar=on_screen(stream)) if shows else None
    if shown is not None:
        show_until_end(shown.close)
    try:
        return session.evaluate(
            task,
            out=NEW_FOLDER if invocation.out is None else invocation.out,
            **job.run_options,
            schedule=invocation.schedule,
            fresh=invocation.fresh,
            reference=invocation.reference,
            replay=invocation.replay,
            mix_machines=invocation.mix_machines,
            job=_as_used(job, session.backend.device.type, job.workers),
            show=shown,
            report=invocation.report,
            started=invocation.started,
            last=True,
            puts_back=False,
        )
    finally:
        if shown is not None:
            shown.close()


def _fetch(job: Job, session: Session) -> None:
    """Have one rank a node fetch what the task's options ask for."""
    if fetch := getattr(job.options, "fetch", None):
        if session.world.local_rank == 0:
            fetch()
        session.control.meet()
