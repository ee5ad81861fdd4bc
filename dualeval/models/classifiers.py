"""Image classifiers by name: torchvision's, the embedded one, or a factory of the user's own."""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dualeval.data.preprocessing import Preprocessing
from dualeval.errors import UsageError
from dualeval.models import published
from dualeval.models.checkpoints import read_state_dict
from dualeval.models.weights import LoadedWeights, load_state_dict, seed_of
from dualeval.vision_library import torchvision
from dualeval.weights_name import is_published_name

EMBEDDED = "fashion-cnn"
_LISTED_AT_MOST = 8
# torchvision's DenseNet files still have the names of its first version, denselayer1.norm.1 for .norm1.
_OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.([12]\.)")


def create(name: str, num_classes: int | None, *, entry: Any = None) -> nn.Module:
    """Make a classifier, with whatever weights its constructor gives it.

    Args:
        name: a torchvision classifier, "fashion-cnn", or "package.module:factory", a callable that returns
            a module and may take ``num_classes``.
        num_classes: number of outputs; None leaves it to the constructor.
        entry: torchvision's entry of the weights that it is for: with what these need beyond their tensors.

    Raises:
        UsageError: there is no such model; offers the nearest names.
    """
    check_name(name)
    arguments = {} if num_classes is None else {"num_classes": num_classes}
    if ":" in name:
        factory = _import_factory(name)
        takes = inspect.signature(factory).parameters
        accepts = "num_classes" in takes or any(p.kind is p.VAR_KEYWORD for p in takes.values())
        try:
            inspect.signature(factory).bind(**(arguments if accepts else {}))
        except TypeError as error:
            raise UsageError(
                f"--model {name}: {factory.__name__}{inspect.signature(factory)} is called with "
                f"{'num_classes alone' if accepts else 'no arguments'}: {error}. Give a function that needs "
                "no others, as def make(num_classes=10): return Net(...)."
            ) from error
        model = factory(**(arguments if accepts else {}))
        if not isinstance(model, nn.Module):
            raise UsageError(f"--model {name} returned a {type(model).__name__}, expected a torch.nn.Module")
        return model
    if name == EMBEDDED:
        from dualeval.models.fashion_cnn import FashionCNN

        return FashionCNN(**arguments)
    known = published.torchvision_names()
    if name not in known:
        near = difflib.get_close_matches(name, [*known, EMBEDDED], n=5, cutoff=0.5)
        hint = f" Nearest: {', '.join(near)}." if near else ""
        raise UsageError(
            f"there is no model {name!r}.{hint} Give a torchvision classifier, {EMBEDDED}, "
            "or package.module:factory."
        )
    # Without this argument torchvision warns that these two take long to draw their first values.
    extra = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    if entry is not None:
        extra |= published.constructor_arguments(name, entry)
    model = torchvision().models.get_model(name, weights=None, **arguments, **extra)
    assert isinstance(model, nn.Module)
    return model


def check_name(name: str) -> None:
    """Check that a model's name is no file of code.

    Raises:
        UsageError: it is one; says how to name the function in it.
    """
    file, _, function = name.partition(":")
    path = Path(file if file.endswith(".py") else f"{file.replace('.', '/')}.py")
    if not file.endswith(".py") and (function or not path.is_file()):
        return
    if file in (EMBEDDED, *published.torchvision_names()):
        return
    module = path.stem if path.is_absolute() else ".".join(path.with_suffix("").parts)
    found = _callables(path)
    example = function or next(iter(found), "FUNCTION")
    inside = f" It has {', '.join(found[:_LISTED_AT_MOST])}." if found else ""
    where = f" in {path.parent}" if path.is_absolute() else ""
    what = "is a file of code" if path.is_file() else "is the name of a file of code, which does not exist"
    raise UsageError(
        f"--model {name} {what}: expected MODULE:FUNCTION, a function or class that returns the model. "
        f"Type{where}: --model {module}:{example}.{inside}"
    )


def _callables(path: Path) -> list[str]:
    """The functions and classes of a file, which is not run."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]


def _import_factory(name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), attribute]):
        raise UsageError(f"--model {name}: expected package.module:factory")
    # The folder a person stands in, as for `python -m`: a console script does not look there.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UsageError(f"--model {name}: no module named {error.name!r} can be imported") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        near = difflib.get_close_matches(attribute, dir(module), n=5)
        hint = f" Nearest: {', '.join(near)}." if near else ""
        raise UsageError(f"--model {name}: module {module_name} has no callable {attribute!r}.{hint}")
    return factory


def sources_of(name: str) -> list[Any]:
    """The factory that a model's name names, and its module; nothing for a name that names none."""
    return [_import_factory(name), sys.modules[name.partition(":")[0]]] if ":" in name else []


