"""Batch norms folded into the convolutions before them, where no other code sees the difference."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from dualeval.engine.model.compute import copy_sharing_tensors
from dualeval.errors import UsageError, with_type

# The pairs that torch.fx.experimental.optimization.fuse folds. No subclasses: these may do more.
_PAIRS: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: nn.Conv1d,
    nn.BatchNorm2d: nn.Conv2d,
    nn.BatchNorm3d: nn.Conv3d,
}


class _Folded(nn.Identity):
    """Replaces a folded norm, and refuses a forward in which its input is not its convolution's output."""

    def __init__(self, convolution: nn.Module, names: str) -> None:
        super().__init__()
        # Methods, so that a copy of the model gets its own.
        self._compute, self._names, self._output = convolution.forward, names, None
        vars(convolution)["forward"] = self._convolve

    def _convolve(self, images: Tensor) -> Any:
        self._check(self._output is None)
        self._output = self._compute(images)
        return self._output

    def forward(self, input: Tensor) -> Tensor:
        self._check(self._output is input)
        self._output = None
        return input

    def _check(self, fits: bool) -> None:
        if not fits:
            raise UsageError(
                f"--optimize fold: {self._names} are one operation now, and the task's forward calls one "
                "without the other. Let it call model(...), or leave --optimize fold out"
            )


def fold(model: nn.Module) -> int:
    """Fold a model's batch norms into the convolutions before them; ``nn.Identity`` replaces the norms.

    Pairs and weights are those of ``torch.fx.experimental.optimization.fuse``, but the model keeps its own
    forward, methods and signature. Modules are replaced; no tensor is written.
    """
    pairs = _pairs(model, _traced(model, {}))
    if pairs and (defaults := _defaults(model)):
        # The tracer passes a tensor even for an optional "mask=None", which may lead through other branches.
        without = _pairs(model, _traced(model, defaults))
        pairs = [pair for pair in pairs if pair in without]
    for before, after in pairs:
        # By ``_pairs``, these are a convolution and a batch norm.
        convolution: Any = model.get_submodule(before)
        norm: Any = model.get_submodule(after)
        with torch.no_grad():
            fused = fuse_conv_bn_eval(convolution, norm).requires_grad_(False)
        _exchange(model, before, fused)
        _exchange(model, after, _Folded(fused, f"{before} and {after}"))
    return len(pairs)


def _defaults(model: nn.Module) -> dict[str, Any]:
    """The optional arguments of a model's forward, with their defaults."""
    arguments = inspect.signature(type(model).forward).parameters.values()
    return {each.name: each.default for each in arguments if each.default is not each.empty}


def _traced(model: nn.Module, arguments: dict[str, Any]) -> fx.Graph:
    """The graph of a model's forward with some of its arguments given."""
    if "forward" in vars(model):
        raise UsageError(
            f"--optimize fold: the forward of this {type(model).__name__} is an attribute of the object "
            "(model.forward = ...), and torch.fx follows that of the class. Leave --optimize fold out."
        )
    tracer = fx.Tracer()
    tracer.proxy_buffer_attributes = True
    try:
        # The forward runs with proxies for tensors: on a copy, so that the model itself keeps none of them.
        return tracer.trace(copy_sharing_tensors(model), concrete_args=arguments)
    except Exception as error:
        raise UsageError(
            f"--optimize fold: torch.fx cannot follow the forward of {type(model).__name__}: "
            f"{with_type(error)}. It may not branch on values or sizes of tensors. Leave --optimize fold "
            "out, or give a model whose batch norms are folded already."
        ) from error


def _pairs(model: nn.Module, graph: fx.Graph) -> list[tuple[str, str]]:
    """The names of each convolution and the batch norm that is the only operation after it."""
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    # The forward may read a module's tensor directly, to add a penalty, for instance.
    read = {node.target for node in graph.nodes if node.op == "get_attr"}
    names = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    read_tensors = {id(tensor) for name, tensor in names if name in read}
    pairs = []
    for node in graph.nodes:
        if node.op != "call_module" or calls[node.target] > 1:
            continue
        norm = model.get_submodule(node.target)
        before = node.args[0] if len(node.args) == 1 else None
        if type(norm) not in _PAIRS or not isinstance(before, fx.Node) or before.op != "call_module":
            continue
        convolution = model.get_submodule(str(before.target))
        if (
            type(convolution) is _PAIRS[type(norm)]
            and len(before.users) == 1
            and calls[before.target] == 1
            and isinstance(norm, nn.modules.batchnorm._BatchNorm)
            and norm.running_mean is not None
            and not _does_more(convolution, read_tensors)
            and not _does_more(norm, read_tensors)
        ):
            pairs.append((str(before.target), str(node.target)))
    return pairs


def _does_more(module: nn.Module, read: Collection[int]) -> bool:
    """Whether a module cannot be replaced: it does more, is in training mode, or its tensors are read."""
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module) or module.training:
        return True
    return any(id(tensor) in read for tensor in [*module.parameters(), *module.buffers()])


def _exchange(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace a module by another one, under each name that the model has for it."""
    old = model.get_submodule(name)
    for parent in list(model.modules()):
        for child, held in list(parent._modules.items()):
            if held is old:
                parent._modules[child] = module
