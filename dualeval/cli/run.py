"""``dualeval run``: evaluate a model."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from dualeval.choices import DATA_FINGERPRINTS, ON_ERROR, PRECISIONS, SCHEDULES, check_choice
from dualeval.cli import options
from dualeval.engine.options import check_timeout
from dualeval.engine.session import Session
from dualeval.engine.signals import numbers_of
from dualeval.errors import UsageError
from dualeval.job import TASKS, Job
from dualeval.launch import PROBES, examine
from dualeval.launch.cores import own_cores, share_of_cores
from dualeval.process_start import DEFAULT_SIGNALS
from dualeval.world import World

if TYPE_CHECKING:
    from dualeval.result import Result
    from dualeval.tasks import Task

_MOST_AUTOMATIC_WORKERS = 8
_LAST_WORDS_S = 0.5
_LEAST_TIMEOUT_S = 1.0
_LONGEST_TIMEOUT_S = 1e6


@dataclass(frozen=True, kw_only=True)
class _Invocation:
    """How this invocation runs and shows a job: nothing that its result depends on."""

    out: Path | None
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
    started: float

    def __post_init__(self) -> None:
        check_choice("--schedule", self.schedule, SCHEDULES)
        check_timeout("--heartbeat-timeout", self.heartbeat_timeout)
        check_timeout("--forward-timeout", self.forward_timeout)
        numbers_of(self.stop_signals)


def _numbers(
    _context: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[float, ...] | None:
    if value is None:
        return None
    try:
        return tuple(float(part) for part in value.split(","))
    except ValueError as error:
        raise click.BadParameter(
            f"{value!r}: expected numbers with commas between, such as 0.5,0.5,0.5", param=parameter
        ) from error


@click.command()
@click.option("--config", type=click.Path(path_type=Path), help="Job file (TOML); flags win over it.")
@click.option("--task", help=f"Kind of evaluation: {', '.join(TASKS)}.")
@click.option(
    "--model",
    help="torchvision classifier, fashion-cnn, package.module:factory; or a folder of a transformers model.",
)
@click.option(
    "--weights",
    help="State_dict file (.pt, .pth, .safetensors), DEFAULT or IMAGENET1K_V1 (torchvision's), random:SEED.",
)
@click.option("--weights-key", help="Key of the state_dict in a checkpoint, as model_ema or ema.state_dict.")
@click.option("--weights-prefix", help="Take only the tensors whose names begin with this, without it.")
@click.option(
    "--download", is_flag=True, help="Allow --weights DEFAULT or IMAGENET1K_V1 to fetch the weights."
)
@click.option(
    "--data", help="Folder with one sub-folder of images a class, or with idx files; JSON file of SQuAD."
)
@click.option("--num-classes", type=int, help="Number of classes, where neither data nor weights tell.")
@click.option(
    "--resize", type=int, help="Bring the shorter side to this many pixels.  [default: the model's]"
)
@click.option("--crop", type=int, help="Cut a square of this side from the centre.  [default: the model's]")
@click.option("--interpolation", help="nearest, bilinear, bicubic or lanczos.  [default: the model's]")
@click.option("--mean", callback=_numbers, help="Mean a channel, with commas.  [default: the model's]")
@click.option("--std", callback=_numbers, help="Standard deviation a channel.  [default: the model's]")
@click.option("--max-length", type=int, help="Most tokens of a window of question and text.  [default: 384]")
@click.option("--stride", type=int, help="Tokens that windows of one text share.  [default: 128]")
@click.option("--n-best", type=int, help="Starts and ends of a window that are paired.  [default: 20]")
@click.option("--max-answer-length", type=int, help="Most tokens of an answer.  [default: 30]")
@click.option(
    "--null-threshold", type=float, help="No answer where it scores better by more than this.  [default: 0]"
)
@options.METRIC
@click.option("--batch-size", type=int, help="Samples a batch.  [default: 64]")
@click.option("--limit", type=int, help="Evaluate only the first N samples.")
@click.option("--precision", help=f"{', '.join(PRECISIONS)}; tf32 needs a GPU.  [default: fp32]")
@click.option("--device", help="cpu, cuda or cuda:N.  [default: a GPU where there is one]")
@click.option("--workers", type=int, help="Reading processes a rank.  [default: by task and cores]")
@click.option(
    "--on-error", help=f"What a sample that cannot be read does: {', '.join(ON_ERROR)}.  [default: stop]"
)
@click.option(
    "--data-fingerprint",
    help="What of image files tells two data sets apart: size and ends, or content.  [default: ends]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Output folder; a run that was begun there goes on.  [default: a new one in runs/]",
)
@options.FRESH
@click.option(
    "--replay/--no-replay",
    default=True,
    help="Before going on in --out, evaluate one finished batch anew and compare it.  [default: replay]",
)
@click.option(
    "--mix-machines",
    is_flag=True,
    help="Let devices or versions differ between ranks, or from what --out holds.",
)
@click.option(
    "--schedule",
    default=SCHEDULES[0],
    help="static: each rank the same number of chunks; dynamic: a slow rank takes fewer.  [default: static]",
)
@click.option(
    "--heartbeat-timeout",
    type=float,
    default=60.0,
    help="Seconds without progress after which a rank is given up.  [default: 60]",
)
@click.option(
    "--forward-timeout",
    type=float,
    default=1800.0,
    help="The same for a rank that computes with a batch in hand.  [default: 1800]",
)
@click.option(
    "--stop-signals",
    default=",".join(DEFAULT_SIGNALS),
    help=f"Signals that save and end the run.  [default: {','.join(DEFAULT_SIGNALS)}]",
)
@click.option("--allow-shared-gpu", is_flag=True, help="Let several ranks of a node share a GPU.")
@click.option("--backend", help="How ranks talk: single, torch, horovod, mpi.  [default: by launcher]")
@click.option("--launcher", help=f"Who started the ranks: {', '.join(PROBES)}.  [default: detected]")
@click.option("--nproc", type=int, help="Start that many processes here, as torchrun or horovodrun would.")
@click.option("--progress/--no-progress", default=True, help="Show how far the run is.")
@options.AS_JSON
@click.option(
    "--dry-run",
    is_flag=True,
    help="Check options, data, weights and model by building it (--download fetches), print the job as it "
    "would run, and stop: no rank is started, nothing is evaluated or written.",
)
@click.pass_context
def run(context: click.Context, /, **flags: Any) -> None:
    """Evaluate a model; without options the embedded job: 10,000 real images.

    \b
    dualeval run
    dualeval run --nproc 2
    torchrun --nproc-per-node 8 -m dualeval run
    horovodrun -np 8 dualeval run
    mpirun -np 8 dualeval run
    srun -N2 --ntasks-per-node 4 dualeval run
    dualeval run --model resnet18 --weights ckpt.pt --data /data/imagenet/val
    """
    started = perf_counter()
    launcher, nproc, dry_run = flags.pop("launcher"), flags.pop("nproc"), flags.pop("dry_run")
    config = flags.pop("config")
    invocation = _Invocation(
        started=started,
        stop_signals=tuple(flags.pop("stop_signals").split(",")),
        **{
            name: flags.pop(name)
            for name in (
                *("out", "fresh", "backend", "allow_shared_gpu", "progress", "as_json"),
                *("schedule", "heartbeat_timeout", "forward_timeout", "replay", "mix_machines"),
            )
        },
    )
    job = Job.read(config, flags)
    detection = examine(os.environ, launcher)
    world = detection.place
    if dry_run:
        if world.is_main:
            click.echo(json.dumps(_dry_run(job, invocation, world, nproc), indent=2, ensure_ascii=False))
        return
    if world.is_main:
        for note in detection.notes:
            click.echo(f"dualeval: note: {note}", err=True)
    if nproc is not None:
        context.exit(_start_ranks(nproc, world, job, invocation, context.obj))
    context.exit(_evaluate(job, invocation, launcher))


def _dry_run(job: Job, invocation: _Invocation, world: World, nproc: int | None) -> dict[str, Any]:
    """Check a job as far as one process can, and return its options as they would be used."""
    import torch

    from dualeval.backends import choose_backend
    from dualeval.devices import device_here
    from dualeval.engine import numerics
    from dualeval.engine.evaluation_mode import set_evaluation_mode
    from dualeval.engine.folder.layout import check_path
    from dualeval.engine.trial import check_names
    from dualeval.local_ranks import last_rank

    # What every rank would find here.
    last = world if nproc is None else last_rank(nproc, world, invocation.backend)
    choose_backend(invocation.backend, last)
    device = device_here(job.device, nproc or 1, last, allow_shared_gpu=invocation.allow_shared_gpu)
    numerics.check_precision(job.precision, device)
    if invocation.out is not None:
        check_path(invocation.out)
    if job.download:
        _fetch(job)
    task = _make_task(job)
    # Whether weights fit the model, and the model the data, does not depend on the device.
    cpu = torch.device("cpu")
    with numerics.settings("fp32", cpu), numerics.autocast(job.precision, cpu):
        model = task.build_model(cpu)
    check_names(task.metrics(), task.rows or ())
    if world.is_main:
        for sentence in [*task.notes(), *set_evaluation_mode(model)]:
            click.echo(f"dualeval: note: {sentence}", err=True)
    own = own_cores()
    cores = share_of_cores(own, [own] * last.local_size)
    return {**_as_used(job, device.type, _workers(job, task, cores)), **task.options()}


def _as_used(job: Job, device: str, workers: int) -> dict[str, Any]:
    """The options as given, with what this machine decides where they are left open."""
    return {**job.to_json(), "device": job.device or device, "workers": workers}


def _start_ranks(
    nproc: int, world: World, job: Job, invocation: _Invocation, arguments: Sequence[str]
) -> int:
    """Start this same command, less --nproc, as ``nproc`` ranks of torchrun's or horovodrun's kind."""
    from dualeval.local_ranks import last_rank, start_ranks

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


def _evaluate(job: Job, invocation: _Invocation, launcher: str | None) -> int:
    """Evaluate as one rank; returns the exit code, the same on every rank."""
    session = Session(
        backend=invocation.backend,
        device=job.device,
        launcher=launcher,
        allow_shared_gpu=invocation.allow_shared_gpu,
        mix_machines=invocation.mix_machines,
        heartbeat_timeout=invocation.heartbeat_timeout,
        forward_timeout=invocation.forward_timeout,
        stop_signals=invocation.stop_signals,
    )
    return options.evaluate_and_show(
        session, lambda session: _run_engine(job, invocation, session), as_json=invocation.as_json
    )


def _run_engine(job: Job, invocation: _Invocation, session: Session) -> Result:
    from dualeval.engine.options import NEW_FOLDER
    from dualeval.report.progress import Progress
    from dualeval.report.screen import on_screen

    if job.download:
        _download(job, session)
    task = _make_task(job)
    workers = _workers(job, task, session.cores)
    stream = sys.stderr if invocation.as_json else sys.stdout
    shows = invocation.progress and session.world.is_main
    shown = Progress(stream, as_bar=on_screen(stream)) if shows else None
    try:
        return session.evaluate(
            task,
            out=NEW_FOLDER if invocation.out is None else invocation.out,
            batch_size=job.batch_size,
            limit=job.limit,
            precision=job.precision,
            workers=workers,
            fewer_workers=job.workers is None,
            on_error=job.on_error,
            schedule=invocation.schedule,
            fresh=invocation.fresh,
            replay=invocation.replay,
            mix_machines=invocation.mix_machines,
            job=_as_used(job, session.backend.device.type, workers),
            show=shown,
            started=invocation.started,
            last=True,
            puts_back=False,
        )
    finally:
        if shown is not None:
            shown.close()


def _download(job: Job, session: Session) -> None:
    if session.world.local_rank == 0:
        _fetch(job)
    session.control.meet()


def _fetch(job: Job) -> None:
    from dualeval.models import published

    if job.model and job.weights:
        published.download(job.model, job.weights)


def _make_task(job: Job) -> Task:
    own = job.own_options()
    data = None if job.data is None else Path(job.data)
    if job.task == "question-answering":
        from dualeval.tasks.question_answering import QuestionAnswering

        if job.model is None or data is None:
            raise UsageError(
                "--task question-answering needs --model DIR, a local folder with model and tokenizer, and "
                "--data FILE, questions in the JSON format of SQuAD."
            )
        return QuestionAnswering(
            model=Path(job.model),
            data=data,
            weights=job.weights,
            weights_key=job.weights_key,
            weights_prefix=job.weights_prefix,
            metrics=job.metric,
            batch_size=job.batch_size,
            **own,
        )
    from dualeval.tasks.image_classification import ImageClassification

    own.pop("download", None)
    return ImageClassification(
        model=job.model,
        weights=job.weights,
        weights_key=job.weights_key,
        weights_prefix=job.weights_prefix,
        data=data,
        num_classes=own.pop("num_classes", None),
        metrics=job.metric,
        data_fingerprint=own.pop("data_fingerprint", DATA_FINGERPRINTS[0]),
        preprocessing=own,
    )


def _workers(job: Job, task: Task, cores: int) -> int:
    if job.workers is not None:
        return job.workers
    if not task.wants_workers:
        return 0
    return min(_MOST_AUTOMATIC_WORKERS, cores)
