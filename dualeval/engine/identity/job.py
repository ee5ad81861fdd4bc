"""The identity of a job: everything that decides its numbers, by name, as far as it can be named.

World size, backend, launcher, workers, threads, folders and machines are no part of it.
"""

from __future__ import annotations

import dis
import enum
import functools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import islice
from operator import itemgetter
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dualeval.engine.device.divided import class_of
from dualeval.engine.identity.hasher import Hasher
from dualeval.engine.identity.model import ModelHasher, ModelIdentity
from dualeval.engine.identity.plain import (
    attributes_of,
    ignored_by,
    is_device,
    is_incidental,
    is_path,
    name_of,
    short_hex,
)
from dualeval.engine.identity.source import has_source, is_own, names_in, source_fingerprints
from dualeval.engine.values.nests import held_by, own_attributes
from dualeval.errors import UsageError
from dualeval.metrics import Metric, RowMetric
from dualeval.tasks import Dataset, Task

_VALUES = (
    *(bool, int, float, complex, str, bytes, enum.Enum),
    *(FunctionType, functools.partial, Tensor, np.ndarray, np.generic),
)
# How many entries or attributes of an object are searched for the user's own objects.
_LOOKED_AT = 32
# Types whose content is searched, but which do not count themselves.
_PASSED = (list, tuple, dict, MethodType, functools.partial)
_OBJECTS = "functions with values of their own"  # as a module's name
# Longer texts are hashed: nobody wants a password or a token in job.json.
_LONGEST_VALUE = 16
_MOST_SHOWN = 128
# What typing.Protocol leaves in every class that derives from one.
_OF_TYPING = {"_is_protocol", "_is_runtime_protocol"}


def job_identity(
    task: Task,
    dataset: Dataset,
    model: ModelIdentity,
    metrics: Sequence[Metric],
    row_metrics: Sequence[RowMetric],
    samples: int,
    attributes: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """The part of a job's identity that follows from task, data set and model."""
    hasher = model.hasher
    measures: list[Metric | RowMetric] = [*metrics, *row_metrics]
    # Further code that decides numbers, named by task and metrics.
    named = [
        *task.sources(),
        *(item for each in measures if hasattr(each, "sources") for item in each.sources()),
    ]
    items = [task, dataset, getattr(dataset, "wrapped", None), *measures]
    objects = [*items, *model.modules]
    # An object with a fingerprint of its own names what it depends on.
    for item in items:
        for each in () if _has_fingerprint(item) else _inside(item):
            if isinstance(each, FunctionType):
                hasher.meet(each)
            else:
                objects.append(each)
    return {
        "task": task.name,
        **_sources(objects, named, hasher),
        "task_options": _as_json(task.fingerprint(), f"task {task.name!r}"),
        # The options that the command line gave the task, whatever its fingerprint says.
        **({"options": dict(task.given_options)} if task.given_options else {}),
        **({"task_attributes": dict(attributes)} if attributes else {}),
        "data": dataset.fingerprint(samples),
        "samples": samples,
        "weights": dict(model.weights),
        "structure": dict(model.structure),
        # Values that the source of classes leaves open: they may come from the environment, or a caller.
        "constants": constants(objects, hasher, named),
        # In the order of their slots in the ledger.
        "metrics": [metric.name for metric in measures],
        "metric_options": {metric.name: metric_fingerprint(metric) for metric in measures},
    }


def _has_fingerprint(item: Any) -> bool:
    if isinstance(item, Task):
        return type(item).fingerprint is not Task.fingerprint
    return callable(getattr(item, "fingerprint", None))


def _inside(item: Any, depth: int = 4) -> Iterator[Any]:
    """An object, and the user's objects and functions in it, as a transform or a ``Subset``'s data set."""
    yield item
    ignored = {id(value) for name, value in own_attributes(item).items() if name in ignored_by(type(item))}
    for each in held_by(item, _LOOKED_AT) if depth and not isinstance(item, FunctionType) else ():
        kind = type(each)
        if kind in _PASSED:
            yield from islice(_inside(each, depth - 1), 1, None)
        elif is_own(each) if kind is FunctionType else _has_own_parts(kind) and id(each) not in ignored:
            yield from _inside(each, depth - 1)


def _has_own_parts(kind: type) -> bool:
    """Whether a class is the user's and no module, or a data set of torch, which may wrap another."""
    return (is_own(kind) and not issubclass(kind, nn.Module)) or issubclass(kind, torch.utils.data.Dataset)


def _sources(
    objects: Sequence[object], named: Sequence[Any], hasher: ModelHasher
) -> dict[str, dict[str, str]]:
    """Hashes of the source of objects, of what a task names, and of all code in the model's structure."""
    code = defaultdict[str, list[bytes]](list)
    for kind in {kind: None for item in objects for kind in class_of(item).__mro__}:
        digest = hasher.digest(kind)  # it notes the module, too
        if not has_source(kind):
            code[kind.__module__].append(digest)
    for item in named:
        digest = hasher.digest(item)
        if isinstance(item, (FunctionType, type)):
            code[item.__module__ or "builtins"].append(digest)
        elif not isinstance(item, ModuleType):
            # Such as a partial: its values belong to the job, whoever wrote its class.
            code[_OBJECTS].append(digest)
    return source_fingerprints(hasher.met, code)


def task_attributes(task: Task) -> dict[str, Any]:
    """The values in a task's attributes, if its class has no fingerprint of its own.

    Take them before the first batch: a task may count in an attribute.
    """
    if type(task).fingerprint is not Task.fingerprint:
        return {}
    hasher = Hasher()
    return {
        name: shown(value, hasher)
        for name, value in sorted(attributes_of(task).items())
        # The given options are in the job already.
        if _holds_values(value) and not is_incidental(name) and name != "given_options"
    }


def _holds_values(value: Any) -> bool:
    if isinstance(value, (tuple, list, set, frozenset)):
        return all(map(_holds_values, value))
    if isinstance(value, dict):
        return all(map(_holds_values, [*value, *value.values()]))
    if is_dataclass(value) and not isinstance(value, type):
        return all(_holds_values(getattr(value, field.name, None)) for field in fields(value))
    return value is None or (isinstance(value, _VALUES) and not isinstance(value, (np.memmap, nn.Module)))


def _as_json(value: Any, whose: str) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the fingerprint() of {whose} returned a value that is not JSON: {error}. Return numbers, text, "
            "None, and lists and dicts of them."
        ) from error


