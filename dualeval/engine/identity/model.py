"""The identity of a model: its tensors, and everything else in its modules that can decide a number."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from dualeval.engine.device.divided import class_of, is_of_fsdp, is_state_of_fsdp, whole
from dualeval.engine.identity.hasher import Hasher, script_code
from dualeval.engine.identity.plain import attributes_of, is_incidental, short_hex, tensor_digest

# Attributes of an nn.Module that are read in another way, or that no forward in evaluation reads.
_BOOKKEEPING = {
    *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook"),
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks"),
    *("_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks"),
    *("_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    *("_compiled_call_impl", "_super_module_initialized"),
}
# What torch.compile and torch.fx keep beside the module and its text.
_COMPILED = {"dynamo_ctx", "forward", "_torchdynamo_orig_callable", "_torchdynamo_wrapper_id"}
_TRACED = {"meta", "_graph", "_code", "_tracer_cls", "_tracer_extras", "_codegen"}
# Most hashes of a structure: every rank sends its own.
_MOST_NAMED = 192


def model_fingerprint(
    model: nn.Module,
    around_gather: Callable[[], AbstractContextManager[object]] = nullcontext,
    digests: Mapping[str, bytes] | None = None,
) -> dict[str, Any]:
    """sha256 over names and contents of all parameters, all buffers and what else a state_dict holds.

    A collective if the model is sharded: its parameters are gathered one by one. Parameters whose ``digests``
    are given, by their first names, are not gathered.
    """
    hasher = ModelHasher(model)
    known = {} if digests is None else {id(each): digests[name] for name, each in model.named_parameters()}
    state = _state(model)
    digest = hashlib.sha256()
    for name, item in sorted(state.items()):
        if id(item) not in known:  # a tied one is there under several names
            known[id(item)] = (
                tensor_digest(name, whole(item, around_gather), hasher.digest)
                if isinstance(item, Tensor)
                else hasher.digest(item)
            )
        digest.update(name.encode() + b"\0" + known[id(item)])
    return {"fingerprint": digest.hexdigest(), "elements": sum(map(_elements, state.values()))}


def _state(model: nn.Module) -> dict[str, Any]:
    """Parameters and buffers, also those that a state_dict leaves out, and its other entries."""
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    return {**model.state_dict(keep_vars=True), **tensors}


def _elements(item: Any) -> int:
    if isinstance(item, Tensor):
        return item.numel()
    return sum(map(_elements, item)) if isinstance(item, tuple | list) else 0


class ModelHasher(Hasher):
    """Digests of what belongs to a model: its modules and their tensors are known by their names."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__(None if model is None else _names(model))

    def special(self, value: Any) -> bytes | None:
        """The digest of a module outside the model, such as one that a hook keeps, with all that it holds."""
        if not issubclass(type(value), nn.Module):
            return None
        parts = [_own_tensors(value), list(value._modules.values())]
        return self.combined("module", [self.digests_by_value(value), *parts])

    def digests_by_value(self, module: nn.Module) -> dict[str, bytes]:
        """The digests of a module without its parts: class, names of parts, hooks, each value."""
        children = [(name, child is None) for name, child in module._modules.items()]
        absent = {name: tensor is None for name, tensor in _own_tensors(module).items()}
        kind: Any = class_of(module)
        if isinstance(module, torch.jit.ScriptModule):
            kind, values = "script", {"text": self._script(module)}
        else:
            values = {name: self.digest(value) for name, value in values_of(module).items()}
        of_class = {
            "__class__": self.combined("own", [kind, children, absent]),
            "(hooks)": self.combined("hooks", _hooks(module)),
        }
        return {**values, **of_class}

    def _script(self, module: Any) -> bytes:
        compiled = module._c
        kind: Any = torch._C.ConcreteModuleType.from_jit_type(compiled._type())
        attributes = {name: compiled.getattr(name) for name in kind.get_attributes()}
        attributes.pop("_is_full_backward_hook", None)
        methods = {name: script_code(self, compiled._get_method(name)) for name in compiled._method_names()}
        return self.combined("script", [module.original_name, attributes, methods])


