"""The options of the task image-classification; light to import, for the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dualeval.data.class_folders import check_folder
from dualeval.data.set_names import data_beside
from dualeval.errors import UsageError
from dualeval.models.weights_name import (
    check_weights_file,
    function_beside,
    is_path_of_weights,
    is_published_name,
    model_beside,
)
from dualeval.options.choices import CLASS_ORDERS, DATA_FINGERPRINTS, SPLITS, check_mean, check_std
from dualeval.options.fields import check_fields, option

if TYPE_CHECKING:
    from dualeval.data.cache import DataCache
    from dualeval.models.sources import ModelSource
    from dualeval.tasks import Task

_MODEL = "Model"
_DATA = "Data"
_IMAGES = "Images"


class PictureOptions:
    """What is done with the options of tasks on pictures; the fields are those of the subclasses."""

    model: str | None
    weights: str | None
    download: bool
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None

    def __post_init__(self) -> None:
        check_fields(self)
        check_mean("--mean", self.mean)
        check_std("--std", self.std)
        if self.download and not (self.weights and is_published_name(self.weights)):
            found = "is not given" if self.weights is None else f"is {self.weights}"
            raise UsageError(
                f"--download fetches weights that torchvision publishes, and --weights {found}. Give "
                "--weights DEFAULT or a name such as IMAGENET1K_V1, or leave --download out."
            )

    def check_paths(self) -> None:
        """Check that files are there, before torch is imported."""
        if self.weights and is_path_of_weights(self.weights) and Path(self.weights).suffix:
            check_weights_file(self.weights)

    def _source(self) -> ModelSource:
        from dualeval.models.classifiers import source_of

        return source_of(self.model or "")

    def fetch(self) -> None:
        """Fetch the weights, where that is wanted; one process a node does."""
        # Without data the task is refused: nothing is fetched for that.
        if self.download and self.model and self.weights and getattr(self, "data", None):
            self._source().download(self.weights)

    def make(self, cache: DataCache | None = None, *, model: Any = None, preprocessing: Any = None) -> Task:
        """The task; ``model`` and ``preprocessing`` are those from Python that no text names."""
        from dualeval import tasks
        from dualeval.models.classifiers import arguments_of

        given = {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]
        del given["download"]
        given["metrics"], given["model_arguments"] = given.pop("metric"), arguments_of(given.pop("model_arg"))
        for name, value in (("model", model), ("preprocessing", preprocessing)):
            given[name] = given[name] if value is None else value
        task: Task = getattr(tasks, type(self).__name__.removesuffix("Options"))(**given, cache=cache)
        return task


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
        group=_MODEL,
        metavar="NAME",
        resolve=model_beside,
    )
    weights: str | None = option(
        None, "Checkpoint, DEFAULT, IMAGENET1K_V1, random:SEED.", group=_MODEL, is_path=is_path_of_weights
    )
    data: str | Path | None = option(
        None,
        "Folder of class folders, manifest (.csv), or CIFAR10:DIR.",
        group=_DATA,
        resolve=data_beside,
        metavar="PATH",
    )
    split: str | None = option(
        None, "Part of a data set by name.", group=_DATA, choices=SPLITS, shown="test or val"
    )
    image_root: Path | None = option(
        None, "Folder from which a manifest's paths count.", group=_DATA, shown="the manifest's"
    )
    path_column: str | None = option(
        None, "A manifest's column of paths.", group=_DATA, shown="path, image, file, ..."
    )
    label_column: str | None = option(
        None, "A manifest's column of labels.", group=_DATA, shown="label, class, target, y"
    )
    num_classes: int | None = option(
        None, "Number of classes, if data and weights do not define it.", group=_DATA, least=1
    )
    class_map: Path | None = option(None, "Class index of each folder: a JSON file.", group=_DATA)
    class_order: str | None = option(
        None,
        "Order of class folders: number puts 2 before 10.",
        group=_DATA,
        choices=CLASS_ORDERS,
        shown="known names, else name",
        metavar="name|number",
    )
    data_fingerprint: str = option(
        DATA_FINGERPRINTS[0],
        "Compare image files by size and ends, or by content.",
        group=_DATA,
        choices=DATA_FINGERPRINTS,
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
    download: bool = option(
        False, "Download the weights of --weights DEFAULT, IMAGENET1K_V1, ...", group=_MODEL
    )
    model_arg: tuple[str, ...] = option(
        (),
        "Argument of a factory, timm or torchvision model; repeatable.",
        group=_MODEL,
        metavar="NAME=VALUE",
        is_repeated=True,
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
    crop: int | None = option(
        None, "Crop a square of this side from the centre.", group=_IMAGES, least=1, shown="the model's"
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
    keep: tuple[str, ...] = ()

    def check_paths(self) -> None:
        """And that the data's folder is; what may be a name is left to the task."""
        if self.model is not None and ":" in self.model:
            return  # its library or module is named first
        super().check_paths()
        if self.data and ":" not in str(self.data) and not Path(self.data).suffix:
            check_folder(Path(self.data))


def same_as_classification(name: str) -> Any:
    """A field of another task on pictures that is that of image classification."""
    found = next(each for each in fields(ImageClassificationOptions) if each.name == name)
    return field(default=found.default, metadata=found.metadata)
