"""The cells of a ``dualeval bench``: which can be measured on this machine, and their starts, one by one."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import click

from dualeval.errors import EXIT_DONE, UsageError
from dualeval.launch.site import Site, default_ranks
from dualeval.launch.starts import child_environ, why_not
from dualeval.options.job import Job
from dualeval.result import json_text
from dualeval.tools import node_facts
from dualeval.tools.bench.cell import OWN_COMMAND
from dualeval.tools.bench.page import MEASURED, SCHEMA_VERSION, progress_line, with_figures
from dualeval.tools.bench.plan import (
    DATAPARALLEL,
    MODES,
    OF_RANKS,
    Cell,
    CellStart,
    cores_of_processes,
    order_of_round,
    plan_cells,
)
from dualeval.tools.trials import FAILED, NOT_HERE, NOT_RUN, Ended, Interrupts, Trials
from dualeval.whole_files import write_text
from dualeval.wording import counted

if TYPE_CHECKING:
    import torch

JSON = "bench.json"
_GIB = 2**30
# How an error names the rank that met it.
_RANK = re.compile(r"^(rank \d+) on .+? \(pid \d+\): ")


def prepare(
    flags: Mapping[str, Any], job: Job, folder: Path, when: str, interrupts: Interrupts, words: Sequence[str]
) -> Cells:
    """Check the job, look at the machine, and list the cells."""
    from dualeval.world import World
    from dualeval.world.devices import device_here

    environ = child_environ(os.environ, str(Path(sys.executable).parent))
    # This machine alone, also in a job of Slurm.
    environ.pop("SLURM_JOB_ID", None)
    device = device_here(job.device, 1, World.alone())
    description = _described(job)
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
    return Cells(
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
    from dualeval.engine.numerics import check_precision
    from dualeval.world import World
    from dualeval.world.devices import device_here

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
class Cells(Trials):
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
                if self.cells[index]["outcome"] in (NOT_RUN, MEASURED):
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
            said = progress_line(cell)
        else:
            # Not tried again: it would fail in each round.
            cell["outcome"], cell["reason"] = FAILED, _why(ended, err)
            said = f"failed: {cell['reason']}"
        click.echo(f"round {number + 1}/{settings['rounds']}  {cell['label']}  {said}")


def _why(ended: Ended, err: Path) -> str:
    if ended.code is None:
        return ended.how
    lines = [line for line in err.read_text("utf-8", "replace").splitlines() if line.strip()]
    errors = [line.partition("dualeval: error: ")[2] for line in lines if "dualeval: error: " in line]
    # Tables are shared: without the name of the host.
    return _RANK.sub(r"\1: ", (errors or lines[-1:] or [ended.how])[0])
