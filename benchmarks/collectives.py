"""Every backend operation through ``Backend``, against the same call on the bare library.

Both are called in turns in the same processes, each call after a barrier; the slowest rank's time counts, a
round. The bare call is measured twice: with the outcome that ``Backend`` has (a new tensor, the argument
untouched), which the wanted figure is about, and at its least, into tensors that are there already.

    python benchmarks/collectives.py [--budget SECONDS] [--group NAME]... [--ranks N]...
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from common import (
    ONE_THREAD,
    ROOT,
    Command,
    horovodrun,
    machine,
    median_ratio,
    missing,
    mpirun,
    run_process,
    spread,
    table,
    torchrun,
    write_results,
)

WANTED = 1.10
WANTED_FROM_BYTES = 2**20
SIZES = (2, 4)
_TIMEOUT_S = 600
# Milliseconds. The backend's own 20 over MPI would hide what a call costs: it is most of any call's time.
_CYCLE_TIME = {"HOROVOD_CYCLE_TIME": "1"}
_BYTES = {8: "8 B", 2**20: "1 MiB", 64 * 2**20: "64 MiB"}


@dataclass(frozen=True, kw_only=True)
class Group:
    """One library between ranks that one launcher starts."""

    backend: str  # its name for ``connect``
    start: Command  # gives the command that starts so many ranks
    over_mpi: bool = False  # whether it is mpirun


GROUPS = {
    "torch, gloo (torchrun)": Group(backend="torch", start=torchrun),
    "Horovod, gloo (horovodrun)": Group(backend="horovod", start=horovodrun),
    "Horovod, MPI (mpirun)": Group(backend="horovod", start=mpirun, over_mpi=True),
    "mpi4py (mpirun)": Group(backend="mpi", start=mpirun, over_mpi=True),
}


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--budget", type=float, default=1.5, help="seconds for each operation and size")
    parser.add_argument("--group", action="append", choices=GROUPS, help="only this one; may be repeated")
    parser.add_argument("--ranks", action="append", type=int, choices=SIZES, help="likewise")
    arguments = parser.parse_args()
    host = machine()
    start = perf_counter()
    measured = []
    absent = {
        name: reason
        for name, of in GROUPS.items()
        if (reason := missing(of.backend, over_mpi=of.over_mpi)) is not None
    }
    for name in arguments.group or GROUPS:
        if name in absent:
            print(f"{name} is left out: {absent[name]}")
            continue
        for size in arguments.ranks or SIZES:
            cases = measure(GROUPS[name], size, arguments.budget)
            measured.append({"group": name, "ranks": size, "cases": cases})
            print(f"{name}, {size} ranks: {perf_counter() - start:.0f} s since the start", flush=True)
    rows = [row for of in measured for row in _rows(of)]
    left_out = "".join(f"Left out: {name}: {reason}.\n\n" for name, reason in absent.items())
    body = left_out + _text(rows, perf_counter() - start)
    figures = {
        "wanted_at_most": WANTED,
        "wanted_from_bytes": WANTED_FROM_BYTES,
        "left_out": absent,
        "groups": measured,
    }
    write_results("collectives", "Collectives through `Backend` over bare calls", body, figures, host)


def measure(group: Group, size: int, budget_s: float) -> list[dict[str, Any]]:
    """Measure a group on ``size`` ranks; by case the seconds of the slowest rank, a value a round."""
    with tempfile.TemporaryDirectory(prefix="dualeval-collectives-") as folder:
        script = [str(ROOT / "benchmarks/collectives_rank.py"), "--backend", group.backend]
        command = group.start(size, *script, "--folder", folder, "--budget", str(budget_s))
        run_process(command, timeout_s=_TIMEOUT_S, environ={**ONE_THREAD, **_CYCLE_TIME})
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(size)]
    return [_slowest(same_case) for same_case in zip(*ranks, strict=True)]


def _slowest(of_ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    by_call = {
        call: [max(of_round) for of_round in zip(*(case["seconds"][call] for case in of_ranks), strict=True)]
        for call in of_ranks[0]["seconds"]
    }
    return {**of_ranks[0], "seconds": by_call}


# -- the report ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table, and whether it reaches the wanted figure (None: none is wanted)."""

    cells: list[str]
    passes: bool | None


def _rows(measured: dict[str, Any]) -> list[Row]:
    rows = []
    for case in measured["cases"]:
        seconds = case["seconds"]
        ours, bare = seconds["Backend"], seconds["new"]
        passes = median_ratio(ours, bare) <= WANTED if case["bytes"] >= WANTED_FROM_BYTES else None
        others = [
            cell
            for call in ("any", "own")
            for cell in ([_ms(seconds[call]), spread(ours, seconds[call])] if call in seconds else ["", ""])
        ]
        name = f"{case['operation']} {case['dtype']}".strip()
        cells = [measured["group"], str(measured["ranks"]), name, _BYTES.get(case["bytes"], "")]
        cells += [str(len(ours)), _ms(ours), _ms(bare), f"**{spread(ours, bare)}**", *others]
        rows.append(Row(cells=[*cells, {None: "", True: "yes", False: "no"}[passes]], passes=passes))
    return rows


def _ms(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.3f}"


def _text(rows: Sequence[Row], took_s: float) -> str:
    judged = [row for row in rows if row.passes is not None]
    missed = [row.cells for row in judged if not row.passes]
    head = ["library", "ranks", "operation", "size", "rounds", "`Backend` ms", "bare ms", "ratio"]
    head += ["any lengths ms", "ratio to that", "at least ms", "ratio to that", f"at most {WANTED:.2f}"]
    above = f"## Rows above the wanted figure\n\n{table(head, missed)}\n" if missed else ""
    return (
        f"Wanted: a ratio of at most {WANTED:.2f} at 1 MiB and up. {len(judged) - len(missed)} of "
        f"{len(judged)} such rows reach it.\n\n"
        "`Backend` and the bare calls take turns in the same processes, every second round backwards, each "
        "call after the library's barrier. The slowest rank's time counts; median over the rounds, of the "
        "times and of the ratios of a round, the middle half of the ratios in brackets. Sizes are a rank's; "
        "one thread a rank.\n\n"
        '"Bare" leaves behind what `Backend` does: a new tensor, the argument as it was (all_reduce: into a '
        "copy, or by the library's call that returns a new tensor; broadcast: into a copy on rank 0 and a "
        "new tensor elsewhere, or likewise; gather and all_gather: into new tensors). The ratio that is "
        'wanted is to this. "Any lengths" is a bare gather whose ranks first tell each other the lengths of '
        "their tensors, because they may differ, as `Backend` allows (which also says whose is of another "
        'type). "At least" reuses tensors that are there already: in place, or into the same ones each time. '
        "Horovod has no gather to one rank, so its bare gather is the allgather that its user takes, of any "
        "lengths and into new tensors always.\n\n"
        f"Horovod with HOROVOD_CYCLE_TIME={_CYCLE_TIME['HOROVOD_CYCLE_TIME']} (milliseconds), its own "
        "setting. Over MPI the backend takes 20 where the user has set nothing: each call, bare or not, "
        f"then waits for its cycle, and little else is seen. Measured in {took_s:.0f} s.\n\n"
        f"{above}## All rows\n\n{table(head, [row.cells for row in rows])}"
    )


if __name__ == "__main__":
    main()
