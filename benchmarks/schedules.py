"""The two schedules: with one rank three times slower, and with equal ranks.

Four ranks of this machine, under torchrun (gloo), whose every batch sleeps 20 ms, so that two cores serve
them all. Slowed, the last one sleeps 60 ms: then the least time in which the chunks can be done is chunks /
sum over ranks of (1 / seconds a chunk), and ``timing.evaluate_s`` of both schedules is compared with that.
Among equal ranks the dynamic schedule is compared with the static one: with ranks that sleep, and with two
ranks that compute the embedded job in batches of 64. All runs of the same ranks take turns in the same
processes.

    python benchmarks/schedules.py [--rounds N] [--pairs N] [--chunks N]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import torch
from common import (
    ONE_THREAD,
    end_on_sigterm,
    machine,
    median_ratio,
    run_process,
    spread,
    table,
    take_turns,
    torchrun,
    write_results,
)
from engine import Engine
from memory import TinyTask
from torch import Tensor

from dualeval import connect, detect
from dualeval.tasks.image_classification import ImageClassification

SCHEDULES = ("static", "dynamic")
WANTED_OVER_IDEAL = 1.15
WANTED_OVER_STATIC = 1.02
SLEEPING_RANKS = 4
COMPUTING_RANKS = 2
BATCH_S, SLOW_BATCH_S = 0.02, 0.06
_SLEEPING_BATCH, _COMPUTING_BATCH = 8, 64
_TIMEOUT_S = 60.0  # what the CLI gives a rank
_START_S = 120
_ROUND_S = 120


class Sleeping(TinyTask):
    """A task that takes no time but what it sleeps."""

    def __init__(self, count: int, seconds: float) -> None:
        super().__init__(count)
        self._seconds = seconds
        self.batches = 0

    def observe(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The columns of a classification, after a while."""
        sleep(self._seconds)
        self.batches += 1
        return super().observe(outputs, batch)


class Computing(ImageClassification):
    """The embedded job."""

    batches = 0

    def observe(self, outputs: Tensor, batch: dict[str, Tensor]) -> Mapping[str, Tensor]:
        """As the embedded job does."""
        self.batches += 1
        return super().observe(outputs, batch)


# -- the ranks -----------------------------------------------------------------------------------------


def be_rank(kind: str, chunks: int, rounds: int, folder: Path) -> None:
    """Be one rank under torchrun: every case in turn; rank 0 writes folder/measured.json."""
    torch.set_num_threads(1)
    world = detect(os.environ)
    backend = connect("torch", world, "cpu")
    engine = Engine(backend, timeout_s=_TIMEOUT_S)

    def evaluate(make: Callable[[], Sleeping | Computing], batch_size: int, schedule: str) -> dict[str, Any]:
        task = make()
        result = engine.evaluate(
            task, out=folder / "out", batch_size=batch_size, schedule=schedule, fresh=True
        )
        batches = backend.all_gather_json(task.batches)
        assert sum(batches) == result.chunks["total"], "a chunk is a batch here"
        return {"evaluate_s": result.timing["evaluate_s"], "chunks": batches, "digest": result.metrics_digest}

    def sleeping(slow_s: float) -> Callable[[], Sleeping]:
        seconds = slow_s if world.rank == world.size - 1 else BATCH_S
        return partial(Sleeping, chunks * _SLEEPING_BATCH, seconds)

    cases: dict[str, tuple[Callable[[], Sleeping | Computing], int]] = (
        {"computing": (Computing, _COMPUTING_BATCH)}
        if kind == "computing"
        else {
            "slowed": (sleeping(SLOW_BATCH_S), _SLEEPING_BATCH),
            "equal": (sleeping(BATCH_S), _SLEEPING_BATCH),
        }
    )
    entries = {
        f"{name} {schedule}": partial(evaluate, *case, schedule)
        for name, case in cases.items()
        for schedule in SCHEDULES
    }
    try:
        take_turns(1, entries)
        measured = take_turns(rounds, entries)
        if world.is_main:
            (folder / "measured.json").write_text(json.dumps(measured))
        engine.control.leave()
    finally:
        backend.close()


