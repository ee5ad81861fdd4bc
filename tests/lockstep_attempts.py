"""Several attempts at a sharded network in one session, some of which fail: under torchrun."""

from __future__ import annotations

import sys
from collections.abc import Callable

import dualeval
from dualeval.result import Result
from tests.workers.lockstep_worker import ShardedTask

CASES: dict[str, dict[str, str]] = {
    "good": {},
    "everywhere": {"what": "raise", "at": "3"},
    "good after everywhere": {},
    "columns of one rank": {"what": "observe", "at": "3", "rank": "1"},
    "good after columns": {},
    "forward of one rank": {"what": "raise", "at": "3", "rank": "1"},
    "good at last": {},
}


def main() -> int:
    """Make all attempts, as far as one comes; print what becomes of each."""
    with dualeval.Session() as session:

        def attempt(task: ShardedTask) -> Callable[[], Result]:
            return lambda: session.evaluate(task, batch_size=4, puts_back=False, last=True)

        for name, wrong in CASES.items():
            _, failure = session.attempt(attempt(ShardedTask(30, wrong)), last=name == "good at last")
            if session.world.is_main:
                print(f"{name}: {'done' if failure is None else failure}", flush=True)
    return session.exit_code


if __name__ == "__main__":
    sys.exit(main())
