"""Digests of values, callables and objects: equal for equal values, in every process and on every machine.

Objects are inspected without running their code: no ``repr`` of an unknown object (it may hold an address),
no attribute that computes, no import. An object that cannot be inspected counts with its type alone; its
content is left to the batches that are evaluated again before a run continues.
"""

from __future__ import annotations

import datetime
import enum
import functools
import io
import logging
import operator
import random
import re
import subprocess
import sys
import threading
import uuid
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from multiprocessing.process import BaseProcess
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    CodeType,
    FunctionType,
    GeneratorType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualeval.engine.identity.plain import (
    IGNORES,
    attributes_of,
    ignored_by,
    is_incidental,
    module_name,
    name_of,
    plain_digest,
    sha256_of,
    tensor_digest,
)
from dualeval.engine.identity.source import definition, has_source, is_own, names_in
from dualeval.errors import DualevalError, UsageError

# The closure has the wrapped function. Torch adds the function that is not compiled, and an address.
_NOT_OF_A_FUNCTION = {"__wrapped__", "__dynamo_disable", "_torchdynamo_wrapper_id"}
# Names in a class that its functions do not read, or that Python generates.
_NOT_OF_A_BODY = {
    *("__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__", "__slots__"),
    *("__firstlineno__", "__static_attributes__", "__annotate__", "__annotate_func__", "__parameters__"),
    *("__annotations_cache__", "__abstractmethods__", "_abc_impl", "__classcell__"),
}
BY_TYPE_ALONE = (
    *(torch.Generator, np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random),
    *(logging.Logger, threading.Thread, io.IOBase, weakref.WeakKeyDictionary, weakref.WeakValueDictionary),
    *(weakref.WeakSet, GeneratorType, subprocess.Popen, BaseProcess),
    # In a model, these say when it was made.
    *(datetime.date, uuid.UUID),
)
_WITH_SAFE_REPR = (
    *(datetime.time, datetime.timedelta, datetime.timezone, Decimal, Fraction, range),
    *(complex, torch.dtype, torch.layout, torch.memory_format, torch.qscheme, np.dtype),
)
# Methods of classes that are not Python's own code, such as torch.Tensor.relu.
_DESCRIPTORS = (
    *(MethodDescriptorType, ClassMethodDescriptorType, WrapperDescriptorType),
    *(GetSetDescriptorType, MemberDescriptorType),
)
_WRAPPERS = (staticmethod, classmethod, functools._lru_cache_wrapper)
_OPERATORS = (operator.attrgetter, operator.itemgetter, operator.methodcaller)


