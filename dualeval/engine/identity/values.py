"""Digests of values, callables and objects: equal for equal ones, in every process and on every machine.

What decides a number is looked at, never asked: no ``repr`` of an unknown object (it may hold an address), no
attribute that computes, no import. What cannot be looked into counts with its type alone, and is left to the
batch that is evaluated anew before a run goes on.
"""

from __future__ import annotations

import datetime
import enum
import functools
import hashlib
import io
import logging
import operator
import random
import re
import struct
import subprocess
import threading
import uuid
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from fractions import Fraction
from multiprocessing.process import BaseProcess
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    CodeType,
    EllipsisType,
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

from dualeval.engine.identity.source import has_source
from dualeval.engine.identity.tensors import tensor_digest
from dualeval.engine.identity.walk import Walk
from dualeval.engine.nests import own_attributes
from dualeval.errors import DualevalError, UsageError

# In a class or an object: the names of attributes that decide no number.
IGNORES = "dualeval_identity_ignores"

# Attributes that say where a thing was found, and not what it is.
_WHEREABOUTS = {"name_or_path"}
# And those that say which process of how many this is: a job is the same in all of them.
_PROCESS = {"rank", "global_rank", "local_rank", "node_rank", "group_rank", "world_size", "local_world_size"}
# And a hash that Python has salted, another in each process; transformers keeps one of a model's options.
_SALTED = {"original_object_hash"}
_DEVICE = re.compile(r"(cpu|cuda|xpu|mps|hpu|npu|tpu|xla)(:\d+)?")
# Of two parts or more, or after "=" or "file://"; not in an address, nor a relative one.
_PATH_INSIDE = re.compile(
    r"""(?<![\w./~)\]}*-])/(?!/)[^\s"'<>|:;,/]+/[^\s"'<>|:;,]*|(?:(?<==)|(?<=file://))/(?!/)[^\s"'<>|:;,]+"""
)
# What it wraps is in its closure. Torch keeps one that is not compiled beside it, and an address.
_NOT_OF_A_FUNCTION = {"__wrapped__", "__dynamo_disable", "_torchdynamo_wrapper_id"}
# Of a class: what its functions do not read, or Python makes of them.
_NOT_OF_A_BODY = {
    *("__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__", "__slots__"),
    *("__firstlineno__", "__static_attributes__", "__annotate__", "__annotate_func__", "__parameters__"),
    *("__annotations_cache__", "__abstractmethods__", "_abc_impl", "__classcell__"),
}
_BY_TYPE_ALONE = (
    *(torch.Generator, np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random),
    *(logging.Logger, threading.Thread, io.IOBase, weakref.WeakKeyDictionary, weakref.WeakValueDictionary),
    *(weakref.WeakSet, GeneratorType, subprocess.Popen, BaseProcess),
    # Those that a model holds say when it was made.
    *(datetime.date, uuid.UUID),
)
_WITH_SAFE_REPR = (
    *(
        datetime.time,
        datetime.timedelta,
        datetime.timezone,
        Decimal,
        Fraction,
        range,
    ),
    *(complex, torch.dtype, torch.layout, torch.memory_format, torch.qscheme, np.dtype),
)
# The plain value in one of a class that derives from a plain one's.
_DERIVED: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    *(
        (int, int.__int__),
        (float, float.__float__),
        (str, str.__str__),
        (bytes, lambda value: bytes.__add__(value, b"")),
    ),
)
# Methods of classes that are not Python's own code, such as torch.Tensor.relu.
_DESCRIPTORS = (
    *(MethodDescriptorType, ClassMethodDescriptorType, WrapperDescriptorType),
    *(GetSetDescriptorType, MemberDescriptorType),
)
_OPERATORS = (operator.attrgetter, operator.itemgetter, operator.methodcaller)


