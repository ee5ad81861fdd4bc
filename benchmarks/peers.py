"""dualeval beside libraries and loops that do the same: speed, start-up, memory, and whether they are right.

The loops of ``loops.py`` take turns in the same processes, on 1 and on 2 processes: seconds over those of a
bare loop of the same round. Then each loop evaluates 997 images, a number that no number of ranks divides,
in new processes, on 1, 2 and 3: start-up, peak memory, samples counted and the loss.

``make bench-peers`` makes the environment that this needs, and starts it.

    python benchmarks/peers.py [--rounds N] [--starts N] [--images N] [--resnet-images N] [--no-libraries]
        [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import (
    ONE_THREAD,
    end_on_sigterm,
    machine,
    median_ratio,
    python_or_torchrun,
    run_process,
    spread,
    table,
    take_turns,
    write_results,
)
from loops import BARE, LIBRARIES, LOOPS, world
from problems import Problem, fashion_cnn, resnet18, small_cnn
from torch import distributed, nn

from dualeval.tools.bench.measuring import peak_of_process

SIZES = (1, 2)
RESULT_SIZE = 3
UNEVEN = 997  # a prime: no number of ranks divides it
_RESNET_BATCH = 8
_READY_PART = 5  # ready batches are timed on every fifth image of the others
LEAST_IMAGES = _READY_PART * max(SIZES) * 64
LEAST_RESNET_IMAGES = max(SIZES) * _RESNET_BATCH
_WARM_UP_BATCHES = 8
_TIMEOUT_S = 1200
_SCRIPT = str(Path(__file__).resolve())

PROBLEMS = SMALL, READY, RESNET = "small CNN", "small CNN, ready batches", "ResNet-18"


# -- the ranks ----------------------------------------------------------------------------------------


def problems(images: int, resnet_images: int) -> dict[str, Problem]:
    """What the loops are timed on, by name."""
    small = small_cnn().first(images)
    return {
        SMALL: small,
        READY: replace(small.first(max(1, images // _READY_PART)), ready=True),
        RESNET: resnet18(resnet_images, _RESNET_BATCH),
    }


def be_timed(folder: Path, options: argparse.Namespace) -> None:
    """Be one rank: every loop in turn; rank 0 writes folder/measured.json."""
    torch.set_num_threads(1)
    rank, size = world()
    if size > 1:
        distributed.init_process_group("gloo")
    measured = {}
    for name, problem in problems(options.images, options.resnet_images).items():
        few = problem.first(_WARM_UP_BATCHES * problem.batch_size)
        take_turns(1, {loop: partial(_over_ranks, run, few) for loop, run in LOOPS.items()})
        turns = {loop: partial(_over_ranks, run, problem) for loop, run in LOOPS.items()}
        measured[name] = {"images": len(problem.targets), "turns": take_turns(options.rounds, turns)}
    if rank == 0:
        (folder / "measured.json").write_text(json.dumps(measured))
    _leave_group()


def _over_ranks(run: Callable[[Problem], Any], problem: Problem) -> dict[str, Any]:
    """Start a loop on all ranks together; the slowest rank's seconds, all samples, rank 0's other values."""
    if world()[1] > 1:
        distributed.barrier()
    outcome = run(problem)
    torch.set_num_threads(1)  # libraries may take more
    seconds, samples = torch.tensor(outcome.seconds, dtype=torch.float64), torch.tensor(outcome.samples)
    if world()[1] > 1:
        distributed.all_reduce(seconds, distributed.ReduceOp.MAX)
        distributed.all_reduce(samples)
    return {**asdict(outcome), "seconds": seconds.item(), "samples": samples.item()}


def be_started(folder: Path, loop: str) -> None:
    """Be one rank of a loop that is alone in its process; writes folder/RANK.json."""
    torch.set_num_threads(1)
    outcome = LOOPS[loop](fashion_cnn().first(UNEVEN))
    found = {**asdict(outcome), "peak_bytes": peak_of_process()}
    (folder / f"{world()[0]}.json").write_text(json.dumps(found))
    _leave_group()


def _leave_group() -> None:
    # Without this, a process whose group was in use may abort as it ends.
    if distributed.is_initialized():
        distributed.destroy_process_group()


# -- starting them ------------------------------------------------------------------------------------


def timed(size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Time all loops on ``size`` processes; by problem, what ``be_timed`` has measured."""
    arguments = [f"--rounds={options.rounds}", f"--images={options.images}"]
    arguments.append(f"--resnet-images={options.resnet_images}")
    arguments += ["--no-libraries"] if options.no_libraries else []
    with tempfile.TemporaryDirectory(prefix="dualeval-peers-") as folder:
        command = python_or_torchrun(size, _SCRIPT, "--rank-of", folder, *arguments)
        run_process(command, timeout_s=_TIMEOUT_S, environ=ONE_THREAD)
        measured: dict[str, Any] = json.loads((Path(folder) / "measured.json").read_text())
    return measured


