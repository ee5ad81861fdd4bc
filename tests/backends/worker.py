"""One rank of a contract group: runs every check that applies, and writes what it found.

Started by the real launcher: ``torchrun --nproc-per-node 2 worker.py --backend torch --folder FOLDER``.
The report is one JSON line a check in ``FOLDER/rank-N.jsonl``: {"check": name, "problems": [text]}.
"""

from __future__ import annotations

import argparse
import json
import os
import traceback
from pathlib import Path

from dualeval.launch import detect
from dualeval.world.devices import connect
from tests.backends.bench import Bench
from tests.backends.checks import CHECKS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--device")
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    world = detect(os.environ)
    backend = connect(arguments.backend, world, arguments.device)
    with (arguments.folder / f"rank-{world.rank}.jsonl").open("w", encoding="utf-8") as report:
        for name, check in CHECKS.items():
            if not check.applies(arguments.backend, world.size):
                continue
            bench = Bench(backend, arguments.folder)
            try:
                check.run(bench)
            except Exception:
                # The others may be inside a collective of this check: end here, and the launcher ends them.
                bench.problems.append(traceback.format_exc())
                raise
            finally:
                print(json.dumps({"check": name, "problems": bench.problems}), file=report, flush=True)


if __name__ == "__main__":
    main()
