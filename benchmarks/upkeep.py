"""What the journal and the heartbeats cost: the same evaluation with them and without, in turns.

"With" is an evaluation as ``dualeval run`` does it: journal files written, checksummed and synced, signs told
twice a second, ranks given up after 60 s, a ``Watch`` that looks four times a second. "Without" writes no
byte, tells no sign, notes no progress and watches nobody; the rows are collected in both. The embedded model
and its 10,000 images, as often as it takes; at 1 process and at 2 under torchrun (gloo), where all rounds
are run by the same processes.

Compared are ``timing.evaluate_s`` and the processor seconds of all ranks in that loop. Beside them stands
what can be told apart within "with": the seconds spent on journal files, and the processor seconds of all
threads but the main one.

    python benchmarks/upkeep.py [--rounds N] [--samples N]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import process_time, thread_time
from typing import Any
from unittest.mock import patch

import psutil  # type: ignore[import-untyped]
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
from engine import Engine
from problems import Problem, fashion_cnn
from torch import Tensor

from dualeval import Backend, Result, connect, detect
from dualeval.engine.control.plane import ControlPlane
from dualeval.engine.control.progress import Progress, Stage, Tally
from dualeval.engine.end.watch import Watch
from dualeval.engine.folder.folder import RunFolder
from dualeval.engine.folder.journal import JournalWriter
from dualeval.engine.folder.layout import file_name
from dualeval.engine.folder.recorder import Recorder

WANTED = 1.01
SIZES = (1, 2)
_TIMEOUT_S = 60.0  # what the CLI gives a rank
_START_S = 120
_ROUND_S = 180
_CLOCKS = {"wall_s": "wall time", "cpu_s": "CPU seconds"}


# -- the loop without ----------------------------------------------------------------------------------


def _only_name(
    self: JournalWriter,
    chunks: Sequence[int],
    rows: Sequence[int],
    delta: Tensor,
    columns: Mapping[str, Tensor],
    failures: Sequence[tuple[int, str]] = (),
) -> None:
    self.written.append(self.folder / file_name(self._prefix, len(self.written)))


def _no_files(self: RunFolder, *_arguments: Any, **_options: Any) -> list[Any]:
    """None was written."""
    return []


def _write_nothing(self: RunFolder, result: Result, *_arguments: Any, **_options: Any) -> Result:
    """There is no journal file to make predictions.parquet of."""
    return result


def _note_nothing(self: Progress, stage: Stage, chunk: int | None = None) -> None:
    """Nobody looks."""


def _report_nothing(self: ControlPlane) -> None:
    """No helper thread."""


@contextmanager
def _without_upkeep() -> Iterator[None]:
    with (
        patch.object(JournalWriter, "write", _only_name),
        patch.object(RunFolder, "merged_files", _no_files),
        patch.object(RunFolder, "write", _write_nothing),
        patch.object(Progress, "step", _note_nothing),
        patch.object(ControlPlane, "start_beats", _report_nothing),
    ):
        yield


# -- one evaluation ------------------------------------------------------------------------------------


@contextmanager
def _loop_clocks() -> Iterator[dict[str, float]]:
    """Fill in, of the loop that is run within, this process's and its other threads' processor seconds."""
    taken: dict[str, float] = {}
    begin_run, flush = ControlPlane.begin_run, Recorder.flush

    def begin(self: ControlPlane, *arguments: Any, **options: Any) -> Tally:
        tally = begin_run(self, *arguments, **options)
        taken["cpu_s"], taken["main_s"] = process_time(), thread_time()
        return tally

    def end(self: Recorder, *arguments: Any, **options: Any) -> bool:
        flushed = flush(self, *arguments, **options)
        taken["cpu_s"] = process_time() - taken["cpu_s"]
        taken["others_cpu_s"] = taken["cpu_s"] - (thread_time() - taken.pop("main_s"))
        taken["files"] = len(self.writer.written)
        return flushed

    with patch.object(ControlPlane, "begin_run", begin), patch.object(Recorder, "flush", end):
        yield taken


class _NoWatch:
    """What a run tells its watch, where there is none."""

    def keep(self, folder: object) -> None:
        """Do nothing."""

    def release(self, *, done: bool) -> None:
        """Do nothing."""


def _evaluate(problem: Problem, engine: Engine, out: Path, watch: Watch | _NoWatch) -> Result:
    options = {"out": out, "batch_size": problem.batch_size, "workers": 0, "fresh": True}
    return engine.evaluate(problem.task(), {"watch": watch}, **options)


def _with(problem: Problem, backend: Backend, out: Path) -> Result:
    engine = Engine(backend, timeout_s=_TIMEOUT_S)
    watch = Watch(engine.control, lambda: 1)
    result = _evaluate(problem, engine, out, watch=watch)
    engine.control.leave()
    watch.stop()
    # It ends after one more look, which would be part of the next evaluation.
    watch._thread.join()
    return result


def _without(problem: Problem, backend: Backend, out: Path) -> Result:
    with _without_upkeep():
        engine = Engine(backend)
        result = _evaluate(problem, engine, out, _NoWatch())
        engine.control.leave()
    return result


def _measure(problem: Problem, backend: Backend, out: Path, *, upkeep: bool) -> dict[str, Any]:
    """Evaluate once on all ranks; seconds of the slowest, processor seconds of all together."""
    with _loop_clocks() as taken:
        result = (_with if upkeep else _without)(problem, backend, out)
    everyone = backend.all_gather_json(taken)
    return {
        "wall_s": result.timing["evaluate_s"],
        "journal_s": max(rank["journal"] for rank in result.timing["ranks"]),
        "digest": result.metrics_digest,
        **{name: sum(rank[name] for rank in everyone) for name in taken},
    }


def be_rank(samples: int, rounds: int, folder: Path) -> None:
    """Be one rank: both evaluations in turn; rank 0 writes folder/measured.json."""
    torch.set_num_threads(1)
    backend = connect(None, detect(os.environ), "cpu")
    try:
        problem = _problem(samples)
        take_turns(1, _entries(problem.first(50 * problem.batch_size), backend, folder))
        measured = take_turns(rounds, _entries(problem, backend, folder))
        if backend.world.is_main:
            (folder / "measured.json").write_text(json.dumps(measured))
    finally:
        backend.close()


def _entries(problem: Problem, backend: Backend, folder: Path) -> dict[str, partial[dict[str, Any]]]:
    return {
        name: partial(_measure, problem, backend, folder / "out", upkeep=name == "with")
        for name in ("with", "without")
    }


def _problem(samples: int) -> Problem:
    """The embedded job, its images repeated."""
    once = replace(fashion_cnn(), ready=True)
    times = -(-samples // len(once.images))
    return replace(once, images=once.images.repeat(times, 1, 1, 1), targets=once.targets.repeat(times)).first(
        samples
    )


# -- the report ----------------------------------------------------------------------------------------


def measure(size: int, samples: int, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Measure on ``size`` ranks; by evaluation, a value a round."""
    with tempfile.TemporaryDirectory(prefix="dualeval-upkeep-") as folder:
        arguments = [str(Path(__file__).resolve()), "--rank-of", folder]
        arguments += ["--samples", str(samples), "--rounds", str(rounds)]
        command = python_or_torchrun(size, *arguments)
        run_process(command, timeout_s=_START_S + rounds * _ROUND_S, environ=ONE_THREAD)
        measured: dict[str, list[dict[str, Any]]] = json.loads((Path(folder) / "measured.json").read_text())
    return measured


