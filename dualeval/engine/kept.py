"""What a user's objects and functions keep: the values that they reach, to see which a call changes."""

from __future__ import annotations

import functools
import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dualeval.engine.guest import put_back, version_of
from dualeval.engine.identity.hasher import BY_TYPE_ALONE
from dualeval.engine.identity.source import is_own, names_in
from dualeval.engine.nests import own_attributes

# Bytes of tensors and arrays that are compared by content, in all; others by object and version.
_CONTENT = 1 << 26
# Of a container's entries so many from each end are looked at, and its length.
_ENTRIES = 32
_VALUES = 50_000
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_LISTS: tuple[type, ...] = (list, tuple, deque)


class Kept:
    """The values that some objects and functions reach now, by the place where each of them lies.

    Reached are attributes, parameters, buffers and hooks of modules, entries of containers, what functions
    close over, and the globals that the user's own functions name.
    """

    def __init__(self, roots: Mapping[str, Any], *, returns: bool = False) -> None:
        self._values: dict[str, Any] = {}
        # Kept alive, so that nothing else gets their ids.
        self._entered: dict[int, Any] = {}
        self._put_back: list[Callable[[], object]] = []
        self._left = _CONTENT
        modules = {
            id(part) for root in roots.values() if isinstance(root, nn.Module) for part in root.modules()
        }
        waiting = deque((place, value, returns) for place, value in roots.items())
        while waiting and len(self._values) < _VALUES:
            place, value, returned = waiting.popleft()
            self._values[place] = self._token(value, returned)
            # By its type: a proxy answers isinstance with what it stands for.
            if not issubclass(type(value), (*_PLAIN, Tensor, np.ndarray)) and id(value) not in self._entered:
                self._entered[id(value)] = value
                is_other_module = issubclass(type(value), nn.Module) and id(value) not in modules
                returned = returned and not is_other_module and not _is_of_a_library(value)
                self._put_back += _ways_back(value) if returned else ()
                waiting += ((inner, held, returned) for inner, held in _inside(place, value))

    def changed_since(self, earlier: Kept) -> list[str]:
        """The places whose values are others than at an earlier time."""
        places = dict.fromkeys([*earlier._values, *self._values])
        nothing = object()
        return [
            place
            for place in places
            if self._values.get(place, nothing) != earlier._values.get(place, nothing)
        ]

    def put_back(self) -> None:
        """Put back what containers, objects, closures and globals hold; of modules see ``Snapshot``."""
        for way in self._put_back:
            way()

    def _token(self, value: Any, returned: bool) -> Any:
        """What is compared of a value, beside the values inside of it."""
        kind = type(value)
        if kind in (float, complex):
            # By its text: NaN is not equal to itself.
            return kind, repr(value)
        if kind in _PLAIN:
            return kind, value
        if issubclass(kind, (Tensor, np.ndarray)):
            return kind, self._content(value, returned)
        return kind, len(value) if kind in (*_LISTS, dict, set, frozenset) else None

    def _content(self, value: Any, returned: bool) -> Any:
        """A digest of a tensor or array; of others which object it is, and its version."""
        # An array of another class may hold more than its bytes: a mask, a unit, a file.
        is_plain = type(value) in (np.ndarray, Tensor)
        with suppress(RuntimeError, TypeError, ValueError):  # a layout without bytes of its own
            size = value.numel() * value.element_size() if isinstance(value, Tensor) else value.nbytes
            if size <= self._left and is_plain:
                own = np.ascontiguousarray(_bytes_of(value) if isinstance(value, Tensor) else value)
                self._left -= size
                if returned and not (type(value) is Tensor and value.is_inference()):
                    self._put_back.append(functools.partial(_write_back, value, own.copy()))
                return tuple(value.shape), hashlib.blake2b(own.tobytes(), digest_size=16).digest()
        self._entered[id(value)] = value
        return id(value), version_of(value) if isinstance(value, Tensor) else 0


def _bytes_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return np.asarray(plain.view(-1).view(torch.uint8))


def _write_back(value: Any, before: np.ndarray[Any, Any]) -> None:
    """Write the bytes of an earlier time into a tensor or array; one of another size stays as it is."""
    if isinstance(value, np.ndarray):
        if value.flags.writeable and value.shape == before.shape and value.tobytes() != before.tobytes():
            value[...] = before
        return
    if value.numel() * value.element_size() != len(before) or np.array_equal(_bytes_of(value), before):
        return
    with torch.no_grad(), suppress(RuntimeError):  # several of its values are one: expanded
        value.copy_(torch.from_numpy(before).view(value.dtype).view(value.shape))


def _is_of_a_library(value: Any) -> bool:
    """Whether an object's class is another's: neither a module, nor of the user, nor a plain container."""
    kind = type(value)
    walked = (type, nn.Module, ModuleType, FunctionType, MethodType, functools.partial)
    if issubclass(kind, functools._lru_cache_wrapper):
        return not is_own(value.__wrapped__)
    if issubclass(kind, (*walked, staticmethod, classmethod)) or kind.__module__ in (
        "builtins",
        "collections",
    ):
        return False
    return not is_own(kind)


