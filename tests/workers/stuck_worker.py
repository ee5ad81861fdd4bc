"""One rank of two, of which rank 1 waits in a collective to which rank 0 never comes.

``stuck_worker.py BACKEND``. Each rank says what it hears of that, and ends.
"""

from __future__ import annotations

import os
import sys
import threading
from time import sleep

from dualeval.engine.control.plane import open_control_plane
from dualeval.errors import PeerError
from dualeval.launch import detect
from dualeval.world.devices import connect

LIMIT_S = 60.0


def main() -> None:
    backend = connect(sys.argv[1], detect(os.environ), "cpu")
    control = open_control_plane(backend, 2.0)

    def end() -> None:
        while control.failure is None and control.news.wait(LIMIT_S):
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
    main()
