"""The engine without a session: a benchmark times it again and again beside other loops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dualeval import Backend, Result, Task, World, connect
from dualeval.engine.control.plane import open_control_plane
from dualeval.engine.evaluator import Evaluator
from dualeval.engine.options import RunOptions


class Engine:
    """Evaluates over one backend as often as it is asked; without one over this process alone."""

    def __init__(self, backend: Backend | None = None, **control: Any) -> None:
        self.backend = connect("single", World.alone(), "cpu") if backend is None else backend
        self.control = open_control_plane(self.backend, **control)

    def evaluate(self, task: Task, how: Mapping[str, Any] | None = None, **options: Any) -> Result:
        """Evaluate a task; ``options`` are those of a run, ``how`` more arguments of the Evaluator."""
        return Evaluator(task, self.backend, self.control, RunOptions(**options), **(how or {})).run()
