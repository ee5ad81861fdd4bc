"""The engine without a session: a benchmark times it again and again beside other loops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dualeval import Backend, Result, Task, World, connect
from dualeval.engine.control.plane import open_control_plane
from dualeval.engine.end.watch import Watch
from dualeval.engine.job.run_state import Run
from dualeval.engine.run import evaluate
from dualeval.engine.values.options import RunOptions


class Engine:
    """Evaluates over one backend as often as it is asked; without one over this process alone."""

    def __init__(self, backend: Backend | None = None, **control: Any) -> None:
        self.backend = connect("single", World.alone(), "cpu") if backend is None else backend
        self.control = open_control_plane(self.backend, **control)
        self._watch: Watch | None = None

    def evaluate(self, task: Task, how: Mapping[str, Any] | None = None, **options: Any) -> Result:
        """Evaluate a task; ``options`` are those of a run, ``how`` more fields of it."""
        given: dict[str, Any] = dict(how or {})
        if "watch" not in given:
            self._watch = self._watch or Watch(self.control, lambda: 1, ends_process=False)
            given["watch"] = self._watch
        place: dict[str, Any] = {
            "backend": self.backend,
            "control": self.control,
            "device": self.backend.device,
        }
        return evaluate(task, Run(options=RunOptions(**options), **place, **given))
