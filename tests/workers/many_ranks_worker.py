"""Dozens of ranks of one run from one process: it imports all that they need once, and then forks them.

``many_ranks_worker.py FOLDER VARIABLES``, where VARIABLES is a JSON file: for each rank the variables that a
launcher would set for it. Each rank writes the digest of the embedded job to ``FOLDER/rank-N``. When one
fails, all are ended, and so is this process, with exit code 1.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

import torch

# The model and the data of the embedded job.
import dualeval.data.idx
import dualeval.models.fashion_cnn  # noqa: F401
from dualeval.engine.options import RunOptions
from dualeval.launch import detect
from dualeval.tasks.image_classification import ImageClassification
from dualeval.world.devices import connect
from tests.sessions import joined, run_task

# Seconds after which a rank ends itself, whoever may have gone before.
LIMIT_S = 240


def main() -> None:
    folder = Path(sys.argv[1])
    launched: list[dict[str, str]] = json.loads(Path(sys.argv[2]).read_text())
    if "HOROVOD_RANK" in launched[0]:
        importlib.import_module("horovod.torch")
    # Of a process with threads a fork takes only one along, and the locks that the others hold.
    threads = os.listdir("/proc/self/task")  # noqa: PTH208 - numbers, not paths
    assert len(threads) == 1, f"{len(threads)} threads before the fork"
    ranks = {}
    for number, variables in enumerate(launched):
        pid = os.fork()
        if pid == 0:
            run_rank(folder, variables)
        ranks[pid] = number
    failed = False
    while ranks:
        pid, status = os.wait()
        number, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
        if code != 0 and not failed:
            failed = True
            print(f"rank {number} ended with {code}, and with it all that were left", file=sys.stderr)
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    sys.exit(1 if failed else 0)


def run_rank(folder: Path, variables: Mapping[str, str]) -> None:
    """Evaluate as one rank, in a child of the fork, and end it there."""
    signal.alarm(LIMIT_S)
    code = 1
    try:
        os.environ.update(variables)
        torch.set_num_threads(1)
        world = detect(os.environ)
        with connect(None, world, "cpu") as backend, joined(backend) as control:
            result = run_task(ImageClassification(), backend, control, RunOptions(out=folder / "out"))
        assert result.chunks["resumed"] == 0
        (folder / f"rank-{world.rank}").write_text(result.metrics_digest)
        code = 0
    except Exception:  # noqa: BLE001 - what follows the fork in the parent is not the child's to do
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
