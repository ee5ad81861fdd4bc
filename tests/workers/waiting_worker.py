"""One rank of a world of which one rank is late at each place where the others wait for it.

``waiting_worker.py BACKEND LATE FOLDER``: rank LATE waits before it joins, before the first collective,
before it comes to the control plane and before the cores are divided, each time until a file of that place's
name is in the folder; it fails where none comes. Waits speak soon. BACKEND ``guest`` is
torch in a group of the script's own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch.distributed as dist

from dualeval.engine.control import plane as control
from dualeval.engine.control.plane import open_control_plane
from dualeval.launch import detect
from dualeval.world import waiting
from dualeval.world.devices import connect, take_cores
from dualeval.world.store import join_store

LIMIT_S = 30.0


def main() -> None:
    backend_name, late, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    waiting.FIRST_WORD_S = 0.3
    world = detect(os.environ)

    def come(place: str) -> None:
        start = monotonic()
        while world.rank == late and not (folder / place).exists():
            assert monotonic() - start < LIMIT_S, f"nobody has said that rank {late} is late to {place}"
            sleep(0.02)

    def come_and_join(*arguments: Any) -> Any:
        come("control")
        return join_store(*arguments)

    if is_guest := backend_name == "guest":
        backend_name = "torch"
        dist.init_process_group("gloo")
    come("join")
    with connect(backend_name, world, "cpu") as backend:
        come("first")
        vars(control)["join_store"] = come_and_join
        plane = open_control_plane(backend)
        come("cores")
        take_cores(backend, sets_threads=True)
        plane.leave()
    if is_guest:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
