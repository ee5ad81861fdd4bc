"""The options of detection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from dualeval.models.weights import model_beside
from dualeval.options.fields import option
from dualeval.tasks.options.base import DATA, MODEL, PictureOptions, same

if TYPE_CHECKING:
    from dualeval.models.sources.source import ModelSource

_BOXES = "Boxes"
# It imports this module.
_DETECTORS = "dualeval.tasks.detection.detectors"
_IOU_TYPES = ("bbox", "segm", "keypoints")


@dataclass(frozen=True, kw_only=True)
class DetectionOptions(PictureOptions):
    """Objects in pictures, with annotations as COCO writes them."""

    start: ClassVar[Mapping[str, str]] = {
        "imports": "import torch",
        "model": "from transformers import AutoModelForObjectDetection as Detector; "
        'return Detector.from_pretrained("models/mine")',
        "data": "val2017",
        "more": ', annotations="annotations/instances_val2017.json"',
    }

    @staticmethod
    def known_metrics() -> Mapping[str, str]:
        """The metrics that can be asked for by name."""
        return {
            "ap": "COCO's average precision and recall of boxes, by pycocotools; all, by size, by class",
            "mask_ap": "the same of masks, with --iou-type segm",
            "keypoint_ap": "the same of keypoints, with --iou-type keypoints",
            "f1": "F1 at an overlap of 0.5, of detections with a score of at least 0.5",
            "confusion": "which categories were taken for which, likewise; the last one is nothing",
        }

    model: str = option(help="hf:DIR, torchvision name, pkg.mod:fn.", group=MODEL, resolve=model_beside)
    data: Path = option(help="Folder of the pictures.", group=DATA)
    annotations: Path | None = option(
        None, "Their annotations, JSON as COCO has it.", group=DATA, shown="beside the folder", metavar="FILE"
    )
    category_names: str | None = option(
        None,
        "Name of each label of the model: a file, or a,b,c.",
        group=DATA,
        is_path=lambda text: "," not in text,
        shown="the model's",
    )
    category_map: str | None = option(
        None,
        "Category of the model's names: person=human,car=vehicle, or a JSON file.",
        group=DATA,
        is_path=lambda text: "=" not in text,
    )
    num_classes: int | None = option(
        None, "Classes of torchvision's network, with background.", group=MODEL, least=2
    )
    orientation: Literal["stored", "shown"] | None = option(
        None, "Of pictures that EXIF turns, if sizes do not tell.", group=DATA, shown="found out"
    )
    order: Literal["id", "shape"] = option(
        "id", "Order of the pictures, so which are in a batch.", group=DATA
    )
    boxes_in: Literal["picture", "input", "stretched"] | None = option(
        None,
        "Whose pixels a function's boxes are in: the picture's, or those of the input that --preprocessing "
        "made.",
        group=_BOXES,
        shown="asked, where these differ",
    )
    iou_type: tuple[str, ...] = option(
        ("bbox",),
        "What is compared: bbox, segm, keypoints.",
        group=_BOXES,
        fits=lambda value: isinstance(value, tuple) and value != () and set(value) <= {*_IOU_TYPES},
        expected="bbox, segm or keypoints, or several with commas",
        metavar="A,B",
    )
    sigmas: tuple[float, ...] | None = option(
        None, "How exact each keypoint is.", group=_BOXES, shown="COCO's 17", metavar="A,B"
    )
    score_threshold: float | None = option(None, "Leave out detections below this score.", group=_BOXES)
    max_detections: int | None = option(
        None,
        "Detections of a category that count, a picture.",
        group=_BOXES,
        least=1,
        shown="100; of keypoints 20",
    )
    bootstrap: int = option(1000, "Resamples for the intervals; 0: none.", group=_BOXES, least=0)
    data_fingerprint: str = same("data_fingerprint")
    preprocessing: str | None = same("preprocessing")

    def source(self) -> ModelSource:
        from dualeval.models.classifiers import arguments_of

        made: ModelSource = import_module(_DETECTORS).detector_of(
            self.model, arguments_of(self.model_arg), kinds=self.iou_type, trust=self.trust_checkpoint
        )
        return made