@dataclass(frozen=True, kw_only=True)
class WeightsSource:
    """Where a classifier's weights come from.

    Attributes:
        text: the value of ``--weights``.
        seed: of "random:SEED"; None for weights in a file.
        path: the file or folder; None for random ones.
        entry: torchvision's entry, where the file is one that it publishes, whatever the file's name.
    """

    text: str
    seed: int | None = None
    path: Path | None = None
    entry: Any = None


def find_weights(name: str, weights: str) -> WeightsSource:
    """Find out what a value of ``--weights`` stands for, and that it is there.

    Args:
        name: as for ``create``.
        weights: a path, the name of weights that torchvision publishes (DEFAULT, IMAGENET1K_V1,
            ResNet50_Weights.IMAGENET1K_V1; from its local cache) or "random:SEED".

    Raises:
        UsageError: there are no such weights.
    """
    seed = seed_of(weights)
    if seed is not None:
        return WeightsSource(text=weights, seed=seed)
    if is_published_name(weights):
        if name == EMBEDDED:
            raise UsageError(
                f"--weights {weights}: torchvision publishes none for {EMBEDDED}, whose own weights are "
                "shipped with dualeval. Leave --weights out, or give --weights DEFAULT."
            )
        entry = published.entry_named(name, weights)
        return WeightsSource(text=weights, path=published.checked_cached_file(entry, weights), entry=entry)
    path = Path(weights)
    if path.is_dir():
        return WeightsSource(text=weights, path=path)
    if not path.is_file():
        hint = "" if path.suffix or len(path.parts) > 1 else " " + published.names_hint(name, weights)
        raise UsageError(
            f"weights file {path} does not exist. Give a checkpoint with --weights PATH.{hint.rstrip()}"
        )
    return WeightsSource(text=weights, path=path, entry=published.recognise(name, path))


def build(
    name: str,
    weights: str | WeightsSource,
    num_classes: int | None,
    *,
    weights_key: str | None = None,
    weights_prefix: str | None = None,
    trust: bool = False,
    on_load: Callable[[LoadedWeights], None] = lambda loaded: None,
) -> nn.Module:
    """Make a classifier and give it its weights, on the CPU, in evaluation mode.

    Args:
        name: as for ``create``.
        weights: as for ``find_weights``, or what that has found.
        num_classes: number of outputs; None where only the model or the weights tell.
        weights_key: where the state_dict lies in a file, as for ``checkpoints.read_state_dict``.
        weights_prefix: of the names that are taken from a file, as for ``weights.load_state_dict``.
        trust: read also weights that run code, as for ``checkpoints.read_state_dict``.
        on_load: called with what was taken from a file that was given by its path.

    Raises:
        UsageError: model and weights do not fit, or do not exist.
    """
    source = weights if isinstance(weights, WeightsSource) else find_weights(name, weights)
    if source.path is None:
        assert source.seed is not None, "weights are in a file or drawn"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(source.seed)
            return create(name, num_classes).eval()
    found = read_state_dict(source.path, weights_key, trust=trust)
    with torch.random.fork_rng(devices=[]):  # a constructor draws values that are overwritten here
        model = create(name, num_classes, entry=source.entry)
    if name.startswith("densenet") and name in published.torchvision_names():
        _rename_as_torchvision(found.tensors, model)
    loaded = load_state_dict(model, found, prefix=weights_prefix, source=f"the weights {source.text}")
    if not is_published_name(source.text):
        on_load(loaded)
    return model.eval()


def _rename_as_torchvision(tensors: dict[str, Any], model: nn.Module) -> None:
    """Give a DenseNet's tensors the present names, where the model has these; a prefix may be before them."""
    own = tuple(model.state_dict())
    for old in [name for name in tensors if _OLD_DENSENET.search(name)]:
        new = _OLD_DENSENET.sub(r"\1\2", old)
        if new.endswith(own) and new not in tensors:
            tensors[new] = tensors.pop(old)


def preprocessing_of(name: str, entry: Any = None) -> Preprocessing:
    """The preprocessing of a model's images.

    Args:
        name: as for ``create``.
        entry: torchvision's entry, where the weights are published ones: theirs is taken.

    Returns:
        For other weights that of the first ones published for the model: later ones often go with a recipe
        of their own (resnet50's IMAGENET1K_V2 with a resize to 232), which nobody else's weights had. For a
        model without published weights the one of most ImageNet classifiers.
    """
    if entry is None:
        entry = next(iter(published.entries_of(name)), None)
    return Preprocessing() if entry is None else published.preprocessing_of(entry)


def preprocessing_origin(name: str, entry: Any = None) -> str:
    """Where ``preprocessing_of`` takes its values from, in words for people."""
    if entry is not None:
        return f"those of {entry}"
    entries = published.entries_of(name)
    if not entries:
        return "assumed, the model names none"
    if all(published.preprocessing_of(other) == published.preprocessing_of(entries[0]) for other in entries):
        return "the model's defaults"
    return f"the model's defaults, as for {entries[0].name}"
