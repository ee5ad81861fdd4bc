"""Units: the parts of a model whose parameters are gathered together, while they compute.

The rule, from the top of the model:

* A module whose parameters take at most 1/32 of the model's bytes is a unit.
* A larger one is divided into its children, and is itself a unit for what is left directly in it.
* What takes less than 1/1024 of the model's bytes is no unit: it stays with the module above.
* The model itself is the last unit, and has all that is in no other.

A rank holds at a time the unit that computes, those that it is inside of, and its own part of all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import nn

_LARGEST_PART = 32
_SMALLEST_PART = 1024
# Often their children are called one by one, and they themselves are not.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def units_of(model: nn.Module, sizes: Mapping[int, int]) -> list[nn.Module]:
    """The modules that are units, each behind those inside of it; the model itself is the last.

    Three kinds of modules are no units, and what is in them belongs to the module above: those that nobody
    calls (``nn.Sequential``, ``nn.ModuleList``, ``nn.ModuleDict`` and others without a forward), those that
    share a parameter with a module outside of them, and ``nn.TransformerEncoderLayer``, which computes in
    another way, with other bits, where it or a part has a hook. Modules that read the parameters of their
    children without calling them (``is_indivisible``) are not divided.
    """
    whole = sum(sizes.values())
    paths = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    uses = _uses(model)
    done: dict[int, set[int]] = {}
    units: list[nn.Module] = []

    def is_alone(module: nn.Module, parameters: set[int]) -> bool:
        inside = _uses(module)
        return all(inside[name] * paths[id(module)] == uses[name] for name in parameters)

    def divide(module: nn.Module) -> set[int]:
        """The parameters of a module that are in none of the units found."""
        if id(module) in done:  # it is there under several names
            return done[id(module)]
        left = {id(parameter) for parameter in module.parameters()} & sizes.keys()
        is_large = _LARGEST_PART * sum(sizes[name] for name in left) > whole
        if (is_large and not is_indivisible(module)) or type(module) in _CONTAINERS:
            left = {id(parameter) for parameter in module.parameters(recurse=False)} & sizes.keys()
            left = left.union(*map(divide, module.children()))
        is_small = _SMALLEST_PART * sum(sizes[name] for name in left) < whole
        can_be = is_called(module) and not isinstance(module, nn.TransformerEncoderLayer)
        if module is not model and left and not is_small and can_be and is_alone(module, left):
            units.append(module)
            left = set()
        done[id(module)] = left
        return left

    divide(model)
    return [*units, model]


def is_called(module: nn.Module) -> bool:
    """Whether a module is one that others call: a container is not, nor what has no forward."""
    return type(module) not in _CONTAINERS and has_forward(module)


def has_forward(module: nn.Module) -> bool:
    """Whether a module has a forward of its own."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def is_indivisible(module: nn.Module) -> bool:
    """Whether a module of torch's reads the parameters of its children without calling them."""
    return isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer)


def _uses(module: nn.Module) -> Counter[int]:
    """How many names each parameter has inside of a module."""
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
