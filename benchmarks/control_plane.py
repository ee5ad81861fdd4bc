"""The control plane of 64 to 4,096 ranks: how long to meet, to hear of a failure, to stop.

Every rank is real: two clients of the store, a thread of beats, the whole of ``ControlPlane``. But the ranks
are threads, 64 a process, and share the locks and cores of these; rank 0 has a process of its own. So the
times are upper bounds. Rank 0's load is what its process takes while all ranks beat: "cores" with the store's
own thread, "thread of beats" what competes with the evaluation for Python's lock.

    python benchmarks/control_plane.py [--ranks 100 1000] [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from common import machine, table, write_results

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dualeval.engine.end.conclusion import ALL_SAVED_WITHIN_S  # noqa: E402
from dualeval.world.waiting import limit_for  # noqa: E402
from tests.vehicles.control_ranks import fail_in_the_middle, on_many_ranks, stop_all  # noqa: E402

RANKS_A_PROCESS = 64
# Nobody is taken for dead while thousands of threads share two cores.
LONG_S = 600.0
# What docs/promises.md says: seconds until all have heard of a failure, and have stopped.
HEARD_WITHIN_S = 2.0
STOPPED_WITHIN_S = 5.0
# Both of up to so many ranks; of more, a stop is to be a stop: rank 0 knows in time that all have saved.
PROMISED_FOR = 1000


def measure(size: int) -> dict[str, float]:
    """One round: meet, beat, fail, of as many as the promise is for; and another world that stops."""
    processes = max(4, size // RANKS_A_PROCESS)
    found = {} if size > PROMISED_FOR else _failing(size, processes)
    stopping = _checked(on_many_ranks(size, processes, stop_all, LONG_S))
    signalled = stopping[size // 2]["signalled"]
    return {
        **found,
        "stop heard": max(of_rank["heard"] for of_rank in stopping) - signalled,
        "rank 0 knew": stopping[0]["all saved"] - signalled,
        "stopped": max(of_rank["ended"] for of_rank in stopping) - signalled,
    }


def _failing(size: int, processes: int) -> dict[str, float]:
    start = monotonic()
    failing = _checked(on_many_ranks(size, processes, fail_in_the_middle, LONG_S))
    failed = failing[size // 2]["failed"]
    opened = max(of_rank["opened"] for of_rank in failing)
    return {
        "opened": opened - start,
        "met": max(of_rank["met"] for of_rank in failing) - opened,
        "heard": max(of_rank["heard"] for of_rank in failing if "heard" in of_rank) - failed,
        **{name: failing[0][name] for name in ("beats a second", "cores", "cores of beats")},
    }


def _checked(moments: Sequence[Any]) -> Sequence[dict[str, float]]:
    wrong = [found for found in moments if isinstance(found, str)]
    if wrong:
        sys.exit(wrong[0])
    return moments


def _shown(figures: Mapping[str, float], name: str, digits: int) -> str:
    return f"{figures[name]:.{digits}f}" if name in figures else "-"


def _report(by_size: Mapping[int, Sequence[Mapping[str, float]]], rounds: int) -> str:
    rows = []
    for size, turns in by_size.items():
        middle = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
        rows.append(
            [
                f"{size:,}",
                *(_shown(middle, name, 2) for name in ("opened", "met", "heard", "stop heard")),
                f"{middle['rank 0 knew']:.2f} of {limit_for(size, ALL_SAVED_WITHIN_S):.1f}",
                _shown(middle, "stopped", 2),
                _shown(middle, "beats a second", 1),
                *(_shown(middle, name, 3) for name in ("cores", "cores of beats")),
            ]
        )
    head = [
        "ranks",
        "s to open",
        "s to meet",
        "s until all heard of a failure",
        "s until all heard of a stop",
    ]
    head += ["s until rank 0 knew that all had saved, of those that it waits"]
    head += ["s until all had saved and knew it", "beats/s of a rank", "rank 0: cores", "its thread of beats"]
    return (
        f"Wanted of up to {PROMISED_FOR:,} ranks: a failure heard by all within {HEARD_WITHIN_S:g} s, a stop "
        f"concluded within {STOPPED_WITHIN_S:g} s. Of more: each stop is a stop: rank 0 knows that all "
        f"have saved before it gives them up. Medians of {rounds} rounds. Rank 0 has a process of its own, "
        f"the others are threads, {RANKS_A_PROCESS} a process (up to 256 ranks: in four processes), with two "
        f"clients of the store each: upper bounds, as they share these processes' locks and the cores. All "
        f"count as ranks of one host, whose processes rank 0 looks at with every "
        f"beat.\n\n{table(head, rows)}"
    )


def main() -> None:
    """Measure, print and write the results; ends with 1 where a limit is not met."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1000, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    host = machine()
    measured = {size: [measure(size) for _ in range(arguments.rounds)] for size in arguments.ranks}
    body = _report(measured, arguments.rounds)
    figures = {"rounds": measured, "wanted": {"heard": HEARD_WITHIN_S, "stopped": STOPPED_WITHIN_S}}
    write_results("control-plane", "The control plane of many ranks", body, figures, host)
    broken = [
        f"{size} ranks: {name} after {found:.2f} s, wanted {limit:g}"
        for size, turns in measured.items()
        for name, limit in (
            *((("heard", HEARD_WITHIN_S), ("stopped", STOPPED_WITHIN_S)) if size <= PROMISED_FOR else ()),
            ("rank 0 knew", limit_for(size, ALL_SAVED_WITHIN_S)),
        )
        if (found := statistics.median(turn[name] for turn in turns)) > limit
    ]
    if broken:
        sys.exit("\n".join(broken))


if __name__ == "__main__":
    main()