def values_of(module: nn.Module) -> dict[str, Any]:
    """What a module holds besides tensors, modules and hooks."""
    attributes = {name: value for name, value in attributes_of(module).items() if name not in _BOOKKEEPING}
    left_out: set[str] = set()
    if isinstance(module, torch.fx.GraphModule):
        attributes["code"] = module.code
        left_out = _TRACED
    elif type(module).__module__.startswith("torch._dynamo"):
        left_out = _COMPILED | {name for name, value in attributes.items() if callable(value)}
    return {
        name: value
        for name, value in attributes.items()
        if name not in left_out and not is_incidental(name) and not is_state_of_fsdp(name)
    }


@dataclass(frozen=True, kw_only=True)
class ModelIdentity:
    """The identity of a model as it was built; to be taken before the model is prepared for evaluation."""

    # Makes digests of what belongs to the model; knows the model's modules and tensors by name.
    hasher: ModelHasher
    # All modules of the model.
    modules: tuple[nn.Module, ...]
    # The result of `structure_fingerprint`.
    structure: Mapping[str, str]
    # The result of `model_fingerprint`.
    weights: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        around_gather: Callable[[], AbstractContextManager[object]] = nullcontext,
        *,
        weights: Mapping[str, Any] | None = None,
    ) -> ModelIdentity:
        """Take the identity of a model as it was built; a collective if it is sharded."""
        if weights is None:
            weights = model_fingerprint(model, around_gather)
        hasher = ModelHasher(model)
        structure = structure_fingerprint(model, hasher)
        return cls(hasher=hasher, modules=tuple(model.modules()), structure=structure, weights=weights)


def structure_fingerprint(model: nn.Module, hasher: ModelHasher) -> dict[str, str]:
    """Hashes of everything in modules but their tensors: classes, plain values, callables, hooks.

    One hash per class and attribute, over all modules of that class, so that a difference has a name.
    """
    groups: dict[str, Any] = {
        "model": hashlib.sha256(hasher.combined("model", [_aliases(model), _hooks_of_all()]))
    }
    for name, module in model.named_modules():
        # The class of a copied trace is not that of the trace.
        kind = "script" if isinstance(module, torch.jit.ScriptModule) else class_of(module).__qualname__
        for attribute, digest in sorted(hasher.digests_by_value(module).items()):
            group = f"{kind.rpartition('.')[2]}.{attribute}"
            group = group if group in groups or len(groups) < _MOST_NAMED else "others"
            groups.setdefault(group, hashlib.sha256()).update(f"{name}.{attribute}\0".encode() + digest)
    return {name: short_hex(digest.digest()) for name, digest in groups.items()}


def _aliases(model: nn.Module) -> list[tuple[str, str]]:
    """Further names of modules that a model holds more than once, each with the first name."""
    first = {id(module): name for name, module in model.named_modules()}
    modules = model.named_modules(remove_duplicate=False)
    return [(name, first[id(module)]) for name, module in modules if first[id(module)] != name]


def _names(model: nn.Module) -> dict[str, Any]:
    modules = {f"module {name}": module for name, module in model.named_modules()}
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {**modules, **{f"tensor {name}": tensor for name, tensor in tensors.items()}}


def _own_tensors(module: nn.Module) -> Mapping[str, Tensor | None]:
    # In a compiled module these are no dicts.
    return {**dict(module._parameters.items()), **dict(module._buffers.items())}


def _hooks(module: nn.Module) -> list[Any]:
    """A module's forward hooks in their order, without the numbers that the process has given them.

    FSDP's own hooks are left out: a sharded model is the same model.
    """
    return [
        [(hook, number in with_kwargs) for number, hook in hooks.items() if not is_of_fsdp(hook)]
        for hooks, with_kwargs in (
            (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
            (module._forward_hooks, module._forward_hooks_with_kwargs),
        )
    ]


def _hooks_of_all() -> list[Any]:
    """The hooks that every module's forward calls."""
    return [
        list(global_hooks._global_forward_pre_hooks.values()),
        list(global_hooks._global_forward_hooks.values()),
    ]
