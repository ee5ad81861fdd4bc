"""A finished run of a built-in task: its metrics, and the task with its data; no model is read."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from dualeval import tasks
from dualeval.errors import DualevalError, UsageError, text_of
from dualeval.messages import listed
from dualeval.metrics import Metric, RowMetric, is_of_rows, keeps_rows
from dualeval.metrics.by_name import named, of_no_task
from dualeval.metrics.classification import SCORES, Auroc, classification_metrics
from dualeval.metrics.metric import called
from dualeval.metrics.texts import regression_metric
from dualeval.options.fields import fields_of
from dualeval.result import read_job
from dualeval.tasks import Task
from dualeval.tasks.options import TASKS

_OF_OWN_MODELS = f"{tasks.__name__}.own_model.ModelTask"


def metrics_of_run(job_file: Path, asked: Sequence[str] = ()) -> list[Metric | RowMetric]:
    """Make metrics for the rows of a run."""
    try:
        content = read_job(job_file.parent)
    except FileNotFoundError as error:
        raise UsageError(
            f"{job_file.parent} has no {job_file.name}, which says what was evaluated. Give the output "
            "folder of a finished run."
        ) from error
    if (task_class := content.get("task_class")) is None:
        raise UsageError(
            f"{job_file.parent} is a run of an earlier version of dualeval, which did not keep what its "
            f"metrics are computed from. Evaluate again: 'dualeval run ... --out {job_file.parent} --fresh'."
        )
    names = asked or content.get("metrics", ())
    others = of_no_task(names)
    if others and len(others) == len(names):
        return _of_no_task(others, content)
    if getattr(_options_class(task_class), "metrics_need_data", False):
        return _of_data(job_file, names)
    make = _stored_metrics(task_class)
    if task_class == _OF_OWN_MODELS:
        if metrics := _of_own_model(content, names):
            return metrics
        of_code = [name for name in names if not _of_own_model(content, [name])]
        if len(of_code) < len(names):
            by_name = next(name for name in names if name not in of_code)
            raise UsageError(
                f"only your code has the metric {listed(of_code)} of {job_file.parent}. Those by name are "
                f"computed by 'dualeval score {job_file.parent} --metric {by_name}'; all, as objects, "
                f"in Python by dualeval.rescore({str(job_file.parent)!r}, metrics=[...])."
            )
    if make is None:
        raise UsageError(
            f"{job_file.parent} is a run of the task {task_class}, whose metrics only its own code knows. In "
            f"Python: dualeval.rescore({str(job_file.parent)!r}, metrics=[...]) computes metrics (objects) "
            "from the run's rows; given the run's own metrics, it gives the metrics_digest in result.json. "
            "For metrics by group type the run's own command again, with --by."
        )
    for name, options in content.get("job", {}).get("metric_options", {}).items():
        if not asked and name in names and isinstance(options, dict) and "torchmetrics" in options:
            raise UsageError(
                f"{job_file.parent} has the metric {name!r} of TorchMetrics, and {job_file.name} does not "
                "say with which arguments. Name the metrics, as in 'dualeval score "
                f"{job_file.parent} --metric torchmetrics:...', or in Python dualeval.rescore."
            )
    try:
        of_task = [name for name in names if name not in others]
        metrics = [*make(content["job"]["task_options"], of_task or content["metrics"])]
        if "probabilities" in (kept := content["job"].get("columns") or ()) and "logits" not in kept:
            # Of an earlier version, or of a run that TorchMetrics alone has asked for them.
            metrics = [Auroc("probabilities") if isinstance(each, Auroc) else each for each in metrics]
    except (KeyError, TypeError, AttributeError) as error:
        raise DualevalError(f"{job_file} is damaged: {type(error).__name__}: {error}") from error
    metrics = [metric for metric in metrics if asked or is_of_rows(metric) or keeps_rows(metric)]
    return [*metrics, *_of_no_task(others, content)]


def _of_own_model(content: Mapping[str, Any], names: Sequence[str]) -> list[Metric | RowMetric]:
    """Metrics of classes or numbers by name; none where one is another, or was an object of the user's."""
    classes = (content.get("options") or {}).get("num_classes")
    kept, options = content["job"].get("columns") or (), content["job"].get("metric_options") or {}
    if classes is None and "squared_error" not in kept:
        return []
    try:
        made = classification_metrics(names, classes) if classes else [*map(regression_metric, names)]
    except UsageError:
        return []
    kinds = {each.name: f"{type(each).__module__}.{type(each).__qualname__}" for each in made}
    is_known = all(options.get(name, {}).get("class", kind) == kind for name, kind in kinds.items())
    return made if is_known else []


