"""The network of the embedded job."""

from __future__ import annotations

from typing import Any

from torch import nn

from dualeval.errors import UsageError
from dualeval.models.sources import ModelSource, WeightsSource, refuse_arguments, weights_of_file
from dualeval.models.weights_name import is_published_name

EMBEDDED = "fashion-cnn"


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

    def create(self, num_classes: int | None, *, entry: Any = None) -> nn.Module:
        from dualeval.models.fashion_cnn import FashionCNN

        return FashionCNN() if num_classes is None else FashionCNN(num_classes=num_classes)
