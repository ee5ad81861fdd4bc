"""The network of the embedded job, and the model that it is to ``--model``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dualeval.errors import UsageError
from dualeval.models.sources.source import (
    Loading,
    ModelSource,
    WeightsSource,
    refuse_arguments,
    weights_of_file,
)
from dualeval.models.weights import LoadedWeights, is_published_name


class FashionCNN(nn.Module):
    """Three 3x3 convolutions and two linear layers for 28x28 grey images; 358,186 parameters."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64 * 7 * 7, 96),
            nn.ReLU(inplace=True),
            nn.Dropout(0.3),
            nn.Linear(96, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map float images (batch, 1, 28, 28) to logits (batch, num_classes)."""
        logits: Tensor = self.classifier(self.features(images))
        return logits


EMBEDDED = "fashion-cnn"
# Beside the data of the embedded job, which ships with this package, too.
EMBEDDED_WEIGHTS = Path(__file__).resolve().parents[2] / "assets/fashion_cnn.safetensors"


class EmbeddedModel(ModelSource):
    """``fashion-cnn``, whose weights are shipped with dualeval."""

    needs_weights = False

    def check(self) -> None:
        refuse_arguments(self.name, self.arguments, "beside its number of classes (--num-classes)")

    def find_weights(self, weights: str | None) -> WeightsSource:
        assert weights is not None, "the task knows where the shipped ones are"
        if is_published_name(weights):
            raise UsageError(
                f"--weights {weights}: torchvision publishes none for {EMBEDDED}, whose own weights are "
                "shipped with dualeval. Leave --weights out, or give --weights DEFAULT."
            )
        return weights_of_file(weights)

    def load(self, weights: WeightsSource, num_classes: int | None, loading: Loading) -> nn.Module:
        """The shipped file is what it is: nothing in it is searched, and no name has a prefix."""
        asked = (weights.path, num_classes or 10, loading.key, loading.prefix, loading.is_late)
        if asked != (EMBEDDED_WEIGHTS, 10, None, None, False):
            return super().load(weights, num_classes, loading)
        from safetensors.torch import load_file

        model = self.create(num_classes)
        model.load_state_dict(load_file(EMBEDDED_WEIGHTS))
        loading.on_load(LoadedWeights(file=str(weights.path), key="", prefix="", left_out=()))
        return model

    def create(self, num_classes: int | None, *, entry: Any = None) -> nn.Module:
        return FashionCNN() if num_classes is None else FashionCNN(num_classes=num_classes)