def _stored_metrics(task_class: str) -> Callable[[Any, Sequence[str]], Sequence[Metric | RowMetric]] | None:
    """The function of that name beside a built-in task; None where the metrics do not follow from options."""
    module = task_class.rpartition(".")[0]
    # What job.json names is imported only if it is here.
    if module not in {f"{tasks.__name__}.{each.name}" for each in pkgutil.iter_modules(tasks.__path__)}:
        return None
    return getattr(importlib.import_module(module), "stored_metrics", None)


def _of_data(job_file: Path, names: Sequence[str]) -> list[Metric | RowMetric]:
    """Metrics that read the data of the run, which is opened again."""
    task, why = task_of_run(job_file)
    if task is None:
        raise UsageError(f"the metrics of {job_file.parent} read its data: {why}")
    known = [*task.metrics()]
    chosen_ones = [each for name in names for each in called(name, known)]
    return [each for each in known if each in chosen_ones]


def _of_no_task(texts: Sequence[str], content: Mapping[str, Any]) -> list[Metric | RowMetric]:
    """Metrics of TorchMetrics and of packages, for the columns that a run has made."""
    columns = content.get("job", {}).get("columns") or ()
    # Of a classifier also what it could have made: ``check_columns`` says how.
    of_scores = SCORES if "rank" in columns else ()
    return [named(text, (), {*columns, *of_scores}) for text in texts]


_IMAGES = "image-classification"
# What only a model needs: the task is made for what its data show.
_OF_MODEL = (
    *("weights", "weights_key", "weights_prefix", "model_arg", "trust_checkpoint", "download", "metric"),
    "trust_tasks",  # what a file of a run names is not run
    *("num_classes", "class_names", "resize", "crop", "interpolation", "channels", "mean", "std"),
)


def task_of_run(job_file: Path) -> tuple[Task | None, str]:
    """Make the built-in task of a finished run again, for its ``show``; or None, and why, in a sentence.

    No checkpoint is read, and no code that the files of the run name: a network on pictures has a stand-in.
    """
    try:
        content = json.loads(job_file.read_text("utf-8"))
        used = json.loads((job_file.parent / "result.json").read_text("utf-8"))["job"]
        options = _options_class(content["task_class"])
        if options is None:
            return None, (
                f"{content['task_class']} is a task of your own, which only its own code can make: no "
                "pictures and texts are shown."
            )
        task = _made_again(options, used)
        dataset, job = task.dataset(), content["job"]
        # Of images the labels are in it, and may be the model's; ``place_of`` compares the ids.
        is_known = job["task"] != _IMAGES and "sample" not in job
        if is_known and dataset.fingerprint(job["samples"]) != job["data"]:
            return None, f"the data of {job_file.parent} have changed since: none of them is shown."
    except (OSError, ValueError, LookupError, TypeError, AttributeError, DualevalError) as error:
        # What the error says to give is an option of the run's command, which is not the one that was typed.
        fault = text_of(error).partition(" Give --")[0].rstrip(".")
        return None, (
            f"the data of {job_file.parent} cannot be opened again: {fault}. Without them no pictures and "
            "texts are shown: put them, or a link to them, where they were, and type the command again."
        )
    return task, ""


def _options_class(task_class: str) -> Any:
    """The options of a built-in task, by the task's class; None for others."""
    classes = [f"{module}.{name}" for name, module in tasks.class_names().items()]
    return dict(zip(classes, TASKS.values(), strict=True)).get(task_class)


def _made_again(options_class: Any, used: Mapping[str, Any]) -> Task:
    fields = {field.name: field for field in fields_of(options_class)}
    options = {
        name: field.of_toml(used[name], name, Path())
        for name, field in fields.items()
        if name not in _OF_MODEL and used.get(name) is not None
    }
    stand_in: dict[str, Any] = {}
    if "preprocessing" in fields:
        options |= {"model": "", "preprocessing": "imagenet"}
        stand_in = {"model": nn.Identity()}
    task: Task = options_class(**options).make(**stand_in)
    return task
