"""The state of models and random generators, to put them back as they were."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dualeval.engine.device.accelerator import random_states, set_random_states
from dualeval.engine.device.divided import reshard, units_in
from dualeval.engine.model.kept import VALUES, Kept, is_config, put_back
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
        units, parameters = units_in(model.modules()), list[Tensor | None]()
        reshard(units.values())
        new = [module for module in model.modules() if id(module) not in self._modules]
        for module in new:
            parameters += module._parameters.values()
            attributes, dicts = dict[str, Any](), dict[str, dict[Any, Any]]()
            # A program's attributes are not Python's.
            for name, value in () if isinstance(module, torch.jit.ScriptModule) else vars(module).items():
                attributes[name] = value
                if name in _DICTS and not (name in _OF_STATE_DICTS and id(module) in units):
                    dicts[name] = dict(value)
                elif name in _OF_MODULES or type(value) in VALUES or id(value) in self._configs:
                    continue
                elif is_config(value):
                    self._configs[id(value)] = Kept(value, ())
            self._modules[id(module)] = _Module(module, attributes, dicts)
        self._note(parameters)
        self.remember_buffers(new)

    def knows(self, model: nn.Module) -> bool:
        """Whether a part of a model belongs to one that is remembered."""
        return any(id(module) in self._modules for module in model.modules())

    def remember_buffers(self, modules: Iterable[nn.Module]) -> None:
        """Note only the buffers of modules, and their values."""
        buffers, copied = list[Tensor](), set[int]()
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is not None and not is_lazy(buffer):
                    if not isinstance(module, torch.jit.ScriptModule):
                        self._buffers.append((module, name, buffer))
                    buffers.append(buffer)
                    size = buffer.numel() * buffer.element_size()
                    if size <= self._left:
                        copied.add(id(buffer))
                        self._left -= size
        self._note(buffers, copied)

    def _note(self, tensors: Iterable[Tensor | None], copied: Collection[int] = ()) -> None:
        """Note tensors; the values of those with these ids are copied."""
        for tensor in tensors:
            if tensor is not None and not is_lazy(tensor) and id(tensor) not in self._tensors:
                # Elements of an expanded tensor share memory: torch refuses to write into it as a whole.
                is_expanded = tensor.layout is torch.strided and 0 in tensor.stride()
                self._tensors[id(tensor)] = _Tensor(
                    tensor,
                    tensor.data,
                    tensor.requires_grad,
                    tensor.grad if tensor.is_leaf else None,
                    # Inference tensors do not count how often they were written.
                    0 if tensor.is_inference() else tensor._version,
                    tensor.detach().clone() if id(tensor) in copied and not is_expanded else None,
                )

    def put_back(self) -> None:
        """Put every model back as it was when it was remembered."""
        modules = [*self._modules.values()]
        reshard(units_in([each.module for each in modules]).values())
        # A first forward that wrote into parameters may have noted this in an attribute, which must stay.
        held = [each.dicts.get("_parameters", {}).values() for each in modules]
        if self._written().isdisjoint(map(id, chain(*held))):
            # Not by setattr or train(): the model may override both.
            put_back([(vars(each.module), each.attributes) for each in modules if each.attributes])
            put_back([(vars(each.module)[at], each.dicts[at]) for each in modules for at in each.dicts])
        for config in self._configs.values():
            config.put_back()
        for owner, name, buffer in self._buffers:
            if owner._buffers.get(name) is not buffer:
                owner._buffers[name] = buffer
        for noted in self._tensors.values():
            tensor, data = noted.tensor, noted.data
            if (tensor.device, tensor.dtype, tensor.shape) != (data.device, data.dtype, data.shape):
                # Moved or cast in place: its former memory is still there.
                tensor.data = data
            if noted.values is not None and not tensor.is_inference():
                # Batch norms write into buffers without raising the version. Neither does this, as data has
                # its own: a backward whose forward came before still works.
                data.copy_(noted.values)
            if tensor.is_leaf:
                if tensor.requires_grad != noted.requires_grad:
                    tensor.requires_grad_(noted.requires_grad)
                if tensor.grad is not noted.grad:
                    tensor.grad = noted.grad

    def changes(self) -> list[str]:
        """The modules' attributes that were replaced, and the tensors that were written into."""
        changed, written = list[str](), self._written()
        for kept in self._modules.values():
            now, kind = vars(kept.module), type(kept.module).__name__
            # Without a call for each dict: a model has hundreds, and most are empty.
            for at in (None, *kept.dicts):
                held, before = (now, kept.attributes) if at is None else (now[at], kept.dicts[at])
                for name in {**before, **held}:
                    if held.get(name, self) is not before.get(name, self):
                        changed.append(f"{kind}.{name}")
                for name, value in before.items():
                    if id(value) in written and held.get(name, self) is value:
                        changed.append(f"{kind}.{name}")
        return [*changed, *chain(*[config.changes() for config in self._configs.values()])]

    def _written(self) -> set[int]:
        """The ids of the tensors that were written into; no other object has one of these, as they live."""
        noted = [each for each in self._tensors.values() if not each.tensor.is_inference()]
        return {id(each.tensor) for each in noted if each.tensor._version != each.version}

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


@dataclass(frozen=True)
class _Tensor:
    tensor: Tensor
    data: Tensor
    requires_grad: bool
    grad: Tensor | None
    version: int
    values: Tensor | None


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
