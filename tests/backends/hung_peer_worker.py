"""A rank that goes down while another one hangs: ``torchrun --nproc-per-node 2 hung_peer_worker.py FOLDER``.

Rank 1 stops, as Ctrl-Z or a dead disk would stop it. Rank 0 closes as one that has failed, and says so.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from dualeval.launch import detect
from dualeval.world.devices import connect


def main() -> None:
    folder, group = Path(sys.argv[1]), sys.argv[2]
    world = detect(os.environ)
    if group == "callers":
        dist.init_process_group("gloo")
    backend = connect(None, world, "cpu")
    backend.all_reduce(torch.ones(3))
    (folder / f"pid-{world.rank}").write_text(str(os.getpid()))
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    backend.close(failed=True)
    (folder / "closed").write_text("")
    # torchrun waits for rank 1, which the test ends.
    os._exit(0)


if __name__ == "__main__":
    main()
