"""Runs that are killed at random, and gone on with until they are done: nothing lost, nothing counted twice.

A round runs a small job (2,000 images of the embedded one in batches of 20) under a random launcher and
backend with 1 to 4 ranks, hurts it at a random moment, and types the same command with another launcher,
backend and number of ranks, hurting that as well with probability 1/3, until the job is done. Its digest has
to be that of a run that nobody hurt.

    python benchmarks/faults.py [--rounds N] [--seed N] [--only NUMBER]

A round is played again, with the same choices, by its number and the seed. Exit code 1 where a sample was
lost or counted twice, a digest differs, a run hung, or anything else went wrong.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from common import ROOT, machine, missing, table, write_results

# The rounds are the tests' own.
sys.path.insert(0, str(ROOT))

from tests.conftest import Launch
from tests.vehicles.faults import KILL, KILL_0, POINTS, SAMPLES, TERM, Round, play, uninterrupted

# In every twenty rounds.
_MIX = [*[KILL] * 11, *[KILL_0] * 3, *[TERM] * 3, *POINTS]


def main() -> int:
    """Play, print and write the results; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one")
    parser.add_argument("--only", type=int, help="play this round alone, and write nothing")
    arguments = parser.parse_args()
    for backend, over_mpi in (("horovod", False), ("mpi", True)):
        reason = missing(backend, over_mpi=over_mpi)
        if reason is not None:
            parser.error(reason)
    seed = secrets.randbelow(10**6) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    host = machine()
    numbers = range(arguments.rounds) if arguments.only is None else [arguments.only]
    start = perf_counter()
    rounds = _play_all(seed, numbers)
    minutes = (perf_counter() - start) / 60
    bad = [played for played in rounds if not played.went_well]
    if arguments.only is None:
        body = _report(seed, rounds, minutes)
        figures = {"seed": seed, "rounds": [asdict(played) for played in rounds]}
        write_results("faults", "Runs that are killed, and gone on with", body, figures, host)
    for played in rounds if arguments.only is not None else bad:
        print(f"\n{played}", file=sys.stderr)
    return 1 if bad else 0


def _play_all(seed: int, numbers: Any) -> list[Round]:
    launch = Launch()
    rounds = []
    with tempfile.TemporaryDirectory(prefix="dualeval-faults-") as folder:
        digest = uninterrupted(launch, Path(folder) / "uninterrupted")
        for number in numbers:
            start = perf_counter()
            # 7 and 20 have no common divisor: kinds are spread over the rounds, and each comes its times.
            kind = _MIX[7 * number % len(_MIX)]
            with tempfile.TemporaryDirectory(prefix=f"round-{number}-", dir=folder) as own:
                played = play(launch, Path(own), kind, f"{seed}/{number}", digest)
            rounds.append(played)
            how = "well" if played.went_well else "NOT WELL"
            print(
                f"round {number}, {kind}: hurt {played.hurt} times, went {how}, "
                f"{perf_counter() - start:.1f} s",
                flush=True,
            )
    return rounds


def _report(seed: int, rounds: list[Round], minutes: float) -> str:
    """The table, and what it is a table of."""
    kinds = list(dict.fromkeys(_MIX))
    rows = [_row(kind, [played for played in rounds if played.kind == kind]) for kind in kinds]
    rows.append(_row("**all**", rounds))
    head = [
        "what was done to it",
        "rounds",
        "times hurt",
        "chunks resumed",
        "samples lost",
        "samples counted twice",
        "digests differing",
        "runs hanging",
        "else wrong",
        "longest until all ranks were gone, s",
    ]
    wrong = "".join(f"\n```\n{played}\n```\n" for played in rounds if not played.went_well)
    return (
        f"Seed {seed}, {len(rounds)} rounds in {minutes:.0f} minutes: {SAMPLES:,} images of the embedded job "
        "in batches of 20, a journal file every 0.2 s; `dualeval run`, `dualeval run --nproc N` with torch "
        "and with Horovod, `torchrun`, and `mpirun` with mpi4py, 1 to 4 ranks, all drawn anew for each run "
        "of a round. Each run after the first is hurt again with probability 1/3. Wanted: nothing lost, "
        f"nothing twice, no other digest, nothing hanging.\n\n{table(head, rows)}{wrong}"
    )


def _row(name: str, rounds: list[Round]) -> list[str]:
    found = [played.found for played in rounds if played.found is not None]
    noticed = [seconds for played in rounds for seconds in played.notice_s]
    counted = (
        len(rounds),
        sum(played.hurt for played in rounds),
        sum(one.resumed for one in found),
        sum(one.lost for one in found),
        sum(one.twice for one in found),
        sum(one.differs for one in found),
        sum(played.hanging for played in rounds),
        sum(bool(played.wrong or (played.found and played.found.wrong)) for played in rounds),
    )
    return [name, *map(str, counted), f"{max(noticed):.1f}" if noticed else "-"]


if __name__ == "__main__":
    sys.exit(main())
