"""The options of segmentation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from dualeval.models.weights import model_beside
from dualeval.options.fields import option
from dualeval.tasks.options.base import DATA, MODEL, PictureOptions, same

if TYPE_CHECKING:
    from dualeval.models.sources.source import ModelSource


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
            "mean_accuracy": "the same fraction for each class, and the mean",
            "dice": "Dice coefficient (F1) of each class, and the mean",
            "picture_iou": "mean IoU of each picture alone, averaged over pictures",
            "nonfinite_logits": "how many pictures have a NaN or an infinity among their logits",
            "pixel_check": "warnings of absent classes, ignored pixels and turned pictures; always included",
        }

    model: str = option(help="torchvision name, hf:DIR, pkg.mod:fn, file.", group=MODEL, resolve=model_beside)
    data: Path = option(
        help="Folder of pictures, a manifest (.csv), or shards (.tar).", group=DATA, takes_urls=True
    )
    masks: Path | None = option(
        None, "Folder of their masks, of the same names.", group=DATA, shown="the manifest's", metavar="DIR"
    )
    path_column: str | None = same("path_column")
    mask_column: str | None = option(
        None, "A manifest's column of masks.", group=DATA, shown="mask, label, ..."
    )
    quoting: str | None = same("quoting")
    num_classes: int | None = option(
        None, "Number of classes, if the model does not tell.", group=DATA, least=2
    )
    ignore_index: tuple[int, ...] | Literal["none"] | None = option(
        None,
        "Labels of pixels that do not count, or none.",
        group=DATA,
        shown="255",
        fits=lambda value: value in (None, "none") or isinstance(value, tuple),
        expected="whole numbers with commas between, or none",
    )
    mask_values: str | None = option(
        None,
        "Class of each label: 0=0,255=1,7=none, or a JSON file.",
        group=DATA,
        is_path=lambda text: "=" not in text,
        shown="the label",
    )
    reduce_labels: Literal["yes", "no"] | None = option(
        None, "Label 0 does not count, 1 is class 0.", group=DATA, shown="the model's, else no"
    )
    class_names: str | None = option(
        None, "Names of the classes: a file, or a,b,c.", group=DATA, is_path=lambda text: "," not in text
    )
    keep_masks: bool = option(False, "Keep each predicted mask in the rows, as run lengths.", group=DATA)
    data_fingerprint: str = same("data_fingerprint")
    preprocessing: str | None = same("preprocessing")
    resize: int | None = same("resize")
    interpolation: str | None = same("interpolation")
    channels: Literal[1, 3] | None = same("channels")
    mean: tuple[float, ...] | None = same("mean")
    std: tuple[float, ...] | None = same("std")

    def source(self) -> ModelSource:
        from dualeval.models.classifiers import arguments_of
        from dualeval.models.segmenters import segmenter_of

        return segmenter_of(self.model, arguments_of(self.model_arg), trust=self.trust_checkpoint)
