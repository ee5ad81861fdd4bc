"""One rank of a world whose last rank is late: to join, and again to a collective.

``late_worker.py BACKEND SECONDS FOLDER``; writes what each wait took to ``FOLDER/rank-N.json``: a list of
[seconds, processor seconds of this process meanwhile].
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from time import monotonic, process_time, sleep

import torch

from dualeval.launch import detect
from dualeval.world.devices import connect


def main() -> None:
    backend_name, seconds, folder = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
    world = detect(os.environ)
    last = world.rank == world.size - 1
    waits = []
    if last:
        sleep(seconds)
    start = monotonic(), process_time()
    with connect(backend_name, world, "cpu") as backend:
        waits.append((monotonic() - start[0], process_time() - start[1]))
        backend.barrier()
        if last:
            sleep(seconds)
        start = monotonic(), process_time()
        total = backend.all_reduce(torch.tensor(world.rank + 1))
        waits.append((monotonic() - start[0], process_time() - start[1]))
        assert total == sum(range(1, world.size + 1))
    (folder / f"rank-{world.rank}.json").write_text(json.dumps(waits))


if __name__ == "__main__":
    main()