class Values:
    """Makes digests; one for everything that belongs together, as what it meets again it does once.

    Args:
        known: objects whose content is hashed elsewhere, by the name that stands for each; of several names
            of one object the first does.

    Attributes:
        modules: names of the modules of all classes and functions that were met.
    """

    def __init__(self, known: Mapping[str, Any] | None = None) -> None:
        self.modules: set[str] = set()
        # The objects are kept, here and below, so that nothing else gets their ids meanwhile.
        self._objects = dict(known or {})
        self._known = {id(value): name for name, value in reversed(self._objects.items())}
        self._done: dict[int, tuple[Any, bytes]] = {}
        self._contents: dict[int, tuple[Any, bytes]] = {}
        # While one value is made: who gives the digests of those that it holds.
        self._asked: Callable[[Any], bytes] | None = None

    def let_go(self, value: Any) -> None:
        """Keep a known object no longer for the sake of its name: it has the name while others keep it."""
        name = self._known[id(value)]
        self._objects[name] = weakref.ref(value, functools.partial(self._forget, id(value)))

    def _forget(self, number: int, _: Any) -> None:
        self._known.pop(number, None)

    def digest(self, value: Any) -> bytes:
        """sha256 of a value, 32 bytes."""
        if type(value) is int and value in self._known:
            return _hash("id", self._known[value].encode())
        plain = _plain(value)
        if plain is not None:
            return plain
        if id(value) in self._known:
            return _hash("known", self._known[id(value)].encode())
        if self._asked is not None:
            return self._asked(value)
        if id(value) not in self._done:
            found = Walk(self._done, self._make)
            found.visit(value)
        return self._done[id(value)][1]

    def _make(self, value: Any, asked: Callable[[Any], bytes]) -> bytes:
        """The digest of a value from those of the values that it holds."""
        self._asked = asked
        try:
            return self.special(value) or self._made(value)
        except (DualevalError, MemoryError):
            raise
        except Exception:
            if issubclass(type(value), Tensor):
                raise
            # An object that does not let itself be looked at.
            return _hash("type", _name(type(value)))
        finally:
            self._asked = None

    def special(self, value: Any) -> bytes | None:
        """The digest of what a subclass knows more about."""
        return None

    def all(self, kind: str, values: Iterable[Any]) -> bytes:
        """The digest of several values in their order."""
        return _hash(kind, *map(self.digest, values))

    def _made(self, value: Any) -> bytes:
        # Its type, never isinstance: that asks an object for its __class__.
        own = type(value)
        for kinds, make in self._makers:
            if issubclass(own, kinds):
                exact = own in _EXACT or issubclass(own, type)
                return (
                    make(self, value) if exact else self._with_attributes(value, self._content(value, make))
                )
        if issubclass(own, _BY_TYPE_ALONE):
            return _hash("type", _name(own))
        return self._with_attributes(value, b"")

    def _content(self, value: Any, make: Callable[[Any, Any], bytes]) -> bytes:
        """What a maker says; of a large array it is made once, also where it is part of a cycle."""
        if not issubclass(type(value), np.ndarray) or value.dtype.hasobject:
            return make(self, value)
        if id(value) not in self._contents:
            self._contents[id(value)] = (value, make(self, value))
        return self._contents[id(value)][1]

    # -- what holds other values -----------------------------------------------------------------------

    # The iterators are Python's own: one of a derived class may raise, or never end.

    def _sequence(self, value: Any) -> bytes:
        base = next(kind for kind in (tuple, list, deque) if issubclass(type(value), kind))
        return self.all(type(value).__name__, base.__iter__(value))

    def _set(self, value: Any) -> bytes:
        base: Any = set if issubclass(type(value), set) else frozenset
        return _hash("set", *sorted(map(self.digest, base.__iter__(value))))

    def _mapping(self, value: Any) -> bytes:
        base: Any = next(
            kind for kind in (OrderedDict, dict, MappingProxyType) if issubclass(type(value), kind)
        )
        items = [_hash("item", self._key(key, item), self.digest(item)) for key, item in base.items(value)]
        # The order of a plain one may come from a set's, which is another in each process.
        return _hash("mapping", *(items if base is OrderedDict else sorted(items)))

    def _key(self, key: Any, item: Any) -> bytes:
        return _hash("own id") if type(key) is int and key == id(item) else self.digest(key)

    def _array(self, value: np.ndarray[Any, Any] | np.generic) -> bytes:
        value = np.asarray(value)
        if value.dtype.hasobject:
            return self.all("objects", [value.shape, *value.reshape(-1).tolist()])
        header = f"{value.dtype.descr if value.dtype.names else value.dtype.str} {value.shape}"
        # As they lie in memory: a data set may be an array.
        values = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        return _hash("array", header.encode(), values.data)

    def _tensor(self, value: Tensor) -> bytes:
        return _hash("tensor", tensor_digest("that is an attribute", value, self.digest))

    def _with_attributes(self, value: Any, content: bytes) -> bytes:
        """The digest of a class, a content, and what stands in an object's attributes."""
        attributes = attributes_of(value)
        return _hash("object", self.digest(type(value)), content, self.attributes(attributes))

    def attributes(self, attributes: Mapping[str, Any]) -> bytes:
        """The digest of attributes by name, in any order."""
        named = sorted((name, value) for name, value in attributes.items() if not says_where(name))
        return _hash(
            "attributes", *(part for name, value in named for part in (name.encode(), self.digest(value)))
        )

    # -- callables and classes -------------------------------------------------------------------------

    def _function(self, value: FunctionType) -> bytes:
        self.modules.add(value.__module__ or "builtins")
        extra = {name: item for name, item in vars(value).items() if name not in _NOT_OF_A_FUNCTION}
        parts = [
            value.__defaults__,
            value.__kwdefaults__,
            extra,
            [_content(cell) for cell in value.__closure__ or ()],
        ]
        if not has_source(value):
            # What it looks up by name stands in no file either.
            names = sorted(_names(value.__code__) & value.__globals__.keys())
            parts.append({name: value.__globals__[name] for name in names})
        name = f"{value.__module__}.{value.__qualname__}".encode()
        return _hash("function", name, self.digest(value.__code__), *map(self.digest, parts))

    def _code(self, value: CodeType) -> bytes:
        counts = (value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags)
        exceptions = getattr(value, "co_exceptiontable", b"")  # Python 3.10 has none
        return self.all("code", [value.co_code, exceptions, counts, value.co_names, value.co_consts])

    def _builtin(self, value: BuiltinFunctionType) -> bytes:
        owner = value.__self__
        name = f"{value.__module__}.{value.__qualname__}".encode()
        return _hash("builtin", name, b"" if isinstance(owner, ModuleType) else self.digest(owner))

    def _method(self, value: MethodType) -> bytes:
        return self.all("method", [value.__func__, value.__self__])

    def _partial(self, value: functools.partial[Any]) -> bytes:
        return self.all("partial", [value.func, value.args, value.keywords])

    def _class(self, value: type) -> bytes:
        kinds = value.__mro__
        self.modules |= {kind.__module__ for kind in kinds}
        bodies = [self.body(kind) for kind in kinds if not has_source(kind)]
        return _hash("class", _name(value), *bodies)

    def body(self, kind: type) -> bytes:
        """The digest of what a class defines: its functions' code, and its values."""
        left_out = {*_NOT_OF_A_BODY, *ignored(kind)}
        body = {name: value for name, value in vars(kind).items() if name not in left_out}
        return _hash("body", _name(kind), self.attributes(body))

    def _property(self, value: property) -> bytes:
        return self.all("property", [value.fget, value.fset])

    def _wrapped(self, value: Any) -> bytes:
        return _hash("wrapped", self.digest(value.__wrapped__))

    def _script_object(self, value: Any) -> bytes:
        try:
            state = value.__getstate__()
        except RuntimeError:  # a class of C++ that says nothing of what it holds
            return _hash("type", _name(type(value)))
        return _hash("script object", self.digest(state))

    # The first that fits.
    _makers: tuple[tuple[Any, Callable[[Any, Any], bytes]], ...] = (
        (Tensor, _tensor),
        (enum.Enum, lambda self, value: self.all("enum", [type(value), value.name, value.value])),
        ((tuple, list, deque), _sequence),
        ((set, frozenset), _set),
        ((dict, MappingProxyType), _mapping),
        ((np.ndarray, np.generic), _array),
        (FunctionType, _function),
        (MethodType, _method),
        (MethodWrapperType, lambda self, value: self.all("slot", [value.__name__, value.__self__])),
        (_DESCRIPTORS, lambda self, value: _hash("slot", _name(value.__objclass__), value.__name__.encode())),
        (BuiltinFunctionType, _builtin),
        (functools.partial, _partial),
        (CodeType, _code),
        (type, _class),
        (ModuleType, lambda self, value: _hash("module", value.__name__.encode())),
        (property, _property),
        ((staticmethod, classmethod, functools._lru_cache_wrapper), _wrapped),
        (_OPERATORS, lambda self, value: self.all("operator", value.__reduce__()[1])),
        (slice, lambda self, value: self.all("slice", [value.start, value.stop, value.step])),
        (re.Pattern, lambda self, value: self.all("pattern", [value.pattern, value.flags])),
        (weakref.ref, lambda self, value: _hash("reference", self.digest(weakref.ref.__call__(value)))),
        (io.BytesIO, lambda self, value: self.digest(io.BytesIO.getvalue(value))),
        (np.ufunc, lambda self, value: _hash("ufunc", value.__name__.encode())),
        (torch.jit.ScriptFunction, lambda self, value: script_code(self, value)),
        (torch.ScriptObject, _script_object),
        (torch._ops.OpOverload, lambda self, value: _hash("operation", value.name().encode())),
        (
            torch._ops.OpOverloadPacket,
            lambda self, value: _hash("operation", value._qualified_op_name.encode()),
        ),
        (_WITH_SAFE_REPR, lambda self, value: _hash("repr", repr(value).encode())),
    )


