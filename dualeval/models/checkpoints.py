"""Reading what a training script has saved, without running code, and finding the state_dict in it."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals

from dualeval.data.contents import what_weights_are
from dualeval.errors import UsageError
from dualeval.models.candidates import (
    KNOWN_KEYS,
    Candidate,
    at,
    candidates,
    is_state_dict,
    listed,
    said_twice,
    state_dicts,
)
from dualeval.models.passed_over import PassedOver, PassedOverArray

_LISTED_AT_MOST = 8
_REFUSED = re.compile(r"unsupported global(?:: global)? (\S+)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class StateDict:
    """A state_dict in a file.

    Attributes:
        path: the file.
        key: the keys that lead to it, with dots between; "" where the file is nothing else.
        tensors: by name; with the ``_metadata`` that torch keeps beside them where there are any. An
            entry ``_extra_state`` may be anything, and hold objects that were passed over.
    """

    path: Path
    key: str
    tensors: OrderedDict[str, Any]


class _AsDict:
    """Makes a plain dict, the only mapping beside OrderedDict and Counter that torch fills from a file."""

    def __new__(cls, *_: object) -> dict[Any, Any]:  # type: ignore[misc]
        return {}


class _AsList:
    """Makes a plain list, the only sequence that torch fills from a file."""

    def __new__(cls, *_: object) -> list[Any]:  # type: ignore[misc]
        return []


# What usual checkpoints hold beside tensors: the names in the file, and what is made of each. None of these
# types is used itself. So no constructor and no __setstate__ of theirs sees what a file says, and it does not
# matter what they would do with it: numpy's believe the offsets in a dtype, and follow them. What a file puts
# into one of them is read by the same rules, so nothing else can hide there.
_ADMITTED: dict[str, Callable[..., object]] = {
    **dict.fromkeys(("argparse.Namespace", "types.SimpleNamespace"), PassedOver),
    **{
        f"{module}.{name}": PassedOver
        for module in ("pathlib", "pathlib._local")  # the latter in files of Python 3.13
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
    # Scalars and arrays; numpy 1 and numpy 2.
    **dict.fromkeys(("numpy.dtype", "numpy.ndarray"), PassedOver),
    **{
        f"{module}.multiarray.{name}": made
        for module in ("numpy.core", "numpy._core")
        for name, made in (("scalar", PassedOver), ("_reconstruct", PassedOverArray))
    },
    **{f"datetime.{name}": PassedOver for name in ("datetime", "date", "time", "timedelta", "timezone")},
    # As values, and as what a defaultdict makes.
    **{
        f"builtins.{name}": PassedOver
        for name in ("bool", "int", "float", "str", "list", "tuple", "dict", "frozenset", "range", "slice")
    },
    "collections.defaultdict": _AsDict,
    "collections.deque": _AsList,
}


def read_state_dict(path: Path, key: str | None = None) -> StateDict:
    """Read a state_dict from a .safetensors file or from what ``torch.save`` wrote, without running code.

    Args:
        path: the file. It may be a state_dict, or a checkpoint that holds one.
        key: where it lies in the checkpoint, nested keys with dots between; None finds the one that is there.

    Returns:
        The state_dict with the names as they are in the file.

    Raises:
        UsageError: the file is missing, unreadable or needs code to be read; it holds no state_dict, or none
            under this key; or it holds several, and no key was given.
    """
    if not path.is_file():
        raise UsageError(f"weights file {path} does not exist. Give a state_dict file with --weights PATH.")
    try:
        other = what_weights_are(path)
    except OSError as error:
        raise UsageError(f"weights file {path} cannot be read: {error.strerror or error}") from error
    if other is not None:
        raise UsageError(f"weights file {path} {other}.")
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    if is_state_dict(content):
        if key is not None:
            raise UsageError(
                f"--weights-key {key}: {path} is one state_dict, with no keys above it. Leave --weights-key "
                "out; --weights-prefix takes the tensors whose names begin with a prefix."
            )
        return _found(path, "", content)
    return _found(path, *(_only_one(path, content) if key is None else _under(path, content, key)))


def _found(path: Path, key: str, tensors: Mapping[str, Any]) -> StateDict:
    # With its _metadata, the versions of modules by which some of them know and convert an older layout.
    return StateDict(
        path=path, key=key, tensors=tensors if isinstance(tensors, OrderedDict) else OrderedDict(tensors)
    )


# -- finding ---------------------------------------------------------------------------------------------


def _only_one(path: Path, content: object, above: str = "") -> tuple[str, Mapping[str, Any]]:
    """The one state_dict under known keys.

    Args:
        path: the file, for messages.
        content: of the file, or what is below a key.
        above: that key.

    Raises:
        UsageError: there is none, or more than one.
    """
    found = candidates(content, above)
    if not found:
        raise _none_there(path, content, above)
    if len(found) > 1:
        raise _several(path, found)
    return found[0].key, found[0].content


def _several(path: Path, found: list[Candidate]) -> UsageError:
    twice = said_twice(found)
    clear = next((place.key for place in found if place.whole and place.key not in twice), None)
    saved = "the one that is meant alone, with torch.save(model.state_dict(), PATH)."
    advice = (
        f"Save {saved}"
        if clear is None
        else f"Say which is meant: --weights-key KEY, such as --weights-key {clear}."
    )
    if twice:
        advice = f"Two things answer to {', '.join(twice)}. {advice}"
    if clear is not None and not all(place.whole for place in found):
        advice = f"{advice} One with other things than tensors cannot be taken: save it alone."
    return UsageError(
        f"{path} holds {len(found)} state_dicts: {listed(found)}. They can give different results. {advice}"
    )


def _under(path: Path, content: object, key: str) -> tuple[str, Mapping[str, Any]]:
    """The state_dict that a key leads to, or the only one below it."""
    found = at(content, key)
    if not found:
        elsewhere = state_dicts(content)
        hint = f" State_dicts lie under {listed(elsewhere)}." if elsewhere else ""
        raise UsageError(f"--weights-key {key}: {path} holds no such key ({_keys_of(content)}).{hint}")
    if len(found) > 1:
        raise UsageError(
            f"--weights-key {key}: {len(found)} things in {path} answer to it, expected one. Save the one "
            "that is meant alone, with torch.save(model.state_dict(), PATH)."
        )
    [inner] = found
    if is_state_dict(inner):
        return key, inner
    if not isinstance(inner, (Mapping, list, tuple)):
        what = "an object" if isinstance(inner, PassedOver) else f"a {type(inner).__name__}"
        raise UsageError(
            f"--weights-key {key}: {path} holds {what} there, expected a state_dict (tensors by name)."
        )
    return _only_one(path, inner, key)


def _none_there(path: Path, content: object, above: str) -> UsageError:
    # What is there instead, under the known keys.
    nested = [content.get(key) for key in KNOWN_KEYS] if isinstance(content, Mapping) else []
    inner = next((value for value in nested if isinstance(value, Mapping)), content)
    others = state_dicts(content, above)
    hint = (
        f" State_dicts lie under other keys: {listed(others)}; --weights-key KEY takes one." if others else ""
    )
    place = f" under the key {above}" if above else ""
    return UsageError(
        f"{path} holds no state_dict{place} ({_keys_of(inner)}); expected tensors by name, or such a mapping "
        f"under one of {', '.join(KNOWN_KEYS)}.{hint} Save one with torch.save(model.state_dict(), PATH)."
    )


def _keys_of(content: object) -> str:
    if not isinstance(content, Mapping):
        return f"found: {type(content).__name__}"
    found = f"found: {', '.join(map(str, content))[:200]}"
    others = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if len(others) == len(content):
        return found
    return f"{found}; no tensor is {', '.join(others[:_LISTED_AT_MOST])}"


# -- reading ---------------------------------------------------------------------------------------------


def _read_safetensors(path: Path) -> object:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path} is not a readable safetensors file: {error}") from error


def _read_torch(path: Path) -> object:
    # Only the zip format of torch >= 1.6 can be mapped into memory.
    mapped = zipfile.is_zipfile(path)
    try:
        with warnings.catch_warnings(), _admitting():
            warnings.simplefilter("ignore")  # what torch guesses of a file that it then refuses
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        detail = _refusal(str(error))
        why = f" ({detail})" if detail else ""
        raise UsageError(
            f"{path} cannot be read as plain tensors{why}. It is damaged, or holds pickled Python "
            "objects, which could run code. Save it again with torch.save(model.state_dict(), PATH) or as "
            "safetensors."
        ) from error
    except Exception as error:  # a damaged stream raises whatever its bytes happen to ask for
        if not mapped and path.read_bytes()[:2] == b"PK":
            raise UsageError(
                f"{path} is cut short: it begins as a file of torch.save, and its end is missing "
                f"({path.stat().st_size:,} bytes are there). Fetch or save it again."
            ) from error
        said = str(error) or type(error).__name__
        raise UsageError(f"{path} is not a readable torch file: {said.splitlines()[0]}") from error


def _refusal(said: str) -> str:
    """What torch refuses, without its advice to switch the protection off."""
    name = _REFUSED.search(said)
    if name is not None:
        return f"Unsupported global: GLOBAL {name[1]}"
    _, _, detail = said.partition("WeightsUnpickler error: ")
    return (detail or said).splitlines()[0].split(". ")[0]


@contextmanager
def _admitting() -> Iterator[None]:
    """Let torch take what is admitted; what a program has admitted itself stays, but for the same names.

    A program's numpy.dtype and the one here do not go together.
    """
    before: list[Any] = get_safe_globals()
    others = [entry for entry in before if _name_in_files(entry) not in _ADMITTED]
    clear_safe_globals()
    add_safe_globals([*others, *((made, name) for name, made in _ADMITTED.items())])
    try:
        yield
    finally:
        clear_safe_globals()
        add_safe_globals(before)


def _name_in_files(entry: Any) -> str:
    return str(entry[1]) if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"
