"""Image classifiers by a value of ``--model``: which source makes it, and making it in one call."""

from __future__ import annotations

import ast
import keyword
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from dualeval.errors import UsageError
from dualeval.models.sources.fashion_cnn import EMBEDDED as EMBEDDED
from dualeval.models.sources.fashion_cnn import EmbeddedModel
from dualeval.models.sources.source import NO_ARGUMENTS, Loading, ModelSource, WeightsSource
from dualeval.models.weights import LoadedWeights

# What --model takes besides torchvision's names and the embedded one: how it is written, and what it is.
KINDS = {
    "timm:NAME": "a model of timm, with timm's preprocessing",
    "hf:DIR": "an image classifier of transformers in a folder, with its image processor",
    "FILE.py:FUNCTION, MODULE:FUNCTION": "what your function returns, given --model-arg NAME=VALUE",
    "FILE.pt2, FILE.pt": "a torch.export program or a TorchScript archive; needs --trust-checkpoint",
}


def source_of(
    name: str | nn.Module | Callable[[], nn.Module],
    arguments: Mapping[str, Any] = NO_ARGUMENTS,
    *,
    trust: bool = False,
) -> ModelSource:
    """The source of a model."""
    if isinstance(name, str):
        return _source_class(name)(name, arguments, trust=trust)
    from dualeval.models.sources.factory import ModuleModel

    return ModuleModel(name, arguments, trust=trust)


def _source_class(name: str) -> type[ModelSource]:
    # Each source imports its library when it is asked for.
    if name == EMBEDDED:
        return EmbeddedModel
    if name.startswith("timm:"):
        from dualeval.models.sources.timm_models import TimmModel

        return TimmModel
    if name.startswith("hf:"):
        from dualeval.models.sources.transformers_models import TransformersModel

        return TransformersModel
    from dualeval.models.published import torchvision_names
    from dualeval.models.sources.factory import FactoryModel, refuse_file_of_code
    from dualeval.models.sources.program import ProgramModel, is_path_of_program
    from dualeval.models.sources.vision import TorchvisionModel

    if is_path_of_program(name):
        return ProgramModel
    if ":" not in name and name in torchvision_names():
        return TorchvisionModel
    refuse_file_of_code(name)
    return FactoryModel if ":" in name else TorchvisionModel


def arguments_of(words: Sequence[str]) -> dict[str, Any]:
    """Keyword arguments of several ``--model-arg NAME=VALUE``."""
    arguments: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        name = name.strip()
        if not equals or not name.isidentifier() or keyword.iskeyword(name):
            raise UsageError(f"--model-arg {word}: expected NAME=VALUE, as in --model-arg depth=18")
        if name == "num_classes":
            raise UsageError(f"--model-arg {word}: the number of classes is given with --num-classes")
        if name in arguments:
            raise UsageError(f"--model-arg {name} is given twice. Leave out one.")
        try:
            arguments[name] = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError):
            arguments[name] = text
    return arguments


def create(name: str, num_classes: int | None, arguments: Mapping[str, Any] = NO_ARGUMENTS) -> nn.Module:
    """Make a classifier, with whatever weights its constructor gives it."""
    return source_of(name, arguments).create(num_classes)


def build(
    name: str,
    weights: str | WeightsSource | None,
    num_classes: int | None,
    *,
    arguments: Mapping[str, Any] = NO_ARGUMENTS,
    weights_key: str | None = None,
    weights_prefix: str | None = None,
    trust: bool = False,
    on_load: Callable[[LoadedWeights], None] = lambda loaded: None,
) -> nn.Module:
    """Make a classifier and give it its weights, on the CPU, in evaluation mode."""
    source = source_of(name, arguments, trust=trust)
    weights_source = weights if isinstance(weights, WeightsSource) else source.find_weights(weights)
    loading = Loading(key=weights_key, prefix=weights_prefix, on_load=on_load)
    return source.build(weights_source, num_classes, loading)
