"""What the speed steps compute: networks with random weights, and a few inputs in memory, again and again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from problems import Normalised, small_cnn, unchanged
from torch import Tensor, nn
from torch.utils.data import Dataset

from dualeval import ModelTask
from dualeval.vision_library import torchvision

BATCH = 64
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_WORDS, _TOKENS = 30_522, 128


class Again(Dataset[tuple[Tensor, Tensor]]):
    """So many samples, which are a few in memory again and again; read by the batch, without a copy."""

    def __init__(self, inputs: Tensor, targets: Tensor, count: int) -> None:
        self._inputs, self._targets, self._count = inputs, targets, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One sample; no loop asks for it, but that is what makes a data set."""
        place = index % len(self._inputs)
        return self._inputs[place], self._targets[place]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """One ready batch."""
        first = indices[0] % len(self._inputs)
        rows: Any = slice(first, first + len(indices))
        if first + len(indices) > len(self._inputs):
            rows = torch.as_tensor(indices) % len(self._inputs)
        return self._inputs[rows], self._targets[rows]

    def id(self, index: int) -> str:
        """The sample's number."""
        return str(index)

    def fingerprint(self, count: int) -> str:
        """sha256 over the targets in memory and their number."""
        return hashlib.sha256(self._targets.numpy().tobytes() + str(count).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Load:
    """A network, and what it computes."""

    network: nn.Module  # in evaluation mode, on the CPU
    inputs: Tensor  # a whole number of batches, but where there are fewer samples than a batch
    targets: Tensor

    def task(self, count: int, inputs: Tensor | None = None) -> ModelTask:
        """The first so many samples, as dualeval gets them."""
        data = Again(self.inputs if inputs is None else inputs, self.targets, count)
        return ModelTask(model=self.network, data=data, collate=unchanged)


class _Bert(nn.Module):
    """A BERT that classifies tokens; its logits alone."""

    def __init__(self, *, small: bool) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        of_small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        sizes: dict[str, Any] = {**of_small, "intermediate_size": 64, "vocab_size": 100} if small else {}
        self.network = BertForSequenceClassification(BertConfig(num_labels=2, **sizes)).eval()

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.network(input_ids=tokens).logits
        return logits


def _images(build: Callable[[], nn.Module], count: int, side: int) -> Load:
    torch.manual_seed(0)
    network = Normalised(build().eval(), _MEAN, _STD)
    inputs = torch.randint(256, (count, 3, side, side), dtype=torch.uint8)
    return Load(network=network, inputs=inputs, targets=torch.randint(1000, (count,)))


def _small_cnn(count: int, small: bool) -> Load:
    problem = small_cnn().first(count)
    return Load(network=problem.network, inputs=problem.images, targets=problem.targets)


def _named(name: str) -> Callable[[int, bool], Load]:
    def load(count: int, small: bool) -> Load:
        return _images(
            lambda: torchvision().models.get_model(name, weights=None), count, 32 if small else 224
        )

    return load


def _vit(count: int, small: bool) -> Load:
    models = torchvision().models
    if not small:
        return _images(lambda: models.get_model("vit_b_16", weights=None), count, 224)
    sizes = {"image_size": 32, "patch_size": 16, "num_layers": 2, "num_heads": 2}
    sizes |= {"hidden_dim": 32, "mlp_dim": 64}
    return _images(lambda: models.VisionTransformer(**sizes), count, 32)


def _bert(count: int, small: bool) -> Load:
    torch.manual_seed(0)
    tokens = torch.randint(100 if small else _WORDS, (count, 16 if small else _TOKENS))
    return Load(network=_Bert(small=small), inputs=tokens, targets=torch.randint(2, (count,)))


LOADS: Mapping[str, Callable[[int, bool], Load]] = {
    "small-cnn": _small_cnn,
    "resnet18": _named("resnet18"),
    "resnet50": _named("resnet50"),
    "vit_b_16": _vit,
    "bert-base": _bert,
}


def load_of(name: str, images: int, device: str) -> Load:
    """A network by its name with a few inputs; a small form of it on a CPU."""
    count = max(BATCH, min(images, 1024) // BATCH * BATCH)
    return LOADS[name](count, device == "cpu")