def _ways_back(value: Any) -> Iterator[Callable[[], object]]:
    """What puts back an object's own content, entry by entry."""
    kind = type(value)
    if kind in (list, deque):
        yield functools.partial(_refill, value, list(value), value.extend)
    elif kind is set:
        yield functools.partial(_refill, value, list(value), value.update)
    elif issubclass(kind, dict):
        yield functools.partial(put_back, value, dict(dict.items(value)))
    elif issubclass(kind, FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # an empty one
                yield functools.partial(setattr, cell, "cell_contents", cell.cell_contents)
        if is_own(value):
            read = value.__globals__
            held = {name: read[name] for name in names_in(value.__code__) & read.keys()}
            yield functools.partial(read.update, held)
    elif issubclass(kind, functools._lru_cache_wrapper):
        if not value.cache_info().currsize:  # one that holds something cannot be put back
            yield value.cache_clear
    elif not issubclass(kind, (type, nn.Module, ModuleType, *BY_TYPE_ALONE)) and is_own(kind):
        with suppress(Exception):  # slots, or a property of the user's of this name
            yield functools.partial(put_back, vars(value), dict(vars(value)))
    elif issubclass(kind, type) and is_own(value):
        for name, held in vars(value).items():
            if not name.startswith("__"):
                yield functools.partial(_set_again, value, name, held)


def _set_again(kind: type, name: str, held: Any) -> None:
    if vars(kind).get(name) is not held:
        setattr(kind, name, held)


def _refill(value: Any, before: list[Any], fill: Callable[[Iterable[Any]], object]) -> None:
    if len(value) != len(before) or any(now is not then for now, then in zip(value, before, strict=True)):
        value.clear()
        fill(before)


def _inside(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The values that a value holds, and their places."""
    kind = type(value)
    if issubclass(kind, FunctionType):
        yield from _of_function(value)
    elif issubclass(kind, MethodType):
        yield from ((place, value.__func__), (place, value.__self__))
    elif issubclass(kind, functools.partial):
        yield from ((place, part) for part in (value.func, value.args, value.keywords))
    elif issubclass(kind, type):
        if is_own(value):
            yield from ((f"{place}.{name}", held) for name, held in vars(value).items())
    elif issubclass(kind, (staticmethod, classmethod)):
        yield place, value.__func__
    elif issubclass(kind, property):
        yield from ((place, part) for part in (value.fget, value.fset))
    elif issubclass(kind, functools._lru_cache_wrapper):
        yield place, value.__wrapped__
    elif not issubclass(kind, (*BY_TYPE_ALONE, ModuleType)):
        if issubclass(kind, dict):
            found = _ends(dict.items(value), dict.__len__(value))
            yield from ((f"{place}[{_shown(key)}]", held) for key, held in found)
        elif base := next((each for each in _LISTS if issubclass(kind, each)), None):
            numbered = enumerate(base.__iter__(value))  # type: ignore[attr-defined]
            for number, held in _ends(numbered, base.__len__(value)):  # type: ignore[attr-defined]
                yield f"{place}[{number}]", held
        elif kind in (set, frozenset):
            yield from ((f"{place}[{_shown(held)}]", held) for held in value if type(held) in _PLAIN)
        if issubclass(kind, nn.Module):
            for parts in (value._parameters, value._buffers, value._modules):
                yield from ((f"{place}.{name}", held) for name, held in parts.items())
        for name, held in own_attributes(value).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield f"{place}.{name}", held
        yield from ((f"class {base.__name__}", base) for base in kind.__mro__)


def _shown(key: Any) -> str:
    """A key of a dict; only a plain one is asked for its text."""
    is_short = type(key) in _PLAIN and not (type(key) is int and abs(key) >> 64)
    return f"{key!r:.40}" if is_short else type(key).__name__


def _ends(entries: Iterable[Any], count: int) -> Iterator[Any]:
    entries = iter(entries)
    yield from islice(entries, min(count, _ENTRIES))
    yield from islice(entries, max(0, count - 2 * _ENTRIES), None)


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    name = function.__qualname__
    yield from ((f"{name}.{key}", held) for key, held in vars(function).items())
    yield from ((f"a default of {name}", held) for held in function.__defaults__ or ())
    yield from ((f"{key} of {name}", held) for key, held in (function.__kwdefaults__ or {}).items())
    for free, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{free} of {name}", cell.cell_contents
        except ValueError:  # empty
            continue
    if not is_own(function):
        return
    names = names_in(function.__code__)
    for key in sorted(names & function.__globals__.keys()):
        held = function.__globals__[key]
        yield f"{key} of the module {function.__module__}", held
        if issubclass(type(held), ModuleType):
            named = sorted(names & vars(held).keys())
            yield from ((f"{other} of the module {held.__name__}", vars(held)[other]) for other in named)
