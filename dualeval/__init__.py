"""dualeval: evaluate any PyTorch model on any number of processes, with the same bits on each.

The names below are the public ones. They are imported at their first use: importing dualeval is cheap.
"""

from __future__ import annotations

# Not typing's own, which takes as long to import as Python to start; bool(0), as of a plain False jedi, which
# completes in editors, takes all below for never there.
TYPE_CHECKING = bool(0)
if TYPE_CHECKING:
    from typing import Any

    from dualeval.backends.base import Backend as Backend
    from dualeval.columns.ragged import Ragged as Ragged
    from dualeval.columns.ragged import Text as Text
    from dualeval.comparison.compared import compare as compare
    from dualeval.door import evaluate as evaluate
    from dualeval.door import export as export
    from dualeval.engine.samples.samples import wrap as wrap
    from dualeval.engine.scoring.rescoring import rescore as rescore
    from dualeval.engine.session import Session as Session
    from dualeval.engine.values.options import NEW_FOLDER as NEW_FOLDER
    from dualeval.errors import BackendError as BackendError
    from dualeval.errors import DualevalError as DualevalError
    from dualeval.errors import ExactlyOnceError as ExactlyOnceError
    from dualeval.errors import LaunchError as LaunchError
    from dualeval.errors import PeerError as PeerError
    from dualeval.errors import Stopped as Stopped
    from dualeval.errors import UsageError as UsageError
    from dualeval.launch import detect as detect
    from dualeval.metrics import Measured as Measured
    from dualeval.metrics import Metric as Metric
    from dualeval.metrics import RowMetric as RowMetric
    from dualeval.models.late_building import late_model as late_model
    from dualeval.options.job import Job as Job
    from dualeval.result import Result as Result
    from dualeval.tasks import Dataset as Dataset
    from dualeval.tasks import Task as Task
    from dualeval.tasks.own_model import ModelTask as ModelTask
    from dualeval.training.early_stopping import EarlyStopping as EarlyStopping
    from dualeval.world import World as World
    from dualeval.world.devices import connect as connect

__version__ = "0.1.0"

# The public names by their modules.
_NAMES = {
    "dualeval.backends.base": ("Backend",),
    "dualeval.columns.ragged": ("Ragged", "Text"),
    "dualeval.comparison.compared": ("compare",),
    "dualeval.door": ("evaluate", "export"),
    "dualeval.training.early_stopping": ("EarlyStopping",),
    "dualeval.engine.values.options": ("NEW_FOLDER",),
    "dualeval.engine.scoring.rescoring": ("rescore",),
    "dualeval.engine.samples.samples": ("wrap",),
    "dualeval.engine.session": ("Session",),
    "dualeval.errors": (
        "BackendError",
        "DualevalError",
        "ExactlyOnceError",
        "LaunchError",
        "PeerError",
        "Stopped",
        "UsageError",
    ),
    "dualeval.launch": ("detect",),
    "dualeval.metrics": ("Measured", "Metric", "RowMetric"),
    "dualeval.models.late_building": ("late_model",),
    "dualeval.options.job": ("Job",),
    "dualeval.result": ("Result",),
    "dualeval.tasks": ("Dataset", "Task"),
    "dualeval.tasks.own_model": ("ModelTask",),
    "dualeval.world": ("World",),
    "dualeval.world.devices": ("connect",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
# As in dualeval.metrics.Mean and dualeval.tasks.Segmentation.
_ROOMS = ("metrics", "tasks")

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    import importlib

    if name in _ROOMS:
        return importlib.import_module(f"dualeval.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, *_ROOMS]
