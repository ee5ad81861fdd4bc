"""How long a run takes beside its evaluation loop, against a bare script that evaluates nothing.

Start-up is the wall time of the whole command less ``timing.evaluate_s`` of its result: imports, data,
weights, joining the group, agreeing, reducing, rows in Parquet, the printed table, leaving. The bare script
imports torch, loads the same weights, joins a group of the same library under the same launcher, and ends.

Processor time cannot be split in this way, so it is taken from runs of one batch (``--limit 64``).

    python benchmarks/startup.py [--rounds N] [--command NAME]...
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    BIN,
    ONE_THREAD,
    ROOT,
    horovodrun,
    horovodrun_mpi,
    machine,
    median_ratio,
    missing,
    mpirun,
    run_process,
    spread,
    table,
    take_turns,
    torchrun,
    write_results,
)

WANTED = 1.25
_TIMEOUT_S = 120
_ONE_BATCH = ["--limit", "64"]
_SCRIPT = [str(ROOT / "benchmarks/bare_start.py"), str(ROOT / "dualeval/assets/fashion_cnn.safetensors")]
_BARE = {
    "python": [str(BIN / "python"), *_SCRIPT],
    "torchrun": torchrun(2, *_SCRIPT, "torch"),
    "horovodrun --gloo": horovodrun(2, *_SCRIPT, "horovod"),
    "horovodrun --mpi": horovodrun_mpi(2, *_SCRIPT, "horovod"),
    "mpirun, Horovod": mpirun(2, *_SCRIPT, "horovod"),
    "mpirun, mpi4py": mpirun(2, *_SCRIPT, "mpi"),
    "mpirun, torch": mpirun(2, *_SCRIPT, "torch-over-mpi"),
}
_DUALEVAL = [str(BIN / "dualeval"), "run"]
_MODULE = ["-m", "dualeval", "run"]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A way to start an evaluation."""

    command: list[str]  # starts it; up to --out
    bare: str  # name of the bare script's command that joins the same library's group in the same way
    ranks: int = 2  # number of processes
    backend: str = "torch"  # name of the backend
    over_mpi: bool = False  # whether mpirun starts the ranks