def measure(kind: str, size: int, chunks: int, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Measure the cases of a kind on ``size`` ranks; by case and schedule, a value a round."""
    with tempfile.TemporaryDirectory(prefix="dualeval-schedules-") as folder:
        arguments = ["--rank-of", folder, "--kind", kind, "--chunks", str(chunks), "--rounds", str(rounds)]
        command = torchrun(size, str(Path(__file__).resolve()), *arguments)
        run_process(command, timeout_s=_START_S + rounds * _ROUND_S, environ=ONE_THREAD)
        measured: dict[str, list[dict[str, Any]]] = json.loads((Path(folder) / "measured.json").read_text())
    return measured


# -- the report ----------------------------------------------------------------------------------------


def ideal_s(chunks: int) -> float:
    """Seconds that the slowed ranks need at least."""
    return chunks / ((SLEEPING_RANKS - 1) / BATCH_S + 1 / SLOW_BATCH_S)


def _seconds(turns: Sequence[Mapping[str, Any]]) -> list[float]:
    return [turn["evaluate_s"] for turn in turns]


def _ratios(measured: Mapping[str, list[dict[str, Any]]], chunks: int) -> dict[str, float]:
    """By what is compared, the median."""
    ratios = {
        f"slowed, {schedule} over ideal": statistics.median(_seconds(measured[f"slowed {schedule}"]))
        / ideal_s(chunks)
        for schedule in SCHEDULES
    }
    for case in ("equal", "computing"):
        static, dynamic = (_seconds(measured[f"{case} {schedule}"]) for schedule in SCHEDULES)
        ratios[f"{case}, dynamic over static"] = median_ratio(dynamic, static)
    return ratios


def _broken(measured: Mapping[str, list[dict[str, Any]]], ratios: Mapping[str, float]) -> list[str]:
    """A sentence for each limit that is not met."""
    limits = {
        "slowed, dynamic over ideal": WANTED_OVER_IDEAL,
        "equal, dynamic over static": WANTED_OVER_STATIC,
        "computing, dynamic over static": WANTED_OVER_STATIC,
    }
    found = [
        f"{name}: {ratios[name]:.4f}, wanted at most {limit}"
        for name, limit in limits.items()
        if ratios[name] > limit
    ]
    for cases in (("slowed", "equal"), ("computing",)):
        digests = {
            turn["digest"]
            for case in cases
            for schedule in SCHEDULES
            for turn in measured[f"{case} {schedule}"]
        }
        if len(digests) != 1:
            found.append(f"{' and '.join(cases)}: metrics differ: {', '.join(sorted(digests))}")
    return found


def _slowed_text(measured: Mapping[str, list[dict[str, Any]]], chunks: int, rounds: int) -> str:
    rows = []
    for schedule in SCHEDULES:
        turns = measured[f"slowed {schedule}"]
        seconds = _seconds(turns)
        shares = [
            f"{low}" if low == high else f"{low} to {high}"
            for counts in zip(*(turn["chunks"] for turn in turns), strict=True)
            for low, high in [(min(counts), max(counts))]
        ]
        rows.append(
            [
                schedule,
                f"{statistics.median(seconds):.3f}",
                f"**{spread(seconds, [ideal_s(chunks)] * len(seconds))}**",
                f"{WANTED_OVER_IDEAL}" if schedule == "dynamic" else "",
                *shares,
                turns[0]["digest"][:12],
            ]
        )
    head = ["schedule", "evaluate_s", "over ideal", "wanted at most"]
    head += [f"chunks of rank {rank}" for rank in range(SLEEPING_RANKS)]
    return (
        "## One rank three times slower\n\n"
        f"{SLEEPING_RANKS} ranks, {chunks} chunks; a chunk takes {1000 * BATCH_S:.0f} ms, and on the last "
        f"rank {1000 * SLOW_BATCH_S:.0f} ms, asleep: ideal {ideal_s(chunks):.3f} s. Median of {rounds} "
        f"rounds taken in turns, the middle half in brackets.\n\n{table([*head, 'digest'], rows)}\n"
    )


def _equal_text(measured: Mapping[str, list[dict[str, Any]]], rounds: int, pairs: int) -> str:
    rows = []
    cases = (
        ("equal", "asleep", SLEEPING_RANKS, rounds),
        ("computing", "embedded job", COMPUTING_RANKS, pairs),
    )
    for case, words, ranks, count in cases:
        static, dynamic = (_seconds(measured[f"{case} {schedule}"]) for schedule in SCHEDULES)
        rows.append(
            [
                words,
                str(ranks),
                str(sum(measured[f"{case} dynamic"][0]["chunks"])),
                f"{statistics.median(max(turn['chunks']) for turn in measured[f'{case} dynamic']):.0f}",
                str(count),
                *(f"{statistics.median(seconds):.3f}" for seconds in (static, dynamic)),
                f"**{spread(dynamic, static)}**",
                f"{WANTED_OVER_STATIC}",
            ]
        )
    head = ["ranks are", "ranks", "chunks", "most of a rank, dynamic", "rounds"]
    head += ["static s", "dynamic s", "dynamic over static"]
    return (
        "## Equal ranks\n\n"
        f"`timing.evaluate_s`; a chunk takes {1000 * BATCH_S:.0f} ms asleep, or computes {_COMPUTING_BATCH} "
        "images with one thread. Median ratio of the rounds, the middle half in brackets. A rank that "
        "takes a chunk more than its share needs the time of that chunk more.\n\n"
        f"{table([*head, 'wanted at most'], rows)}"
    )


def main() -> None:
    """Measure, print and write the results; ends with 1 where a limit is not met."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="of the ranks that sleep; two at least")
    parser.add_argument("--pairs", type=int, default=25, help="rounds of the ranks that compute")
    parser.add_argument("--chunks", type=int, default=480, help="of the ranks that sleep")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of is not None:
        be_rank(arguments.kind, arguments.chunks, arguments.rounds, arguments.rank_of)
        return
    end_on_sigterm()
    host = machine()
    chunks, rounds, pairs = arguments.chunks, arguments.rounds, arguments.pairs
    measured = {
        **measure("sleeping", SLEEPING_RANKS, chunks, rounds),
        **measure("computing", COMPUTING_RANKS, chunks, pairs),
    }
    ratios = _ratios(measured, chunks)
    broken = _broken(measured, ratios)
    body = _slowed_text(measured, chunks, rounds) + _equal_text(measured, rounds, pairs)
    body += f"\nMetrics are the same in all runs of a job: {'no' if 'differ' in str(broken) else 'yes'}.\n"
    figures = {
        "ratios": ratios,
        "wanted_at_most": {"over_ideal": WANTED_OVER_IDEAL, "over_static": WANTED_OVER_STATIC},
        "ideal_s": ideal_s(chunks),
        "runs": measured,
    }
    write_results("schedules", "Static and dynamic schedule", body, figures, host)
    if broken:
        sys.exit("\n".join(broken))


if __name__ == "__main__":
    main()
