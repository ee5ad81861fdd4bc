"""One rank of the digest matrix: evaluates the embedded job in many manners, each anew.

``digest_worker.py FOLDER MANNERS``, where MANNERS is JSON: a list of [limit, workers, threads].
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from dualeval.engine.options import RunOptions
from dualeval.launch import detect
from dualeval.tasks.image_classification import ImageClassification
from dualeval.world.devices import connect
from tests.sessions import joined, run_task


def main() -> None:
    folder = Path(sys.argv[1])
    found = []
    with connect(None, detect(os.environ), "cpu") as backend, joined(backend) as control:
        for number, (limit, workers, threads) in enumerate(json.loads(sys.argv[2])):
            torch.set_num_threads(threads)
            result = run_task(
                ImageClassification(),
                backend,
                control,
                RunOptions(out=folder / str(number), limit=limit, workers=workers),
            )
            found.append(
                {
                    "digest": result.metrics_digest,
                    "samples": result.samples_digest,
                    "resumed": result.chunks["resumed"],
                    "total": result.samples["total"],
                }
            )
        if backend.world.is_main:
            (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
