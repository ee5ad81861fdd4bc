"""One start of a cell of ``dualeval bench``: starts its ranks, or is one of them and measures."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dualeval.cli.options import work_in_session
from dualeval.engine.end.process import numbers_of
from dualeval.engine.session import Session
from dualeval.launch import detect
from dualeval.options.job import Job
from dualeval.process_start import DEFAULT_SIGNALS, end_with_parent
from dualeval.tools.bench.plan import DATAPARALLEL, OF_RANKS, CellStart, own_part
from dualeval.whole_files import write_text

# Starts this command line anew, with the same interpreter and code.
OWN_COMMAND = (sys.executable, str(Path(__file__).resolve().parents[2] / "__main__.py"))


def run_cell(job: Job, start: CellStart, launcher: str | None, command: Sequence[str]) -> int:
    """Measure a cell once; returns the exit code."""
    backend = start.mode if start.mode in OF_RANKS else "single"
    if launcher is None:
        # Where 'dualeval bench' is killed: what it measures next would be beside this.
        end_with_parent(signal.SIGTERM)
    if launcher is None and start.mode in OF_RANKS:
        return _start_ranks(job, start, command)
    # Before any library counts the cores.
    local_rank = detect(os.environ, launcher).local_rank
    each = start.cores * (start.processes if start.mode == DATAPARALLEL else 1)
    os.sched_setaffinity(0, own_part(sorted(os.sched_getaffinity(0)), each, local_rank))
    session = Session(backend=backend, device=job.device, launcher=launcher or "none")
    code, measured = work_in_session(session, lambda session: _measure(session, job, start))
    if measured is not None and session.world.is_main:
        write_text(Path(start.to), json.dumps(measured))
    return code


def _start_ranks(job: Job, start: CellStart, command: Sequence[str]) -> int:
    from dualeval.world.local_ranks import last_rank, start_ranks

    last = last_rank(start.processes, detect(os.environ), start.mode)
    return start_ranks(
        [*command, "--launcher", last.launcher],
        last,
        backend=start.mode,
        device=job.device,
        allow_shared_gpu=False,
        stop_signals=numbers_of(DEFAULT_SIGNALS),
        takes_signals=True,
    )


def _measure(session: Session, job: Job, start: CellStart) -> dict[str, Any]:
    if start.train:
        from dualeval.tools.bench.training import measure_training

        return measure_training(session, job.make_task(), job.run_options, start)
    from dualeval.tools.bench.evaluation import measure_evaluation

    return measure_evaluation(session, job.make_task, job.run_options, start)
