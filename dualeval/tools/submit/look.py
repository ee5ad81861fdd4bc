"""What is looked at before a job is queued: whether its paths are here, and names of models and metrics."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dualeval.errors import LibraryError, UsageError, text_of, with_type
from dualeval.messages import nearest
from dualeval.models.weights import is_published_name
from dualeval.options.fields import paths_in
from dualeval.options.job import Job, is_several
from dualeval.options.plugins import BUILT_IN
from dualeval.options.several import candidates_of, found_models

# On what the metrics of a task by name depend: all that its model and data may decide.
_DECIDED: dict[str, list[dict[str, Any]]] = {
    "image-classification": [{"num_classes": count} for count in (10**5, 2048)],
    "segmentation": [{"num_classes": 1}],
    "text-classification": [{"num_classes": count} for count in (1, 10**5, 2048, 2)],
    "question-answering": [{"unanswerable": True}],
    "language-modeling": [{"kind": kind} for kind in ("choices", "answers", "documents")],
}


def findings(jobs: Sequence[tuple[str | None, Job]], reference: Path | None) -> Iterator[tuple[str, bool]]:
    """What would make the jobs fail: a sentence, and whether the job's nodes see the same.

    They may not where the folder of a path is not here either, or the import of the user's code breaks.
    """
    yield from _missing([] if reference is None else [("--reference", reference)])
    try:
        if is_several(jobs):
            jobs = [(each.name, each.job) for each in candidates_of(jobs, found_models(jobs))]
        # A task of the user's may make the files that its options name.
        for task, options in [(job.task, job.options) for _, job in jobs if job.kind.origin == BUILT_IN]:
            missing = [*_missing(paths_in(options))]
            yield from missing
            if not any(sentence.startswith(("--model ", "--preprocessing ")) for sentence, _ in missing):
                _check_names(task, options)
    except LibraryError as error:
        yield text_of(error), False
    except UsageError as error:
        yield text_of(error), True
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever code does that is imported
        yield f"the names of models and metrics could not be checked here: {with_type(error)}", False


def _missing(paths: Iterable[tuple[str, Path]]) -> Iterator[tuple[str, bool]]:
    for flag, path in paths:
        if not os.path.exists(path):  # noqa: PTH110 - False also where a folder may not be read
            is_seen = os.access(path.parent, os.R_OK | os.X_OK)
            hint = nearest(path.name, sorted(each.name for each in path.parent.iterdir())) if is_seen else ""
            yield f"{flag} {path} does not exist here.{hint}", is_seen or not path.is_absolute()


def _check_names(task: str, options: Any) -> None:
    """Check names as the task does, without weights and data; a module of the user's is imported."""
    from dualeval import tasks
    from dualeval.models.published import entries_of, entry_named
    from dualeval.models.text_models import check_folder
    from dualeval.tasks.picture_task import named_preprocessing

    module = sys.modules[getattr(tasks, type(options).__name__.removesuffix("Options")).__module__]
    if not hasattr(options, "source"):  # a model of texts
        check_folder(options.model, module.USE)
    elif name := options.model:
        options.source().sources()
        if options.weights and is_published_name(options.weights) and entries_of(name):
            entry_named(name, options.weights)
        named_preprocessing(options.preprocessing, f"--preprocessing {options.preprocessing}")
    if getattr(options, "metrics_need_data", False):
        return
    *others, last = _DECIDED[task]
    for name in options.metric:
        for decided in others:
            with suppress(UsageError):
                module.stored_metrics(decided, [name])
                break
        else:
            module.stored_metrics(last, [name])