# Of these all is said by their content; of a class that derives from them, class and attributes count, too.
_EXACT = {
    *(tuple, list, deque, set, frozenset, dict, OrderedDict, MappingProxyType, np.ndarray, torch.Size, slice),
    *(Tensor, torch.nn.Parameter, torch.nn.Buffer, FunctionType, MethodType, BuiltinFunctionType, CodeType),
    *(type, ModuleType, property, staticmethod, classmethod, functools._lru_cache_wrapper, functools.partial),
    *(
        *_OPERATORS,
        re.Pattern,
        weakref.ref,
        io.BytesIO,
        np.ufunc,
        torch.jit.ScriptFunction,
        torch.ScriptObject,
    ),
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket, MethodWrapperType, *_DESCRIPTORS, *_WITH_SAFE_REPR),
}


class Contents(Values):
    """Digests of samples: each text, path, date and attribute counts as it is: it is what is evaluated."""

    def digest(self, value: Any) -> bytes:
        """sha256 of a value, 32 bytes."""
        if type(value) is str:
            return _hash("sample's text", value.encode("utf-8", "surrogatepass"))
        if issubclass(type(value), PurePath):
            return _hash("sample's path", value.as_posix().encode("utf-8", "surrogatepass"))
        if issubclass(type(value), (datetime.date, uuid.UUID)):
            said = str(value) if issubclass(type(value), uuid.UUID) else value.isoformat()
            return _hash(f"sample's {type(value).__name__}", said.encode())
        return super().digest(value)

    def attributes(self, attributes: Mapping[str, Any]) -> bytes:
        """The digest of attributes by name, in any order."""
        return self.all(
            "attributes", [sorted(attributes), *(attributes[name] for name in sorted(attributes))]
        )


