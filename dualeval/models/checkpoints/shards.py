"""Checkpoints in several files, with an index that says which tensor is in which file."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

from dualeval.errors import UsageError
from dualeval.models.checkpoints.finding import is_state_dict
from dualeval.models.checkpoints.safetensors_files import read_safetensors
from dualeval.models.checkpoints.torch_files import TorchFile
from dualeval.wording import listed


def read_shards(index: Path, *, trust: bool) -> OrderedDict[str, Any]:
    """The tensors that an index names, by name; their values are not read."""
    places = _weight_map(index)
    found: dict[str, Any] = {}
    for name in dict.fromkeys(places.values()):
        path = index.parent / name
        if not path.is_file():
            raise UsageError(
                f"{index} names the file {name}, which is not beside it. Fetch or copy all files."
            )
        tensors = _tensors_of(path, trust)
        wanted = {tensor for tensor, file in places.items() if file == name}
        if others := sorted(wanted ^ tensors.keys()):
            raise UsageError(
                f"{path} does not belong to {index.name}: only one of them has {listed(others)}. Copy "
                "all files of one checkpoint."
            )
        found |= tensors
    return OrderedDict((name, found[name]) for name in places)


def _tensors_of(path: Path, trust: bool) -> OrderedDict[str, Any]:
    if path.suffix == ".safetensors":
        return OrderedDict(read_safetensors(path))
    file = TorchFile(path, trust=trust)
    if not is_state_dict(file.tree):
        raise UsageError(f"{path} is one of several files with weights, and holds more than tensors by name.")
    return file.late_state_dict("", file.tree)


def _weight_map(index: Path) -> dict[str, str]:
    """File names by the names of tensors."""
    try:
        content = json.loads(index.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{index} is not readable JSON: {error}. Fetch or copy it again.") from error
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not places:
        raise UsageError(f"{index} has no weight_map, which says which tensor is in which file.")
    return {tensor: str(name) for tensor, name in places.items()}
