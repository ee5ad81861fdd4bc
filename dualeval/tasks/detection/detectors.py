"""Networks that find objects, by a value of ``--model``; what they are given, and what they give."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from dualeval.data.preprocessing import OwnPreprocessing
from dualeval.errors import UsageError
from dualeval.messages import nearest
from dualeval.models import classifiers, published
from dualeval.models.sources.program import is_path_of_program
from dualeval.models.sources.source import NO_ARGUMENTS, ModelSource, WeightsSource
from dualeval.models.sources.transformers_models import PREFIX, TransformersModel
from dualeval.models.sources.vision import TorchvisionModel
from dualeval.models.transformers_folder import CONFIG, LOCAL, transformers_for
from dualeval.tasks.detection.masks import masks_by
from dualeval.tasks.refusals import describe
from dualeval.vision_library import torchvision

# By what is compared, what is given of each detection.
GIVEN = {"bbox": "boxes", "segm": "masks", "keypoints": "keypoints"}


class TorchvisionDetector(TorchvisionModel):
    """A network of ``torchvision.models.detection``."""

    def check(self) -> None:
        super().check()
        try:
            torchvision().ops.nms(torch.zeros(0, 4), torch.zeros(0), 0.5)
        except (NotImplementedError, RuntimeError) as error:
            raise UsageError(
                f"--model {self.name}: torchvision's operators are not here, since it was built for another "
                "torch. Install torchvision and torch from one index."
            ) from error

    def names(self) -> list[str]:
        return published.detection_names()

    def needed_arguments(self) -> dict[str, Any]:
        # Without it torchvision fetches a backbone.
        return {"weights_backbone": None}

    def label_names(self, weights: WeightsSource) -> dict[int, str] | None:
        """What published weights call each label; of others labels are ids."""
        return None if weights.entry is None else dict(enumerate(weights.entry.meta["categories"]))


class TransformersDetector(TransformersModel):
    """A folder with a network such as DETR, and its image processor."""

    kind, forms = "AutoModelForObjectDetection", "MODEL_FOR_OBJECT_DETECTION_MAPPING"
    noun, trained_for = "object detection network", "object detection"

    @cached_property
    def processor(self) -> Any:
        """The folder's image processor, which prepares pictures, and makes boxes of outputs."""
        with self._reading("image processor"):
            return transformers_for("--model hf:DIR").AutoImageProcessor.from_pretrained(
                self._folder, **LOCAL
            )

    def label_names(self, weights: WeightsSource) -> dict[int, str] | None:
        """The names in ``id2label``."""
        return {int(label): str(name) for label, name in self._read_config().id2label.items()}

    def prepares(self) -> OwnPreprocessing:
        """What the processor does to a picture."""
        return OwnPreprocessing(function=_Prepared(self.processor))


class TransformersMasks(TransformersDetector):
    """A folder with a network such as Mask2Former, which gives masks."""

    kind, forms = "AutoModelForUniversalSegmentation", "MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING"
    noun, trained_for = "instance segmentation network", "instance segmentation"

    def check(self) -> None:
        super().check()
        if not hasattr(self.processor, "post_process_instance_segmentation"):
            raise UsageError(
                f"--model {self.name}: {type(self.processor).__name__} makes no masks of objects."
            )


class _Prepared:
    """A picture as an image processor prepares it: (channels, height, width), the mask behind the colours."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self.__qualname__ = type(processor).__name__

    def __call__(self, picture: Any) -> Tensor:
        prepared = self._processor(images=picture, return_tensors="pt")
        mask = prepared.get("pixel_mask")
        values: Tensor = prepared["pixel_values"][0]
        # Of pictures that are brought to one size nobody needs a mask.
        return values if mask is None else torch.cat([values, mask.to(values.dtype)])


def detector_of(
    name: str | nn.Module | Callable[[], nn.Module],
    arguments: Mapping[str, Any] = NO_ARGUMENTS,
    *,
    kinds: Sequence[str] = ("bbox",),
    trust: bool = False,
) -> ModelSource:
    """The source of a network that finds objects, and gives what these kinds are."""
    if isinstance(name, str) and name.startswith(PREFIX):
        if len(kinds) > 1 or kinds[0] == "keypoints":
            raise UsageError(
                f"--iou-type {','.join(kinds)}: a folder of transformers is evaluated for boxes (bbox) or "
                "masks (segm) alone. Give a module of your own that returns all."
            )
        source_class = TransformersMasks if kinds[0] == "segm" else TransformersDetector
        return source_class(name, arguments, trust=trust)
    if isinstance(name, str) and (Path(name) / CONFIG).is_file():
        raise UsageError(f"--model {name} is a folder of transformers. Type --model {PREFIX}{name}.")
    if getattr(getattr(name, "config", None), "model_type", None) is not None:
        raise UsageError(
            "model is a network of transformers, whose boxes its image processor makes: save both into a "
            "folder (save_pretrained), and give model='hf:DIR'."
        )
    if not isinstance(name, str) or ":" in name:
        source = classifiers.source_of(name, arguments, trust=trust)
        if not str(name).startswith("timm:"):
            return source
    elif name in published.detection_names():
        return TorchvisionDetector(name, arguments, trust=trust)
    known = published.detection_names()
    kind = "a program that takes pictures of one size" if is_path_of_program(str(name)) else "no such network"
    raise UsageError(
        f"--model {name} is {kind}.{nearest(str(name), known, most=5, cutoff=0.5)} Expected a network that "
        f"finds objects: hf:DIR, package.module:factory, FILE.py:factory, or one of torchvision "
        f"({', '.join(known)})."
    )


def run_transformers(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The logits and boxes or masks of each query; pictures have masks where the network takes them."""
    given = dict(batch)
    if "pixel_mask" not in inspect.signature(model.forward).parameters:
        given.pop("pixel_mask", None)
    outputs = model(**given)
    if "masks_queries_logits" not in outputs:
        return {name: outputs[name].float() for name in ("logits", "pred_boxes")}
    pictures = batch["pixel_values"]
    shown = batch.get("pixel_mask", torch.ones_like(pictures[:, 0]))
    # Of each picture its own height and width within the batch's.
    valid = torch.stack([shown.amax(2).sum(1), shown.amax(1).sum(1)], 1).long()
    whole = torch.tensor(pictures.shape[2:], device=valid.device).expand_as(valid)
    names = ("class_queries_logits", "masks_queries_logits")
    return {**{name: outputs[name].float() for name in names}, "valid": valid, "input": whole}


