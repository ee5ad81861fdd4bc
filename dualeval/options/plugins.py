"""What is found by a name: built-in tasks, those of installed packages, and anybody's by module or file.

A package offers tasks and metrics by entry points, of the groups ``dualeval.tasks`` and ``dualeval.metrics``.
Each is imported when it is asked for, so one that is broken stands in nobody else's way.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, make_dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dualeval.errors import DualevalError, UsageError
from dualeval.messages import did_you_mean, nearest
from dualeval.options.fields import OptionField, fields_of, options_of_call
from dualeval.tasks.options import TASKS

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from dualeval.data.cache import DataCache
    from dualeval.tasks import Task

TASK_GROUP = "dualeval.tasks"
METRIC_GROUP = "dualeval.metrics"
BUILT_IN = "built in"

# Words for what people look for among the tasks, and the example to begin with.
_EXAMPLES = {
    "detect": "detection.py:rectangles",
    "multilabel": "multilabel.py:digits",
    "regression": "regression.py:diabetes",
}
DEFAULT_TASK = next(iter(TASKS))


@dataclass(frozen=True, kw_only=True)
class TaskKind:
    """A kind of evaluation, and how one is made."""

    # As asked for.
    name: str
    # Where it comes from, in words.
    origin: str
    # What it evaluates, in a line.
    summary: str
    # The dataclass of its options.
    options_class: type
    # Makes the task of such options.
    make: Callable[[Any], Any]
    # What was found by the name: a class, a function or a task.
    source: Any

    @functools.cached_property
    def fields(self) -> tuple[OptionField, ...]:
        """Its options."""
        return fields_of(self.options_class)


# -- tasks ---------------------------------------------------------------------------------------------


def task_kind(reference: str) -> TaskKind:
    """The kind of task that ``--task`` names."""
    if reference in TASKS:
        return _task_kind_of(TASKS[reference], reference, BUILT_IN)
    if ":" in reference:
        source, origin = _load(reference)
        return _task_kind_of(source, reference, origin)
    offered = entry_points_of(TASK_GROUP)
    if reference in offered:
        return _task_kind_of(load_plugin(offered[reference]), reference, origin_of(offered[reference]))
    if reference.endswith(".py"):
        raise UsageError(
            f"--task {reference}: expected a class after the file, as in --task {reference}:Class"
        )
    known = [*TASKS, *offered]
    hint = did_you_mean(reference, known, cutoff=0.4)
    if example := next((name for name in _EXAMPLES if name in reference.lower()), None):
        hint = f" dualeval's repository has an example to begin with: --task examples/{_EXAMPLES[example]}"
    raise UsageError(
        f"--task {reference!r}: expected one of {', '.join(known)}; or package.module:Class or "
        f"file.py:Class, a task of your own.{hint}"
    )


def scored_kind(name: str) -> TaskKind:
    """The kind of task that scores the answers in a file, by its name in ``scored()``."""
    return _task_kind_of(TASKS[name].scored, name, BUILT_IN)


def _task_kind_of(source: Any, name: str, origin: str) -> TaskKind:
    from dualeval.tasks import Task

    flag = f"--task {name}"
    summary = summary_of(source)
    options_class: type
    make: Callable[[Any], Any]
    if isinstance(source, Task):
        summary = summary_of(type(source))
        options_class, make = make_dataclass("NoOptions", [], frozen=True), lambda options: source
    elif isinstance(source, type) and is_dataclass(source) and callable(getattr(source, "make", None)):
        options_class, make = source, source.make  # type: ignore[attr-defined]
    elif isinstance(source, type) and not issubclass(source, Task):
        bases = ", ".join(base.__name__ for base in source.__bases__)
        raise UsageError(
            f"{flag}: {source.__name__} is not a task: expected a class derived from dualeval.Task, and it "
            f"is derived from {bases}"
        )
    elif not callable(source):
        raise UsageError(
            f"{flag}: a {type(source).__name__} is not a task: expected a class derived from dualeval.Task, "
            "a function that returns a task, or a task"
        )
    elif missing := sorted(getattr(source, "__abstractmethods__", ())):
        raise UsageError(
            f"{flag}: {source.__name__} does not say {', '.join(missing)}: a task has to define "
            f"{'it' if len(missing) == 1 else 'them'}"
        )
    else:
        options_class, make = _options_of(source, flag)
    kind = TaskKind(
        name=name, origin=origin, summary=summary, options_class=options_class, make=make, source=source
    )
    for field in kind.fields:
        if field.is_required and not field.is_settable:
            raise UsageError(
                f"{flag}: its option {field.name} has the type {field.kind_name}, "
                "which cannot be typed. Give it a default, or one of the types int, float, bool, str, Path, "
                "Literal, tuple and list of them."
            )
    return kind


def _options_of(source: Any, flag: str) -> tuple[type, Callable[[Any], Any]]:
    """The options of a class or function: a dataclass that it names, or its keyword arguments."""
    options_class = getattr(source, "options_class", None)
    if options_class is not None:
        if not (isinstance(options_class, type) and is_dataclass(options_class)):
            raise UsageError(f"{flag}: its options_class is {options_class!r}, expected a dataclass")
        return options_class, source
    made = options_of_call(source)
    names = fields_of(made)
    if len(names) == 1 and isinstance(names[0].kind, type) and is_dataclass(names[0].kind):
        return names[0].kind, source
    return made, lambda options: source(**{field.name: getattr(options, field.name) for field in names})


def made_task(kind: TaskKind, options: Any, cache: DataCache | None = None) -> Task:
    """The task of a kind, made of its options."""
    from dualeval.tasks import Task

    task = kind.make(options) if cache is None or kind.name not in TASKS else options.make(cache)
    if not isinstance(task, Task):
        raise UsageError(
            f"--task {kind.name}: it returned a {type(task).__name__}, expected a task: an object whose "
            "class is derived from dualeval.Task"
        )
    return task


def summary_of(source: Any) -> str:
    """The first sentence of what a class says of itself, not of what it is derived from."""
    docstring = vars(source).get("__doc__") if isinstance(source, type) else getattr(source, "__doc__", None)
    summary = (docstring or "").strip().split("\n\n")[0]
    # What a dataclass writes itself.
    return "" if summary.startswith(f"{getattr(source, '__name__', '')}(") else " ".join(summary.split())


# -- modules and files ---------------------------------------------------------------------------------


def _load(reference: str) -> tuple[Any, str]:
    """What a module or file has under a name, and where it comes from."""
    place, _, attribute = reference.rpartition(":")
    from dualeval.user_code.importing import own_module

    module = own_module(place, f"--task {reference}")
    origin = f"{'file' if place.endswith('.py') else 'module'} {place}"
    if not hasattr(module, attribute):
        names = _tasks_in(module)
        hint = nearest(attribute, [*names, *(name for name in vars(module) if not name.startswith("_"))])
        tasks = f" Tasks there: {', '.join(names)}." if names else " It has no task class."
        raise UsageError(f"--task {reference}: {place} has no {attribute!r}.{hint}{tasks}")
    return getattr(module, attribute), origin


def _tasks_in(module: ModuleType) -> list[str]:
    """The names of the classes of tasks that a module defines itself, and of tasks."""
    from dualeval.tasks import Task

    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, Task)
        or (
            isinstance(value, type)
            and issubclass(value, Task)
            and value.__module__ == module.__name__
            and not inspect.isabstract(value)
        )
    ]


# -- entry points --------------------------------------------------------------------------------------


def entry_points_of(group: str) -> Mapping[str, EntryPoint]:
    """What the installed packages offer in a group, by name; of one name the first that is found."""
    from importlib.metadata import entry_points  # with the parser of mails, which takes long

    by_name: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        by_name.setdefault(entry.name, entry)
    return by_name


def origin_of(entry: EntryPoint) -> str:
    """The package of an entry point, in words."""
    return "a package" if entry.dist is None else f"package {entry.dist.name} {entry.dist.version}"


def load_plugin(entry: EntryPoint) -> Any:
    """What an entry point names."""
    try:
        return entry.load()
    except DualevalError:
        raise
    except (Exception, SystemExit) as error:
        from dualeval.user_code.importing import broken

        raise broken(f"{entry.name} ({entry.value}) of {origin_of(entry)}", error) from error


def plugin_metric(name: str) -> Any:
    """The metric that a package offers under a name, made where it is a class or a function."""
    entry = entry_points_of(METRIC_GROUP).get(name)
    if entry is None:
        return None
    metric = load_plugin(entry)
    return metric() if isinstance(metric, type) or inspect.isroutine(metric) else metric


def is_metric_of_no_task(text: str) -> bool:
    """Whether a metric is asked for by a package's name for it, or with its origin before a colon."""
    return ":" in text or text in entry_points_of(METRIC_GROUP)
