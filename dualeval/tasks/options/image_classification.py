"""The options of image-classification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from dualeval.data.set_names import data_beside, kind_at
from dualeval.models.weights import model_beside
from dualeval.options.choices import SPLITS
from dualeval.options.fields import option
from dualeval.tasks.options.base import DATA, IMAGES, MODEL, PictureOptions, same


@dataclass(frozen=True, kw_only=True)
class ImageClassificationOptions(PictureOptions):
    """One class an image: class folders, a manifest, or a data set by name."""

    # What ``dualeval init`` writes for this task.
    start: ClassVar[Mapping[str, str]] = {
        "imports": "import torch; import torchvision",
        "model": "model = torchvision.models.resnet18(num_classes=10); "
        'model.load_state_dict(torch.load("checkpoint.pt", weights_only=True)); return model',
        "data": "val",
        "more": ', preprocessing="imagenet"',
    }

    @staticmethod
    def known_metrics() -> Mapping[str, str]:
        """The metrics that can be asked for by name; it imports torch."""
        from dualeval.metrics.classification import LINES

        return LINES

    model: str | None = option(
        None,
        "torchvision name, timm:NAME, hf:DIR, pkg.mod:fn, file.",
        group=MODEL,
        metavar="NAME",
        resolve=model_beside,
    )
    data: str | Path | None = option(
        None,
        "Class folders, manifest (.csv), shards (.tar), CIFAR10:DIR.",
        group=DATA,
        resolve=data_beside,
        metavar="PATH",
        takes_urls=True,
    )
    split: str | None = option(
        None, "Part of a data set by name.", group=DATA, choices=SPLITS, shown="test or val"
    )
    image_root: Path | None = option(
        None,
        "Folder that a manifest's paths are relative to.",
        group=DATA,
        shown="the manifest's",
        takes_urls=True,
    )
    path_column: str | None = same("path_column")
    label_column: str | None = option(
        None, "A manifest's column of labels.", group=DATA, shown="label, class, target, y"
    )
    label_key: str | None = option(
        None, "Key of the label in tar shards' .json.", group=DATA, shown=".cls, or label, class, ..."
    )
    quoting: str | None = same("quoting")
    num_classes: int | None = option(
        None, "Number of classes, if data and weights do not define it.", group=DATA, least=1
    )
    class_map: Path | None = same("class_map")
    class_order: str | None = same("class_order")
    data_fingerprint: str = same("data_fingerprint")
    preprocessing: str | None = same("preprocessing")
    resize: int | None = same("resize")
    crop: int | None = option(
        None, "Crop a square of this side from the centre.", group=IMAGES, least=1, shown="the model's"
    )
    interpolation: str | None = same("interpolation")
    channels: Literal[1, 3] | None = same("channels")
    mean: tuple[float, ...] | None = same("mean")
    std: tuple[float, ...] | None = same("std")

    def check_paths(self) -> None:
        """And that the data's folder is; what may be a name is left to the task."""
        if self.model is not None and ":" in self.model:
            return  # its library or module is named first
        super().check_paths()
        if self.data and ":" not in str(self.data) and not Path(self.data).suffix:
            kind_at(Path(self.data))
