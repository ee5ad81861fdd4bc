"""``dualeval bench``: how fast a job is with each mode, number of processes, precision and batch size."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import click

from dualeval.bench.figures import FAILED, MEASURED, NOT_HERE, NOT_RUN, with_figures
from dualeval.bench.page import SCHEMA_VERSION, csv_text, page, progress_line
from dualeval.bench.plan import (
    DATAPARALLEL,
    MODES,
    OF_RANKS,
    Cell,
    CellStart,
    cores_of_processes,
    order_of_round,
    plan_cells,
)
from dualeval.bench.plots import check_plots, draw
from dualeval.choices import CAST, PRECISIONS, check_choice, check_preparation
from dualeval.cli import node_facts
from dualeval.cli.bench_cell import run_cell
from dualeval.cli.grouped import grouped
from dualeval.cli.task_flags import TaskCommand, config_flag, job_flags, task_flags, whole_job_of
from dualeval.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, LaunchError, UsageError
from dualeval.job import COMMON, DATA, LAUNCH, MODEL, RUN, Job, start_of
from dualeval.launch import detect
from dualeval.launch.site import Site, default_ranks
from dualeval.launch.starts import child_environ, may_start_ranks, why_not
from dualeval.launch.supervise import Ended, Interrupted, Interrupts, ask, run_supervised
from dualeval.plugins import DEFAULT_TASK

if TYPE_CHECKING:
    import torch

_MEASURE = "Measure"
_PAGE, _CSV, _JSON = "bench.md", "bench.csv", "bench.json"
_GIB = 2**30
# How an error names the rank that met it.
_RANK = re.compile(r"^(rank \d+) on .+? \(pid \d+\): ")
_MAIN_FILE = Path(__file__).resolve().parent.parent / "__main__.py"


def _words(_context: click.Context, _parameter: click.Parameter, value: str | None) -> list[str] | None:
    """Words with commas between, each once."""
    return None if value is None else list(dict.fromkeys(word.strip() for word in value.split(",")))


def _counts(context: click.Context, parameter: click.Parameter, value: str | None) -> list[int] | None:
    words = _words(context, parameter, value)
    if words is None:
        return None
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise click.BadParameter(
            f"{value!r}: expected whole numbers of at least 1 with commas between, as 1,2"
        )
    return sorted(set(map(int, words)))


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What was asked for on the command line, beside the job."""

    mode: list[str] | None
    processes: list[int] | None
    precision: list[str] | None
    batch_size: list[int] | None
    rounds: int
    min_seconds: float
    warmup: int
    cores_per_process: int | None
    timeout_s: float
    train: bool
    plots: bool
    as_json: bool

    def __post_init__(self) -> None:
        for mode in self.mode or ():
            check_choice("--mode", mode, MODES)
        for precision in self.precision or ():
            check_choice("--precision", precision, PRECISIONS)
        if not math.isfinite(self.min_seconds):
            raise UsageError(f"--min-seconds {self.min_seconds:g}: expected a number of seconds")
        if math.isnan(self.timeout_s):
            raise UsageError(f"--timeout-s {self.timeout_s:g}: expected a number of seconds")
        if self.mode == [DATAPARALLEL] and self.processes == [1]:
            raise UsageError(
                f"--mode {DATAPARALLEL} --processes 1: it splits a batch over several GPUs, so "
                "there is nothing to measure. Give --processes 2 or more."
            )
        if self.plots:
            check_plots()


# Flags that decide nothing with --train.
_OF_EVALUATION = ("metric", "cluster", "on_error", "keep_batchnorm_fp32", "layout", "optimize")


