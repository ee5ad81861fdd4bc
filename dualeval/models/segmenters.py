"""Networks for segmentation by a value of ``--model``: the sources of image classifiers, for other models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from dualeval.data.preprocessing import Uncropped
from dualeval.errors import UsageError
from dualeval.messages import nearest
from dualeval.models import classifiers, published
from dualeval.models.sources.processors import processor_values, uncropped_of
from dualeval.models.sources.program import is_path_of_program
from dualeval.models.sources.source import NO_ARGUMENTS, ModelSource, WeightsSource
from dualeval.models.sources.transformers_models import PREFIX, TransformersModel
from dualeval.models.sources.vision import TorchvisionModel
from dualeval.models.transformers_folder import CONFIG


class TorchvisionSegmenter(TorchvisionModel):
    """A network of ``torchvision.models.segmentation``."""

    def names(self) -> list[str]:
        return published.segmentation_names()

    def needed_arguments(self) -> dict[str, Any]:
        # Without it torchvision fetches a backbone.
        return {"weights_backbone": None}


class TransformersSegmenter(TransformersModel):
    """A folder with a network such as SegFormer, and its image processor."""

    kind, forms = "AutoModelForSemanticSegmentation", "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING"
    noun, trained_for = "image segmentation network", "semantic segmentation"

    def _processor_values(self) -> tuple[dict[str, Any], str]:
        with self._reading("image processor"):
            return processor_values(self._folder, self.name)

    def uncropped(self) -> Uncropped:
        """What the folder's image processor does to a picture."""
        return uncropped_of(*self._processor_values())

    def reduces_labels(self) -> bool:
        """Whether the processor takes label 0 for none, and 1 for class 0."""
        values = self._processor_values()[0]
        # Older files have the second name, which newer versions of the library read and pass over.
        return bool(values.get("do_reduce_labels") or values.get("reduce_labels"))


def segmenter_of(
    name: str | nn.Module | Callable[[], nn.Module],
    arguments: Mapping[str, Any] = NO_ARGUMENTS,
    *,
    trust: bool = False,
) -> ModelSource:
    """The source of a network for segmentation."""
    if isinstance(name, str) and name.startswith(PREFIX):
        return TransformersSegmenter(name, arguments, trust=trust)
    if isinstance(name, str) and name in published.segmentation_names():
        return TorchvisionSegmenter(name, arguments, trust=trust)
    if isinstance(name, str) and (Path(name) / CONFIG).is_file():
        raise UsageError(f"--model {name} is a folder of transformers. Type --model {PREFIX}{name}.")
    source = None
    if not isinstance(name, str) or ":" in name or is_path_of_program(name) or name.endswith(".py"):
        source = classifiers.source_of(name, arguments, trust=trust)
    if source is None or source.name == classifiers.EMBEDDED or str(name).startswith("timm:"):
        known = published.segmentation_names()
        raise UsageError(
            f"--model {name} is not a network for segmentation."
            f"{nearest(str(name), known, most=5, cutoff=0.5)} Give one of torchvision ({', '.join(known)}), "
            "hf:DIR, package.module:factory, or the path of a TorchScript archive or .pt2 program."
        )
    return source


def published_uncropped(source: ModelSource, weights: WeightsSource) -> tuple[Uncropped, str] | None:
    """The preprocessing that a library has published for a model, and whose it is; None where none has."""
    if isinstance(source, TransformersSegmenter):
        return source.uncropped(), source.preprocessing_origin()
    entry = weights.entry or next(iter(published.entries_of(source.name)), None)
    if entry is None:
        return None
    preset = entry.transforms()
    uncropped = Uncropped(
        resize=preset.resize_size[0],
        interpolation=preset.interpolation.value,
        mean=tuple(preset.mean),
        std=tuple(preset.std),
    )
    return uncropped, f"those of {entry}" if weights.entry is not None else "the model's defaults"
