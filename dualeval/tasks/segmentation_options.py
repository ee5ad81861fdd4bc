"""The options of the task segmentation; light to import, for the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dualeval.errors import UsageError
from dualeval.models.weights_name import (
    check_weights_file,
    function_beside,
    is_path_of_weights,
    is_published_name,
    model_beside,
)
from dualeval.options.choices import DATA_FINGERPRINTS, check_mean, check_std
from dualeval.options.fields import check_fields, option

if TYPE_CHECKING:
    from dualeval.data.cache import DataCache
    from dualeval.tasks.segmentation import Segmentation

_MODEL = "Model"
_DATA = "Data"
_IMAGES = "Images"


@dataclass(frozen=True, kw_only=True)
class SegmentationOptions:
    """A class for each pixel: a folder of pictures and one of masks, or a manifest.

    Attributes:
        known_metrics: the metrics that can be asked for by name, with a line each.
    """

    known_metrics: ClassVar[Mapping[str, str]] = {
        "iou": "intersection over union of each class, and the mean (mIoU)",
        "pixel_accuracy": "fraction of labelled pixels whose class is predicted",
        "mean_accuracy": "that fraction of each class's pixels, and the mean",
        "dice": "Dice coefficient of each class, which is its F1, and the mean",
        "picture_iou": "mean IoU of each picture alone, averaged over pictures",
        "nonfinite_logits": "how many pictures have a NaN or an infinity among their logits",
    }

    model: str = option(
        help="torchvision name, hf:DIR, pkg.mod:fn, file.",
        group=_MODEL,
        resolve=model_beside,
    )
    weights: str | None = option(
        None, "Checkpoint, DEFAULT, random:SEED.", group=_MODEL, is_path=is_path_of_weights
    )
    weights_key: str | None = option(
        None, "Key of the state_dict in a checkpoint, such as model_ema.", group=_MODEL
    )
    weights_prefix: str | None = option(
        None, "Use only tensors whose names start with this; remove it.", group=_MODEL
    )
    trust_checkpoint: bool = option(
        False, "Open files that can run code: pickles, TorchScript, .pt2.", group=_MODEL
    )
    download: bool = option(False, "Download the weights of --weights DEFAULT, ...", group=_MODEL)
    model_arg: tuple[str, ...] = option(
        (),
        "Argument of a factory or torchvision model; repeatable.",
        group=_MODEL,
        metavar="NAME=VALUE",
        is_repeated=True,
    )
    data: Path = option(help="Folder of pictures, or a manifest (.csv).", group=_DATA)
    masks: Path | None = option(
        None, "Folder of their masks, of the same names.", group=_DATA, shown="the manifest's", metavar="DIR"
    )
    image_root: Path | None = option(
        None, "Folder from which a manifest's paths count.", group=_DATA, shown="the manifest's"
    )
    path_column: str | None = option(
        None, "A manifest's column of pictures.", group=_DATA, shown="path, image, file, ..."
    )
    mask_column: str | None = option(
        None, "A manifest's column of masks.", group=_DATA, shown="mask, label, ..."
    )
    num_classes: int | None = option(
        None, "Number of classes, if the model does not tell.", group=_DATA, least=2
    )
    ignore_index: int | None = option(
        None, "Label of pixels that do not count.", group=_DATA, least=0, shown="255"
    )
    reduce_labels: Literal["yes", "no"] | None = option(
        None, "Label 0 does not count, 1 is class 0.", group=_DATA, shown="the model's, else no"
    )
    class_names: str | None = option(
        None,
        "Names of the classes: a file, or a,b,c.",
        group=_DATA,
        is_path=lambda text: "," not in text,
    )
    data_fingerprint: str = option(
        DATA_FINGERPRINTS[0],
        "Compare files by size and ends, or by content.",
        group=_DATA,
        choices=DATA_FINGERPRINTS,
    )
    preprocessing: str | None = option(
        None,
        "none, imagenet or FILE.py:function.",
        group=_IMAGES,
        shown="the model's",
        resolve=function_beside,
    )
    resize: int | None = option(
        None, "Resize the shorter side to this many pixels.", group=_IMAGES, least=1, shown="the model's"
    )
    interpolation: str | None = option(
        None, "nearest, bilinear, bicubic or lanczos.", group=_IMAGES, shown="the model's"
    )
    channels: Literal[1, 3] | None = option(
        None, "Channels of the images: 3 for RGB, 1 for grey.", group=_IMAGES, shown="3"
    )
    mean: tuple[float, ...] | None = option(
        None, "Mean of each channel, with commas.", group=_IMAGES, shown="the model's"
    )
    std: tuple[float, ...] | None = option(
        None, "Standard deviation of each channel.", group=_IMAGES, shown="the model's"
    )
    metric: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        check_mean("--mean", self.mean)
        check_std("--std", self.std)
        if self.download and not (self.weights and is_published_name(self.weights)):
            raise UsageError(
                "--download fetches weights that torchvision publishes: give --weights DEFAULT, or leave it "
                "out."
            )

    def check_paths(self) -> None:
        """Check that files are there, before torch is imported; what may be a name is left to the task.

        Raises:
            UsageError: one is not.
        """
        if self.weights and is_path_of_weights(self.weights) and Path(self.weights).suffix:
            check_weights_file(self.weights)

    def fetch(self) -> None:
        """Fetch the weights, where that is wanted; one process a node does."""
        if self.download and self.weights:
            from dualeval.models.segmenters import segmenter_of

            segmenter_of(self.model).download(self.weights)

    def make(
        self, cache: DataCache | None = None, *, model: Any = None, preprocessing: Any = None
    ) -> Segmentation:
        """The task.

        Args:
            cache: what other tasks of the run have read of their data.
            model: from Python, a module or a function that returns one, in place of the name.
            preprocessing: likewise a function, or a dict of fields.
        """
        from dualeval.models.classifiers import arguments_of
        from dualeval.tasks.segmentation import Segmentation

        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given["metrics"] = given.pop("metric")
        given["model_arguments"] = arguments_of(given.pop("model_arg"))
        del given["download"]
        given["model"] = self.model if model is None else model
        given["preprocessing"] = self.preprocessing if preprocessing is None else preprocessing
        return Segmentation(**given, cache=cache)