@click.command(cls=TaskCommand, groups=(MODEL, DATA), last=(_MEASURE, RUN, LAUNCH))
@task_flags
@job_flags("metric", "limit", "sample", "seed", "cluster")
@grouped(
    "--mode",
    group=_MEASURE,
    callback=_words,
    metavar="WORDS",
    help=f"Some of {', '.join(MODES)}.  [default: all]",
)
@grouped(
    "--processes",
    group=_MEASURE,
    callback=_counts,
    metavar="N,N",
    help="Numbers of processes.  [default: 1, 2, one per GPU or core (4 at most)]",
)
@grouped(
    "--precision",
    group=_MEASURE,
    callback=_words,
    metavar="WORDS",
    help=f"Some of {', '.join(PRECISIONS)}.  [default: fp32]",
)
@grouped(
    "--batch-size",
    group=_MEASURE,
    callback=_counts,
    metavar="N,N",
    help="Samples per batch of each process.  [default: 64]",
)
@grouped("--train", group=_MEASURE, is_flag=True, help="Time training steps in place of evaluations.")
@grouped(
    "--rounds",
    group=_MEASURE,
    type=click.IntRange(min=1),
    default=5,
    metavar="N",
    help="Starts of each cell.  [default: 5]",
)
@grouped(
    "--min-seconds",
    group=_MEASURE,
    type=click.FloatRange(min=0, min_open=True),
    default=3.0,
    metavar="S",
    help="Measured in each start, at least.  [default: 3]",
)
@grouped(
    "--warmup",
    group=_MEASURE,
    type=click.IntRange(min=1),
    default=2,
    metavar="N",
    help="Batches per process before it is measured.  [default: 2]",
)
@grouped(
    "--cores-per-process",
    group=_MEASURE,
    type=click.IntRange(min=1),
    metavar="N",
    help="Cores of each process.  [default: cores / most processes]",
)
@grouped(
    "--timeout-s",
    group=_MEASURE,
    type=click.FloatRange(min=1),
    default=600.0,
    metavar="S",
    help="Time limit of each start.  [default: 600]",
)
@grouped("--plots/--no-plots", group=_MEASURE, default=True, help="Draw speed-up against processes.")
@config_flag
@job_flags("keep_batchnorm_fp32", "layout", "optimize", "on_error", "device", "workers")
@grouped(
    "--out",
    group=RUN,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="A new or empty folder.  [default: runs/bench-TIME]",
)
@grouped("--json", "as_json", group=RUN, is_flag=True, help="Print bench.json, and nothing else.")
@grouped("--dry-run", group=RUN, is_flag=True, help="Check the job, list the cells; measure nothing.")
@click.option("--cell", hidden=True)
@click.option("--launcher", hidden=True)
@click.pass_context
def bench(context: click.Context, /, **flags: Any) -> None:
    """Measure images/s, speed-up and memory of a job by mode, processes, precision and batch size.

    \b
    dualeval bench
    dualeval bench --model resnet50 --weights random:0 --data DIR --processes 1,2,4,8 --batch-size 64,256
    dualeval bench --precision fp32,amp-bf16 --mode single,torch
    dualeval bench --train --model resnet18 --weights random:0 --data DIR

    Options of the job are those of 'dualeval run'. Type it once, not under a launcher: it starts the
    processes itself.
    """
    if flags["cell"] is not None:
        start = CellStart(**json.loads(flags["cell"]))
        job = whole_job_of(
            {**flags, "batch_size": start.batch_size, "precision": start.precision}, "dualeval bench"
        )
        context.exit(run_cell(job, start, flags["launcher"], [sys.executable, str(_MAIN_FILE), *context.obj]))
    if unused := start_of(flags["config"]):
        click.echo(
            f"dualeval: note: {' and '.join(sorted(unused))} in {flags['config']} is of 'dualeval run'; here "
            "it is --out and --processes",
            err=True,
        )
    asked = _Asked(**{name: flags[name] for name in _Asked.__dataclass_fields__})
    _check_place(flags["launcher"])
    job = whole_job_of(
        {**flags, **{name: (flags[name] or [None])[0] for name in ("batch_size", "precision")}},
        "dualeval bench",
    )
    for size in asked.batch_size or ():
        COMMON["batch_size"].check(size)
    if asked.train and job.task != DEFAULT_TASK:
        raise UsageError(
            f"--train times --task {DEFAULT_TASK}, and the task is {job.task}. Leave out --train."
        )
    if asked.train and (of_evaluation := [name for name in _OF_EVALUATION if flags[name]]):
        words = ", ".join(f"--{name.replace('_', '-')}" for name in of_evaluation)
        raise UsageError(
            f"{words}: no meaning with --train, which has no metrics, skips no sample and trains the model "
            "as it is built. Leave it out."
        )
    _check_precisions(asked, job)
    if flags["dry_run"] and flags["as_json"]:
        raise UsageError(
            "--json prints what was measured, and --dry-run measures nothing: leave out one of them."
        )
    started = datetime.now(timezone.utc)
    folder = (flags["out"] or Path("runs", f"bench-{started:%Y%m%dT%H%M%S}")).absolute()
    _check_folder(folder)
    with Interrupts() as interrupts:
        try:
            measuring = _prepare(asked, job, folder, interrupts, context.obj, started)
        except Interrupted as error:
            click.echo(f"dualeval: interrupted by {error}; nothing was measured", err=True)
            context.exit(EXIT_STOPPED)
        if flags["dry_run"]:
            for cell in measuring.cells:
                click.echo(f"{cell['label']}{'' if cell['reason'] is None else ': ' + cell['reason']}")
            return
        report = measuring.run()
    context.exit(_finish(report, folder, asked))


