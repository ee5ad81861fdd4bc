"""Images per second of the engine against a bare loop.

In one process, the evaluation loop of a whole run (``timing.evaluate_s``: all metrics, journal and rows
included) and the bare loop of ``loops.py`` take turns; the ratio is the median over the pairs. ``peers.py``
has the comparison with other libraries, at 1 and 2 processes.

    python benchmarks/overhead.py [--pairs N]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from time import process_time

import loops
import torch
from common import machine, median_ratio, spread, table, take_turns, write_results
from engine import Engine
from problems import Problem, fashion_cnn, resnet18

WANTED = {"fashion-cnn": 0.95, "resnet18": 0.98}
_RESNET_IMAGES, _RESNET_BATCH = 96, 32


def evaluate(problem: Problem, engine: Engine, folder: Path) -> tuple[float, float]:
    """Run the engine; wall and processor seconds of its loop. An earlier run in ``folder`` is removed."""
    reported_cpu_s = 0.0

    def show(done: int, total: int) -> None:
        # The engine's last report, after the last flush, ends the loop.
        nonlocal reported_cpu_s
        reported_cpu_s = process_time()

    watch = problem.start()
    options = {"out": folder, "batch_size": problem.batch_size, "workers": 0, "fresh": True}
    result = engine.evaluate(problem.task(), {"show": show}, **options)
    assert result.chunks["resumed"] == 0, "the folder was emptied"
    assert watch.began is not None, "no problem is empty"
    return result.timing["evaluate_s"], reported_cpu_s - watch.began[1]


def against_bare(problem: Problem, pairs: int) -> dict[str, dict[str, list[float]]]:
    """By loop: wall and processor seconds, a value a pair."""
    engine = Engine()
    with tempfile.TemporaryDirectory(prefix="dualeval-overhead-") as folder:

        def ours() -> tuple[float, float]:
            return evaluate(problem, engine, Path(folder) / "out")

        def bare() -> tuple[float, float]:
            outcome = loops.bare(problem)
            return outcome.seconds, outcome.cpu_s

        entries = {"dualeval": ours, "bare": bare}
        take_turns(1, entries)
        measured = take_turns(pairs, entries)
    return {
        loop: {"wall_s": [wall for wall, _ in turns], "cpu_s": [cpu for _, cpu in turns]}
        for loop, turns in measured.items()
    }


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=9)
    arguments = parser.parse_args()
    host = machine()
    torch.set_num_threads(1)
    problems = {"fashion-cnn": fashion_cnn(), "resnet18": resnet18(_RESNET_IMAGES, _RESNET_BATCH)}
    pairs = {
        name: against_bare(replace(problem, ready=True), arguments.pairs)
        for name, problem in problems.items()
    }
    body = _pairs_text(pairs, arguments.pairs)
    figures = {
        "ratios": {
            name: {clock: median_ratio(of["bare"][clock], of["dualeval"][clock]) for clock in of["bare"]}
            for name, of in pairs.items()
        },
        "wanted_at_least": WANTED,
        "pairs": pairs,
    }
    write_results("overhead", "Speed of the evaluation loop", body, figures, host)


def _pairs_text(pairs: dict[str, dict[str, dict[str, list[float]]]], count: int) -> str:
    images = {"fashion-cnn": 10_000, "resnet18": _RESNET_IMAGES}
    rows = []
    for name, of in pairs.items():
        bare, ours = of["bare"], of["dualeval"]
        speeds = [f"{images[name] / statistics.median(loop['wall_s']):,.0f}" for loop in (bare, ours)]
        ratios = [spread(bare[clock], ours[clock]) for clock in ("wall_s", "cpu_s")]
        rows.append([name, *speeds, f"**{ratios[0]}**", ratios[1], f"{WANTED[name]}"])
    head = ["model", "bare images/s", "dualeval images/s", "dualeval over bare", "by CPU time", "wanted"]
    return (
        f"One process, one thread, {count} pairs taken in turns; the median ratio of images/s, and the "
        "middle half of the ratios in brackets. CPU time leaves out waiting, but not a core that runs slower "
        "because of its neighbours.\n\n"
        f"{table(head, rows)}"
    )


if __name__ == "__main__":
    main()
