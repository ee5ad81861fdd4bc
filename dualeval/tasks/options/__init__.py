"""The built-in tasks with their options, a file a task; light to import, for the command line.

Callers: options, cli, tasks. Keep: no torch here; a field is a flag, a key of job files and of ``job`` in
results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

# The module of a task has its name, with underscores; the class of its options has it in capitals, with
# "Options". The task's class, without that, is a name of ``dualeval.tasks``, too.
_NAMES = (
    "image-classification",
    "segmentation",
    "detection",
    "text-classification",
    "question-answering",
    "language-modeling",
    "lm-eval",
)


def class_name(name: str) -> str:
    """The name of a built-in task's class."""
    return name.title().replace("-", "")


class _Options(Mapping[str, Any]):
    """The classes of options by the task's name, imported where one is asked for."""

    def __getitem__(self, name: str) -> Any:
        if name not in _NAMES:
            raise KeyError(name)
        return getattr(import_module(f"{__name__}.{name.replace('-', '_')}"), f"{class_name(name)}Options")

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def __len__(self) -> int:
        return len(_NAMES)

    def __contains__(self, name: object) -> bool:
        return name in _NAMES


TASKS = _Options()


def scored() -> dict[str, Any]:
    """Of the tasks whose answers can be had as a file, for ``dualeval score``: the options of that."""
    return {name: kind.scored for name, kind in TASKS.items() if hasattr(kind, "scored")}


def requested() -> dict[str, Any]:
    """Of the tasks whose requests can be written, for ``dualeval requests``: the options of that."""
    return {name: kind.requested for name, kind in TASKS.items() if hasattr(kind, "requested")}
