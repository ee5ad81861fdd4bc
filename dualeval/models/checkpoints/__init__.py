"""Reading what a training has saved, in every form, without running code; and finding the state_dict."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualeval.data.contents import what_weights_are
from dualeval.errors import UsageError
from dualeval.models.checkpoints.distributed import DistributedFolder
from dualeval.models.checkpoints.finding import choose
from dualeval.models.checkpoints.folders import METADATA, is_index, refuse_part_of_folder, saved_in
from dualeval.models.checkpoints.safetensors_files import read_safetensors
from dualeval.models.checkpoints.shards import read_shards
from dualeval.models.checkpoints.torch_files import TorchFile


@dataclass(frozen=True, kw_only=True)
class StateDict:
    """A state_dict in a checkpoint."""

    path: Path
    # The keys that lead to it, with dots between; "" where the checkpoint is nothing else.
    key: str
    # By name, read when they are used; with the `_metadata` that torch keeps beside them where there are any.
    # An entry `_extra_state` may be anything, and hold objects that were passed over.
    tensors: OrderedDict[str, Any]


def read_state_dict(path: Path, key: str | None = None, *, trust: bool = False) -> StateDict:
    """Find a state_dict in a checkpoint. Of other tensors, such as an optimizer's, no value is read."""
    saved = path
    if path.is_dir():
        saved = saved_in(path)
        if saved.name == METADATA:
            distributed = DistributedFolder(path)
            found, tensors = choose(path, distributed.tree, key)
            return StateDict(path=path, key=found, tensors=distributed.late_state_dict(tensors))
    _check_file(saved)
    if is_index(saved) or saved.suffix == ".safetensors":
        content = read_shards(saved, trust=trust) if is_index(saved) else read_safetensors(saved)
        found, tensors = choose(path, content, key)
        return StateDict(path=path, key=found, tensors=OrderedDict(tensors))
    file = TorchFile(saved, trust=trust)
    found, tensors = choose(path, file.tree, key)
    return StateDict(path=path, key=found, tensors=file.late_state_dict(found, tensors))


def _check_file(path: Path) -> None:
    """Check that a file is there and can be one of weights, by its first bytes."""
    if not path.is_file():
        raise UsageError(f"weights file {path} does not exist. Give a state_dict file with --weights PATH.")
    refuse_part_of_folder(path)
    if is_index(path):
        return
    try:
        other = what_weights_are(path)
    except OSError as error:
        raise UsageError(f"weights file {path} cannot be read: {error.strerror or error}") from error
    if other is not None:
        raise UsageError(f"weights file {path} {other}.")