class Hasher:
    """Makes digests of values; values that belong together share one, which hashes each object once."""

    def __init__(self, known: Mapping[str, Any] | None = None) -> None:
        # The modules of all classes and functions that were met.
        self.met = set[str]()
        # By id; weakly, so that a model that is being divided can free its parameters.
        self._known = {
            id(value): (weakref.ref(value), name) for name, value in reversed([*(known or {}).items()])
        }
        # Keeps the objects, so that no other object gets their ids.
        self._done: dict[int, tuple[Any, bytes]] = {}
        # The nesting depth of each object that is being hashed.
        self._depths: dict[int, int] = {}

    def digest(self, value: Any) -> bytes:
        """sha256 of a value, 32 bytes."""
        if type(value) is int and (name := self._name_of(value)) is not None:
            return sha256_of("id", name)
        if (plain := plain_digest(value)) is not None:
            return plain
        number = id(value)
        if (name := self._name_of(number)) is not None:
            return sha256_of("known", name)
        if number in self._depths:
            # A cycle: the object counts as the number of levels up to it.
            return sha256_of("above", str(len(self._depths) - self._depths[number]).encode())
        if number not in self._done:
            self._depths[number] = len(self._depths)
            try:
                self._done[number] = value, self._made_of(value)
            except RecursionError:
                if self._depths[number]:
                    raise
                raise UsageError(
                    f"a {type(value).__name__} is nested too deeply to be identified (a list in a list, an "
                    f"object in an object). Keep them flat, or name the attribute in {IGNORES} of the class "
                    "that has it."
                ) from None
            finally:
                del self._depths[number]
        return self._done[number][1]

    def _name_of(self, number: int) -> bytes | None:
        """The name under which the object with this id is known."""
        reference, name = self._known.get(number, (None, ""))
        return None if reference is None or reference() is None else name.encode()

    def _made_of(self, value: Any) -> bytes:
        try:
            return self.special(value) or self._by_type(value)
        except (DualevalError, MemoryError, RecursionError):
            raise
        except Exception:
            if issubclass(type(value), Tensor):
                raise
            # The object cannot be inspected.
            return sha256_of("type", name_of(type(value)))

    def special(self, value: Any) -> bytes | None:
        """For subclasses: the digest of a value that has a rule of its own; None for any other."""
        return None

    def combined(self, kind: str, values: Iterable[Any]) -> bytes:
        """The digest of several values in their order."""
        return sha256_of(kind, *map(self.digest, values))

    def _by_type(self, value: Any) -> bytes:
        # Never isinstance: that asks an object for its __class__.
        kind = type(value)
        for kinds, rule in self._rules:
            if issubclass(kind, kinds):
                exact = kind in _EXACT or issubclass(kind, type)
                content = rule(self, value)
                return content if exact else self._with_attributes(value, content)
        if issubclass(kind, BY_TYPE_ALONE):
            return sha256_of("type", name_of(kind))
        return self._with_attributes(value, b"")

    # -- what holds other values -----------------------------------------------------------------------

    # The iterators are Python's own: that of a derived class may raise, or never end.

    def _sequence(self, value: Any) -> bytes:
        base = next(kind for kind in (tuple, list, deque) if issubclass(type(value), kind))
        return self.combined(type(value).__name__, base.__iter__(value))

    def _set(self, value: Any) -> bytes:
        base: Any = set if issubclass(type(value), set) else frozenset
        return sha256_of("set", *sorted(map(self.digest, base.__iter__(value))))

    def _mapping(self, value: Any) -> bytes:
        base: Any = next(
            kind for kind in (OrderedDict, dict, MappingProxyType) if issubclass(type(value), kind)
        )
        items = [
            sha256_of("item", self._key(key, item), self.digest(item)) for key, item in base.items(value)
        ]
        # The order of a plain dict may come from a set, whose order differs between processes.
        return sha256_of("mapping", *(items if base is OrderedDict else sorted(items)))

    def _key(self, key: Any, item: Any) -> bytes:
        return sha256_of("own id") if type(key) is int and key == id(item) else self.digest(key)

    def _array(self, value: np.ndarray[Any, Any] | np.generic) -> bytes:
        value = np.asarray(value)
        if value.dtype.hasobject:
            return self.combined("objects", [value.shape, *value.reshape(-1).tolist()])
        header = f"{value.dtype.descr if value.dtype.names else value.dtype.str} {value.shape}"
        # From memory, without a copy: a data set may be an array.
        values = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        return sha256_of("array", header.encode(), values.data)

    def _tensor(self, value: Tensor) -> bytes:
        return sha256_of("tensor", tensor_digest("that is an attribute", value, self.digest))

    def _with_attributes(self, value: Any, content: bytes) -> bytes:
        """The digest of an object: its class, its content and its attributes."""
        attributes = attributes_of(value)
        return sha256_of("object", self.digest(type(value)), content, self.attributes(attributes))

    def attributes(self, attributes: Mapping[str, Any]) -> bytes:
        """The digest of attributes by name, in any order."""
        named = sorted(name for name in attributes if not is_incidental(name))
        return sha256_of(
            "attributes", *(part for name in named for part in (name.encode(), self.digest(attributes[name])))
        )

    # -- callables and classes -------------------------------------------------------------------------

    def _function(self, value: FunctionType) -> bytes:
        self.meet(value)
        extra = {name: item for name, item in vars(value).items() if name not in _NOT_OF_A_FUNCTION}
        parts = [
            value.__defaults__,
            value.__kwdefaults__,
            extra,
            [_cell_content(cell) for cell in value.__closure__ or ()],
        ]
        if not has_source(value):
            # The globals that it names are in no file either.
            names = sorted(names_in(value.__code__) & value.__globals__.keys())
            parts.append({name: value.__globals__[name] for name in names})
        text = definition(value)
        return sha256_of("function", name_of(value), self.digest(text), *map(self.digest, parts))

    def meet(self, item: type | FunctionType) -> None:
        """Note the module of a class or function."""
        self.met.add(item.__module__ or "builtins")

    def _code(self, value: CodeType) -> bytes:
        counts = (value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags)
        exceptions = getattr(value, "co_exceptiontable", b"")  # Python 3.10 has none
        return self.combined("code", [value.co_code, exceptions, counts, value.co_names, value.co_consts])

    def _builtin(self, value: BuiltinFunctionType) -> bytes:
        owner = value.__self__
        return sha256_of(
            "builtin", name_of(value), b"" if isinstance(owner, ModuleType) else self.digest(owner)
        )

    def _class(self, value: type) -> bytes:
        kinds = value.__mro__
        for kind in kinds:
            self.meet(kind)
        bodies = [self.body(kind) for kind in kinds if not has_source(kind)]
        put_in = [function for kind in kinds for function in _put_into(kind)]
        return sha256_of("class", name_of(value), *bodies, *map(self.digest, put_in))

    def _module(self, value: ModuleType) -> bytes:
        self.met.add(value.__name__)
        return sha256_of("module", module_name(value.__name__).encode())

    def body(self, kind: type) -> bytes:
        """The digest of a class's own definition: its functions' code, and its values."""
        left_out = {*_NOT_OF_A_BODY, *ignored_by(kind)}
        body = {name: value for name, value in vars(kind).items() if name not in left_out}
        return sha256_of("body", name_of(kind), self.attributes(body))

    def _script_object(self, value: Any) -> bytes:
        try:
            state = value.__getstate__()
        except RuntimeError:  # a class of C++ that does not give its state
            return sha256_of("type", name_of(type(value)))
        return sha256_of("script object", self.digest(state))

    # The rule of each type; the first match counts.
    _rules: tuple[tuple[Any, Callable[[Any, Any], bytes]], ...] = (
        (Tensor, _tensor),
        (enum.Enum, lambda self, value: self.combined("enum", [type(value), value.name, value.value])),
        ((tuple, list, deque), _sequence),
        ((set, frozenset), _set),
        ((dict, MappingProxyType), _mapping),
        ((np.ndarray, np.generic), _array),
        (FunctionType, _function),
        (MethodType, lambda self, value: self.combined("method", [value.__func__, value.__self__])),
        (MethodWrapperType, lambda self, value: self.combined("slot", [value.__name__, value.__self__])),
        (
            _DESCRIPTORS,
            lambda self, value: sha256_of("slot", name_of(value.__objclass__), value.__name__.encode()),
        ),
        (BuiltinFunctionType, _builtin),
        (
            functools.partial,
            lambda self, value: self.combined("partial", [value.func, value.args, value.keywords]),
        ),
        (CodeType, _code),
        (type, _class),
        (ModuleType, _module),
        (property, lambda self, value: self.combined("property", [value.fget, value.fset])),
        (_WRAPPERS, lambda self, value: sha256_of("wrapped", self.digest(value.__wrapped__))),
        (_OPERATORS, lambda self, value: self.combined("operator", value.__reduce__()[1])),
        (slice, lambda self, value: self.combined("slice", [value.start, value.stop, value.step])),
        (re.Pattern, lambda self, value: self.combined("pattern", [value.pattern, value.flags])),
        (weakref.ref, lambda self, value: sha256_of("reference", self.digest(weakref.ref.__call__(value)))),
        (io.BytesIO, lambda self, value: self.digest(io.BytesIO.getvalue(value))),
        (np.ufunc, lambda self, value: sha256_of("ufunc", value.__name__.encode())),
        (torch.jit.ScriptFunction, lambda self, value: script_code(self, value)),
        (torch.ScriptObject, _script_object),
        (torch._ops.OpOverload, lambda self, value: sha256_of("operation", value.name().encode())),
        (
            torch._ops.OpOverloadPacket,
            lambda self, value: sha256_of("operation", value._qualified_op_name.encode()),
        ),
        (_WITH_SAFE_REPR, lambda self, value: sha256_of("repr", repr(value).encode())),
    )


