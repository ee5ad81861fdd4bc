"""Memory and time of ``dualeval run --shard fsdp`` on two ranks, relative to the same run with a whole model.

A vision transformer with random weights evaluates small pictures: what is measured is the model, not the
data. Memory is that of the rank that has most, from the moment at which it begins to build the model to the
end of the process, over what it held before: anonymous memory (the heap, tensors) and resident file pages
apart, each looked at every millisecond, and both together as the kernel counts them (VmHWM).

    python benchmarks/sharding.py                      # 1 GB and 100 MB: tables, and a page in results/
    python benchmarks/sharding.py --megabytes 100      # a trial; several with commas
    python benchmarks/sharding.py --json               # {"1000": {"DCP": {"whole": {...}, "sharded": {...}}}}
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common import ONE_THREAD, ROOT, machine, run_process, spread, table, take_turns, torchrun, write_results

# The model is the tests' own.
sys.path.insert(0, str(ROOT))

from tests.vehicles import large_model

RANKS = 2
WANTED = 0.65
WAYS: dict[str, list[str]] = {"whole": [], "sharded": ["--shard", "fsdp"]}
_FORMS = (large_model.TORCH, large_model.PARTS, large_model.DCP)
_KINDS = ("anonymous", "file", "whole")
# (samples, batch size) of the runs whose time is taken.
_TIMED = ((64, 4), (256, 32))
_TIMEOUT_S = 600

Peaks = dict[str, int]


def run(
    megabytes: int, weights: Path, way: str, *, samples: int, batch: int, watched: bool
) -> tuple[Peaks, Any]:
    """Evaluate on two new ranks; gives the largest peaks of a rank by kind (if watched), and the result."""
    with tempfile.TemporaryDirectory(prefix="dualeval-sharding-") as name:
        folder = Path(name)
        job = large_model.job(megabytes, weights, folder / "out", samples=samples, batch=batch)
        environ = {**ONE_THREAD, "PYTHONPATH": str(ROOT)}
        if watched:
            environ[large_model.PEAKS] = name
        command = torchrun(RANKS, "-m", "dualeval", *job, *WAYS[way])
        finished = run_process(command, timeout_s=_TIMEOUT_S, environ=environ)
        result = json.loads((folder / "out/result.json").read_text())
        ranks = large_model.read_peaks(folder)
    assert len(ranks) == (RANKS if watched else 0), f"{len(ranks)} ranks wrote their peaks"
    peaks = {kind: max(rank[kind] for rank in ranks) for kind in (ranks[0] if ranks else ())}
    return peaks, {**result, "wall_s": finished.wall_s}


def measure_memory(megabytes: int, checkpoints: dict[str, Path]) -> dict[str, dict[str, Peaks]]:
    """Peaks by form and way; all runs must have one digest."""
    peaks: dict[str, dict[str, Peaks]] = {}
    digests = set()
    for form, weights in checkpoints.items():
        peaks[form] = {}
        for way in WAYS:
            peaks[form][way], result = run(megabytes, weights, way, samples=32, batch=8, watched=True)
            digests.add(result["metrics_digest"])
    assert len(digests) == 1, f"the runs of {megabytes} MB have {len(digests)} digests"
    return peaks


def measure_time(
    megabytes: int, weights: Path, samples: int, batch: int, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round by way: of the evaluation of the slowest rank, and of the whole command."""

    def seconds(way: str) -> tuple[float, float]:
        _, result = run(megabytes, weights, way, samples=samples, batch=batch, watched=False)
        return max(rank["evaluate"] for rank in result["timing"]["ranks"]), result["wall_s"]

    entries: dict[str, Callable[[], tuple[float, float]]] = {way: partial(seconds, way) for way in WAYS}
    measured = take_turns(rounds, entries)
    return {
        way: {"evaluate": [one for one, _ in rounds_], "command": [one for _, one in rounds_]}
        for way, rounds_ in measured.items()
    }


def _memory_rows(megabytes: str, forms: dict[str, dict[str, Peaks]]) -> list[list[str]]:
    rows = []
    for form, ways in forms.items():
        amounts = [f"{ways[way][kind] / 1e6:,.0f}" for kind in _KINDS for way in WAYS]
        ratios = [f"{ratio(ways, kind):.2f}" for kind in ("anonymous", "whole")]
        rows.append([f"{megabytes} MB", form, *amounts, *ratios])
    return rows


def ratio(ways: dict[str, Peaks], kind: str) -> float:
    """Peak of the sharded run over that of the whole one."""
    return ways["sharded"][kind] / ways["whole"][kind]


def _report(memory: dict[str, Any], times: dict[str, Any]) -> str:
    rows = [row for megabytes, forms in memory.items() for row in _memory_rows(megabytes, forms)]
    worst = max(ratio(ways, "anonymous") for forms in memory.values() for ways in forms.values())
    head = ["model", "checkpoint"]
    head += [f"{kind}, {way}" for kind in ("anonymous", "file pages", "VmHWM") for way in WAYS]
    head += ["ratio, anonymous", "ratio, VmHWM"]
    body = (
        f"Wanted: a ratio of at most {WANTED}; the largest of anonymous memory is {worst:.2f}. Peak memory "
        f"of the rank that has most, of {RANKS} ranks, over what it held before it built the model, in MB. "
        f"All runs of a model have one digest.\n\n{table(head, rows)}"
    )
    timed = [
        [
            *(f"{megabytes} MB", str(batch)),
            *(f"{statistics.median(ways[way]['evaluate']):.2f} s" for way in WAYS),
            *(spread(ways["sharded"][kind], ways["whole"][kind]) for kind in ("evaluate", "command")),
        ]
        for megabytes, batches in times.items()
        for batch, ways in batches.items()
    ]
    head = ["model", "batch", *(f"evaluation, {way}" for way in WAYS), "ratio", "ratio of the whole command"]
    return (
        f"{body}\nTime, {RANKS} ranks with one thread each that exchange over gloo on one machine: median "
        f"over the rounds, and of the ratios also the middle half.\n\n{table(head, timed)}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure; print JSON of the memory, or print tables and write them to the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--json", action="store_true", help="print the peaks in bytes; write nothing, time nothing"
    )
    parser.add_argument("--megabytes", default="1000,100", help="sizes of the model")
    parser.add_argument("--rounds", type=int, default=5, help="of the runs whose time is taken")
    given = parser.parse_args(arguments)
    host = machine()
    memory: dict[str, Any] = {}
    times: dict[str, Any] = {}
    for megabytes in map(int, given.megabytes.split(",")):
        with tempfile.TemporaryDirectory(prefix="dualeval-sharding-") as name:
            checkpoints = large_model.write(Path(name), megabytes, _FORMS)
            memory[str(megabytes)] = measure_memory(megabytes, checkpoints)
            if not given.json:
                weights = checkpoints[large_model.PARTS]
                times[str(megabytes)] = {
                    str(batch): measure_time(megabytes, weights, samples, batch, given.rounds)
                    for samples, batch in _TIMED
                }
    if given.json:
        print(json.dumps(memory))
        return
    body = _report(memory, times)
    write_results(
        "sharding", "Memory and time of sharded models", body, {"memory": memory, "times": times}, host
    )


if __name__ == "__main__":
    main()
