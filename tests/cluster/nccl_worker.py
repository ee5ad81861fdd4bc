"""One rank of Horovod's on a node of its own, whose Horovod is said to be built with NCCL.

``nccl_worker.py NAME``: writes to ``NAME.N`` what NCCL would read before, in and after the backend's life.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import torch

from dualeval.launch import detect
from dualeval.world.devices import connect

NAME = "NCCL_SOCKET_IFNAME"


def main() -> None:
    # All but the GPUs is real: Horovod reads the variable nowhere itself.
    vars(importlib.import_module("horovod.torch"))["nccl_built"] = lambda: True
    world = detect(os.environ)
    found = [os.environ.get(NAME)]
    with connect("horovod", world, "cpu") as backend:
        found.append(os.environ.get(NAME))
        assert backend.all_reduce(torch.tensor(1)) == world.size
    found.append(os.environ.get(NAME))
    Path(f"{sys.argv[1]}.{world.rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
