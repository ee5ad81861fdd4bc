"""Torchvision's classifiers, by name."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from dualeval.data.labels import KnownClasses
from dualeval.data.preprocessing import Preprocessing
from dualeval.errors import UsageError
from dualeval.messages import nearest
from dualeval.models import published
from dualeval.models.sources.fashion_cnn import EMBEDDED
from dualeval.models.sources.source import ModelSource, WeightsSource, weights_of_file
from dualeval.models.weights import is_published_name
from dualeval.vision_library import torchvision

# torchvision's DenseNet files still have the names of its first version, denselayer1.norm.1 for .norm1.
_OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|relu|conv))\.([12]\.)")

# They help in training alone: without them a network in evaluation mode gives the same outputs.
_HEADS = ("aux1", "aux2", "AuxLogits", "aux_classifier")


class TorchvisionModel(ModelSource):
    """A classifier of torchvision."""

    publishes_weights = True

    def check(self) -> None:
        known = self.names()
        if self.name not in known:
            hint = nearest(self.name, [*known, EMBEDDED], most=5, cutoff=0.5)
            raise UsageError(
                f"there is no model {self.name!r}.{hint} Give a torchvision classifier, {EMBEDDED}, "
                "timm:NAME, hf:DIR, package.module:factory, FILE.py:factory, or the path of a TorchScript "
                "archive or .pt2 program."
            )
        for argument in ("weights", "weights_backbone", "pretrained"):
            if argument in self.arguments:
                raise UsageError(f"--model-arg {argument}: weights are chosen with --weights. Leave it out.")

    def names(self) -> list[str]:
        """The names that torchvision has for models of this kind."""
        return published.torchvision_names()

    def needed_arguments(self) -> dict[str, Any]:
        """Arguments without which torchvision does more than to make the model."""
        # It warns that these two take long to draw their first values.
        return {"init_weights": False} if self.name in ("googlenet", "inception_v3") else {}

    def find_weights(self, weights: str | None) -> WeightsSource:
        assert weights is not None, "a model without weights of its own"
        if is_published_name(weights):
            entry = published.entry_named(self.name, weights)
            return WeightsSource(
                text=weights, path=published.checked_cached_file(entry, weights), entry=entry
            )
        source = weights_of_file(weights, published.names_hint(self.name, weights))
        if source.path is None:
            return source
        entry = None if source.path.is_dir() else published.recognise(self.name, source.path)
        asked = self.name in published.TRANSFORM_INPUT and "transform_input" not in self.arguments
        if entry is None and asked:
            raise UsageError(
                f"--weights {weights}: no tensor shows whether {self.name} was trained with transform_input, "
                "which decides the numbers. If its training began with weights that torchvision publishes, "
                "type --model-arg transform_input=True; else --model-arg transform_input=False."
            )
        return WeightsSource(text=weights, path=source.path, entry=entry)

    def create(self, num_classes: int | None, *, entry: Any = None) -> nn.Module:
        extra = self.needed_arguments()
        if num_classes is not None:
            extra |= {"num_classes": num_classes}
        if entry is not None:
            extra |= published.constructor_arguments(self.name, entry)
        with self.blaming_arguments(TypeError, ValueError, AssertionError):
            model = torchvision().models.get_model(self.name, weights=None, **extra | dict(self.arguments))
        assert isinstance(model, nn.Module)
        return model

    def rename(self, tensors: dict[str, Any], model: nn.Module) -> None:
        """Give a DenseNet's tensors the model's names, behind any prefix; remove heads that only one has."""
        for head in _HEADS:
            of_file = [name for name in tensors if f"{head}." in name]
            if getattr(model, head, None) is None:
                for name in of_file:
                    del tensors[name]
            elif not of_file:
                setattr(model, head, None)
        if not self.name.startswith("densenet"):
            return
        names = tuple(model.state_dict())
        for old in [name for name in tensors if _OLD_DENSENET.search(name)]:
            new = _OLD_DENSENET.sub(r"\1\2", old)
            if new.endswith(names) and new not in tensors:
                tensors[new] = tensors.pop(old)

    def preprocessing(self, weights: WeightsSource | None = None) -> Preprocessing | None:
        """That of the weights, where torchvision publishes them.

        For others that of the first ones published for the model: later ones often go with a recipe of their
        own (resnet50's IMAGENET1K_V2 with a resize to 232), which nobody else's weights had.
        """
        entry = None if weights is None else weights.entry
        if entry is None:
            entry = next(iter(published.entries_of(self.name)), None)
        return None if entry is None else published.preprocessing_of(entry)

    def preprocessing_origin(self, weights: WeightsSource | None = None) -> str:
        if weights is not None and weights.entry is not None:
            return f"those of {weights.entry}"
        entries = published.entries_of(self.name)
        if not entries:
            return super().preprocessing_origin(weights)
        first = published.preprocessing_of(entries[0])
        if all(published.preprocessing_of(other) == first for other in entries):
            return "the model's defaults"
        return f"the model's defaults, as for {entries[0].name}"

    def known_classes(self, weights: WeightsSource) -> KnownClasses | None:
        return None if weights.entry is None else published.classes_of(weights.entry)

    def download(self, weights: str) -> None:
        published.download(self.name, weights)
