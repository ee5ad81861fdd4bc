"""The weights that torchvision publishes: by name, by file, and what else belongs to them."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import torch

from dualeval.data.labels import KnownClasses, imagenet_wnids
from dualeval.data.preprocessing import Preprocessing
from dualeval.errors import DualevalError, UsageError
from dualeval.messages import nearest
from dualeval.vision_library import torchvision

# torch.hub's rule: the first characters of the file's sha256 stand in its name, as in resnet50-0676ba61.pth.
_HASH_IN_NAME = re.compile(r"-([0-9a-f]{8,})\.")
_PIECE_BYTES = 1 << 20
TRANSFORM_INPUT = ("googlenet", "inception_v3")


def torchvision_names() -> list[str]:
    """The names of torchvision's classifiers."""
    models = torchvision().models
    return list(models.list_models(module=models))


def segmentation_names() -> list[str]:
    """The names of torchvision's networks for segmentation."""
    models = torchvision().models
    return list(models.list_models(module=models.segmentation))


def detection_names() -> list[str]:
    """The names of torchvision's networks that find objects."""
    models = torchvision().models
    return list(models.list_models(module=models.detection))


def entries_of(model: str) -> list[Any]:
    """The weights that torchvision publishes for a model, in the order in which they came out."""
    # Without importing torchvision, which takes a second, for package.module:factory and the embedded one.
    names = (*torchvision_names(), *segmentation_names(), *detection_names())
    if not model.isidentifier() or model not in names:
        return []
    return list(torchvision().models.get_model_weights(model))


def entry_named(model: str, weights: str) -> Any:
    """The entry of a model that a value of ``--weights`` names."""
    entries = entries_of(model)
    if not entries:
        raise UsageError(f"--weights {weights}: {model} has no weights of its own. Give a state_dict file.")
    enumeration = type(entries[0])
    prefix, _, member = weights.rpartition(".")
    if prefix not in ("", enumeration.__name__) or member not in enumeration.__members__:
        raise UsageError(
            f"--weights {weights}: {model} has no weights of this name. {names_hint(model, member)}"
        )
    entry = enumeration[member]
    if entry.meta["categories"] is None:
        raise UsageError(
            f"--weights {weights}: {entry} belong to a network without its classifier, so there is nothing "
            f"to evaluate. {names_hint(model, member)}"
        )
    return entry


def names_hint(model: str, asked: str) -> str:
    """The names of a model's weights, the one nearest to what was asked for first; "" where it has none."""
    entries = entries_of(model)
    if not entries:
        return ""
    names = [entry.name for entry in entries if entry.meta["categories"] is not None]
    names.append("DEFAULT")
    hint = nearest(asked.upper(), names, most=1)
    return f"torchvision's names for {model}: {', '.join(names)}.{hint}"


def cached_file(entry: Any) -> Path:
    """Where torch keeps the file of an entry, whether it is there or not."""
    return Path(torch.hub.get_dir()) / "checkpoints" / file_name(entry)


def file_name(entry: Any) -> str:
    """The name of an entry's file."""
    return Path(entry.url).name


def checked_cached_file(entry: Any, weights: str) -> Path:
    """The file of an entry in the local cache."""
    cached = cached_file(entry)
    if not cached.is_file():
        raise UsageError(
            f"--weights {weights}: {entry} is not in the local cache ({cached}). Add --download to fetch it, "
            "or put the file there."
        )
    _check_hash(cached, sha256_of_file(cached), entry)
    return cached


def recognise(model: str, path: Path) -> Any:
    """The entry of a model that a file's bytes are, whatever its name; None where it is none of them."""
    entries = entries_of(model)
    if not entries:
        return None
    digest = sha256_of_file(path)
    for entry in entries:
        if digest.startswith(_published_hash(entry)):
            return entry
        if path.name == file_name(entry):
            _check_hash(path, digest, entry)
    return None


def _published_hash(entry: Any) -> str:
    match = _HASH_IN_NAME.search(file_name(entry))
    assert match is not None, f"torchvision's {entry} has no hash in its file name"
    return match[1]


def _check_hash(path: Path, digest: str, entry: Any) -> None:
    wanted = _published_hash(entry)
    if not digest.startswith(wanted):
        raise UsageError(
            f"{path} has the name of torchvision's {entry}, but not its bytes: its sha256 begins with "
            f"{digest[: len(wanted)]}, expected {wanted}. If it is damaged, remove it and fetch it again "
            "(--weights NAME --download); if it is another file, rename it and give its path."
        )


def sha256_of_file(path: Path) -> str:
    """sha256, in hex, over a file's bytes."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
    except OSError as error:
        raise UsageError(f"weights file {path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def download(model: str, weights: str) -> None:
    """Fetch weights into torch's cache, checked against the hash in their name."""
    if not entries_of(model):
        return
    entry = entry_named(model, weights)
    if cached_file(entry).is_file():
        return
    try:
        entry.get_state_dict(progress=False, check_hash=True)
    except (OSError, RuntimeError) as error:  # no network; the wrong hash
        raise DualevalError(
            f"{entry.url} cannot be fetched: {error}. Put it at {cached_file(entry)}."
        ) from error


def constructor_arguments(model: str, entry: Any) -> dict[str, Any]:
    """What torchvision's own constructor changes where it is given these weights."""
    if model in TRANSFORM_INPUT:
        return {"transform_input": True}
    if model.startswith("vit_"):
        return {"image_size": entry.meta["min_size"][0]}
    return {}


def preprocessing_of(entry: Any) -> Preprocessing:
    """The preprocessing that belongs to published weights."""
    preset = entry.transforms()
    return Preprocessing(
        resize=preset.resize_size[0],
        crop=preset.crop_size[0],
        interpolation=preset.interpolation.value,
        mean=tuple(preset.mean),
        std=tuple(preset.std),
    )


def classes_of(entry: Any) -> KnownClasses:
    """The classes that published weights tell apart, by torchvision's names for them."""
    names = tuple(entry.meta["categories"])
    wnids = imagenet_wnids() if names == imagenet_classes().names else ()
    return KnownClasses(of=str(entry), names=names, wnids=wnids)


def imagenet_classes() -> KnownClasses:
    """ImageNet's 1,000 classes for a model of one's own, whose folders are known by their wnids alone.

    Where its folders had torchvision's names, it was trained with the order of these names, not of classes.
    """
    names = torchvision().models.ResNet18_Weights.IMAGENET1K_V1.meta["categories"]
    return KnownClasses(of="ImageNet", names=tuple(names), wnids=imagenet_wnids(), go_by_name=False)
