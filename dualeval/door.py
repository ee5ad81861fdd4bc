"""evaluate: the door. A model and data, or a task, evaluated once on all ranks of a launcher; and export."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dualeval.engine.end.process import numbers_of
from dualeval.engine.joining import refusing
from dualeval.engine.options import check_session_options
from dualeval.engine.session import Session
from dualeval.errors import UsageError
from dualeval.process_start import DEFAULT_SIGNALS

if TYPE_CHECKING:
    from dualeval.result import Result
    from dualeval.tasks import Task


def evaluate(
    task: Task | Callable[[], Task] | None = None, *, nproc: int | None = None, **options: Any
) -> Result:
    """Evaluate once, in a session of its own; every rank calls this and gets the same metrics.

    ``evaluate(model=..., data=..., metrics=[...])`` takes any module and any data set; with a path as data
    it is the task image-classification of the command line, with its options (``preprocessing``, ``resize``,
    ``mean``, ``class_map``, ...), for a module or a name. ``evaluate(task)`` takes an object whose class is
    derived from ``Task``.

    Args:
        task: what is evaluated, or a function that makes it, whose wrong input is then one sentence and exit
            code 2 as well; None where ``model`` and ``data`` are given.
        nproc: from a plain script: run it again as so many ranks on this machine, and exit with their exit
            code. What the script does before this call is done here and in each rank, what comes after it in
            the ranks only. Under a launcher it has to be the number of its ranks, and does nothing.
        options: of ``ModelTask``, as ``model``, ``data``, ``metrics``, ``collate``, ``forward`` and
            ``observe``; of ``Session``, as ``backend`` and ``device``; and of ``RunOptions``, as ``out`` and
            ``batch_size``. Without ``out`` nothing is written. ``loggers``, ``step`` and ``report`` are those
            of ``Session.evaluate``.

    Raises:
        SystemExit: the ranks that ``nproc`` has started have ended.
        UsageError: an option, or task, data and weights are not as they have to be; or there is no script
            that could be run again.
        PeerError: another rank failed first.
        Stopped: a signal has ended the run; what was finished is saved.
    """
    if nproc is not None:
        from dualeval.world.local_ranks import start_this_script

        check_session_options(options)
        device = options.get("device")
        launcher = start_this_script(
            nproc,
            backend=options.get("backend"),
            device=None if device is None else str(device),
            allow_shared_gpu=options.get("allow_shared_gpu", False),
            stop_signals=numbers_of(options.get("stop_signals", DEFAULT_SIGNALS)),
        )
        if launcher is not None:
            options["launcher"] = launcher
    names = set(inspect.signature(Session).parameters)
    of_session = {name: options[name] for name in options if name in names}
    # What ranks may differ in concerns their devices and the folder alike.
    others = {name: options[name] for name in options if name not in names - {"mix_machines"}}
    # Before the ranks meet: a wrong argument is wrong on all of them.
    with refusing():
        made = task() if inspect.isfunction(task) else cast("Task | None", task)
        what, of_run = _task_of(made, others)
    with Session(**of_session) as session:
        result = session.evaluate(what, last=True, **of_run)
        session.say_warnings(result)
    if of_run.get("loggers") and session.world.is_main:
        from dualeval.report.loggers import targets_of
        from dualeval.report.loggers.log import log_result

        step = of_run.get("step")
        log_result(result, targets_of(of_run["loggers"], step), step, session.note)
    return result


def export(result: Result | str | Path, to: str | Sequence[str], *, step: int | None = None) -> None:
    """Log a finished result in trackers of experiments; every rank may call it, and rank 0 logs.

    Args:
        result: of an evaluation, or the output folder of a finished run.
        to: where: ``KIND:WHERE``, such as "tensorboard:runs/tb" (docs/loggers.md); or several of these.
        step: which step of a training it is, such as the epoch.

    Raises:
        UsageError: a text names no logger, a package is not installed, or no finished run is there.
        DualevalError: a tracker failed; the others have the result.
    """
    from dualeval.engine.end.process import say
    from dualeval.report.loggers import check_installed, targets_of
    from dualeval.report.loggers.log import export_result, stored_result
    from dualeval.world.local_ranks import rank_of_script

    def note(said: str) -> None:
        say(f"dualeval: {said}")

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
    """The task that is meant, and the options that are none of its arguments."""
    from dualeval.tasks.own_model import ModelTask

    if task is None and "model" in options and isinstance(options.get("data"), str | Path):
        return _image_task_of(options)
    names = set(inspect.signature(ModelTask).parameters)
    of_task = {name: options[name] for name in options if name in names}
    if task is None:
        missing = [name for name in ("model", "data") if name not in of_task]
        if missing:
            raise UsageError(
                f"evaluate was given no {' and no '.join(missing)}: give a task, evaluate(task), or "
                "evaluate(model=..., data=..., metrics=[...])"
            )
        rest = {name: options[name] for name in options if name not in names}
        return ModelTask(**of_task), rest
    if of_task:
        raise UsageError(
            f"{', '.join(of_task)} and a task were given: a task says these itself. Leave out one of the two."
        )
    return task, options


def _image_task_of(options: Mapping[str, Any]) -> tuple[Task, dict[str, Any]]:
    """The task image-classification of a model and a path, as the command line makes it; and the rest."""
    from dualeval.metrics.by_name import of_no_task
    from dualeval.tasks import class_names
    from dualeval.tasks.options import ImageClassificationOptions

    # Weights are fetched by the command line alone.
    names = {field.name for field in fields(ImageClassificationOptions)} - {"metric", "download"}
    given = {name: value for name, value in options.items() if name in names}
    rest = {name: value for name, value in options.items() if name not in {*names, "metrics"} - {"keep"}}
    # What only Python can say.
    of_python = [name for name in ("model", "preprocessing") if not isinstance(given.get(name, ""), str)]
    made = {name: given.pop(name) for name in of_python}
    metrics = options.get("metrics") or ()
    if not isinstance(metrics, list | tuple) or not all(isinstance(each, str) for each in metrics):
        raise UsageError(
            f"metrics={metrics!r}: for a folder of images expected a list of names, as ['top1', 'loss'] "
            "('dualeval list metrics'). For metrics of your own give a data set in place of the folder"
        )
    own = tuple(name for name in metrics if not of_no_task([name]))
    if len(own) < len(metrics):
        rest["metric"] = tuple(metrics)
    try:
        return ImageClassificationOptions(**given, metric=own).make(**made), rest
    except UsageError as error:
        path = str(options["data"])
        if path not in str(error) or not Path(path).exists():
            raise
        raise UsageError(
            f"{error} (A path as data is that of images with classes. For others give a task, as "
            f"dualeval.evaluate(dualeval.tasks.LanguageModeling(model=..., data={path!r})); there are "
            f"{', '.join(class_names())}.)"
        ) from error
