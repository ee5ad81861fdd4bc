"""One rank of a caller's own loop: ``own_loop_worker.py FOLDER OUT [KILL_AFTER]``; writes FOLDER/rank-N.json.

OUT is a folder, or ``none``. With KILL_AFTER rank 0 kills itself after so many batches.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dualeval.backends.base import Backend
from dualeval.engine.control.plane import ControlPlane
from dualeval.engine.end.watch import Watch
from dualeval.engine.folder import recorder
from dualeval.engine.own_loop import OwnLoop
from dualeval.engine.values.options import RunOptions
from dualeval.launch import detect
from dualeval.world.devices import connect
from tests.vehicles.sessions import joined, run_of, watched

SAMPLES = 997
FEATURES = 6
CLASSES = 4


def make_data() -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.rand(FEATURES, generator=generator), index % CLASSES) for index in range(SAMPLES)]


def make_model(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(FEATURES, CLASSES)


def own_loop(
    backend: Backend, control: ControlPlane, watch: Watch, out: Path | None, dataset: Any, **options: Any
) -> OwnLoop:
    """A loop over a data set, with the options of a run among ``options`` taken out."""
    own = {name: options.pop(name) for name in ("collate", "metrics", "model") if name in options}
    note = options.pop("note", lambda sentence: None)
    run_options = RunOptions(out=out, **{"batch_size": 16, **options})
    return OwnLoop(dataset, run_of(backend, control, watch, run_options, note=note, guest=True), **own)


def observed(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """The columns that every loop of these tests adds."""
    losses = nn.functional.cross_entropy(logits, targets, reduction="none")
    return {"loss": losses, "correct": logits.argmax(1) == targets, "target": targets}


def main() -> None:
    folder, out = Path(sys.argv[1]), None if sys.argv[2] == "none" else Path(sys.argv[2])
    kill_after = int(sys.argv[3]) if len(sys.argv) > 3 else None
    if kill_after is not None:
        recorder.FLUSH_ROWS = 16
    model, batches = make_model(), 0
    with (
        connect(None, detect(os.environ), "cpu") as backend,
        joined(backend) as control,
        watched(control) as watch,
    ):
        loop = own_loop(backend, control, watch, out, make_data(), model=model)
        with torch.no_grad():
            for inputs, targets in loop.batches():
                loop.add(inputs, **observed(model(inputs), targets))
                batches += 1
                if batches == kill_after and backend.world.is_main:
                    os.kill(os.getpid(), signal.SIGKILL)
        result = loop.result()
        report = {
            "digest": result.metrics_digest,
            "metrics": result.metrics,
            "resumed": result.chunks["resumed"],
            "replay": result.replay,
            "folder": result.folder,
            "batches": batches,
        }
        (folder / f"rank-{backend.world.rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