def _check_folder(folder: Path) -> None:
    """Refuse a folder for the report that has something in it, or cannot be written; makes none."""
    if folder.is_dir():
        if any(folder.iterdir()):
            raise UsageError(f"--out {folder}: this folder is not empty. Give a new or an empty one.")
        nearest = folder
    elif os.path.lexists(folder):
        raise UsageError(f"--out {folder}: this is no folder. Give a new or an empty one.")
    else:
        nearest = next(parent for parent in folder.parents if os.path.lexists(parent))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        why = "cannot be written" if nearest.is_dir() else "is no folder"
        raise UsageError(f"--out {folder}: {nearest} {why}. Give a folder of your own.")


def _check_precisions(asked: _Asked, job: Job) -> None:
    """Check that each precision goes with the other options.

    Raises:
        UsageError: one does not.
    """
    for precision in asked.precision or [job.precision]:
        check_preparation(
            precision=precision,
            keep_batchnorm_fp32=job.keep_batchnorm_fp32,
            optimize=job.optimize,
            dashes=True,
        )
        if asked.train and precision in CAST:
            raise UsageError(
                f"--train --precision {precision}: a training keeps its weights in float32, as the steps of "
                f"an optimiser are lost in half precision. Give --precision amp-{precision}, or leave out "
                "--train."
            )


def _check_place(launcher: str | None) -> None:
    """Refuse to be one of several ranks, each of which would start all cells."""
    world = detect(os.environ, launcher)
    if not may_start_ranks(world):
        raise LaunchError(
            f"{world.launcher} started this process as rank {world.rank} of {world.size}, and 'dualeval "
            "bench' starts its processes itself. Type it by itself, without a launcher before it."
        )


def _finish(report: Mapping[str, Any], folder: Path, asked: _Asked) -> int:
    """Write and show what was measured; returns the exit code."""
    from dualeval.result import write_text

    pictures = draw(report, folder) if asked.plots else []
    text = page(report, pictures)
    write_text(folder / _PAGE, text)
    write_text(folder / _CSV, csv_text(report))
    if asked.as_json:
        click.echo(_text(report), nl=False)
    else:
        click.echo(f"\n{text}\n{folder / _PAGE}")
    if report["interrupted"]:
        return EXIT_STOPPED
    outcomes = {cell["outcome"] for cell in report["cells"]}
    return EXIT_DONE if MEASURED in outcomes and FAILED not in outcomes else EXIT_FAILED


# -- before the first start ----------------------------------------------------------------------------