def started(size: int, loop: str) -> dict[str, Any]:
    """Start a loop in new processes: start-up, the largest peak of a rank, its result and exit code."""
    with tempfile.TemporaryDirectory(prefix="dualeval-peers-") as folder:
        command = python_or_torchrun(size, _SCRIPT, "--rank-of", folder, "--loop", loop)
        finished = run_process(command, timeout_s=_TIMEOUT_S, environ=ONE_THREAD, any_exit_code=True)
        paths = [Path(folder) / f"{rank}.json" for rank in range(size)]
        # A process may abort after it has its result: that is counted. One without a result is an error.
        if not all(path.exists() for path in paths):
            raise RuntimeError(f"{' '.join(command)} has no result:\n{finished.output}\n{finished.errors}")
        ranks = [json.loads(path.read_text()) for path in paths]
    return {
        "startup_s": finished.wall_s - ranks[0]["seconds"],
        "peak_bytes": max(rank["peak_bytes"] for rank in ranks),
        "samples": sum(rank["samples"] for rank in ranks),
        "top1": ranks[0]["top1"],
        "loss": ranks[0]["loss"],
        "exit_code": finished.exit_code,
    }


def exact(problem: Problem) -> dict[str, float]:
    """Top-1 and mean loss of every image once: float32 losses, summed without rounding."""
    losses: list[float] = []
    right = 0
    with torch.inference_mode():
        for first in range(0, len(problem.targets), problem.batch_size):
            rows = slice(first, first + problem.batch_size)
            logits, targets = problem.network(problem.images[rows]), problem.targets[rows]
            losses += nn.functional.cross_entropy(logits, targets, reduction="none").tolist()
            right += int((logits.argmax(dim=1) == targets).sum())
    return {"top1": right / len(losses), "loss": math.fsum(losses) / len(losses)}


# -- the report ---------------------------------------------------------------------------------------


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="two at least")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--images", type=int, default=70_000, help="of the small CNN")
    parser.add_argument("--resnet-images", type=int, default=32)
    parser.add_argument("--no-libraries", action="store_true", help="only dualeval and the loops by hand")
    parser.add_argument("--json", action="store_true", help="print figures and write nothing")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--loop", choices=LOOPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.no_libraries:
        for loop in LIBRARIES:
            del LOOPS[loop]
    if options.rank_of is not None:
        if options.loop is None:
            be_timed(options.rank_of, options)
        else:
            be_started(options.rank_of, options.loop)
        return
    for option, least in (("images", LEAST_IMAGES), ("resnet_images", LEAST_RESNET_IMAGES)):
        if (found := getattr(options, option)) < least:
            parser.error(f"--{option.replace('_', '-')} is {found}, expected {least} or more: a batch a rank")
    end_on_sigterm()
    torch.set_num_threads(1)
    host = machine()
    figures = measure(options)
    if options.json:
        print(json.dumps(figures))
        return
    body = report(figures)
    write_results("peers", "dualeval beside other ways to evaluate", body, figures, host)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All that the report is made of, as plain values; sizes are texts, as JSON has them."""
    starts = {
        str(size): take_turns(options.starts, {loop: partial(started, size, loop) for loop in LOOPS})
        for size in SIZES
    }
    # For its result only: where there are two cores, three ranks wait for them.
    starts[str(RESULT_SIZE)] = {loop: [started(RESULT_SIZE, loop)] for loop in LOOPS}
    return {
        "uneven": UNEVEN,
        "exact": exact(fashion_cnn().first(UNEVEN)),
        "starts": starts,
        "timed": {str(size): timed(size, options) for size in SIZES},
    }


def report(figures: Mapping[str, Any]) -> str:
    """The page's tables; the first is the one of the README."""
    return f"{_summary_text(figures)}\n{_speed_text(figures)}\n{_starts_text(figures)}"


def _seconds(figures: Mapping[str, Any], size: str, problem: str, loop: str) -> list[float]:
    return [turn["seconds"] for turn in figures["timed"][size][problem]["turns"][loop]]


def _over_bare(figures: Mapping[str, Any], problem: str, loop: str) -> str:
    """Seconds over the bare loop's at each number of processes."""
    ratios = (
        median_ratio(_seconds(figures, size, problem, loop), _seconds(figures, size, problem, BARE))
        for size in figures["timed"]
    )
    return " / ".join(f"{ratio:.2f}" for ratio in ratios)


def _at_sizes(figures: Mapping[str, Any], loop: str, what: str, form: Callable[[float], str]) -> str:
    """Median of a value of the starts, at each number of processes that is timed."""
    values = (
        statistics.median(start[what] for start in figures["starts"][size][loop]) for size in figures["timed"]
    )
    return " / ".join(map(form, values))


