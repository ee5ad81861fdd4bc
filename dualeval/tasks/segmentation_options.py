"""The options of the task segmentation; light to import, for the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from dualeval.models.weights_name import model_beside
from dualeval.options.fields import option
from dualeval.tasks.image_classification_options import PictureOptions
from dualeval.tasks.image_classification_options import same_as_classification as same

if TYPE_CHECKING:
    from dualeval.models.sources import ModelSource

_DATA = "Data"


@dataclass(frozen=True, kw_only=True)
class SegmentationOptions(PictureOptions):
    """A class for each pixel: pictures and masks."""

    start: ClassVar[Mapping[str, str]] = {
        "imports": "import torch; from torchvision.models.segmentation import fcn_resnet50",
        "model": "net = fcn_resnet50(num_classes=5, weights=None, weights_backbone=None); "
        'net.load_state_dict(torch.load("net.pt", weights_only=True)); return net',
        "data": "val/img",
        "more": ', masks="val/masks", preprocessing="imagenet"',
    }

    @staticmethod
    def known_metrics() -> Mapping[str, str]:
        """The metrics that can be asked for by name."""
        return {
            "iou": "intersection over union of each class, and the mean (mIoU)",
            "pixel_accuracy": "fraction of labelled pixels whose class is predicted",
            "mean_accuracy": "that fraction of each class's pixels, and the mean",
            "dice": "Dice coefficient of each class, which is its F1, and the mean",
            "picture_iou": "mean IoU of each picture alone, averaged over pictures",
            "nonfinite_logits": "how many pictures have a NaN or an infinity among their logits",
        }

    model: str = option(
        help="torchvision name, hf:DIR, pkg.mod:fn, file.", group="Model", resolve=model_beside
    )
    weights: str | None = same("weights")
    weights_key: str | None = same("weights_key")
    weights_prefix: str | None = same("weights_prefix")
    trust_checkpoint: bool = same("trust_checkpoint")
    download: bool = same("download")
    model_arg: tuple[str, ...] = same("model_arg")
    data: Path = option(help="Folder of pictures, or a manifest (.csv).", group=_DATA)
    masks: Path | None = option(
        None, "Folder of their masks, of the same names.", group=_DATA, shown="the manifest's", metavar="DIR"
    )
    path_column: str | None = same("path_column")
    mask_column: str | None = option(
        None, "A manifest's column of masks.", group=_DATA, shown="mask, label, ..."
    )
    num_classes: int | None = option(
        None, "Number of classes, if the model does not tell.", group=_DATA, least=2
    )
    ignore_index: tuple[int, ...] | None = option(
        None, "Labels of pixels that do not count.", group=_DATA, shown="255"
    )
    reduce_labels: Literal["yes", "no"] | None = option(
        None, "Label 0 does not count, 1 is class 0.", group=_DATA, shown="the model's, else no"
    )
    class_names: str | None = option(
        None, "Names of the classes: a file, or a,b,c.", group=_DATA, is_path=lambda text: "," not in text
    )
    data_fingerprint: str = same("data_fingerprint")
    preprocessing: str | None = same("preprocessing")
    resize: int | None = same("resize")
    interpolation: str | None = same("interpolation")
    channels: Literal[1, 3] | None = same("channels")
    mean: tuple[float, ...] | None = same("mean")
    std: tuple[float, ...] | None = same("std")
    metric: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()

    def _source(self) -> ModelSource:
        from dualeval.models.segmenters import segmenter_of

        return segmenter_of(self.model)