def _prepare(
    asked: _Asked,
    job: Job,
    folder: Path,
    interrupts: Interrupts,
    words: Sequence[str],
    started: datetime,
) -> _Measuring:
    """Check the job, look at the machine, and list the cells.

    Raises:
        UsageError: the job cannot be evaluated, or there is no such device.
        Interrupted: a signal has come.
    """
    from dualeval.devices import device_here
    from dualeval.world import World

    environ = child_environ(os.environ, str(Path(sys.executable).parent))
    # This machine alone, also in a job of Slurm.
    environ.pop("SLURM_JOB_ID", None)
    device = device_here(job.device, 1, World.alone())
    description = _described(job)

    def run(command: Sequence[str], limit_s: float) -> tuple[int | None, str, str]:
        return ask(command, environ, limit_s, interrupts.check)

    site, [facts] = node_facts.find_site(environ, node_facts.dualeval_words(), run)
    processes = asked.processes or default_ranks(site, device.type)
    cores = asked.cores_per_process or cores_of_processes(processes, site.nodes[0].cores)
    cells = plan_cells(
        asked.mode or MODES,
        processes,
        asked.precision or [job.precision],
        asked.batch_size or [job.batch_size],
        _reasons(job, site, device, cores),
    )
    settings = {
        **{name: getattr(asked, name) for name in ("train", "rounds", "min_seconds", "warmup")},
        "cores": cores,
        "device": device.type,
    }
    return _Measuring(
        folder=folder,
        environ=environ,
        interrupts=interrupts,
        command=[sys.executable, str(_MAIN_FILE), *words],
        timeout_s=asked.timeout_s,
        to_error=asked.as_json,
        header={
            "schema_version": SCHEMA_VERSION,
            "when": f"{started:%Y-%m-%d %H:%M} UTC",
            "command": shlex.join(["dualeval", *words]),
            "settings": settings,
            "job": {"model": description.get("model", job.task), "description": description},
            "machine": _machine(facts),
            "versions": node_facts.versions_of([facts]),
        },
        cells=[
            {
                **asdict(cell),
                "label": cell.label,
                "outcome": NOT_RUN if cell.reason is None else NOT_HERE,
                "measurements": [],
                "figures": None,
            }
            for cell in cells
        ],
    )


def _described(job: Job) -> dict[str, str]:
    """Build the task once, so that a mistake in the job is one error and not that of each cell."""
    import torch

    from dualeval.engine import numerics

    if fetch := getattr(job.options, "fetch", None):
        fetch()
    task = job.make_task()
    cpu = torch.device("cpu")
    with numerics.settings("fp32", cpu):
        task.build_model(cpu)
    return dict(task.description())


def _reasons(job: Job, site: Site, device: torch.device, cores: int) -> Callable[[Cell], str | None]:
    """What says why a cell cannot be measured on this machine."""
    from dualeval.devices import device_here
    from dualeval.engine.numerics import check_precision
    from dualeval.world import World

    usable, gpus = site.nodes[0].cores, site.nodes[0].gpus

    def why(cell: Cell) -> str | None:
        try:
            check_precision(cell.precision, device)
            if cell.mode != DATAPARALLEL:
                device_here(job.device, cell.processes, World.alone())
        except UsageError as error:
            return str(error)
        if cell.mode == DATAPARALLEL and (device.type == "cpu" or gpus < cell.processes):
            return (
                f"nn.DataParallel splits a batch over GPUs: {cell.processes} were asked for, {gpus} are here"
            )
        if cell.processes * cores > usable:
            return (
                f"{cell.processes} processes with {cores} core{'' if cores == 1 else 's'} each are more than "
                f"the {usable} cores here"
            )
        if cell.mode in OF_RANKS:
            return why_not("nproc", cell.mode, cell.processes, device.type, site)
        return None

    return why


