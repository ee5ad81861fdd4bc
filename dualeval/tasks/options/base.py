"""What the options of several tasks have in common; light to import, for the command line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dualeval.errors import UsageError
from dualeval.models.weights import check_weights_file, function_beside, is_path_of_weights, is_published_name
from dualeval.options.choices import (
    CLASS_ORDERS,
    DATA_FINGERPRINTS,
    QUOTINGS,
    check_kind,
    check_mean,
    check_std,
)
from dualeval.options.fields import check_fields, flag_of, option

if TYPE_CHECKING:
    from dualeval.data.cache import DataCache
    from dualeval.models.sources.source import ModelSource
    from dualeval.tasks import Task

MODEL, DATA, IMAGES, TEXTS, TOKENS = "Model", "Data", "Images", "Texts", "Tokens"
# What only drawn answers have, with what it is without.
DRAWING = {"top_p": 1.0, "answers_per_prompt": 1, "answers_seed": 0}


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What all tasks with a model have."""

    # Set by each task, with its own help.
    model: Any = None
    weights: str | None = option(
        None,
        "Checkpoint, DEFAULT, IMAGENET1K_V1, random:SEED.",
        group=MODEL,
        is_path=is_path_of_weights,
        takes_urls=True,
    )
    weights_key: str | None = option(
        None, "Key of the state_dict in a checkpoint, such as model_ema.", group=MODEL
    )
    weights_prefix: str | None = option(
        None, "Use only tensors with this name prefix, and remove the prefix.", group=MODEL
    )
    trust_checkpoint: bool = option(
        False, "Open files that can run code: pickles, TorchScript, .pt2.", group=MODEL
    )
    metric: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)

    def make(self, cache: DataCache | None = None, **of_python: Any) -> Task:
        """The task; models of one run share what is read with the cache."""
        from dualeval import tasks

        arguments = {**self._arguments(), **of_python}
        kind = getattr(tasks, type(self).__name__.removesuffix("Options"))
        task: Task = kind(metrics=arguments.pop("metric"), cache=cache, **arguments)
        return task

    def _arguments(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(frozen=True, kw_only=True)
class PictureOptions(ModelOptions):
    """What the tasks on pictures have."""

    download: bool = option(
        False, "Download the weights of --weights DEFAULT, IMAGENET1K_V1, ...", group=MODEL
    )
    model_arg: tuple[str, ...] = option(
        (),
        "Argument of a factory, timm or torchvision model.",
        group=MODEL,
        metavar="NAME=VALUE",
        is_repeated=True,
    )
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.download and not (self.weights and is_published_name(self.weights)):
            state = "is not given" if self.weights is None else f"is {self.weights}"
            raise UsageError(
                f"--download fetches weights that torchvision publishes, and --weights {state}. Give "
                "--weights DEFAULT or a name such as IMAGENET1K_V1, or leave --download out."
            )

    def check_paths(self) -> None:
        """Check that files are there, before torch is imported."""
        if self.weights and is_path_of_weights(self.weights) and Path(self.weights).suffix:
            check_weights_file(self.weights)

    def source(self) -> ModelSource:
        """Where the model comes from, by its name."""
        from dualeval.models.classifiers import arguments_of, source_of

        return source_of(self.model or "", arguments_of(self.model_arg), trust=self.trust_checkpoint)

    def fetch(self) -> None:
        """Fetch the weights, where that is wanted; one process a node does."""
        # Without data the task is refused: nothing is fetched for that.
        if self.download and self.model and self.weights and getattr(self, "data", None):
            self.source().download(self.weights)

    def _arguments(self) -> dict[str, Any]:
        from dualeval.models.classifiers import arguments_of

        arguments = super()._arguments()
        del arguments["download"]
        arguments["model_arguments"] = arguments_of(arguments.pop("model_arg"))
        return arguments


@dataclass(frozen=True, kw_only=True)
class TextOptions(ModelOptions):
    """A model of texts with its weights; what is evaluated is a subclass's."""

    model: Path = option(
        help="Folder with a model and tokenizer of the transformers library.", group=MODEL, metavar="DIR"
    )
    weights: str | None = option(
        None,
        "Checkpoint, or random:SEED.",
        group=MODEL,
        is_path=is_path_of_weights,
        shown="in the model's folder",
        takes_urls=True,
    )
    adapter: Path | None = option(
        None, "Folder with an adapter of peft, merged into the model.", group=MODEL, metavar="DIR"
    )
    trust_checkpoint: bool = option(
        False, "Read checkpoints that run code, such as pickled models.", group=MODEL
    )


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How a language model answers prompts."""

    think_end: str | None = option(
        None, "Tag after which the answer begins, such as </think> (prompts).", group=TOKENS, metavar="TAG"
    )
    temperature: float = option(0.0, "Draw answers; 0: greedy ones (prompts).", group=TOKENS)
    top_p: float = option(1.0, "Draw from the likeliest tokens with this sum (prompts).", group=TOKENS)
    answers_seed: int = option(0, "Another number draws other answers.", group=TOKENS, least=0)

    def check_answers(self) -> None:
        is_positive = 0 <= self.temperature < math.inf
        check_kind("--temperature", self.temperature, is_positive, "0 or a positive number")
        check_kind("--top-p", self.top_p, 0 < self.top_p <= 1, "a number above 0, at most 1")
        check_kind("--think-end", "", self.think_end != "", "a text")
        drawing = [
            flag_of(name) for name, without in DRAWING.items() if getattr(self, name, without) != without
        ]
        if drawing and not self.temperature:
            raise UsageError(
                f"{' and '.join(drawing)}: greedy answers are all equal. Give --temperature, such as 0.7."
            )


def start_of_texts(library_class: str, data: str) -> Mapping[str, str]:
    return {
        "imports": f"from transformers import {library_class}",
        "model": f'return {library_class}.from_pretrained("models/mine")',
        "data": data,
        "more": ', tokenizer="models/mine"',
    }


@dataclass(frozen=True, kw_only=True)
class _Shared:
    """Options that several tasks have with the same words."""

    path_column: str | None = option(
        None, "A manifest's column of paths.", group=DATA, shown="path, image, file, ..."
    )
    quoting: str | None = option(
        None,
        "Quotation marks around a table's cells.",
        group=DATA,
        choices=QUOTINGS,
        shown="standard; .tsv: asked for",
    )
    class_map: Path | None = option(None, "Class index of each folder or label: a JSON file.", group=DATA)
    class_order: str | None = option(
        None,
        "Order of folders or labels: number puts 2 before 10.",
        group=DATA,
        choices=CLASS_ORDERS,
        shown="known names first",
        metavar="name|number",
    )
    data_fingerprint: str = option(
        DATA_FINGERPRINTS[0],
        "Compare image files by size and ends, or by content.",
        group=DATA,
        choices=DATA_FINGERPRINTS,
    )
    preprocessing: str | None = option(
        None,
        "none, imagenet or FILE.py:function.",
        group=IMAGES,
        shown="the model's",
        resolve=function_beside,
    )
    resize: int | None = option(
        None, "Resize the shorter side to this many pixels.", group=IMAGES, least=1, shown="the model's"
    )
    interpolation: str | None = option(
        None, "nearest, bilinear, bicubic or lanczos.", group=IMAGES, shown="the model's"
    )
    channels: Literal[1, 3] | None = option(
        None, "Channels of the images: 3 for RGB, 1 for grey.", group=IMAGES, shown="3"
    )
    mean: tuple[float, ...] | None = option(
        None, "Mean of each channel.", group=IMAGES, shown="the model's", also=check_mean
    )
    std: tuple[float, ...] | None = option(
        None, "Standard deviation of each channel.", group=IMAGES, shown="the model's", also=check_std
    )


def same(name: str) -> Any:
    """A field that several tasks have."""
    shared = next(each for each in fields(_Shared) if each.name == name)
    return field(default=shared.default, metadata=shared.metadata)