def script_code(values: Values, method: Any) -> bytes:
    """The digest of a compiled function's text, and of the constants that it names."""
    text, constants = method.code_with_constants
    # Numbered by how much this process has compiled before.
    plain = re.sub(r"___torch_mangle_\d+\.?", "", text)
    named = constants if isinstance(constants, dict) else constants.const_mapping
    return values.all("script", [plain, named])


def says_where(name: str) -> bool:
    """Whether a value of that name says where something lies or runs, and not what it is.

    A salted hash says in which process it was made.
    """
    return name.strip("_").lower() in _WHEREABOUTS | _PROCESS | _SALTED


def attributes_of(value: Any) -> dict[str, Any]:
    """What stands in an object's ``__dict__`` and slots, less what it ignores; no attribute that computes."""
    found = own_attributes(value)
    left_out = {IGNORES, *ignored(type(value)), *_names_in(found.get(IGNORES, ()), type(value))}
    return {name: item for name, item in found.items() if name not in left_out}


def ignored(kind: type) -> set[str]:
    """The attributes that a class, and what it derives from, leaves out of the identity."""
    bodies = [type.__dict__["__dict__"].__get__(base) for base in type.__dict__["__mro__"].__get__(kind)]
    named = {name for body in bodies for name in _names_in(body.get(IGNORES, ()), kind)}
    return {IGNORES, *named}