def _machine(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The machine, without its name."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB
    return {
        **{name: facts[name] for name in ("cpu", "cpu_capability", "cores", "gpus", "driver")},
        "memory_gib": round(memory, 1),
        "system": facts["versions"]["system"],
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


# -- measuring -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Measuring:
    """Cells, how each is started, and what was measured of them."""

    folder: Path
    environ: Mapping[str, str]
    interrupts: Interrupts
    command: Sequence[str]
    timeout_s: float
    to_error: bool
    header: Mapping[str, Any]
    cells: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> dict[str, Any]:
        """Measure round by round; bench.json has each figure as soon as it is known. Returns its content."""
        try:
            (self.folder / "logs").mkdir(parents=True)
        except OSError as error:  # a file system that refuses what its permissions allow
            raise UsageError(
                f"--out {self.folder}: it cannot be made ({error.strerror}). Give a folder of your own."
            ) from error
        interrupted = True
        try:
            for number in range(self.header["settings"]["rounds"]):
                for place in order_of_round(len(self.cells), number):
                    if self.cells[place]["outcome"] in (NOT_RUN, MEASURED):
                        self._measure(self.cells[place], number)
                        self._write(interrupted=True)
            interrupted = False
        except Interrupted as error:
            click.echo(
                f"dualeval: interrupted by {error}; what was measured until then is reported", err=True
            )
        if not any((self.folder / "logs").iterdir()):
            (self.folder / "logs").rmdir()
        return self._write(interrupted=interrupted)

    def _write(self, *, interrupted: bool) -> dict[str, Any]:
        from dualeval.result import write_text

        self.cells[:] = with_figures(self.cells)
        report = {**self.header, "cells": self.cells, "interrupted": interrupted}
        write_text(self.folder / _JSON, _text(report))
        return report

    def _measure(self, cell: dict[str, Any], number: int) -> None:
        """Start a cell once, and note what was measured, or why it failed."""
        logs = self.folder / "logs"
        name = f"{cell['mode']}-{cell['processes']}-{cell['precision']}-{cell['batch_size']}-{number + 1}"
        out, err, to = (logs / f"{name}.{kind}" for kind in ("out", "err", "json"))
        settings = self.header["settings"]
        start = CellStart(
            **{key: cell[key] for key in ("mode", "processes", "precision", "batch_size")},
            **{key: settings[key] for key in ("cores", "min_seconds", "warmup", "train")},
            begun=monotonic(),
            to=str(to),
        )
        ended = run_supervised(
            [*self.command, "--cell", json.dumps(start.to_json())],
            stdout=out,
            stderr=err,
            environ=self.environ,
            timeout_s=self.timeout_s,
            check=self.interrupts.check,
        )
        if ended.code == EXIT_DONE and to.exists():
            measured = json.loads(to.read_text("utf-8"))
            # Alike for all cells, but for the line on batch size and precision.
            described = {**measured.pop("description"), "job": ""}
            self.header["job"]["description"].update({k: v for k, v in described.items() if v})
            cell["measurements"].append({"round": number, **measured})
            cell["outcome"] = MEASURED
            for file in (out, err, to):
                file.unlink()
            said = progress_line(cell)
        else:
            # Not tried again: it would fail in each round.
            cell["outcome"], cell["reason"] = FAILED, self._why(ended, err)
            said = f"failed: {cell['reason']}"
        rounds = settings["rounds"]
        click.echo(f"round {number + 1}/{rounds}  {cell['label']}  {said}", err=self.to_error)

    def _why(self, ended: Ended, err: Path) -> str:
        if ended.code is None:
            return f"it did not end within {self.timeout_s:g} s"
        lines = [line for line in err.read_text("utf-8", "replace").splitlines() if line.strip()]
        errors = [line.partition("dualeval: error: ")[2] for line in lines if "dualeval: error: " in line]
        # Tables are shared: without the name of the host.
        return _RANK.sub(r"\1: ", (errors or lines[-1:] or [f"exit code {ended.code}"])[0])


def _text(report: Mapping[str, Any]) -> str:
    return json.dumps(report, indent=2, ensure_ascii=False) + "\n"