def same_bits(starts: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]], loop: str) -> str:
    """Whether all starts of a loop, at all numbers of processes, have the same loss."""
    losses = {start["loss"] for size in starts.values() for start in size[loop]}
    if losses == {None}:
        return ""
    return "yes" if len(losses) == 1 else "no"


def _summary_text(figures: Mapping[str, Any]) -> str:
    sizes = " / ".join(figures["timed"])
    all_sizes = " / ".join(figures["starts"])
    head = ["", *(f"time of the loop over a bare loop's: {name}" for name in PROBLEMS)]
    head += ["start-up s", "peak memory MB", f"samples counted of {figures['uneven']}"]
    head += [f"the same loss, to the bit, on {all_sizes} processes"]
    rows = []
    for loop in LOOPS:
        counted = [str(of[loop][0]["samples"]) for of in figures["starts"].values()]
        rows.append(
            [
                loop,
                *(_over_bare(figures, problem, loop) for problem in PROBLEMS),
                _at_sizes(figures, loop, "startup_s", "{:.1f}".format),
                _at_sizes(figures, loop, "peak_bytes", lambda value: f"{value / 1e6:.0f}"),
                " / ".join(counted),
                same_bits(figures["starts"], loop),
            ]
        )
    return (
        f"Medians on {sizes} processes, samples on {all_sizes}. *Time of the loop* is relative to a loop "
        "that only counts where argmax is the target. The loss changes with the number of processes where "
        "samples are counted twice, or floats are added in another order.\n\n"
        f"{table(head, rows)}"
    )


def _speed_text(figures: Mapping[str, Any]) -> str:
    head = ["evaluated", "processes", "loop", "images/s", "time over the bare loop's", "by CPU time"]
    rows = []
    of_problems = next(iter(figures["timed"].values()))
    for problem, first in of_problems.items():
        for size in figures["timed"]:
            turns = figures["timed"][size][problem]["turns"]
            bare_cpu = [turn["cpu_s"] for turn in turns[BARE]]
            for loop in LOOPS:
                seconds = _seconds(figures, size, problem, loop)
                speed = f"{first['images'] / statistics.median(seconds):,.0f}"
                wall = spread(seconds, _seconds(figures, size, problem, BARE))
                cpu = spread([turn["cpu_s"] for turn in turns[loop]], bare_cpu)
                rows.append([problem, size, loop, speed, wall, cpu])
    rounds = len(next(iter(of_problems[SMALL]["turns"].values())))
    counts = ", ".join(f"{name} {of['images']:,}" for name, of in of_problems.items())
    return (
        "## Speed\n\n"
        f"{rounds} rounds; in each, all loops take turns in the same processes. Time runs from the first "
        "forward of a whole batch until mean loss and top-1 are Python numbers, on the slowest rank; CPU "
        "time is rank 0's. The ratio is the median of the rounds, with the middle half in brackets. "
        "float32, one thread a rank, gloo, no logging, progress or checkpoints. Images, all in memory: "
        f"{counts}. They are a `TensorDataset`, whose samples are collated one by one, or *ready batches*: a "
        "data set whose "
        "`__getitems__` returns a whole batch. dualeval is called as a user calls it, "
        "`dualeval.evaluate(...)`, until that returns; it also computes intervals.\n\n"
        f"{table(head, rows)}"
    )


def _starts_text(figures: Mapping[str, Any]) -> str:
    head = ["loop", "processes", "start-up s", "peak memory of a rank MB", "samples counted"]
    head += ["top-1 error, points", "loss error", "exits with an error after the result"]
    right = figures["exact"]
    rows = []
    for loop in LOOPS:
        for size, of in figures["starts"].items():
            starts = of[loop]
            first = starts[0]
            is_timed = size in figures["timed"]
            errors = ["", ""]
            if first["loss"] is not None:
                errors = [
                    f"{100 * abs(first['top1'] - right['top1']):.3f}",
                    f"{abs(first['loss'] - right['loss']):.1e}",
                ]
            rows.append(
                [
                    loop,
                    size,
                    f"{statistics.median(start['startup_s'] for start in starts):.2f}" if is_timed else "",
                    f"{statistics.median(start['peak_bytes'] for start in starts) / 1e6:.0f}",
                    str(first["samples"]),
                    *errors,
                    f"{sum(start['exit_code'] != 0 for start in starts)} of {len(starts)}",
                ]
            )
    starts_of_one = len(next(iter(figures["starts"]["1"].values())))
    return (
        "## Start-up, memory and results\n\n"
        f"Each start is of new processes: one by python, more by torchrun; {starts_of_one} starts in turns, "
        f"their median. The embedded network and the first {figures['uneven']} images of the embedded data "
        "set. Start-up is the wall time of the whole command without the loop. Errors are relative to every "
        "image once and an exact sum of the losses.\n\n"
        f"{table(head, rows)}"
    )


if __name__ == "__main__":
    main()
