"""What the looks cost: at the first samples, at the first batch, and at the widest batch after the loop.

First of a small network, with all of them and with none, in turns: ratios, and forwards and reads counted.
Then the part of the look in longer runs, each in a process of its own, with two threads.

    python benchmarks/looks.py [--rounds N] [--small-only]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from common import ONE_THREAD, machine, run_process, spread, table, take_turns, write_results
from made_pictures import write_pictures
from torch import Tensor, nn
from torch.utils.data import Dataset

import dualeval
from dualeval.engine.checks import first_batch as trial
from dualeval.engine.checks import repeatability as looks
from dualeval.engine.loop import forward

_TIMEOUT_S = 600
_WIDTH, _LAYERS = 4096, 16  # 1.07 GB
_RESNET = (
    "--model",
    "resnet18",
    "--weights",
    "random:0",
    "--num-classes",
    "10",
    "--preprocessing",
    "imagenet",
)


class Made(Dataset[Any]):
    """Made samples; counts how many are read."""

    def __init__(self, samples: int, width: int) -> None:
        self.rows = torch.rand(samples, width, generator=torch.Generator().manual_seed(0))
        self._reads = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self._reads += 1
        return self.rows[index], index % 10


@contextmanager
def without_looks() -> Iterator[None]:
    """Evaluate inside of it without a look or a trial."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(forward, "look", lambda *_: looks.Looked(threads=1, unlike=[])))
        stack.enter_context(patch.object(forward, "_of_widest", lambda *_: ([], [])))
        stack.enter_context(patch.object(trial, "try_first_batch", lambda *_, **__: []))
        yield


def evaluate_small(samples: int, workers: int, rounds: int) -> None:
    """Evaluate a small network with and without the looks, in turns, and print seconds and counts."""
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)).eval()
    found: dict[str, list[Any]] = {}

    def once() -> tuple[float, int, int]:
        data, calls = Made(samples, 784), [0]
        counting = model.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
        start = perf_counter()
        dualeval.evaluate(model=model, data=data, batch_size=64, workers=workers)
        seconds = perf_counter() - start
        counting.remove()
        return seconds, calls[0], data._reads

    def bare() -> tuple[float, int, int]:
        with without_looks():
            return once()

    take_turns(2, {"with": once, "without": bare})
    found = take_turns(rounds, {"with": once, "without": bare})
    print(json.dumps(found))


def run_without_looks(arguments: list[str]) -> None:
    """``dualeval`` with these arguments, without a look or a trial."""
    from dualeval import cli

    with without_looks():
        cli.main(arguments)


def small(rounds: int, folder: str) -> tuple[str, list[list[str]]]:
    """A table of a small network with and without the looks."""
    rows = []
    for samples, workers in ((1000, 0), (10_000, 0), (1000, 1)):
        asked = ["--small", str(samples), str(workers), "--rounds", str(2 * rounds + 1)]
        arguments = [sys.executable, __file__, *asked]
        found = json.loads(run_process(arguments, timeout_s=_TIMEOUT_S, environ=ONE_THREAD).output)
        seconds, forwards, reads = (
            [[each[place] for each in found[kind]] for kind in ("with", "without")] for place in range(3)
        )
        counts = [f"{a[0]} for {b[0]}" for a, b in (forwards, reads)]
        ms = f"{1000 * statistics.median(b - a for a, b in zip(*reversed(seconds), strict=True)):.0f}"
        if workers:
            counts[1] = ""  # in another process
        rows.append(
            [f"dualeval.evaluate, {samples:,} samples, workers={workers}", spread(*seconds), ms, *counts]
        )
    for samples in (1000, 10_000):
        run = ["run", "--no-progress", "--json", "--limit", str(samples), "--out", f"{folder}/s", "--fresh"]

        def timed(given: list[str]) -> float:
            return run_process([sys.executable, *given], timeout_s=_TIMEOUT_S, environ=ONE_THREAD).wall_s

        kinds = {"with": ["-m", "dualeval", *run], "without": [__file__, "--without", *run]}
        walls = take_turns(rounds, {kind: partial(timed, given) for kind, given in kinds.items()})
        pair = walls["with"], walls["without"]
        ms = f"{1000 * (statistics.median(pair[0]) - statistics.median(pair[1])):.0f}"
        rows.append([f"dualeval run, {samples:,} images, process", spread(*pair), ms, "", ""])
    head = ["evaluation", "time with for without (middle half)", "difference, ms", "forwards", "reads"]
    return table(head, rows), rows


def evaluate_large() -> None:
    """Evaluate a model of 1 GB on 2,000 made samples, and print the times."""
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS))).eval()
    data = Made(2000, _WIDTH)
    result = dualeval.evaluate(model=model, data=data, metrics=["loss"], batch_size=64)
    print(json.dumps({"timing": result.timing, "deterministic": result.deterministic}))


def measured(arguments: list[str]) -> dict[str, Any]:
    """The result of one evaluation in a process of its own."""
    command = [sys.executable, *arguments]
    done = run_process(command, timeout_s=_TIMEOUT_S, environ={**os.environ, "OMP_NUM_THREADS": "2"})
    found: dict[str, Any] = json.loads(done.output)
    return found


def main() -> None:
    """Read the command line, measure in turns, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small-only", action="store_true", help="leave the longer runs out")
    parser.add_argument("--large", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--small", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--without", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.without is not None:
        run_without_looks(asked.without)
    if asked.small is not None:
        samples, workers = asked.small
        evaluate_small(samples, workers, asked.rounds)
        return
    if asked.large:
        evaluate_large()
        return
    host = machine()
    with tempfile.TemporaryDirectory() as folder:
        pictures = Path(folder) / "pictures"
        write_pictures(pictures, 1000, 256, 10)
        of_small, rows_of_small = small(asked.rounds, folder)
        run = ["-m", "dualeval", "run", "--no-progress", "--json"]
        cases = {
            "embedded job, 10,000 images": [*run, "--out", f"{folder}/a"],
            "ResNet-18, 1,000 pictures": [*run, "--out", f"{folder}/b", "--data", str(pictures), *_RESNET],
            "16 linear layers of 1 GB, 2,000 samples": [__file__, "--large"],
        }
        rows = []
        for name, arguments in ({} if asked.small_only else cases).items():
            fresh = ["--fresh"] if "run" in arguments else []
            found = [measured([*arguments, *fresh]) for _ in range(asked.rounds)]
            times = [result["timing"]["ranks"][0] for result in found]
            look, whole = (statistics.median(each[key] for each in times) for key in ("look", "evaluate"))
            said = str(found[0]["deterministic"])
            rows.append([name, f"{look:.3f}", f"{whole:.2f}", f"{100 * look / whole:.1f} %", said])
    long = table(["evaluation", "look, s", "loop, s", "part", "deterministic"], rows) if rows else ""
    page = "\n".join(filter(None, [of_small, long]))
    write_results("looks", "What the looks cost", page, {"small": rows_of_small, "rows": rows}, host)


if __name__ == "__main__":
    main()
