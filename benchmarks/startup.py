"""How long a run takes beside its evaluation loop, against a bare script that evaluates nothing.

Start-up is the wall time of the whole command less ``timing.evaluate_s`` of its result: imports, data,
weights, joining the group, agreeing, reducing, rows in Parquet, the printed table, leaving. The bare script
imports torch, loads the same weights, joins the same group, and ends.

Processor time cannot be split in this way, so it is taken from runs of one batch (``--limit 64``).

    python benchmarks/startup.py [--rounds N]
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
    machine,
    median_ratio,
    run_process,
    spread,
    table,
    take_turns,
    torchrun,
    write_results,
)

WANTED = 1.25
_TIMEOUT_S = 120
_BARE = [str(ROOT / "benchmarks/bare_start.py"), str(ROOT / "dualeval/assets/fashion_cnn.safetensors")]
_BARE_COMMANDS = {1: [str(BIN / "python"), *_BARE], 2: torchrun(2, *_BARE)}
# By the words that a person types: number of processes, and the command up to --out.
_COMMANDS = {
    "dualeval run": (1, [str(BIN / "dualeval"), "run"]),
    "torchrun -m dualeval run": (2, torchrun(2, "-m", "dualeval", "run")),
    "dualeval run --nproc 2": (2, [str(BIN / "dualeval"), "run", "--nproc", "2"]),
}
_ONE_BATCH = ["--limit", "64"]


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start: seconds outside of the evaluation loop, and processor seconds of the whole."""

    startup_s: float
    cpu_s: float


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    host = machine()
    entries: dict[str, Callable[[], Start]] = {}
    for size, command in _BARE_COMMANDS.items():
        entries[f"bare {size}"] = partial(_bare, command)
    for name, (_, command) in _COMMANDS.items():
        entries[name] = partial(_evaluation, command, [])
        entries[f"{name}, one batch"] = partial(_evaluation, command, _ONE_BATCH)
    take_turns(1, entries)  # brings the files into the page cache
    measured = take_turns(rounds, entries)
    body, ratios = _report(measured)
    print(body)
    figures = {
        "ratios": ratios,
        "wanted_at_most": WANTED,
        "starts": {name: [asdict(start) for start in starts] for name, starts in measured.items()},
    }
    page = write_results("startup", "Start-up of `dualeval run` over a bare script's", body, figures, host)
    print(f"written to {page}")


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


def _report(measured: dict[str, list[Start]]) -> tuple[str, dict[str, Any]]:
    """The table, and the median ratios by command."""
    rows = []
    ratios: dict[str, Any] = {}
    for name, (size, _) in _COMMANDS.items():
        bare, full = measured[f"bare {size}"], measured[name]
        batch = measured[f"{name}, one batch"]
        walls, bare_walls = [s.startup_s for s in full], [s.startup_s for s in bare]
        cpus, bare_cpus = [s.cpu_s for s in batch], [s.cpu_s for s in bare]
        ratios[name] = {"wall": median_ratio(walls, bare_walls), "cpu": median_ratio(cpus, bare_cpus)}
        rows.append(
            [
                f"`{name}`",
                str(size),
                f"{statistics.median(bare_walls):.2f}",
                f"{statistics.median(walls):.2f}",
                f"**{spread(walls, bare_walls)}**",
                f"{statistics.median(bare_cpus):.2f}",
                f"{statistics.median(cpus):.2f}",
                spread(cpus, bare_cpus),
            ]
        )
    head = ["command", "ranks", "bare s", "start-up s", "ratio", "bare CPU s", "CPU s", "CPU ratio"]
    rounds = len(measured["bare 1"])
    return (
        f"Wanted: a ratio of at most {WANTED}. Median of {rounds} rounds taken in turns, the middle half of "
        "the ratios in brackets; one thread a rank; embedded job, 10,000 images, `--out` a new folder. "
        "Start-up is wall time less `timing.evaluate_s`; CPU seconds are those of a run of one batch.\n\n"
        + table(head, rows)
    ), ratios


if __name__ == "__main__":
    main()