# The content of these types says all; for a derived class, the class and its attributes count, too.
_EXACT = {
    *(tuple, list, deque, set, frozenset, dict, OrderedDict, MappingProxyType, np.ndarray, torch.Size, slice),
    *(Tensor, torch.nn.Parameter, torch.nn.Buffer, FunctionType, MethodType, BuiltinFunctionType, CodeType),
    *(type, ModuleType, property, functools.partial),
    *(re.Pattern, weakref.ref, io.BytesIO, np.ufunc, torch.jit.ScriptFunction, torch.ScriptObject),
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket, MethodWrapperType),
    *(*_WRAPPERS, *_OPERATORS, *_DESCRIPTORS, *_WITH_SAFE_REPR),
}


class SampleHasher(Hasher):
    """Digests of samples. Each text, path, date and attribute counts as it is, because it is evaluated."""

    def digest(self, value: Any) -> bytes:
        """sha256 of a value, 32 bytes."""
        if type(value) is str:
            return sha256_of("sample's text", value.encode("utf-8", "surrogatepass"))
        if issubclass(type(value), PurePath):
            return sha256_of("sample's path", value.as_posix().encode("utf-8", "surrogatepass"))
        if issubclass(type(value), (datetime.date, uuid.UUID)):
            text = str(value) if issubclass(type(value), uuid.UUID) else value.isoformat()
            return sha256_of(f"sample's {type(value).__name__}", text.encode())
        # In memory, or a file that is read when it is asked for: the same pixels, the same digest.
        if (pillow := sys.modules.get("PIL.Image")) and isinstance(value, pillow.Image):
            content = [
                value.mode,
                value.size,
                value.tobytes(),
                value.getpalette("RGBA"),
                value.getexif().tobytes(),
            ]
            return self.combined("sample's picture", content)
        return super().digest(value)

    def attributes(self, attributes: Mapping[str, Any]) -> bytes:
        """The digest of attributes by name, in any order."""
        return self.combined(
            "attributes", [sorted(attributes), *(attributes[name] for name in sorted(attributes))]
        )


