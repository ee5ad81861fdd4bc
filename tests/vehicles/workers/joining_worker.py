"""One rank of a world in which the others wait: ``joining_worker.py WHAT ARGUMENT...``.

- ``place [BACKEND]``: joins the others, and prints the places of all.
- ``waits BACKEND LATE FOLDER``: rank LATE waits before it joins, before the first collective, before it comes
  to the control plane and before the cores are divided, each time until a file of that place's name is in the
  folder; it fails where none comes. Waits speak soon. BACKEND ``guest`` is torch in a group of the script's.
- ``late BACKEND SECONDS FOLDER``: the last rank is late, to join and again to a collective; writes what each
  wait took to ``FOLDER/rank-N.json``: a list of [seconds, processor seconds of this process meanwhile].
- ``stuck BACKEND``: of two ranks rank 1 waits in a collective to which rank 0 never comes. Each says what it
  hears of that, and ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic, process_time, sleep
from typing import Any

import torch
import torch.distributed as dist

from dualeval.engine.control.plane import open_control_plane
from dualeval.errors import PeerError
from dualeval.launch import detect
from dualeval.world import store, waiting
from dualeval.world.devices import connect, take_cores
from dualeval.world.store import join_store

LIMIT_S = 30.0
WORLD = detect(os.environ)


def place(backend_name: str | None = None) -> None:
    with connect(backend_name, WORLD, "cpu") as backend:
        world = backend.world
        told = [world.rank, world.local_rank, world.local_size, world.node_rank, world.node_sizes]
        everyone = backend.all_gather_json([*told, backend.name, world.placed])
        if world.is_main:
            print(json.dumps(everyone))


def waits(backend_name: str, late: str, folder: str) -> None:
    waiting.FIRST_WORD_S = 0.3

    def come(place: str) -> None:
        start = monotonic()
        while WORLD.rank == int(late) and not Path(folder, place).exists():
            assert monotonic() - start < LIMIT_S, f"nobody has said that rank {late} is late to {place}"
            sleep(0.02)

    def come_and_join(*arguments: Any) -> Any:
        come("control")
        return join_store(*arguments)

    if is_guest := backend_name == "guest":
        backend_name = "torch"
        dist.init_process_group("gloo")
    come("join")
    with connect(backend_name, WORLD, "cpu") as backend:
        come("first")
        vars(store)["join_store"] = come_and_join
        plane = open_control_plane(backend)
        come("cores")
        take_cores(backend, sets_threads=True)
        plane.leave()
    if is_guest:
        dist.destroy_process_group()


def late(backend_name: str, seconds: str, folder: str) -> None:
    last = WORLD.rank == WORLD.size - 1
    waited = []
    if last:
        sleep(float(seconds))
    start = monotonic(), process_time()
    with connect(backend_name, WORLD, "cpu") as backend:
        waited.append((monotonic() - start[0], process_time() - start[1]))
        backend.barrier()
        if last:
            sleep(float(seconds))
        start = monotonic(), process_time()
        total = backend.all_reduce(torch.tensor(WORLD.rank + 1))
        waited.append((monotonic() - start[0], process_time() - start[1]))
        assert total == sum(range(1, WORLD.size + 1))
    Path(folder, f"rank-{WORLD.rank}.json").write_text(json.dumps(waited))


def stuck(backend_name: str) -> None:
    backend = connect(backend_name, WORLD, "cpu")
    control = open_control_plane(backend, 2.0)

    def end() -> None:
        while control.failure is None and control.news.wait(2 * LIMIT_S):
            control.news.clear()
        sys.stderr.write(f"rank {control.name.rank} heard: {control.failure}\n")
        sys.stderr.flush()
        # Rank 0 serves the others.
        sleep(1.5)
        os._exit(1)

    ending = threading.Thread(target=end)
    ending.start()
    if control.name.rank == 1:
        backend.barrier()
    try:
        control.meet()
    except PeerError:
        ending.join()


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    works: dict[str, Callable[..., None]] = {"place": place, "waits": waits, "late": late, "stuck": stuck}
    works[what](*arguments)
