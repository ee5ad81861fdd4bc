"""What the methods of the user's classes read, and their source does not fix.

A class attribute, a module's constant, a default or what a closure holds may come from the environment.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from types import CodeType, FunctionType
from typing import Any

import numpy as np
from torch import Tensor

from dualeval.engine.identity.attributes import ignored_by, is_incidental
from dualeval.engine.identity.hasher import Hasher
from dualeval.engine.identity.plain import is_device, is_path, name_of, short_hex
from dualeval.engine.identity.source import has_source, is_own, names_in
from dualeval.engine.sharding.detect import class_of

# Longer ones are hashed: nobody wants a password or a token in job.json.
_LONGEST_VALUE = 16
_MOST_SHOWN = 128
# What typing.Protocol leaves in every class that derives from one.
_OF_TYPING = {"_is_protocol", "_is_runtime_protocol"}


def constants(objects: Iterable[object], hasher: Hasher, functions: Iterable[Any] = ()) -> dict[str, Any]:
    """Values that methods read, of the user's classes among those of some objects, by class and name.

    They are: plain class attributes; plain constants of a module that methods name; defaults of arguments,
    and what functions close over, where it is plain, a tensor, an array or a function. A name that the
    methods write to as a global is a counter, and left out.
    """
    items: dict[Any, None] = {kind: None for item in objects for kind in class_of(item).__mro__}
    items |= dict.fromkeys(filter(_is_function, map(_innermost, functions)))
    found: dict[str, dict[str, Any]] = {}
    for item in items:
        if not is_own(item) or not has_source(item):
            continue
        is_class = isinstance(item, type)
        pairs = sorted(_read_by(item) if is_class else _constants_of([item]), key=itemgetter(0))
        left_out = ignored_by(item) if is_class else set()
        kept = {
            name: value
            for name, value in pairs
            if (own := name.rpartition(".")[2]) not in left_out and not is_incidental(own)
        }
        name = name_of(item).decode()
        while kept and name in found:  # classes that one function has made, or lambdas of one place
            name += "'"
        if kept:
            found[name] = kept
    if sum(map(len, found.values())) > _MOST_SHOWN:
        return {name: short_hex(hasher.digest(read)) for name, read in found.items()}
    return {name: {key: shown(value, hasher) for key, value in read.items()} for name, read in found.items()}


def shown(value: Any, hasher: Hasher) -> Any:
    """A short value as it is, any other as a hash."""
    if value is None or (type(value) in (bool, int, float) and abs(value) < 2**53):
        return value
    if type(value) is str and len(value) <= _LONGEST_VALUE and not (is_path(value) or is_device(value)):
        return value
    return short_hex(hasher.digest(value))


def _read_by(kind: type) -> Iterator[tuple[str, Any]]:
    body = vars(kind)
    yield from ((name, value) for name, value in body.items() if _is_plain(value) and not _is_pythons(name))
    methods = dict.fromkeys(function for item in body.values() for function in _functions_of(item))
    reached = list(methods)
    for function in reached:  # grows
        place = function.__name__ if function in methods else function.__qualname__
        for name, value in _held_by(function).items():
            if not _is_function(value):
                yield f"{place}.{name}", value
            elif value not in reached:
                reached.append(value)
    yield from _constants_of(reached)


def _constants_of(functions: Sequence[FunctionType]) -> Iterator[tuple[str, Any]]:
    """The plain constants of their modules that functions name, and none of them writes to."""
    written = {name for function in functions for name in _written(function.__code__)}
    for function in functions:
        for name in names_in(function.__code__) - written:
            read = function.__globals__
            if name in read and not _is_pythons(name) and _is_plain(read[name]):
                yield name, read[name]


def _innermost(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__func__", function)


def _functions_of(item: Any) -> list[FunctionType]:
    if isinstance(item, staticmethod | classmethod):
        item = item.__func__
    if isinstance(item, functools.cached_property):
        item = item.func
    parts = [item.fget, item.fset] if isinstance(item, property) else [item]
    return [part for part in parts if isinstance(part, FunctionType)]


def _held_by(function: FunctionType) -> dict[str, Any]:
    """The defaults of a function and what it closes over, where that is no object that may change."""
    code = function.__code__
    arguments = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    held = dict(zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True))
    held |= function.__kwdefaults__ or {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            held[name] = cell.cell_contents
        except ValueError:  # empty
            continue
    kinds = (Tensor, np.ndarray, FunctionType)
    return {name: value for name, value in held.items() if _is_plain(value) or isinstance(value, kinds)}


def _is_function(value: Any) -> bool:
    return isinstance(value, FunctionType)


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, frozenset):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, complex, str, bytes)


def _is_pythons(name: str) -> bool:
    return name in _OF_TYPING or (name.startswith("__") and name.endswith("__"))


def _written(code: CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    own = {
        str(step.argval)
        for step in dis.get_instructions(code)
        if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
    }
    return own.union(*map(_written, inner))