def same_bits(one: Any, other: Any) -> bool:
    """Whether two samples, batches or columns have the same bits; plain tensors are not hashed for it."""
    if type(one) is Tensor is type(other) and not (one.is_quantized or other.is_quantized):
        with suppress(RuntimeError):  # of other layouts, or a view that cannot be read as bytes
            if one.dtype != other.dtype or one.shape != other.shape:
                return False
            flat, other_flat = one.detach().contiguous().flatten(), other.detach().contiguous().flatten()
            return torch.equal(flat.view(torch.uint8), other_flat.view(torch.uint8))
    return SampleHasher().digest(one) == SampleHasher().digest(other)


def script_code(hasher: Hasher, method: Any) -> bytes:
    """The digest of a compiled function's text, and of the constants that it names."""
    text, constants = method.code_with_constants
    # Mangled names are numbered by how much this process has compiled before.
    plain = re.sub(r"___torch_mangle_\d+\.?", "", text)
    named = constants if isinstance(constants, dict) else constants.const_mapping
    return hasher.combined("script", [plain, named])


def _cell_content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _put_into(kind: type) -> list[FunctionType]:
    """The user's functions that were put into a class later: its source does not define them."""
    functions = [(name, value) for name, value in sorted(vars(kind).items()) if type(value) is FunctionType]
    put_in = [value for name, value in functions if value.__qualname__ != f"{kind.__qualname__}.{name}"]
    return [
        value for value in put_in if "<" not in value.__qualname__ and is_own(value) and has_source(value)
    ]
