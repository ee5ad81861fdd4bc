"""The state of models and random generators, to put them back as they were."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dualeval.engine.device.accelerator import random_states, set_random_states
from dualeval.engine.device.divided import is_unit, reshard
from dualeval.engine.model.kept import Kept, is_config, put_back, version_of
from dualeval.errors import UsageError

# The first forward of a sharded model adds these, once: FSDP needs them afterwards, too.
_OF_STATE_DICTS = (
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
# What torch keeps in every module; and of that the dicts of parts, tensors and hooks.
_OF_MODULES = vars(nn.Module())
_DICTS = [name for name, value in _OF_MODULES.items() if isinstance(value, dict)]


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
                for name, value in self._modules[id(module)].attributes.items():
                    if name not in _OF_MODULES and id(value) not in self._configs and is_config(value):
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

    def put_back(self) -> None:
        """Put every model back as it was when it was remembered."""
        reshard(module.module for module in self._modules.values())
        # A first forward that wrote into parameters may have noted this in an attribute, which must stay.
        written = self._written()
        held = [module.dicts.get("_parameters", {}).values() for module in self._modules.values()]
        for module in self._modules.values() if written.isdisjoint(map(id, chain(*held))) else ():
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
        changed, written = list[str](), self._written()
        for kept in self._modules.values():
            now, kind = vars(kept.module), type(kept.module).__name__
            dicts = [now, *map(now.__getitem__, kept.dicts)], [kept.attributes, *kept.dicts.values()]
            for held, before in filter(any, zip(*dicts, strict=True)):  # most are empty
                names = [
                    name for name in {**before, **held} if held.get(name, self) is not before.get(name, self)
                ]
                names += [
                    name for name, value in before.items() if id(value) in written and name not in names
                ]
                changed += [f"{kind}.{name}" for name in names]
        return [*changed, *chain(*[config.changes() for config in self._configs.values()])]

    def _written(self) -> set[int]:
        """The ids of the tensors that were written into; no other object has one of these, as they live."""
        return {key for key, tensor in self._tensors.items() if tensor.is_changed}

    def check(self) -> None:
        """Check that no parameter was written into: their values are not copied."""
        written = self._written()
        for module in self._modules.values():
            # The parameters as noted: others may have replaced them for the evaluation.
            for name, parameter in module.dicts.get("_parameters", {}).items():
                if id(parameter) in written:
                    raise UsageError(
                        f"the evaluation has changed the parameter {name!r} of a "
                        f"{type(module.module).__name__} in place, and its earlier values are not kept: let "
                        "the task's build_model and forward leave the parameters alone, or give build_model "
                        "a copy of the model to return."
                    )


@dataclass(frozen=True)
class _Module:
    module: nn.Module
    attributes: dict[str, Any]
    dicts: Mapping[str, dict[Any, Any]]

    @classmethod
    def of(cls, module: nn.Module) -> _Module:
        if isinstance(module, torch.jit.ScriptModule):
            return cls(module, {}, {})  # a program, whose attributes are not Python's
        attributes, left = vars(module), _OF_STATE_DICTS if is_unit(module) else ()
        names = [name for name in _DICTS if name in attributes and name not in left]
        return cls(module, dict(attributes), {name: dict(attributes[name]) for name in names})

    def put_back(self) -> None:
        # Not by setattr or train(): the model may override both.
        attributes = vars(self.module)
        if self.attributes:
            put_back(attributes, self.attributes)
        for name, before in self.dicts.items():
            if before or attributes[name]:
                put_back(attributes[name], before)


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