# By the words that a person types.
_EVALUATIONS = {
    "dualeval run": Evaluation(command=_DUALEVAL, bare="python", ranks=1),
    "torchrun -m dualeval run": Evaluation(command=torchrun(2, *_MODULE), bare="torchrun"),
    "dualeval run --nproc 2": Evaluation(command=[*_DUALEVAL, "--nproc", "2"], bare="torchrun"),
    "horovodrun --gloo dualeval run": Evaluation(
        command=horovodrun(2, *_MODULE), bare="horovodrun --gloo", backend="horovod"
    ),
    "dualeval run --nproc 2 --backend horovod": Evaluation(
        command=[*_DUALEVAL, "--nproc", "2", "--backend", "horovod"],
        bare="horovodrun --gloo",
        backend="horovod",
    ),
    "horovodrun --mpi dualeval run": Evaluation(
        command=horovodrun_mpi(2, *_MODULE), bare="horovodrun --mpi", backend="horovod", over_mpi=True
    ),
    **{
        f"mpirun dualeval run --backend {backend}": Evaluation(
            command=mpirun(2, *_MODULE, "--backend", backend),
            bare=f"mpirun, {library}",
            backend=backend,
            over_mpi=True,
        )
        for backend, library in (("horovod", "Horovod"), ("mpi", "mpi4py"), ("torch", "torch"))
    },
}


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start: seconds outside of the evaluation loop, and processor seconds of the whole."""

    startup_s: float
    cpu_s: float


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="two at least")
    parser.add_argument("--command", action="append", choices=_EVALUATIONS, help="only this; may be repeated")
    arguments = parser.parse_args()
    host = machine()
    chosen = {name: _EVALUATIONS[name] for name in arguments.command or _EVALUATIONS}
    absent = {
        name: reason
        for name, of in chosen.items()
        if (reason := missing(of.backend, over_mpi=of.over_mpi)) is not None
    }
    evaluations = {name: of for name, of in chosen.items() if name not in absent}
    entries: dict[str, Callable[[], Start]] = {
        f"bare {name}": partial(_bare, command)
        for name, command in _BARE.items()
        if any(of.bare == name for of in evaluations.values())
    }
    for name, of in evaluations.items():
        entries[name] = partial(_evaluation, of.command, [])
        entries[f"{name}, one batch"] = partial(_evaluation, of.command, _ONE_BATCH)
    take_turns(1, entries)  # brings the files into the page cache
    measured = take_turns(arguments.rounds, entries)
    body, ratios = _report(evaluations, measured, arguments.rounds)
    body += "".join(f"\nLeft out: `{name}`: {reason}.\n" for name, reason in absent.items())
    figures = {
        "ratios": ratios,
        "wanted_at_most": WANTED,
        "left_out": absent,
        "starts": {name: [asdict(start) for start in starts] for name, starts in measured.items()},
    }
    write_results("startup", "Start-up of `dualeval run` over a bare script's", body, figures, host)


def _bare(command: list[str]) -> Start:
    finished = run_process(command, timeout_s=_TIMEOUT_S, environ=ONE_THREAD)
    return Start(startup_s=finished.wall_s, cpu_s=finished.cpu_s)


def _evaluation(command: list[str], options: list[str]) -> Start:
    with tempfile.TemporaryDirectory(prefix="dualeval-startup-") as folder:
        out = Path(folder) / "out"
        finished = run_process(
            [*command, *options, "--out", str(out)], timeout_s=_TIMEOUT_S, environ=ONE_THREAD
        )
        result = json.loads((out / "result.json").read_text("utf-8"))
        assert result["chunks"]["resumed"] == 0, "the folder is new"
        assert (out / "predictions.parquet").exists(), "rows are part of the start-up measured here"
    return Start(startup_s=finished.wall_s - result["timing"]["evaluate_s"], cpu_s=finished.cpu_s)


def _report(
    evaluations: dict[str, Evaluation], measured: dict[str, list[Start]], rounds: int
) -> tuple[str, dict[str, Any]]:
    """The table, and the median ratios by command."""
    rows = []
    ratios: dict[str, Any] = {}
    for name, of in evaluations.items():
        bare, full = measured[f"bare {of.bare}"], measured[name]
        batch = measured[f"{name}, one batch"]
        walls, bare_walls = [s.startup_s for s in full], [s.startup_s for s in bare]
        cpus, bare_cpus = [s.cpu_s for s in batch], [s.cpu_s for s in bare]
        ratios[name] = {"wall": median_ratio(walls, bare_walls), "cpu": median_ratio(cpus, bare_cpus)}
        rows.append(
            [
                f"`{name}`",
                str(of.ranks),
                of.bare,
                f"{statistics.median(bare_walls):.2f}",
                f"{statistics.median(walls):.2f}",
                f"**{spread(walls, bare_walls)}**",
                f"{statistics.median(bare_cpus):.2f}",
                f"{statistics.median(cpus):.2f}",
                spread(cpus, bare_cpus),
            ]
        )
    head = [
        "command",
        "ranks",
        "bare script under",
        "bare s",
        "start-up s",
        "ratio",
        "bare CPU s",
        "CPU s",
        "CPU ratio",
    ]
    return (
        f"Wanted: a ratio of at most {WANTED}. Median of {rounds} rounds taken in turns, the middle half of "
        "the ratios in brackets; one thread a rank; embedded job, 10,000 images, `--out` a new folder. "
        "Start-up is wall time less `timing.evaluate_s`; CPU seconds are those of a run of one batch.\n\n"
        + table(head, rows)
    ), ratios


if __name__ == "__main__":
    main()
