"""Reading a checkpoint's tensors, and putting them into a model or saying why they do not fit."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from dualeval.errors import UsageError

_LISTED_AT_MOST = 8
# Where training scripts put the state_dict inside a checkpoint; the first that is there is taken.
_NESTED_UNDER = ("state_dict", "model_state_dict", "model", "model_ema")
# Prefixes that wrappers (DataParallel and DistributedDataParallel; torch.compile) put before every name.
_WRAPPER_PREFIXES = ("module.", "_orig_mod.")


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Read a state_dict from a .safetensors file or from what ``torch.save`` wrote, without running code.

    A state_dict nested in a checkpoint under one of the usual names is found; prefixes of wrappers are
    removed where all names have them.

    Raises:
        UsageError: the file is missing, unreadable, holds no state_dict, or needs code to be read.
    """
    if not path.is_file():
        raise UsageError(f"weights file {path} does not exist. Give a state_dict file with --weights PATH.")
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    for key in _NESTED_UNDER:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    if (
        not isinstance(content, Mapping)
        or not content
        or not all(isinstance(v, Tensor) for v in content.values())
    ):
        keys = ", ".join(map(str, content)) if isinstance(content, Mapping) else type(content).__name__
        raise UsageError(
            f"{path} holds no state_dict (found: {keys[:200]}); expected tensors by name, or such a mapping "
            f"under one of {', '.join(_NESTED_UNDER)}. Save one with torch.save(model.state_dict(), PATH)."
        )
    for prefix in _WRAPPER_PREFIXES:
        if all(name.startswith(prefix) for name in content):
            content = {name.removeprefix(prefix): tensor for name, tensor in content.items()}
    return dict(content)


def _read_safetensors(path: Path) -> object:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path} is not a readable safetensors file: {error}") from error


def _read_torch(path: Path) -> object:
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            # Only the zip format of torch >= 1.6 can be mapped into memory.
            if "mmap" not in str(error):
                raise
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        lines = str(error).splitlines()
        refused = next((line.strip() for line in lines if "Unsupported" in line), lines[0].split(". ")[0])
        detail = refused.split(" was not an allowed")[0].removeprefix("WeightsUnpickler error: ")
        raise UsageError(
            f"{path} cannot be read as plain tensors ({detail}). It is damaged, or holds pickled Python "
            "objects, which could run code. Save it again with torch.save(model.state_dict(), PATH) or as "
            "safetensors."
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise UsageError(f"{path} is not a readable torch file: {str(error).splitlines()[0]}") from error


def load_into(model: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Copy tensors into a model; all of them, and no others.

    Args:
        model: takes the values; keeps its dtypes and device.
        state: tensors by the model's names.
        source: where the tensors come from, for messages.

    Raises:
        UsageError: lists missing and unexpected names and wrong shapes; where the only difference is the
            number of classes, says so.
    """
    own = model.state_dict()
    missing = [name for name in own if name not in state]
    unexpected = [name for name in state if name not in own]
    shapes = {
        name: (tuple(state[name].shape), tuple(own[name].shape))
        for name in own
        if name in state and state[name].shape != own[name].shape
    }
    if not (missing or unexpected or shapes):
        model.load_state_dict(dict(state))
        return
    if not missing and not unexpected:
        _raise_on_class_counts(shapes, source)
    parts = [
        _listed("missing in the file", missing),
        _listed("not in the model", unexpected),
        _listed("of another shape", [f"{name} {a}, the model has {b}" for name, (a, b) in shapes.items()]),
    ]
    raise UsageError(
        f"{source} does not fit the model {type(model).__name__}: {'; '.join(filter(None, parts))}. "
        "Give the weights of this --model."
    )


def _raise_on_class_counts(
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]], source: str
) -> None:
    """Raise where every wrong shape differs in its first dimension alone, by the same two numbers."""
    pairs = {(found[0], wanted[0]) for found, wanted in shapes.values() if found and wanted}
    tails_equal = all(found[1:] == wanted[1:] for found, wanted in shapes.values())
    if len(pairs) == 1 and tails_equal:
        [(found, wanted)] = pairs
        raise UsageError(
            f"{source} is for {found} classes, but {wanted} were expected (from the data's class folders, or "
            "--num-classes). Give data and weights of the same classes."
        )


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _LISTED_AT_MOST} more" if len(names) > _LISTED_AT_MOST else ""
    return f"{len(names)} {what}: {', '.join(names[:_LISTED_AT_MOST])}{more}"
