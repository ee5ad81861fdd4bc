"""An evaluation inside a caller's script, whose state is afterwards what it was before.

A training loop continues after an evaluation bit for bit as without it. Therefore the model's modes, hooks,
tensors and gradients, the states of all random generators and torch's settings are put back, also after an
error. If a batch is only tried, so is what tasks, metrics and their functions keep between batches.
"""

from __future__ import annotations

import inspect
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dualeval.backends.base import Backend
from dualeval.engine.accelerator import random_states, set_random_states
from dualeval.engine.control.plane import ControlPlane
from dualeval.engine.identity.hasher import Hasher
from dualeval.engine.identity.source import is_own
from dualeval.engine.nests import held_by
from dualeval.engine.run_state import Run
from dualeval.engine.sharding.fsdp import is_unit, reshard
from dualeval.errors import UsageError
from dualeval.result import sha256_of_json
from dualeval.tasks import Task

# The first forward of a sharded model adds these, once: FSDP needs them afterwards, too.
_OF_STATE_DICTS = (
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
# A module's dicts of parts, tensors and hooks.
_DICTS = [name for name, value in vars(nn.Module()).items() if isinstance(value, dict)]
# Levels that are searched for models: attributes and names, what these hold, and what that holds.
_LEVELS = 3
_LOOKED_AT_EACH = 256
OF_TASK = ("collate", "forward", "observe", "postprocess")
OF_METRIC = ("update", "compute")

_PLAIN = (bool, int, float, complex, str, bytes)
_LISTS = (list, set, deque)
_NO_CONFIGS = (nn.Module, Tensor, type, ModuleType, FunctionType)
_VALUES = (*_PLAIN, *_LISTS, type(None), tuple, dict, frozenset, torch.dtype, torch.device)
# Most bytes of an array that is compared by content; most attributes of an object.
_CONTENT, _MOST_ATTRIBUTES = 1 << 16, 1 << 10


class Snapshot:
    """The state of models, to put them back as they were."""

    def __init__(self, largest: float = math.inf) -> None:
        self._left = largest
        # Several modules may share a config.
        self._configs: dict[int, Kept] = {}
        self._modules: dict[int, _Module] = {}
        self._tensors: dict[int, _Tensor] = {}
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []

    def remember(self, model: nn.Module) -> None:
        """Note the state of a model, unless it is known; a sharded model's parameters are divided first."""
        reshard(model.modules())
        for module in model.modules():
            if id(module) not in self._modules:
                self._modules[id(module)] = _Module.of(module)
                for parameter in module._parameters.values():
                    self._note(parameter, keeps_values=False)
                self._note_buffers(module)
                for value in self._modules[id(module)].attributes.values():
                    if id(value) not in self._configs and is_config(value):
                        self._configs[id(value)] = Kept(value, ())

    def knows(self, model: nn.Module) -> bool:
        """Whether a part of a model belongs to one that is remembered."""
        return any(id(module) in self._modules for module in model.modules())

    def remember_buffers(self, model: nn.Module) -> None:
        """Note only a model's buffers and their values."""
        for module in model.modules():
            self._note_buffers(module)

    def _note_buffers(self, module: nn.Module) -> None:
        for name, buffer in module._buffers.items():
            if buffer is not None and not is_lazy(buffer):
                if not isinstance(module, torch.jit.ScriptModule):
                    self._buffers.append((module, name, buffer))
                size = buffer.numel() * buffer.element_size()
                self._note(buffer, keeps_values=size <= self._left)
                self._left -= size if size <= self._left else 0

    def _note(self, tensor: Tensor | None, *, keeps_values: bool) -> None:
        if tensor is not None and not is_lazy(tensor) and id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = _Tensor.of(tensor, keeps_values=keeps_values)

    def take(self, model: nn.Module) -> nn.Module:
        """The model to evaluate, without its wrappers for training on several processes."""
        self.remember(model)
        model = unwrapped(model)
        # A compiled program is wrapped as a whole, and its parts cannot be exchanged.
        for module in [] if isinstance(model, torch.jit.ScriptModule) else list(model.modules()):
            module._modules.update(
                {name: unwrapped(part) for name, part in module._modules.items() if part is not None}
            )
        return model

    def share_buffers(self, model: nn.Module, backend: Backend, control: ControlPlane) -> list[str]:
        """Give every rank rank 0's buffers, until ``put_back``; a collective.

        In training, each rank's batch norms see only that rank's samples. ``DistributedDataParallel`` sends
        rank 0's buffers to all ranks before its next forward, and a checkpoint has them.

        New tensors replace the model's own buffers. If these were written into, a backward whose forward came
        before would fail.
        """
        if backend.world.size == 1:
            return []
        buffers = dict(model.named_buffers())
        kinds = [[name, str(buffer.dtype), list(buffer.shape)] for name, buffer in buffers.items()]
        digest = Hasher().digest(list(buffers.values())).hex()
        control.meet()
        everyone = backend.all_gather_json([sha256_of_json(kinds), digest])
        # Models of different structure are refused later, with what differs.
        if any(own[0] != everyone[0][0] for own in everyone) or all(own == everyone[0] for own in everyone):
            return []
        rank_0s = {}
        for buffer in buffers.values():
            values = backend.broadcast(buffer.detach().cpu().contiguous(), src=0)
            rank_0s[id(buffer)] = torch.empty_like(buffer.detach()).copy_(values)
        for module in model.modules():
            for name, own in list(module._buffers.items()):
                if own is not None:
                    module._buffers[name] = rank_0s[id(own)]
        return [
            "the ranks have different buffers (running statistics of batch norms, for instance): rank 0's "
            "are evaluated, and every rank gets its own back afterwards"
        ]

    def put_back(self) -> None:
        """Put every model back as it was when it was remembered."""
        reshard(module.module for module in self._modules.values())
        # A first forward that wrote into parameters may have noted this in an attribute, which must stay.
        held = [
            each for module in self._modules.values() for each in module.dicts.get("_parameters", {}).values()
        ]
        for module in self._modules.values() if not any(map(self._is_written, held)) else ():
            module.put_back()
        for config in self._configs.values():
            config.put_back()
        for owner, name, buffer in self._buffers:
            if owner._buffers.get(name) is not buffer:
                owner._buffers[name] = buffer
        for tensor in self._tensors.values():
            tensor.put_back()

    def changes(self) -> list[str]:
        """The modules' attributes that were replaced, and the tensors that were written into."""
        found = []
        for kept in self._modules.values():
            now, kind = vars(kept.module), type(kept.module).__name__
            for held, before in [
                (now, kept.attributes),
                *((now[name], kept.dicts[name]) for name in kept.dicts),
            ]:
                names = [
                    name for name in {**before, **held} if held.get(name, self) is not before.get(name, self)
                ]
                names += [
                    name for name, value in before.items() if self._is_written(value) and name not in names
                ]
                found += [f"{kind}.{name}" for name in names]
        return [*found, *(place for config in self._configs.values() for place in config.changes())]

    def _is_written(self, value: Any) -> bool:
        return (
            isinstance(value, Tensor) and id(value) in self._tensors and self._tensors[id(value)].is_changed
        )

    def check(self) -> None:
        """Check that no parameter was written into: their values are not copied."""
        for module in self._modules.values():
            # The parameters as noted: others may have replaced them for the evaluation.
            for name, parameter in module.dicts.get("_parameters", {}).items():
                if self._is_written(parameter):
                    raise UsageError(
                        f"the evaluation has changed the parameter {name!r} of a "
                        f"{type(module.module).__name__} in place, and its earlier values are not kept: let "
                        "the task's build_model and forward leave the parameters alone, or give build_model "
                        "a copy of the model to return."
                    )


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of DistributedDataParallel and DataParallel.

    Even in evaluation mode, the wrapper would broadcast the buffers before each forward.
    """
    while isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        model = model.module
    return model


@dataclass(frozen=True)
class _Module:
    module: nn.Module
    attributes: dict[str, Any]
    dicts: Mapping[str, dict[Any, Any]]

    @classmethod
    def of(cls, module: nn.Module) -> _Module:
        if isinstance(module, torch.jit.ScriptModule):
            return cls(module, {}, {})  # a program, whose attributes are not Python's
        own = vars(module)
        names = [name for name in _DICTS if name in own and not (is_unit(module) and name in _OF_STATE_DICTS)]
        return cls(module, dict(own), {name: dict(own[name]) for name in names})

    def put_back(self) -> None:
        # Not by setattr or train(): the model may override both.
        own = vars(self.module)
        if self.attributes:
            put_back(own, self.attributes)
        for name, before in self.dicts.items():
            put_back(own[name], before)


def put_back(now: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Restore a dict's entries and their order."""
    if list(now) != list(before) or any(now[key] is not before[key] for key in before):
        now.clear()
        now.update(before)


@dataclass(frozen=True)
class _Tensor:
    tensor: Tensor
    data: Tensor
    requires_grad: bool
    grad: Tensor | None
    version: int
    values: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor, *, keeps_values: bool) -> _Tensor:
        # Elements of an expanded tensor share memory: torch refuses to write into it as a whole.
        is_expanded = tensor.layout is torch.strided and 0 in tensor.stride()
        values = tensor.detach().clone() if keeps_values and not is_expanded else None
        grad = tensor.grad if tensor.is_leaf else None
        return cls(tensor, tensor.data, tensor.requires_grad, grad, version_of(tensor), values)

    @property
    def is_changed(self) -> bool:
        """Whether the tensor was written into since."""
        return version_of(self.tensor) != self.version

    def put_back(self) -> None:
        tensor, data = self.tensor, self.data
        if (tensor.device, tensor.dtype, tensor.shape) != (data.device, data.dtype, data.shape):
            # Moved or cast in place: its former memory is still there.
            tensor.data = data
        if self.values is not None and not tensor.is_inference():
            # Batch norms write into buffers without raising the version. Neither does this, as data has its
            # own: a backward whose forward came before still works.
            data.copy_(self.values)
        if tensor.is_leaf:
            if tensor.requires_grad != self.requires_grad:
                tensor.requires_grad_(self.requires_grad)
            if tensor.grad is not self.grad:
                tensor.grad = self.grad


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written in place; 0 if it does not count this."""
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def as_it_was(task: Task) -> Iterator[Snapshot]:
    """Put back at the end what an evaluation of a task may change in the process and in the task's models.

    The models are those inside of the task or of what its ``build_model`` names, and the one that it returns.
    Put back are every module's attributes with its mode, its configs' attributes, its hooks and its parts;
    device, dtype, ``requires_grad`` and ``grad`` of parameters and buffers, and the values of buffers; the
    states of Python's, numpy's and torch's random generators; and grad mode. Attributes get the same objects
    back, but what was written into an object stays. ``numerics.settings`` puts back torch's other settings.
    """
    snapshot = Snapshot()
    for model in _models_of(task):
        snapshot.remember(model)
    generators = Generators()
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            yield snapshot
        snapshot.check()
    finally:
        snapshot.put_back()
        generators.put_back()


@contextmanager
def rank_0s_buffers(given: nn.Module | None, run: Run) -> Iterator[None]:
    """Until the loop ends, a caller's model computes alike on all ranks, and without collectives."""
    if given is None or not run.guest:
        yield
        return
    snapshot, model = Snapshot(), unwrapped(given)
    snapshot.remember_buffers(model)
    wrapper = given if isinstance(given, nn.parallel.DistributedDataParallel) else None
    broadcasts = wrapper is not None and wrapper.broadcast_buffers
    try:
        if wrapper is not None:
            # Ranks have different numbers of batches: one would wait for a forward that never comes.
            wrapper.broadcast_buffers = False
        run.note_all(snapshot.share_buffers(model, run.backend, run.control))
        yield
    finally:
        if wrapper is not None:
            wrapper.broadcast_buffers = broadcasts
        snapshot.put_back()