def _file_system(path: Path) -> str:
    """The type of the file system that a folder is on: on one in memory a sync costs nothing."""
    mounts = [mount for mount in psutil.disk_partitions(all=True) if path.is_relative_to(mount.mountpoint)]
    return str(max(mounts, key=lambda mount: len(mount.mountpoint)).fstype)


def _column(turns: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [turn[name] for turn in turns]


def _report(
    by_size: Mapping[int, Mapping[str, list[dict[str, Any]]]], samples: int, rounds: int, file_system: str
) -> str:
    rows = []
    for size, turns in by_size.items():
        ours, bare = turns["with"], turns["without"]
        middles = {name: statistics.median(_column(ours, name)) for name in ours[0] if name != "digest"}
        rows.append(
            [
                str(size),
                f"{middles['wall_s']:.2f}",
                *(f"**{spread(_column(ours, clock), _column(bare, clock))}**" for clock in _CLOCKS),
                f"{middles['files']:.0f}",
                f"{middles['journal_s']:.3f} ({middles['journal_s'] / middles['wall_s']:.2%})",
                f"{middles['others_cpu_s']:.3f} ({middles['others_cpu_s'] / middles['cpu_s']:.2%})",
            ]
        )
    head = ["ranks", "evaluate_s", "ratio of wall time", "ratio of CPU seconds"]
    head += ["journal files", "journal s", "other threads' CPU s"]
    return (
        f"Wanted: ratios of at most {WANTED}. With over without, median of {rounds} rounds taken in turns in "
        f"the same processes, the middle half of the ratios in brackets; {samples:,} samples, batches of 64, "
        f"one thread a rank, output folder on {file_system}. Wall time is the slowest rank's, CPU seconds "
        "are those of all ranks. The last three columns are of the evaluation with journal and heartbeats: "
        f"medians, and their share of its wall time and of its CPU seconds.\n\n{table(head, rows)}"
    )


def _broken(by_size: Mapping[int, Mapping[str, list[dict[str, Any]]]]) -> list[str]:
    """A sentence for each limit that is not met."""
    found = []
    for size, turns in by_size.items():
        for clock, words in _CLOCKS.items():
            ratio = median_ratio(_column(turns["with"], clock), _column(turns["without"], clock))
            if ratio > WANTED:
                found.append(f"ranks {size}: {words} {ratio:.4f}, wanted at most {WANTED}")
        digests = {turn["digest"] for of in turns.values() for turn in of}
        if len(digests) != 1:
            found.append(f"ranks {size}: metrics differ: {', '.join(sorted(digests))}")
    return found


def main() -> None:
    """Measure, print and write the results; ends with 1 where a limit is not met."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=11, help="two at least")
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of is not None:
        be_rank(arguments.samples, arguments.rounds, arguments.rank_of)
        return
    end_on_sigterm()
    host = machine()
    file_system = _file_system(Path(tempfile.gettempdir()).resolve())
    measured = {size: measure(size, arguments.samples, arguments.rounds) for size in SIZES}
    body = _report(measured, arguments.samples, arguments.rounds, file_system)
    figures = {
        "ratios": {
            size: {
                clock: median_ratio(_column(turns["with"], clock), _column(turns["without"], clock))
                for clock in _CLOCKS
            }
            for size, turns in measured.items()
        },
        "wanted_at_most": WANTED,
        "file_system": file_system,
        "rounds": measured,
    }
    write_results("upkeep", "Cost of the journal and the heartbeats", body, figures, host)
    broken = _broken(measured)
    if broken:
        sys.exit("\n".join(broken))


if __name__ == "__main__":
    main()
