"""The entry points: evaluate, once on all ranks of a launcher, for a model and data or a task; and export."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict, cast

from dualeval.engine.joining import refusing
from dualeval.engine.session import Session
from dualeval.engine.values.keywords import RunKeywords, SessionKeywords
from dualeval.engine.values.options import RunOptions, SessionOptions, check_session_options
from dualeval.errors import UsageError
from dualeval.messages import did_you_mean
from dualeval.options.fields import with_keywords
from dualeval.process.signals import numbers_of
from dualeval.process.start import DEFAULT_SIGNALS, may_print
from dualeval.process.status_line import LINE, doing
from dualeval.tasks.keywords import ImageClassificationKeywords
from dualeval.tasks.options.image_classification import ImageClassificationOptions

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Unpack

    from dualeval.metrics import Metric, RowMetric
    from dualeval.result import Result
    from dualeval.tasks import Task
    from dualeval.tasks.image_classification import ImageClassification
    from dualeval.tasks.own_model import ModelTask


class ModelKeywords(TypedDict, total=False):
    """Keywords of ``evaluate(model=..., data=...)``."""

    model: str | nn.Module | Callable[[], nn.Module]
    data: Any
    metrics: Sequence[Metric | RowMetric | str | Callable[..., Any]] | None
    collate: Callable[[list[Any]], Any] | None
    forward: Callable[[nn.Module, Any], Any] | None
    observe: Callable[[Any, Any], Mapping[str, Any]] | None
    rows: Sequence[str] | None
    thread_safe: bool | None
    name: str | None


class DoorKeywords(ModelKeywords, RunKeywords, SessionKeywords, ImageClassificationKeywords, total=False):
    """All keywords of ``evaluate``."""

    loggers: Sequence[str]
    step: int | None
    report: bool
    job: Mapping[str, Any] | None
    show: Callable[[int, int], None] | None
    started: float | None
    puts_back: bool
    preprocessing: str | Mapping[str, Any] | Callable[[Any], Any] | None
    model_arguments: Mapping[str, Any] | None


@with_keywords(
    DoorKeywords, ImageClassificationOptions, RunOptions, SessionOptions, like=(Session.evaluate, Session)
)
def evaluate(
    task: Task | Callable[[], Task] | None = None,
    *more: NoReturn,
    nproc: int | None = None,
    **options: Unpack[DoorKeywords],
) -> Result:
    """Evaluate once, in a session of its own; every rank calls this and gets the same metrics.

    ``evaluate(model=..., data=..., metrics=[...])`` takes any module and any data set; with a path as data
    it is the task image-classification of the command line, with its options (``preprocessing``, ``resize``,
    ``mean``, ``class_map``, ...), for a module or a name. ``evaluate(task)`` takes an object whose class is
    derived from ``Task``.

    Args:
        task: the task, or a function that makes it, so that its wrong input also gives one sentence and exit
            code 2; None if ``model`` and ``data`` are given.
        nproc: from a plain script: run it again as so many ranks on this machine, and exit with their exit
            code. Code before this call runs here and in each rank, code after it only in the ranks. Under a
            launcher it has to be the number of ranks, and does nothing.
        model: a module, or a function that returns one; for a path as data also a name.
        data: a map-style data set, a list or a tensor; or a path.
        metrics: metrics, functions of columns, or names (docs/metrics.md).
        collate: makes a batch of a list of samples.
        forward: (model, batch) -> outputs.
        observe: (outputs, batch) -> columns by name, one row a sample.
        rows: the columns that are kept besides those that metrics read.
        thread_safe: as in ``Task``.
        name: the task's name in results.
        options: those below. Without ``out`` nothing is written.

    Raises:
        SystemExit: the ranks that ``nproc`` has started have ended.
        UsageError: an option is wrong, task, data and weights do not fit together, or there is no script
            to run again.
        PeerError: another rank failed first.
        Stopped: a signal has ended the run; what was finished is saved.
    """
    if more or hasattr(task, "state_dict"):
        with refusing():
            raise UsageError("a model and data are given by name: write evaluate(model=..., data=...)")
    if TYPE_CHECKING:  # jedi, which does not read Unpack, offers the keywords of what takes **options
        ModelTask(**options)  # type: ignore[arg-type, misc]
        Session().evaluate(task, last=True, **options)  # type: ignore[arg-type, misc]
        Session(**options)  # type: ignore[misc]
        ImageClassification(cache=None, **options)  # type: ignore[arg-type, misc]
    keywords: dict[str, Any] = {**options}
    if nproc is not None:
        from dualeval.world.local_ranks import start_this_script

        check_session_options(keywords)
        device = keywords.get("device")
        launcher = start_this_script(
            nproc,
            backend=keywords.get("backend"),
            device=None if device is None else str(device),
            allow_shared_gpu=keywords.get("allow_shared_gpu", False),
            stop_signals=numbers_of(keywords.get("stop_signals", DEFAULT_SIGNALS)),
        )
        if launcher is not None:
            keywords["launcher"] = launcher
    names = set(inspect.signature(Session).parameters)
    of_session = {name: keywords[name] for name in keywords if name in names}
    # An option of the session and of the run: mixed machines concern the devices and the folder.
    others = {name: keywords[name] for name in keywords if name not in names - {"mix_machines"}}
    # Before the ranks meet: a wrong argument fails on all of them alike.
    LINE.speak(speaks=may_print(os.environ) and keywords.get("note") is None)
    with refusing(), doing("setting up the task"):
        made = task() if inspect.isfunction(task) else cast("Task | None", task)
        what, of_run = _task_of(made, others)
    with Session(**of_session) as session:
        result = session.evaluate(what, last=True, **of_run)
        session.say_warnings(result)
    if of_run.get("loggers") and session.world.is_main:
        from dualeval.report.loggers.log import log_result
        from dualeval.report.loggers.loggers import targets_of

        step = of_run.get("step")
        log_result(result, targets_of(of_run["loggers"], step), step, session.note)
    return result


def export(result: Result | str | Path, to: str | Sequence[str], *, step: int | None = None) -> None:
    """Log a finished result in trackers of experiments; every rank may call it, and rank 0 logs.

    Args:
        result: an evaluation's result, or the output folder of a finished run.
        to: ``KIND:WHERE``, such as "tensorboard:runs/tb" (docs/loggers.md); or several of these.
        step: the step of a training that is logged, such as the epoch.

    Raises:
        UsageError: a text names no logger, a package is not installed, or no finished run is there.
        DualevalError: a tracker failed; the others have the result.
    """
    from dualeval.process.speech import say
    from dualeval.report.loggers.log import export_result, stored_result
    from dualeval.report.loggers.loggers import check_installed, targets_of
    from dualeval.world.local_ranks import rank_of_script

    def note(sentence: str) -> None:
        say(f"dualeval: {sentence}")

    targets = targets_of(to, step, "to")
    if not rank_of_script().is_main:
        return
    check_installed(targets, "to")
    if isinstance(result, str | Path):
        export_result(stored_result(Path(result)), Path(result), targets, step, note)
    else:
        folder = None if result.folder is None else Path(result.folder)
        export_result(result, folder, targets, step, note)


def _task_of(task: Task | None, options: dict[str, Any]) -> tuple[Task, dict[str, Any]]:
    """The task, and the options that are not among its arguments."""
    from dualeval.tasks.own_model import ModelTask

    data = options.get("data")
    # A list of shards is no data set of texts; the task refuses it.
    first = data[0] if isinstance(data, list | tuple) and data else None
    are_shards = isinstance(first, str | Path) and str(first).endswith(".tar")
    if task is None and "model" in options and (isinstance(data, str | Path) or are_shards):
        return _image_task_of(options)
    if options.get("metrics") and options.get("metric"):
        raise UsageError("metric and metrics were given: give metrics=[...] alone")
    names = set(inspect.signature(ModelTask).parameters)
    of_images = {*ImageClassificationKeywords.__annotations__, "preprocessing", "model_arguments"}
    if misplaced := [name for name in options if name in of_images - {*RunKeywords.__annotations__, *names}]:
        raise UsageError(
            f"{misplaced[0]} is for data given as a path, of pictures with classes. A data set prepares its "
            "samples, and a module has its weights (model.load_state_dict(...)): leave it out"
        )
    of_task = {name: options[name] for name in options if name in names}
    if task is None:
        missing = [name for name in ("model", "data") if name not in of_task]
        if missing:
            known = DoorKeywords.__annotations__
            unknown = next((name for name in options if name not in known), None)
            hint = "" if unknown is None else f" {unknown!r} is not an option.{did_you_mean(unknown, known)}"
            raise UsageError(
                f"evaluate was given no {' and no '.join(missing)}.{hint} Give a task, evaluate(task), or "
                "evaluate(model=..., data=..., metrics=[...])"
            )
        rest = {name: options[name] for name in options if name not in names}
        return ModelTask(**of_task), rest
    if of_task:
        raise UsageError(
            f"{', '.join(of_task)} and a task were given: a task defines these itself. Leave out one of the "
            "two."
        )
    return task, options


def _image_task_of(options: Mapping[str, Any]) -> tuple[Task, dict[str, Any]]:
    """The task image-classification, made from a model and a path like on the command line; and the rest."""
    from dualeval.metrics.by_name import of_no_task
    from dualeval.tasks import class_names

    # Only the command line downloads weights.
    names = {field.name for field in fields(ImageClassificationOptions)} - {"metric", "download"}
    values = {name: value for name, value in options.items() if name in names}
    rest = {name: value for name, value in options.items() if name not in {*names, "metrics"} - {"keep"}}
    # Values that only Python can give.
    of_python = [name for name in ("model", "preprocessing") if not isinstance(values.get(name, ""), str)]
    made = {name: values.pop(name) for name in of_python}
    if "model_arguments" in rest:
        made["model_arguments"] = rest.pop("model_arguments")
    metrics = options.get("metrics") or ()
    if not isinstance(metrics, list | tuple) or not all(isinstance(each, str) for each in metrics):
        raise UsageError(
            f"metrics={metrics!r}: for a path as data expected a list of names, as ['top1', 'loss'] "
            "('dualeval list metrics'). For metrics of your own give a data set in place of the path"
        )
    of_task = tuple(name for name in metrics if not of_no_task([name]))
    if len(of_task) < len(metrics):
        rest["metric"] = tuple(metrics)
    try:
        return ImageClassificationOptions(**values, metric=of_task).make(**made), rest
    except UsageError as error:
        path = str(options["data"])
        if path not in str(error) or not Path(path).exists():
            raise
        raise UsageError(
            f"{error} (A path as data means images with classes. For other data give a task, as "
            f"dualeval.evaluate(dualeval.tasks.LanguageModeling(model=..., data={path!r})); there are "
            f"{', '.join(class_names())}.)"
        ) from error
