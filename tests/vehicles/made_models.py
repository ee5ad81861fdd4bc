"""Models by name, each made anew at every call, whose identities tests compare.

``python -m tests.vehicles.made_models`` prints these as JSON: name to structure and weights.
"""

from __future__ import annotations

import enum
import functools
import json
import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from dualeval.engine.identity.model import ModelHasher, model_fingerprint, structure_fingerprint


class Mode(enum.Enum):
    FAST = 1
    EXACT = 2


@dataclass
class Options:
    scale: float = 1.0
    names: tuple[str, ...] = ("a", "b")


class Holder(nn.Module):
    """Holds a value as an attribute."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x)
        return found


class WithBuffers(nn.Module):
    """A persistent and a non-persistent buffer, and an extra state."""

    def __init__(self, kept: float = 1.0, left_out: float = 1.0, extra: Any = None) -> None:
        super().__init__()
        self.register_buffer("kept", torch.tensor([kept]))
        self.register_buffer("left_out", torch.tensor([left_out]), persistent=False)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Scripted(nn.Module):
    """For torch.jit.script: an attribute that its text names, and not its value."""

    def __init__(self, eps: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x) * self.eps
        return found


def hooked(scale: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(lambda module, inputs, output: output * scale)
    return model


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    model.append(model[0])
    return model


def loop() -> Any:
    found: dict[str, Any] = {"a": 1}
    found["itself"] = found
    return SimpleNamespace(value=found)


def quantised(dtype: torch.dtype = torch.qint8) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make: Any = torch.ao.quantization.quantize_dynamic
        model: nn.Module = make(nn.Sequential(nn.Linear(4, 4)), {nn.Linear}, dtype)
    return model


def scripted(eps: float = 1.0) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: nn.Module = torch.jit.script(Scripted(eps))
    return model


def traced(eps: float = 1.0) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make: Any = torch.jit.trace
        model: nn.Module = make(Scripted(eps), torch.ones(1, 2))
    return model


def conv(**options: Any) -> nn.Module:
    return nn.Conv2d(2, 2, 3, **options)


def encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 8, **options)


def scaled(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


# Groups of models that differ in one thing each, and in no name or shape of a tensor; the first is the base.
FAMILIES: dict[str, list[Callable[[], nn.Module]]] = {
    "activation": [
        *(
            lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
            lambda: nn.Sequential(nn.Linear(2, 2), nn.GELU()),
        ),
        *(lambda: nn.Sequential(nn.Linear(2, 2), nn.GELU("tanh")), lambda: nn.Sequential(nn.Linear(2, 2))),
        lambda: nn.Sequential(nn.Linear(2, 2), nn.LeakyReLU(0.2)),
    ],
    "conv": [
        *(conv, lambda: conv(stride=2), lambda: conv(padding=1), lambda: conv(dilation=2)),
        lambda: conv(padding=1, padding_mode="reflect"),
    ],
    "eps": [lambda: nn.LayerNorm(2), lambda: nn.LayerNorm(2, eps=1e-6)],
    "batch norm": [lambda: nn.BatchNorm2d(2), lambda: nn.BatchNorm2d(2, eps=1e-3)],
    "bias": [lambda: nn.Linear(2, 2), lambda: nn.Linear(2, 2, bias=False)],
    "heads": [lambda: nn.MultiheadAttention(8, 2), lambda: nn.MultiheadAttention(8, 4)],
    "encoder": [
        *(encoder, lambda: encoder(activation="gelu"), lambda: encoder(activation=functional.silu)),
        *(lambda: encoder(norm_first=True), lambda: encoder(layer_norm_eps=1e-3)),
        lambda: encoder(activation=torch.tanh),
    ],
    "recurrent": [
        *(lambda: nn.LSTM(2, 2, 2), lambda: nn.LSTM(2, 2, 2, batch_first=True)),
        lambda: nn.LSTM(2, 2, 2, dropout=0.5),
    ],
    "dropout": [lambda: nn.Dropout(0.1), lambda: nn.Dropout(0.2)],
    "training": [lambda: nn.ReLU().eval(), lambda: nn.ReLU().train()],
    "order of children": [
        lambda: nn.ModuleDict({"a": nn.ReLU(), "b": nn.GELU()}),
        lambda: nn.ModuleDict({"b": nn.GELU(), "a": nn.ReLU()}),
    ],
    "values": [
        *(
            lambda value=value: Holder(value)
            for value in (None, 0, 1, True, 1.0, -0.0, 0.0, "1", b"1", "", ())
        ),
        *(
            lambda value=value: Holder(value)
            for value in ([1, 2], [2, 1], (1, 2), {1, 2}, {1, 3}, {1: 2}, {})
        ),
        *(
            lambda value=value: Holder(value)
            for value in ([[1], 2], [[1, 2]], float("nan"), 1e-30, 2**80, 2j)
        ),
        *(lambda value=value: Holder(value) for value in (torch.float32, torch.float16, torch.Size((1, 2)))),
        *(lambda value=value: Holder(value) for value in (Mode.FAST, Mode.EXACT, slice(1), slice(2), ...)),
        *(lambda value=value: Holder(value) for value in (Options(), Options(2.0), Options(names=("a",)))),
        *(lambda value=value: Holder(value) for value in (Path("a"), Path("b"), range(3), range(4))),
        *(lambda value=value: Holder(value) for value in (SimpleNamespace(a=1), SimpleNamespace(a=2))),
        *(lambda value=value: Holder(value) for value in (np.float32(1), np.float64(1), np.arange(3))),
        *(lambda value=value: Holder(value) for value in (np.arange(4), np.arange(4.0), np.zeros((2, 2)))),
        *(lambda value=value: Holder(torch.tensor(value)) for value in (1.0, 2.0, 1, [1.0], [[1.0]])),
        lambda: Holder(loop()),
        lambda: Holder([torch.ones(2), {"a": torch.zeros(2)}]),
    ],
    "callables": [
        *(lambda name=name: Holder(getattr(functional, name)) for name in ("relu", "gelu", "silu", "mish")),
        *(lambda name=name: Holder(getattr(torch, name)) for name in ("tanh", "sigmoid")),
        *(lambda name=name: Holder(getattr(Tensor, name)) for name in ("tanh", "sigmoid")),
        *(lambda factor=factor: Holder(scaled(factor)) for factor in (1.0, 2.0)),
        *(lambda: Holder(lambda x: x * 2), lambda: Holder(lambda x: x * 3), lambda: Holder(lambda x: x + 2)),
        *(lambda: Holder(lambda x, a=1: x * a), lambda: Holder(lambda x, a=2: x * a)),
        *(lambda: Holder(lambda x: x in {"a", "b", "c"}), lambda: Holder(lambda x: [x * 1 for _ in "ab"])),
        lambda: Holder(lambda x: [x * 2 for _ in "ab"]),
        *(lambda n=n: Holder(functools.partial(functional.leaky_relu, negative_slope=n)) for n in (0.1, 0.2)),
        *(lambda n=n: Holder(functools.partial(functional.dropout, n)) for n in (0.1, 0.2)),
        *(lambda n=n: Holder(operator.itemgetter(n)) for n in (0, 1)),
        *(
            lambda: Holder(Options().__repr__),
            lambda: Holder(Options(3.0).__repr__),
            lambda: Holder("a,b".split),
        ),
        *(lambda: Holder(functools.lru_cache(scaled)), lambda: Holder(torch.ops.aten.relu.default)),
        *(lambda: Holder(torch.ops.aten.gelu.default), lambda: Holder(nn.ReLU), lambda: Holder(nn.GELU)),
        *(lambda: Holder([nn.ReLU()]), lambda: Holder([nn.GELU()]), lambda: Holder([nn.LeakyReLU(0.3)])),
        lambda: Holder([nn.LeakyReLU(0.1)]),
    ],
    "hooks": [*(lambda: nn.Sequential(nn.Linear(2, 2)), lambda: hooked(1.0), lambda: hooked(2.0))],
    "kept twice": [tied, lambda: nn.Sequential(*tied().children(), nn.ReLU())],
    "scripted": [scripted, lambda: scripted(2.0), traced, lambda: traced(2.0)],
    "traced by fx": [
        lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU())),
        lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.GELU())),
    ],
    "parametrised": [
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)),
    ],
    "quantised": [quantised, lambda: quantised(torch.float16)],
    "state": [WithBuffers, lambda: WithBuffers(extra=1)],
}
BY_NAME = {
    f"{name} {number}": make for name, family in FAMILIES.items() for number, make in enumerate(family)
}


def structure(model: nn.Module) -> dict[str, str]:
    return structure_fingerprint(model, ModelHasher(model))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def identity(make: Callable[[], nn.Module]) -> list[Any]:
    model = seeded(make)
    return [structure(model), model_fingerprint(model)]


if __name__ == "__main__":
    from tests.vehicles import made_models

    # As the module that others import: its classes have its name.
    print(json.dumps({name: identity(make) for name, make in made_models.BY_NAME.items()}))
