"""``dualeval bench``: how fast a job is with each mode, number of processes, precision and batch size."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import click

from dualeval.atomic_files import write_text
from dualeval.cli.options import PATH, grouped
from dualeval.cli.task_flags import TaskCommand, config_flag, job_flags, task_flags, whole_job_of
from dualeval.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, UsageError
from dualeval.launch.site import Site, default_ranks
from dualeval.launch.ways import child_environ, why_not
from dualeval.messages import counted
from dualeval.options.choices import check_choice
from dualeval.options.evaluation import DATA, LAUNCH, MODEL, RUN
from dualeval.options.job import COMMON, Job, start_of
from dualeval.options.plugins import DEFAULT_TASK
from dualeval.options.precision import FP32, PRECISIONS
from dualeval.result import json_text
from dualeval.tools import node_facts, starts
from dualeval.tools.bench.cell import (
    DATAPARALLEL,
    MODES,
    OF_RANKS,
    OWN_COMMAND,
    Cell,
    CellStart,
    cores_of_processes,
    order_of_round,
    plan_cells,
)
from dualeval.tools.bench.page import (
    MEASURED,
    SCHEMA_VERSION,
    check_plots,
    draw,
    page,
    progress_line,
    with_figures,
)

if TYPE_CHECKING:
    import torch


_MEASURE = "Measure"
_measured = partial(grouped, group=_MEASURE)
_WORDS: dict[str, Any] = {"callback": starts.words_of, "metavar": "WORDS"}
_COUNTS: dict[str, Any] = {"callback": starts.counts_of, "metavar": "N,N"}
_COUNT: dict[str, Any] = {"type": click.IntRange(min=1), "metavar": "N"}
_PAGE = "bench.md"
# Flags that decide nothing with --train.
_OF_EVALUATION = ("metric", "cluster", "on_error", "keep_batchnorm_fp32", "layout", "optimize")


@click.command(cls=TaskCommand, groups=(MODEL, DATA), last=(_MEASURE, RUN, LAUNCH))
@task_flags
@job_flags("metric", "limit", "sample", "seed", "cluster")
@_measured("--mode", **_WORDS, help=f"Some of {', '.join(MODES)}.  [default: all]")
@_measured(
    "--processes", **_COUNTS, help="Numbers of processes.  [default: 1, 2, one per GPU or core (4 at most)]"
)
@_measured("--precision", **_WORDS, help=f"Some of {', '.join(PRECISIONS)}.  [default: fp32]")
@_measured("--batch-size", **_COUNTS, help="Samples per batch of each process.  [default: 64]")
@_measured("--train", is_flag=True, help="Time training steps in place of evaluations.")
@_measured("--rounds", **_COUNT, default=5, help="Starts per cell.  [default: 5]")
@_measured(
    "--min-seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=3.0,
    metavar="S",
    help="Minimum measured time of each start.  [default: 3]",
)
@_measured("--warmup", **_COUNT, default=2, help="Batches per process before it is measured.  [default: 2]")
@_measured("--cores-per-process", **_COUNT, help="Cores of each process.  [default: cores / most processes]")
@_measured(
    "--timeout-s",
    type=click.FloatRange(min=1),
    default=600.0,
    metavar="S",
    help="Time limit of each start.  [default: 600]",
)
@_measured("--plots/--no-plots", default=True, help="Draw speed-up against processes.")
@config_flag
@job_flags("keep_batchnorm_fp32", "layout", "optimize", "on_error", "device", "workers")
@grouped(
    "--out", group=RUN, type=PATH, metavar="DIR", help="A new or empty folder.  [default: runs/bench-TIME]"
)
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
        from dualeval.tools.bench.measuring import run_cell

        context.exit(run_cell(job, start, flags["launcher"], [*OWN_COMMAND, *context.obj]))
    if unused := start_of(flags["config"]):
        click.echo(
            f"dualeval: note: {' and '.join(sorted(unused))} in {flags['config']}: not for 'dualeval bench', "
            "which takes --out and --processes",
            err=True,
        )
    for mode in flags["mode"] or ():
        check_choice("--mode", mode, MODES)
    for precision in flags["precision"] or ():
        check_choice("--precision", precision, tuple(PRECISIONS))
    if (flags["mode"], flags["processes"]) == ([DATAPARALLEL], [1]):
        raise UsageError(
            f"--mode {DATAPARALLEL} --processes 1: it splits a batch over several GPUs, so there is nothing "
            "to measure. Give --processes 2 or more."
        )
    if flags["plots"]:
        check_plots()
    starts.check_no_rank(
        flags["launcher"],
        "'dualeval bench' starts its processes itself. Type it by itself, without a launcher before it.",
    )
    job = whole_job_of(
        {**flags, **{name: (flags[name] or [None])[0] for name in ("batch_size", "precision")}},
        "dualeval bench",
    )
    for size in flags["batch_size"] or ():
        COMMON["batch_size"].check(size)
    if flags["train"]:
        _check_training(job, flags)
    for precision in flags["precision"] or [job.precision]:
        replace(job, precision=precision)  # checks what goes with it
    folder, when = starts.new_folder(flags["out"], "bench")
    with starts.Interrupts() as interrupts:
        try:
            cells = prepare(flags, job, folder, when, interrupts, context.obj)
        except starts.Interrupted as error:
            click.echo(f"dualeval: interrupted by {error}; nothing was measured", err=True)
            context.exit(EXIT_STOPPED)
        if flags["dry_run"]:
            for cell in cells.cells:
                click.echo(f"{cell['label']}{'' if cell['reason'] is None else ': ' + cell['reason']}")
            return
        report = cells.run()
    context.exit(_finish(report, folder, plots=flags["plots"]))


def _check_training(job: Job, flags: Mapping[str, Any]) -> None:
    """Check that the job is one whose training steps can be timed."""
    if job.task != DEFAULT_TASK:
        raise UsageError(
            f"--train times --task {DEFAULT_TASK}, and the task is {job.task}. Leave out --train."
        )
    if of_evaluation := [name for name in _OF_EVALUATION if flags[name]]:
        words = ", ".join(f"--{name.replace('_', '-')}" for name in of_evaluation)
        raise UsageError(
            f"{words}: not for --train, which has no metrics, skips no sample and trains the model as it is "
            "built. Leave it out."
        )
    for precision in [PRECISIONS[name] for name in flags["precision"] or [job.precision]]:
        if precision.cast is not None:
            raise UsageError(
                f"--train {precision.flag}: a training keeps its weights in float32, as the steps of an "
                f"optimiser are lost in half precision. Give {precision.flag_of_autocast}, or leave out "
                "--train."
            )


def _finish(report: Mapping[str, Any], folder: Path, *, plots: bool) -> int:
    """Write and show what was measured; returns the exit code."""
    pictures = draw(report, folder) if plots else []
    text = page(report, pictures)
    write_text(folder / _PAGE, text)
    click.echo(f"\n{text}\n{folder / _PAGE}")
    if report["interrupted"]:
        return EXIT_STOPPED
    outcomes = {cell["outcome"] for cell in report["cells"]}
    return EXIT_DONE if MEASURED in outcomes and starts.FAILED not in outcomes else EXIT_FAILED


JSON = "bench.json"
_GIB = 2**30
# How an error names the rank that met it.
_RANK = re.compile(r"^(rank \d+) on .+? \(pid \d+\): ")


def prepare(
    flags: Mapping[str, Any],
    job: Job,
    folder: Path,
    when: str,
    interrupts: starts.Interrupts,
    words: Sequence[str],
) -> _Cells:
    """Check the job, look at the machine, and list the cells."""
    from dualeval.world import World
    from dualeval.world.devices import device_here

    environ = child_environ(os.environ, str(Path(sys.executable).parent))
    # This machine alone, also in a job of Slurm.
    environ.pop("SLURM_JOB_ID", None)
    device = device_here(job.device, 1, World.alone())
    description = _description_of(job)
    site, [facts] = node_facts.find_site(environ, interrupts.check)
    processes = flags["processes"] or default_ranks(site, device.type)
    cores = flags["cores_per_process"] or cores_of_processes(processes, site.nodes[0].cores)
    cells = plan_cells(
        flags["mode"] or MODES,
        processes,
        flags["precision"] or [job.precision],
        flags["batch_size"] or [job.batch_size],
        _reasons(job, site, device, cores),
    )
    return _Cells(
        folder=folder,
        environ=environ,
        interrupts=interrupts,
        command=[*OWN_COMMAND, *words],
        timeout_s=flags["timeout_s"],
        header={
            "schema_version": SCHEMA_VERSION,
            "when": when,
            "command": shlex.join(["dualeval", *words]),
            "settings": {
                **{name: flags[name] for name in ("train", "rounds", "min_seconds", "warmup")},
                "cores": cores,
                "device": device.type,
            },
            "job": {"model": description.get("model", job.task), "description": description},
            "machine": _machine(facts),
            "versions": node_facts.versions_of([facts]),
        },
        cells=[
            {
                **asdict(cell),
                "label": cell.label,
                "outcome": starts.NOT_RUN if cell.reason is None else starts.NOT_HERE,
                "measurements": [],
                "figures": None,
            }
            for cell in cells
        ],
    )


def _description_of(job: Job) -> dict[str, str]:
    """Build the task once, so that a mistake in the job is one error and not that of each cell."""
    import torch

    from dualeval.engine.device import numerics

    if fetch := getattr(job.options, "fetch", None):
        fetch()
    task = job.make_task()
    cpu = torch.device("cpu")
    with numerics.settings(FP32, cpu):
        task.build_model(cpu)
    return dict(task.description())


def _reasons(job: Job, site: Site, device: torch.device, cores: int) -> Callable[[Cell], str | None]:
    """What says why a cell cannot be measured on this machine."""
    from dualeval.world import World
    from dualeval.world.devices import device_here

    usable, gpus = site.nodes[0].cores, site.nodes[0].gpus

    def why(cell: Cell) -> str | None:
        try:
            PRECISIONS[cell.precision].check(device)
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
                f"{cell.processes} processes with {counted(cores, 'core')} each are more than "
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


@dataclass(frozen=True, kw_only=True)
class _Cells(starts.Starts):
    """Cells, how each is started, and what was measured of them."""

    command: Sequence[str]
    header: Mapping[str, Any]
    cells: list[dict[str, Any]]

    def run(self) -> dict[str, Any]:
        """Measure round by round; bench.json has each figure as soon as it is known. Returns its content."""
        interrupted = self.in_order(self._each(), "measured")
        if not any((self.folder / "logs").iterdir()):
            (self.folder / "logs").rmdir()
        return self._write(interrupted=interrupted)

    def _each(self) -> Iterator[None]:
        for number in range(self.header["settings"]["rounds"]):
            for index in order_of_round(len(self.cells), number):
                if self.cells[index]["outcome"] in (starts.NOT_RUN, MEASURED):
                    self._measure(self.cells[index], number)
                    self._write(interrupted=True)
                    yield

    def _write(self, *, interrupted: bool) -> dict[str, Any]:
        self.cells[:] = with_figures(self.cells)
        report = {**self.header, "cells": self.cells, "interrupted": interrupted}
        write_text(self.folder / JSON, json_text(report))
        return report

    def _measure(self, cell: dict[str, Any], number: int) -> None:
        """Start a cell once, and note what was measured, or why it failed."""
        name = f"{cell['mode']}-{cell['processes']}-{cell['precision']}-{cell['batch_size']}-{number + 1}"
        out, err, to = (self.log(name, kind) for kind in ("out", "err", "json"))
        settings = self.header["settings"]
        start = CellStart(
            **{key: cell[key] for key in ("mode", "processes", "precision", "batch_size")},
            **{key: settings[key] for key in ("cores", "min_seconds", "warmup", "train")},
            begun=monotonic(),
            to=str(to),
        )
        ended = self.start([*self.command, "--cell", json.dumps(asdict(start))], name)
        if ended.code == EXIT_DONE and to.exists():
            measured = json.loads(to.read_text("utf-8"))
            # Alike for all cells, but for the line on batch size and precision.
            described = {**measured.pop("description"), "job": ""}
            self.header["job"]["description"].update({k: v for k, v in described.items() if v})
            cell["measurements"].append({"round": number, **measured})
            cell["outcome"] = MEASURED
            for file in (out, err, to):
                file.unlink()
            line = progress_line(cell)
        else:
            # Not tried again: it would fail in each round.
            cell["outcome"], cell["reason"] = starts.FAILED, _why(ended, err)
            line = f"failed: {cell['reason']}"
        click.echo(f"round {number + 1}/{settings['rounds']}  {cell['label']}  {line}")


def _why(ended: starts.Ended, err: Path) -> str:
    if ended.code is None:
        return ended.how
    lines = [line for line in err.read_text("utf-8", "replace").splitlines() if line.strip()]
    errors = [line.partition("dualeval: error: ")[2] for line in lines if "dualeval: error: " in line]
    # Tables are shared: without the name of the host.
    return _RANK.sub(r"\1: ", (errors or lines[-1:] or [ended.how])[0])