def _models_of(task: Task) -> list[nn.Module]:
    """The models that a task may return: in the task, its class, or what its ``build_model`` names.

    A trainer, for instance, has the model as an attribute. A model further down is remembered when it is
    returned.
    """
    level: list[Any] = [
        *vars(task).values(),
        *(value for kind in type(task).__mro__ for value in vars(kind).values()),
        *named_by(inspect.unwrap(task.build_model)),
    ]
    found: dict[int, nn.Module] = {}
    for _ in range(_LEVELS):
        # By type: a proxy answers isinstance for the object that it stands for.
        found |= {id(part): part for part in level if issubclass(type(part), nn.Module)}
        level = [
            value
            for part in level
            if not issubclass(type(part), nn.Module)
            for value in held_by(part, _LOOKED_AT_EACH)
        ]
    return list(found.values())


def named_by(function: Any) -> list[Any]:
    """The outside values that a function's or method's body names; empty for any other value."""
    if not inspect.isfunction(function) and not inspect.ismethod(function):
        return []
    named = inspect.getclosurevars(function)
    return [*named.nonlocals.values(), *named.globals.values()]


class Generators:
    """The states of the process's random generators, as they were when it was made."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state()
        self._devices = random_states()

    def are_others(self) -> bool:
        """Whether a generator has drawn, or was seeded, since."""
        now = [torch.get_rng_state(), *(random_states() or ())]
        drawn = not all(map(torch.equal, now, [self._torch, *(self._devices or now[1:])]))
        drawn = drawn or random.getstate() != self._python
        return drawn or repr(np.random.get_state()) != repr(self._numpy)

    def put_back(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        set_random_states(self._devices)


class Kept:
    """An object's attributes, the outside names of its functions, and what their values hold, as of now.

    Only one level is inspected. A change further down shows in the columns, if it matters. For models, see
    ``Snapshot``.
    """

    def __init__(self, owner: Any, methods: Sequence[str], model: nn.Module | None = None) -> None:
        self._owner, self._methods = owner, methods
        self._of_model = set() if model is None else {id(module) for module in model.modules()}
        self._attributes = dict(_attributes(owner))
        self._before = {place: (value, self._inside(value), bind) for place, value, bind in self._places()}

    def changes(self) -> list[str]:
        """The places of values that were replaced, or now hold other values."""
        now = {place: [value, *self._inside(value)] for place, value, _ in self._places()}
        then = {place: [value, *inside] for place, (value, inside, _) in self._before.items()}
        return [place for place in {**then, **now} if not _are_same(then.get(place), now.get(place))]

    def put_back(self) -> None:
        """Restore attributes, names and containers, but no object's own attributes: they may be related."""
        put_back(_attributes(self._owner), self._attributes)
        for value, inside, bind in self._before.values():
            bind(value)
            if issubclass(type(value), dict):
                half = len(inside) // 2
                put_back(value, dict(zip(inside[:half], inside[half:], strict=True)))
            elif type(value) in _LISTS:
                value.clear()
                (value.update if type(value) is set else value.extend)(inside)

    def _places(self) -> Iterator[tuple[str, Any, Callable[[Any], object]]]:
        """For each value: its place, the value, and a function that binds another value there."""
        owner, held = self._owner, _attributes(self._owner)
        for name, value in list(held.items()):
            yield f"{type(owner).__name__}.{name}", value, partial(held.__setitem__, name)
        methods = [getattr(owner, name) for name in self._methods]
        for function in [getattr(each, "__func__", each) for each in (*methods, *held.values())]:
            if type(function) is not FunctionType or not is_own(function):
                continue
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                with suppress(ValueError):  # an empty cell
                    bind = partial(setattr, cell, "cell_contents")
                    yield f"{name} of {function.__qualname__}", cell.cell_contents, bind
            read, module = function.__globals__, function.__module__
            for name in [each for each in function.__code__.co_names if each in read]:
                yield f"{name} of the module {module}", read[name], partial(read.__setitem__, name)

    def _inside(self, value: Any) -> list[Any]:
        return [] if id(value) in self._of_model else _inside(value)