def found_by(processor: Any, columns: Mapping[str, Tensor], sizes: Sequence[Any]) -> dict[str, list[Any]]:
    """The boxes (xyxy, in pixels of the pictures) or masks, scores and labels that a processor makes."""
    if "masks_queries_logits" in columns:
        return masks_by(processor, columns, sizes)
    outputs = SimpleNamespace(**{name: columns[name] for name in ("logits", "pred_boxes")})
    found = processor.post_process_object_detection(outputs, threshold=0.0, target_sizes=[*map(tuple, sizes)])
    return {name: [each[name] for each in found] for name in ("boxes", "scores", "labels")}


def checked_outputs(model: str, outputs: Any, count: int, kinds: Sequence[str]) -> dict[str, Any]:
    """What a detector as torchvision's returned: of each picture a dict of boxes, scores and labels.

    Masks become bools, a row a picture of all its pixels, one object's behind the other's; and their sizes.
    """
    keys = ("scores", "labels", *(GIVEN[kind] for kind in kinds))
    expected = (
        "expected a list with a dict of tensors for each picture: scores (n,), labels (n,) of whole numbers, "
        "and, as --iou-type asks, boxes (n, 4) as x1, y1, x2, y2, masks (n, height, width) of bools or "
        "probabilities, keypoints (n, points, 3). Wrap it in a module whose forward returns these."
    )
    if not isinstance(outputs, (list, tuple)) or len(outputs) != count:
        raise UsageError(f"the model {model} returned {describe(outputs)} for {count} pictures, {expected}")
    found: dict[str, list[Tensor]] = {name: [] for name in keys}
    for each in outputs:
        if not isinstance(each, Mapping) or not all(isinstance(each.get(key), Tensor) for key in keys):
            raise UsageError(f"the model {model} returned {describe(each)} for a picture, {expected}")
        number = len(each["scores"])
        fits = {
            "scores": each["scores"].ndim == 1,
            "labels": each["labels"].shape == (number,) and not each["labels"].is_floating_point(),
            "boxes": "boxes" not in keys or each["boxes"].shape == (number, 4),
            "masks": "masks" not in keys or (len(each["masks"]) == number and each["masks"].ndim in (3, 4)),
            "keypoints": "keypoints" not in keys
            or (len(each["keypoints"]) == number and each["keypoints"].shape[2:] == (3,)),
        }
        if "masks" in keys and each["masks"].is_floating_point() and each["masks"].numel():
            least, most = (float(end) for end in each["masks"].aminmax())
            if least < 0 or most > 1:
                raise UsageError(
                    f"the model {model} returned masks from {least:.4g} to {most:.4g}, expected bools or "
                    "probabilities: of logits return masks.sigmoid()."
                )
        if wrong := [name for name in keys if not fits[name]]:
            shape, kind = tuple(each[wrong[0]].shape), each[wrong[0]].dtype
            raise UsageError(
                f"the model {model} returned {wrong[0]} of shape {shape} and {kind} for a picture with "
                f"{number} scores, {expected}"
            )
        for name in keys:
            found[name].append(_flat(name, each[name]))
        if "masks" in keys:
            found.setdefault("mask_size", []).append(torch.tensor(each["masks"].shape[-2:]))
    if "masks" in keys:
        return {**found, "mask_size": torch.stack(found["mask_size"])}
    return found


def _flat(name: str, values: Tensor) -> Tensor:
    if name == "labels":
        return values.long()
    if name == "masks":
        return (values if values.dtype == torch.bool else values > 0.5).flatten()  # torchvision's limit
    return (values.flatten(1) if name == "keypoints" else values).float()