def metric_fingerprint(metric: Metric | RowMetric) -> Any:
    """What a metric's values depend on: its ``fingerprint()``, or else its class and attributes."""
    fingerprint = getattr(metric, "fingerprint", None)
    if callable(fingerprint):
        return _as_json(fingerprint(), f"metric {metric.name!r}")
    hasher = ModelHasher()
    named = name_of(type(metric)).decode()
    if isinstance(metric, nn.Module):
        return {"class": named, "state": short_hex(hasher.digest(metric))}
    attributes = sorted(attributes_of(metric).items())
    return {"class": named, **{name: shown(value, hasher) for name, value in attributes}}


# -- what methods read, and their source does not fix: it may come from the environment ---------------------


def constants(objects: Iterable[object], hasher: Hasher, functions: Iterable[Any]) -> dict[str, Any]:
    """Values that methods read, by class and name, of the user's classes among those of ``objects``.

    These are plain class attributes; plain constants of a module that methods name; and defaults of arguments
    and closed-over values, if they are plain, a tensor, an array or a function. A global that the methods
    write to is a counter, and left out.
    """
    items: dict[Any, None] = {kind: None for item in objects for kind in class_of(item).__mro__}
    items |= dict.fromkeys(filter(_is_function, map(_innermost, functions)))
    values: dict[str, dict[str, Any]] = {}
    for item in items:
        if not is_own(item) or not has_source(item):
            continue
        is_class = isinstance(item, type)
        pairs = sorted(_read_by(item) if is_class else _constants_of([item]), key=itemgetter(0))
        left_out = ignored_by(item) if is_class else set()
        kept = {
            name: value
            for name, value in pairs
            if (last := name.rpartition(".")[2]) not in left_out and not is_incidental(last)
        }
        name = name_of(item).decode()
        while kept and name in values:  # classes made by one function, or lambdas in one place
            name += "'"
        if kept:
            values[name] = kept
    if sum(map(len, values.values())) > _MOST_SHOWN:
        return {name: short_hex(hasher.digest(read)) for name, read in values.items()}
    return {name: {key: shown(value, hasher) for key, value in read.items()} for name, read in values.items()}


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
    """The plain module constants that functions name, and that none of them writes to."""
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
    """A function's defaults and closed-over values, except objects that may change."""
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
    names = {
        str(step.argval)
        for step in dis.get_instructions(code)
        if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
    }
    return names.union(*map(_written, inner))
