"""A worker for torchrun: models of many kinds, whole and divided over the ranks; prints what differs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import dualeval


class Tied(nn.Module):
    """Embedding and output share a weight; a child is there under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(8)])
        self.again = self.layers[2]
        self.out = nn.Linear(16, 50, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Any:
        hidden = self.first(self.embed(ids)).mean(1)
        for layer in self.layers:
            hidden = layer(hidden).relu() + hidden
        return self.out(self.again(hidden))


class Odd(nn.Module):
    """Parameters without dimensions, without elements, of integers, not contiguous, of other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.count = nn.Parameter(torch.tensor([3, 1]), requires_grad=False)
        self.turned = nn.Parameter(torch.randn(7, 5).t())
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.short = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        self.lists = nn.ParameterList([nn.Parameter(torch.randn(7, 7)) for _ in range(3)])
        self.never = nn.Linear(64, 64)
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(7, 7))
        self.register_buffer("shift", torch.randn(7), persistent=False)
        self.linear.register_forward_hook(lambda module, inputs, outputs: outputs + module.weight.sum())

    def forward(self, x: Tensor) -> Any:
        for weight in self.lists:
            x = x @ weight
        shift: Any = self.shift
        x = self.linear(self.linear(x)) * self.scale + shift * self.count[0]
        return nn.functional.linear(x, self.turned) + self.short.float() + self.wide.sum().float()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 12)
        self.lstm = nn.LSTM(12, 24, num_layers=2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(48, 5)

    def forward(self, ids: Tensor) -> Any:
        return self.out(self.lstm(self.embed(ids))[0][:, -1])


class Encoder(nn.Module):
    """torch's own encoder, whose fast path reads its children's weights."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32, padding_idx=0)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=not options)
        self.out = nn.Linear(32, 5)

    def forward(self, ids: Tensor) -> Any:
        found = self.encoder(self.embed(ids), src_key_padding_mask=ids == 0)
        return self.out(found[:, 0])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.ModuleList([nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(3)])
        self.out = nn.Linear(32, 5)

    def forward(self, ids: Tensor) -> Any:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden, hidden, hidden, need_weights=False)[0]
        return self.out(hidden[:, 0])


class Iterated(nn.Module):
    """A Sequential whose parts are called one by one, and a convolution in code of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(*[nn.Conv2d(3, 3, 3, padding=1) for _ in range(4)])
        self.wide = nn.Linear(3 * 32 * 32, 96)

    def forward(self, images: Tensor) -> Any:
        for part in self.parts:
            images = part(images).relu()
        return self.wide(images.flatten(1))


def torchvisions(name: str) -> Callable[[], nn.Module]:
    def made() -> Any:
        from dualeval.vision_library import torchvision

        return torchvision().models.get_model(name, weights=None, num_classes=10)

    return made


def images() -> Tensor:
    return torch.rand(12, 3, 32, 32)


def ids() -> Tensor:
    found = torch.randint(1, 50, (12, 9))
    found[::2, 6:] = 0
    return found


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(7, 5), lambda: torch.randn(12, 7)),
    "tied": (Tied, ids),
    "odd": (Odd, lambda: torch.randn(12, 7)),
    "recurrent": (Recurrent, ids),
    "encoder": (Encoder, ids),
    "encoder, norm first": (lambda: Encoder(norm_first=True), ids),
    "attention": (Attention, ids),
    "iterated": (Iterated, images),
    "resnet18": (torchvisions("resnet18"), images),
    "mobilenet_v3_small": (torchvisions("mobilenet_v3_small"), images),
}


# They have parameters of other dtypes, or operations that have no half precision.
FLOAT32_ALONE = ("odd",)


def models_for(precision: str) -> list[str]:
    """The models that compute in a precision when they are whole."""
    left_out = set() if precision == "fp32" else {*FLOAT32_ALONE}
    if precision.startswith("amp"):
        # torch takes the fast path of its encoder under a CPU's autocast, too, where that fails.
        left_out.add("encoder")
    return [name for name in MODELS if name not in left_out]


def outputs_of(outputs: Tensor, batch: Any) -> dict[str, Tensor]:
    return {"outputs": outputs, "sum": outputs.double().sum(1)}


class LateTask(dualeval.ModelTask):
    """Its parameters are still where they were saved: here in tensors beside."""

    def build_late(self, device: torch.device) -> nn.Module:
        model = self.build_model(device)
        made: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    made.setdefault(id(parameter), _late(parameter))
                    setattr(module, name, made[id(parameter)])
        return model


def _late(parameter: nn.Parameter) -> Any:
    values = parameter.detach().clone()
    # Of the same strides: the kernels of some CPUs give other bits for other ones.
    late: Any = nn.Parameter(torch.empty_like(values, device="meta"), requires_grad=False)

    def read_rows(first: int, last: int, into: Tensor) -> None:
        into.copy_(values[first:last] if values.ndim else values)

    late.read_rows = read_rows
    return late


def digest(
    session: dualeval.Session, name: str, kind: type[dualeval.ModelTask], **options: Any
) -> tuple[str, Any]:
    make, data = MODELS[name]

    def model() -> nn.Module:
        torch.manual_seed(3)
        return make().eval()

    torch.manual_seed(5)
    rows = data()
    task = kind(model=model, data=[(row,) for row in rows], metrics=["sum"], observe=outputs_of)
    result = session.evaluate(task, batch_size=2, **options)
    return result.metrics_digest, result.weights


def main(names: list[str], options: dict[str, Any]) -> None:
    found = {}
    with dualeval.Session(note=lambda sentence: None) as session:
        for name in names:
            whole = digest(session, name, dualeval.ModelTask, **options)
            for kind in (dualeval.ModelTask, LateTask):
                found[f"{kind.__name__} {name}"] = (
                    digest(session, name, kind, shard="fsdp", **options) == whole
                )
        if session.world.is_main:
            print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[2:] or list(MODELS), json.loads(sys.argv[1]))