def _attributes(owner: Any) -> dict[str, Any]:
    try:  # not by getattr: a proxy answers for the object that it stands for
        found = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}


def plain_values(model: nn.Module) -> dict[str, Any]:
    """The plain values among the attributes of a model's modules and their configs, by name."""
    found, configs = dict[str, Any](), set[int]()
    for name, module in model.named_modules():
        for attribute, value in list(vars(module).items()):
            held = {f"{name}.{attribute}".lstrip("."): value}
            if id(value) not in configs and is_config(value):
                configs.add(id(value))
                held = {f"{place}.{key}": each for place in held for key, each in _attributes(value).items()}
            for place, each in held.items():
                # Transformers keeps a length as a tensor of one number.
                is_number = type(each) is Tensor and each.ndim == 0 and not each.is_meta
                plain = each.item() if is_number else each
                if _is_plain(plain):
                    found[place] = plain
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN or isinstance(value, Enum)


def is_config(value: Any) -> bool:
    """Whether an object holds only values, as transformers' configs do: no module, tensor or handle."""
    held = {} if issubclass(type(value), _NO_CONFIGS) else _attributes(value)
    return bool(held) and all(
        type(each) in _VALUES or (bool(_attributes(each)) and not issubclass(type(each), _NO_CONFIGS))
        for each in held.values()
    )


def _inside(value: Any) -> list[Any]:
    """What a value holds: a tensor's version, an array's bytes; empty for objects of a library's class."""
    kind = type(value)
    if issubclass(kind, Tensor):
        return [version_of(value)]
    if kind is np.ndarray:
        return [value.tobytes()] if value.nbytes <= _CONTENT and not value.dtype.hasobject else []
    if issubclass(kind, dict):
        return [*dict.keys(value), *held_by(value, len(value))]
    return (
        held_by(value, len(value))
        if kind in _LISTS
        else held_by(value, _MOST_ATTRIBUTES)
        if is_own(kind)
        else []
    )


def _are_same(before: list[Any] | None, now: list[Any] | None) -> bool:
    if before is None or now is None or len(before) != len(now):
        return False
    return all(
        one is other or (type(one) is type(other) and type(one) in _PLAIN and one == other)
        for one, other in zip(before, now, strict=True)
    )
