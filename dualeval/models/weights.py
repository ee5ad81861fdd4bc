"""Reading a checkpoint's tensors, and putting them into a model or saying why they do not fit."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from dualeval.errors import UsageError

_LISTED_AT_MOST = 8
_RANDOM = "random:"
_LARGEST_SEED = 2**64 - 1
# Where training scripts put the state_dict inside a checkpoint; the first that is there is taken.
_NESTED_UNDER = ("state_dict", "model_state_dict", "model", "model_ema")
# Prefixes that wrappers (DataParallel and DistributedDataParallel; torch.compile) put before every name.
_WRAPPER_PREFIXES = ("module.", "_orig_mod.")


def seed_of(weights: str) -> int | None:
    """The seed in "random:SEED"; None where the text names weights that are there.

    Raises:
        UsageError: it is no seed.
    """
    if not weights.startswith(_RANDOM):
        return None
    text = weights.removeprefix(_RANDOM)
    if not text.isdecimal() or int(text) > _LARGEST_SEED:
        raise UsageError(
            f"--weights {weights}: expected random:SEED with a whole number up to {_LARGEST_SEED}, "
            "such as random:0"
        )
    return int(text)


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
        or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in content.items())
    ):
        keys = ", ".join(map(str, content)) if isinstance(content, Mapping) else type(content).__name__
        raise UsageError(
            f"{path} holds no state_dict (found: {keys[:200]}); expected tensors by name, or such a mapping "
            f"under one of {', '.join(_NESTED_UNDER)}. Save one with torch.save(model.state_dict(), PATH)."
        )
    # With its _metadata, the versions of modules by which some of them know and convert an older layout.
    state = content if isinstance(content, OrderedDict) else OrderedDict(content)
    while prefix := next((p for p in _WRAPPER_PREFIXES if all(name.startswith(p) for name in state)), None):
        consume_prefix_in_state_dict_if_present(state, prefix)
    return state


def _read_safetensors(path: Path) -> object:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path} is not a readable safetensors file: {error}") from error


def _read_torch(path: Path) -> object:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch guesses of a file that it then refuses
            # Only the zip format of torch >= 1.6 can be mapped into memory.
            mapped = zipfile.is_zipfile(path)
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        lines = str(error).splitlines()
        refused = next((line.strip() for line in lines if "Unsupported" in line), lines[0].split(". ")[0])
        detail = refused.split(" was not an allowed")[0].removeprefix("WeightsUnpickler error: ")
        raise UsageError(
            f"{path} cannot be read as plain tensors ({detail}). It is damaged, or holds pickled Python "
            "objects, which could run code. Save it again with torch.save(model.state_dict(), PATH) or as "
            "safetensors."
        ) from error
    except Exception as error:  # a damaged stream raises whatever its bytes happen to ask for
        said = str(error) or type(error).__name__
        raise UsageError(f"{path} is not a readable torch file: {said.splitlines()[0]}") from error


def load_into(model: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Copy tensors into a model; all of them, and no others.

    The model's own loading goes first: some modules convert an older layout of their tensors.

    Args:
        model: takes the values; keeps its dtypes and device.
        state: tensors by the model's names.
        source: where the tensors come from, for messages.

    Raises:
        UsageError: lists missing and unexpected names and wrong shapes; where the only difference is the
            number of classes, says so.
    """
    own = model.state_dict()
    if not hasattr(state, "_metadata") and state.keys() == own.keys():
        # A format without versions, in the present layout: MNASNet loads nothing of unknown version.
        state = OrderedDict(state)
        state._metadata = own._metadata  # type: ignore[attr-defined]
    try:
        model.load_state_dict(state)
    except (RuntimeError, ValueError) as error:
        raise _misfit(model, own, state, source, error) from error


def _misfit(
    model: nn.Module,
    own: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    source: str,
    error: Exception,
) -> UsageError:
    missing = [name for name in own if name not in state]
    unexpected = [name for name in state if name not in own]
    shapes = {
        name: (tuple(state[name].shape), tuple(own[name].shape))
        for name in own
        if name in state and state[name].shape != own[name].shape
    }
    if not missing and not unexpected and (counts := _class_counts(shapes)):
        return UsageError(
            f"{source} is for {counts[0]} classes, but {counts[1]} were expected (from the data's class "
            "folders, or --num-classes). Give data and weights of the same classes."
        )
    parts = [
        _listed("missing in the file", missing),
        _listed("not in the model", unexpected),
        _listed("of another shape", [f"{name} {a}, the model has {b}" for name, (a, b) in shapes.items()]),
    ]
    found = "; ".join(filter(None, parts)) or str(error).splitlines()[-1].strip()
    return UsageError(
        f"{source} does not fit the model {type(model).__name__}: {found}. Give the weights of this --model."
    )


def _class_counts(shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> tuple[int, int] | None:
    """(found, wanted) where every wrong shape differs in its first dimension alone, by these two numbers."""
    pairs = {(found[0], wanted[0]) for found, wanted in shapes.values() if found and wanted}
    tails_equal = all(found[1:] == wanted[1:] for found, wanted in shapes.values())
    return next(iter(pairs)) if len(pairs) == 1 and tails_equal else None


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _LISTED_AT_MOST} more" if len(names) > _LISTED_AT_MOST else ""
    return f"{len(names)} {what}: {', '.join(names[:_LISTED_AT_MOST])}{more}"
