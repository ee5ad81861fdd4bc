"""Image classifiers by name: torchvision's, the embedded one, or a factory of the user's own."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dualeval.data.preprocessing import Preprocessing
from dualeval.errors import DualevalError, UsageError
from dualeval.models.weights import load_into, read_state_dict, seed_of
from dualeval.vision_library import torchvision

EMBEDDED = "fashion-cnn"
# torchvision's DenseNet files still have the names of its first version, denselayer1.norm.1 for .norm1.
_OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.([12]\.)")


def create(name: str, num_classes: int | None, *, as_pretrained: bool = False) -> nn.Module:
    """Make a classifier, with whatever weights its constructor gives it.

    Args:
        name: a torchvision classifier, "fashion-cnn", or "package.module:factory", a callable that returns
            a module and may take ``num_classes``.
        num_classes: number of outputs; None leaves it to the constructor.
        as_pretrained: build what torchvision's default weights need beyond the tensors in their file.

    Raises:
        UsageError: there is no such model; offers the nearest names.
    """
    arguments = {} if num_classes is None else {"num_classes": num_classes}
    if ":" in name:
        factory = _import_factory(name)
        takes = inspect.signature(factory).parameters
        accepts = "num_classes" in takes or any(p.kind is p.VAR_KEYWORD for p in takes.values())
        model = factory(**(arguments if accepts else {}))
        if not isinstance(model, nn.Module):
            raise UsageError(f"--model {name} returned a {type(model).__name__}, expected a torch.nn.Module")
        return model
    if name == EMBEDDED:
        from dualeval.models.fashion_cnn import FashionCNN

        return FashionCNN(**arguments)
    known = _torchvision_names()
    if name not in known:
        near = difflib.get_close_matches(name, [*known, EMBEDDED], n=5, cutoff=0.5)
        hint = f" Nearest: {', '.join(near)}." if near else ""
        raise UsageError(
            f"there is no model {name!r}.{hint} Give a torchvision classifier, {EMBEDDED}, "
            "or package.module:factory."
        )
    # Without this argument torchvision warns that these two take long to draw their first values.
    extra = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    if as_pretrained:
        extra |= _pretrained_arguments(name)
    model = torchvision().models.get_model(name, weights=None, **arguments, **extra)
    assert isinstance(model, nn.Module)
    return model


def _pretrained_arguments(name: str) -> dict[str, Any]:
    """What torchvision's own constructors change when they are given weights."""
    if name in ("googlenet", "inception_v3"):
        return {"transform_input": True}
    if name.startswith("vit_"):
        return {"image_size": _default_weights(name).meta["min_size"][0]}
    return {}


def _torchvision_names() -> list[str]:
    models = torchvision().models
    names: list[str] = models.list_models(module=models)
    return names


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


def build(name: str, weights: str, num_classes: int | None) -> nn.Module:
    """Make a classifier and give it its weights, on the CPU, in evaluation mode.

    Args:
        name: as for ``create``.
        weights: a path, "DEFAULT" (torchvision's own, from its local cache) or "random:SEED".
        num_classes: number of outputs; None where only the model or the weights tell.

    Raises:
        UsageError: model and weights do not fit, or do not exist.
    """
    seed = seed_of(weights)
    if seed is not None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return create(name, num_classes).eval()
    state = _default_state_dict(name) if weights == "DEFAULT" else read_state_dict(Path(weights))
    if name.startswith("densenet"):
        for old in [key for key in state if _OLD_DENSENET.search(key)]:
            state[_OLD_DENSENET.sub(r"\1\2", old)] = state.pop(old)
    with torch.random.fork_rng(devices=[]):  # a constructor draws values that are overwritten here
        model = create(name, num_classes, as_pretrained=weights == "DEFAULT")
    load_into(model, state, f"the weights {weights}")
    return model.eval()


def _default_weights(name: str) -> Any:
    """torchvision's default weights entry of a model; None where the model has none."""
    if ":" in name or name == EMBEDDED or name not in _torchvision_names():
        return None
    entries = list(torchvision().models.get_model_weights(name))
    return entries[0].DEFAULT if entries else None


def _cached_file(entry: Any) -> Path:
    return Path(torch.hub.get_dir()) / "checkpoints" / Path(entry.url).name


def _default_state_dict(name: str) -> dict[str, Tensor]:
    entry = _default_weights(name)
    if entry is None:
        raise UsageError(f"--weights DEFAULT: {name} has no weights of its own. Give a state_dict file.")
    cached = _cached_file(entry)
    if not cached.is_file():
        raise UsageError(
            f"--weights DEFAULT: {entry} is not in the local cache ({cached}). Add --download to fetch it, "
            "or put the file there."
        )
    return read_state_dict(cached)


def download_default(name: str) -> None:
    """Fetch a model's default weights into torch's cache, checked against the hash in their name.

    Raises:
        DualevalError: they could not be fetched.
    """
    entry = _default_weights(name)
    if entry is not None and not _cached_file(entry).is_file():
        try:
            entry.get_state_dict(progress=False, check_hash=True)
        except (OSError, RuntimeError) as error:  # no network; the wrong hash
            raise DualevalError(
                f"{entry.url} cannot be fetched: {error}. Put it at {_cached_file(entry)}."
            ) from error


def preprocessing_of(name: str) -> Preprocessing:
    """The preprocessing that belongs to a model's default weights; ImageNet's usual one where it has none."""
    entry = _default_weights(name)
    if entry is None:
        return Preprocessing()
    preset = entry.transforms()
    return Preprocessing(
        resize=preset.resize_size[0],
        crop=preset.crop_size[0],
        interpolation=preset.interpolation.value,
        mean=tuple(preset.mean),
        std=tuple(preset.std),
    )
