"""The options that all tasks on texts have; light to import, for the command line."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from dualeval.models.weights_name import is_path_of_weights
from dualeval.options.fields import check_fields, option
from dualeval.tasks.image_classification_options import same_as_classification as same

if TYPE_CHECKING:
    from dualeval.data.cache import DataCache
    from dualeval.tasks import Task

_MODEL = "Model"


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """A model of texts with its weights; what is evaluated is a subclass's."""

    model: Path = option(
        help="Folder with a model and tokenizer of the transformers library.", group=_MODEL, metavar="DIR"
    )
    weights: str | None = option(
        None,
        "Checkpoint, or random:SEED.",
        group=_MODEL,
        is_path=is_path_of_weights,
        shown="in the model's folder",
    )
    weights_key: str | None = same("weights_key")
    weights_prefix: str | None = same("weights_prefix")
    trust_checkpoint: bool = option(
        False, "Read checkpoints that run code, such as pickled models.", group=_MODEL
    )
    metric: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)

    def make(self, cache: DataCache | None = None) -> Task:
        """The task; models of one run share what is read with the cache."""
        from dualeval import tasks

        given = {field.name: getattr(self, field.name) for field in fields(self)}
        kind = getattr(tasks, type(self).__name__.removesuffix("Options"))
        task: Task = kind(metrics=given.pop("metric"), cache=cache, **given)
        return task
