"""One rank that joins the others, and prints its place: ``place_worker.py [BACKEND]``."""

from __future__ import annotations

import json
import os
import sys

from dualeval.launch import detect
from dualeval.world.devices import connect


def main() -> None:
    backend_name = sys.argv[1] if len(sys.argv) > 1 else None
    with connect(backend_name, detect(os.environ), "cpu") as backend:
        world = backend.world
        told = [world.rank, world.local_rank, world.local_size, world.node_rank, world.node_sizes]
        everyone = backend.all_gather_json([*told, backend.name, world.placed])
        if world.is_main:
            print(json.dumps(everyone))


if __name__ == "__main__":
    main()
