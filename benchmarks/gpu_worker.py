"""What the steps of ``gpu.py`` have processes of their own measure: ``gpu_worker.py NAME JSON`` prints it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from gpu_steps import on_bits, on_speed
from gpu_steps.trial import ANSWER

_ALL = (
    *(on_bits.evaluate, on_bits.transport, on_bits.no_memory, on_bits.asserts, on_bits.copies, on_bits.masks),
    *(on_bits.errors_of_fp32, on_bits.float64_columns, on_bits.on_the_cpu, on_bits.outer_autocast),
    *(
        on_bits.in_training,
        on_speed.speed,
        on_speed.throughput,
        on_speed.decode,
        on_speed.waits,
        on_speed.profile,
    ),
)
WORKERS: dict[str, Callable[[dict[str, Any]], Any]] = {worker.__name__: worker for worker in _ALL}

if __name__ == "__main__":
    said = WORKERS[sys.argv[1]](json.loads(sys.argv[2]))
    if said is not None:
        print(f"\n{ANSWER}{json.dumps(said)}", flush=True)
