"""One rank of a world of which one rank is late at each place where the others wait for it.

``waiting_worker.py BACKEND LATE FOLDER``: rank LATE waits before it joins, before it opens the control plane
and before the cores are divided, each time until the file of that name is in the folder. Waits speak soon.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from time import monotonic, sleep

from dualeval import open_control_plane, waiting
from dualeval.devices import connect
from dualeval.launch import detect

# A test that fails is not to wait for ever.
LIMIT_S = 30.0


def main() -> None:
    backend_name, late, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    waiting.FIRST_WORD_S = 0.3
    world = detect(os.environ)

    def come(place: str) -> None:
        start = monotonic()
        while world.rank == late and not (folder / place).exists() and monotonic() - start < LIMIT_S:
            sleep(0.02)

    come("join")
    with connect(backend_name, world, "cpu") as backend:
        come("control")
        with open_control_plane(backend):
            come("cores")
            # By its module's name: dualeval.cli.run itself is the command.
            importlib.import_module("dualeval.cli.run")._take_share_of_cores(backend)


if __name__ == "__main__":
    main()
