"""Evaluates with reading processes, where the shared memory has no room for all their batches. OUT"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from dualeval.engine.options import RunOptions
from dualeval.errors import UsageError
from dualeval.launch import detect
from dualeval.world.devices import connect
from tests.sessions import joined, run_task
from tests.tiny import TinyTask

WORKERS = 8


def main(out: Path) -> None:
    """Write what came of it: with as many as there is room for, with that number asked for, with all."""
    notes: list[str] = []
    found: dict[str, Any] = {}
    with connect(None, detect(os.environ), "cpu") as backend, joined(backend) as control:

        def digest(name: str, **options: Any) -> str:
            task, folder = TinyTask(40_000), out / name
            result = run_task(
                task, backend, control, RunOptions(out=folder, batch_size=2000, **options), note=notes.append
            )
            return result.metrics_digest

        found["fewer"] = digest("fewer", workers=WORKERS, fewer_workers=True)
        found["notes"] = list(notes)
        words = notes[0].partition("room for ")[2].split(" ")[0] if notes else "none"
        found["room"] = int(words) if words.isdecimal() else 0
        found["asked"] = digest("asked", workers=found["room"])
        try:
            digest("all", workers=WORKERS)
        except UsageError as error:
            found["error"] = str(error)
        if backend.world.is_main:
            (out / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