def _names_in(names: Any, kind: type) -> set[str]:
    if type(names) is str:
        return {names}
    if type(names) in (tuple, list, set, frozenset) and all(type(name) is str for name in names):
        return set(names)
    # A slot or property of that name says it for each object, where it is found.
    if type(names) is MemberDescriptorType:
        return set()
    raise UsageError(
        f"{IGNORES} of {kind.__module__}.{kind.__qualname__} is of type {type(names).__name__}; expected a "
        f'tuple of attribute names, such as {IGNORES} = ("started_at",)'
    )


def _hash(kind: str, *parts: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(kind.encode())
    for part in parts:
        # With its length: parts must not run into each other.
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()


def _plain(value: Any) -> bytes | None:
    """The digest of a value that holds no other; None for any other."""
    kind = type(value)
    if value is None or kind in (bool, EllipsisType, type(NotImplemented)):
        return _hash("constant", str(value).encode())
    if kind is int:
        return _hash("int", str(value).encode() if -(2**63) < value < 2**63 else hex(value).encode())
    if kind is float:
        return _hash("float", struct.pack(">d", value))
    if kind is str:
        return _text(value)
    if kind in (bytes, bytearray):
        return _hash("bytes", bytes(value))
    # Which of them it is says the machine, not the job.
    if kind is torch.device:
        return _hash("device")
    if issubclass(kind, PurePath):
        return _hash("path", b"" if value.is_absolute() else value.as_posix().encode())
    if issubclass(kind, enum.Enum):
        return None
    # A class derived from one: its value counts, and its name.
    for base, content in _DERIVED:
        if issubclass(kind, base):
            plain = _plain(content(value))
            return None if plain is None else _hash("derived", _name(kind), plain)
    return None


def is_device(value: str) -> bool:
    """Whether a text names a device."""
    return _DEVICE.fullmatch(value) is not None


def has_path(value: str) -> bool:
    """Whether a text is an absolute path, or holds one."""
    return (value.startswith("/") and len(value) > 1) or _PATH_INSIDE.search(value) is not None


def _text(value: str) -> bytes:
    if is_device(value):
        return _hash("device")
    # Where a file lies decides nothing: a folder may be moved.
    if value.startswith("/") and len(value) > 1:
        return _hash("path", b"")
    return _hash("text", _PATH_INSIDE.sub("/", value).encode("utf-8", "surrogatepass"))


def _name(kind: type) -> bytes:
    return f"{kind.__module__}.{kind.__qualname__}".encode()


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _names(code: CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names, inner))
