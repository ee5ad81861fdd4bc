"""Runs on a backend that a test has opened, watched and concluded as a guest's session does it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dualeval.backends.base import Backend
from dualeval.engine import run
from dualeval.engine.control.plane import ControlPlane, open_control_plane
from dualeval.engine.end.conclusion import Conclusion
from dualeval.engine.end.watch import Watch
from dualeval.engine.job.run_state import Run
from dualeval.engine.values.options import Out, RunOptions
from dualeval.errors import PeerError
from dualeval.result import Result
from dualeval.tasks import Task
from dualeval.world import World
from dualeval.world.devices import connect

# All that a finished run has in its folder.
FILES = ["job.json", "predictions.parquet", "result.json", "status.json"]


@contextmanager
def joined(backend: Backend) -> Iterator[ControlPlane]:
    """The control plane of some runs; what the block raises is told to the other ranks."""
    control = open_control_plane(backend)
    try:
        yield control
    except BaseException as error:
        if not isinstance(error, PeerError):
            control.fail(error)
        raise
    finally:
        control.leave()


@contextmanager
def watched(control: ControlPlane) -> Iterator[Watch]:
    """The watch of a run; what the block raises concludes the run."""
    conclusion = Conclusion(control, is_owner=False, ends_process=False)
    try:
        yield conclusion.watch
    except BaseException as error:
        conclusion.conclude(error)
        raise
    finally:
        conclusion.watch.stop()


def run_task(task: Task, backend: Backend, control: ControlPlane, options: RunOptions, **own: Any) -> Result:
    """Evaluate a task; ``own`` are fields of the ``Run``."""
    with watched(control) as watch:
        return run.evaluate(task, run_of(backend, control, watch, options, **own))


def run_of(backend: Backend, control: ControlPlane, watch: Watch, options: RunOptions, **own: Any) -> Run:
    """A run on the backend's own device; of ``own`` None leaves a field as it is."""
    given = {name: value for name, value in own.items() if value is not None}
    return Run(backend=backend, control=control, options=options, watch=watch, device=backend.device, **given)


# Fields of a ``Run``; other options of ``evaluate`` are those of ``RunOptions``.
_OF_RUN = ("note", "job", "show", "guest", "cores")


def evaluate(task: Task, out: Out = None, **options: Any) -> Result:
    """Evaluate a task in this process alone."""
    own = {name: options.pop(name) for name in _OF_RUN if name in options}
    with connect(None, World.alone(), "cpu") as backend, joined(backend) as control:
        return run_task(task, backend, control, RunOptions(out=out, **options), **own)


def noted(task: Task, out: Path | None = None, **options: Any) -> tuple[Result, list[str]]:
    """Evaluate a task so; and what is noted meanwhile."""
    notes: list[str] = []
    return evaluate(task, out, note=notes.append, **options), notes
