"""The task image-classification: one class an image."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from dualeval.columns.late import keeps_late
from dualeval.data.labels import KnownClasses, check_indices
from dualeval.data.preprocessing import Normalisation
from dualeval.data.set_names import refuse_several
from dualeval.errors import UsageError
from dualeval.messages import counted, first_of
from dualeval.metrics import Metric, RowMetric
from dualeval.metrics.classification import ON_REQUEST, classification_metrics, observed_logits
from dualeval.models import classifiers
from dualeval.models.sources.fashion_cnn import EMBEDDED_WEIGHTS as EMBEDDED_WEIGHTS
from dualeval.models.weights import OtherClasses, OtherShapes
from dualeval.options.fields import of_python, with_keywords
from dualeval.tasks import picture_task
from dualeval.tasks.image_data import ASSETS, DataSource
from dualeval.tasks.keywords import ImageClassificationKeywords
from dualeval.tasks.labels import FolderLabels, agreed_classes, check_classes, hint_for, names_of
from dualeval.tasks.options.image_classification import ImageClassificationOptions
from dualeval.tasks.refusals import no_logits, refuse_other_shapes, refuse_other_task, refuse_probabilities

if TYPE_CHECKING:
    from dualeval.data.cache import DataCache
    from dualeval.tasks.image_data import ImageData

# Mean and standard deviation of Fashion-MNIST's training pixels, scaled to [0, 1].
FASHION_MEAN = 0.2860
FASHION_STD = 0.3530


_TOP = 5
_PIXELS = ("resize", "crop", "interpolation", "channels", "mean", "std")


class ImageClassification(picture_task.PictureTask):
    """A classifier on images with one true class each.

    Args:
        model: a name, as on the command line; a module, which is evaluated as it is; or a function without
            arguments that returns one. None: the embedded one.
        data: a folder of class folders, a manifest, or a data set by name.
        metrics: names of metrics; none for the default ones.
        preprocessing: a name, a function of a PIL image, or a mapping of the options from ``resize`` on.
        model_arguments: of what makes the model, by name.
        cache: what other tasks of the run have read of their data.
        options: the others of ``dualeval run``, by the same names (docs/image-classification.md):
            weights, weights_key, weights_prefix, trust_checkpoint, split, image_root, path_column,
            label_column, label_key, quoting, num_classes, class_map, class_order, data_fingerprint, resize,
            crop, interpolation, channels, mean, std, keep.

    Raises:
        UsageError: options, model, weights and data do not fit together.
        TypeError: there is no such option.
    """

    name = "image-classification"
    # All that any metric reads, so that each can be computed later.
    rows = ("target", "prediction", "confidence", "loss", "top", "rank", "nan_logits", "inf_logits")
    on_request = ON_REQUEST

    @with_keywords(ImageClassificationKeywords, ImageClassificationOptions)
    def __init__(
        self,
        *,
        model: str | nn.Module | Callable[[], nn.Module] | None = None,
        data: str | Path | None = None,
        metrics: Sequence[str] = (),
        preprocessing: Any = None,
        model_arguments: Mapping[str, Any] | None = None,
        cache: DataCache | None = None,
        **options: Unpack[ImageClassificationKeywords],
    ) -> None:
        refuse_several(data)
        refuse_other_task(model if isinstance(model, str) else None, None if data is None else Path(data))
        if TYPE_CHECKING:  # for jedi, as in dualeval.evaluate
            ImageClassificationOptions(metric=(), download=False, model_arg=(), **options)  # type: ignore[arg-type]
        settings = of_python(ImageClassificationOptions, options, metrics, data=data)
        asked = {name: getattr(settings, name) for name in _PIXELS if getattr(settings, name) is not None}
        named = {} if preprocessing is None else {"preprocessing": preprocessing}
        asked |= preprocessing if isinstance(preprocessing, Mapping) else named
        weights = settings.weights
        if model is None and (weights is not None or data is not None):
            flag = "--weights" if data is None else "--data"
            raise UsageError(f"{flag} was given without --model. Name the model that is to be evaluated.")
        name = classifiers.EMBEDDED if model is None else model
        source = classifiers.source_of(name, dict(model_arguments or {}), trust=settings.trust_checkpoint)
        self._model_name = model = source.name
        embedded = model == classifiers.EMBEDDED
        if embedded and weights in (None, "DEFAULT"):
            weights = str(EMBEDDED_WEIGHTS)
        if data is None and not embedded:
            raise UsageError(
                f"--model {model} was given without --data. Give --data PATH, or --data {ASSETS} for the "
                "10,000 images of the embedded job."
            )
        super().__init__(source, weights, settings)
        self._data = DataSource(settings)
        self._class_map = None if settings.class_map is None else Path(settings.class_map)
        self._class_order = settings.class_order
        self._asked_classes = settings.num_classes
        whole_files = settings.data_fingerprint == "content"
        self._preprocessing, self._dataset = self._open_data(asked, whole_files, cache)
        self._data_fingerprint = "content" if self._data.is_small else settings.data_fingerprint
        self._metric_names = settings.metric
        self._model_detail = ""

    @property
    def wants_workers(self) -> bool:
        """True where pictures are decoded or resized; others lie in memory as they are evaluated."""
        return not self._dataset.in_memory

    def _open_data(
        self, asked: Mapping[str, Any], whole_files: bool, cache: DataCache | None
    ) -> tuple[picture_task.ChosenPreprocessing, ImageData]:
        """What is done to the images, and the images; sets the number of classes."""
        data, flags = self._data, dict(asked)
        named = flags.pop("preprocessing", None)
        data.check_labels({"--class-map": self._class_map, "--class-order": self._class_order})
        images = data.open(self._labeler(), whole_files=whole_files, cache=cache)
        self._num_classes = agreed_classes(images.labels, self._asked_classes, self._class_map)
        base = picture_task.named_preprocessing(
            named, f"--preprocessing {named}" if isinstance(named, str) else "the argument preprocessing"
        )
        keeps_size = data.is_small and not {"resize", "crop"} & flags.keys()
        known = self._known_normalisation() if keeps_size else None
        needed = {"mean", "std"} if keeps_size else {*picture_task.NEEDED}
        if base is None and known is None and not needed <= flags.keys():
            carried = self._model.carried_preprocessing(self._source, self._num_classes)
            base = picture_task.named_preprocessing(*carried)
        if keeps_size and (base is None or type(base.values) is Normalisation):
            known = known if base is None else (base.values, base.origin)
            chosen = picture_task.choose_for_small(data.small_description, images.sample_shape, known, flags)
        else:
            chosen = picture_task.choose_for_files(self._model, self._source, base, flags)
        return chosen, images.prepared(chosen.values)

    def _labeler(self) -> FolderLabels:
        return FolderLabels(
            class_map=self._class_map,
            order=self._class_order,
            num_classes=self._data.least_classes(self._asked_classes),
            of_weights=self._classes_of_weights,
            weights=self._source.path if self._source.entry is None else None,
        )

    @property
    def _classes_of_weights(self) -> KnownClasses | None:
        """The classes that model and weights tell apart, where their names are known."""
        return self._model.known_classes(self._source)

    def _known_normalisation(self) -> tuple[Normalisation, str] | None:
        """What small images are normalised with, and why, where nobody has to ask for it."""
        fashion = Normalisation(mean=(FASHION_MEAN,), std=(FASHION_STD,))
        if self._weights_are_embedded:
            return fashion, "the model's defaults"
        return (fashion, "Fashion-MNIST's") if self._data.is_embedded else None

    @property
    def _weights_are_embedded(self) -> bool:
        path = self._source.path
        is_shipped = path is not None and path.resolve() == EMBEDDED_WEIGHTS
        return is_shipped and self._model_name == classifiers.EMBEDDED

    @property
    def _may_have_more_classes(self) -> bool:
        """Whether the number of classes is only known to be large enough for those of a class map."""
        return self._dataset.labels.are_partial and self._asked_classes is None

    def dataset(self) -> ImageData:
        return self._dataset

    def to_pack(self, cache: DataCache) -> tuple[ImageData, dict[str, Any]]:
        """What ``dualeval pack`` packs, all of it with labels by name, and their names."""
        if self._data.is_small:
            raise UsageError(f"the {self._data.small_description} lie in memory already: no pack is needed.")
        # Which class each name is, is decided by the run; it may know names for bools.
        names = KnownClasses(of="bools", names=("false", "true"))
        label = FolderLabels(class_map=None, order="name", num_classes=None, of_weights=names)
        whole_files = self._data_fingerprint == "content"
        images = self._data.open(label, whole_files=whole_files, cache=cache).prepared(
            self._preprocessing.values
        )
        labels = images.labels
        facts = {"noun": labels.noun, "names": [*labels.classes], "of_indices": [*labels.of_indices]}
        return images, facts

    def collate(self, samples: Any) -> dict[str, Tensor]:
        """Stack samples to images (n, channels, height, width) and targets int64 (n,)."""
        if isinstance(samples, dict):
            return samples
        images, targets = zip(*samples, strict=True)
        if (stacked := getattr(samples, "stacked", None)) is not None:
            return {"images": stacked, "targets": torch.tensor(targets)}
        refuse_other_shapes(images, self._dataset.sample_shape)
        return {"images": torch.stack(images), "targets": torch.tensor(targets)}

    def _checked(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The model, tried on blank images of the data's shape; it has its weights and is on this device."""
        if hasattr(model, "transform_input"):
            # Of googlenet and inception_v3: it normalises anew, and a state_dict does not say whether.
            self._model_detail = f", transform_input {model.transform_input}"
        shape = self._dataset.sample_shape
        wanted = self._preprocessing.values
        channels = len(wanted.mean), len(wanted.std)
        if set(channels) - {1, shape[0]}:
            raise UsageError(
                f"--mean has {channels[0]} values and --std {channels[1]}, expected {shape[0]} of each, one "
                "per channel, or 1 for all channels."
            )
        self._scale = self._scale_on(device)
        blank = torch.zeros(self._model.trial_images, *shape, dtype=torch.uint8, device=device)
        self._num_classes = self._count_classes(model, blank)
        return model

    def _built(self, build: Callable[..., nn.Module]) -> nn.Module:
        try:
            return build(self._source, self._num_classes, self._loading)
        except OtherClasses as error:
            labels = self._dataset.labels
            if self._may_have_more_classes and error.count > labels.largest:
                return build(self._source, error.count, self._loading)
            if labels.are_partial:
                because = f"the weights {self._source.text} are for {error.count} classes"
                check_indices(labels.classes, error.count, f"--class-map {self._class_map}", because)
            if labels.num_classes is None:  # then neither have they said how many there are
                self._check_classes(f"the model of {self._source.text}", error.count, None)
                asked = "--num-classes" if self._asked_classes else "the model's own number"
                raise UsageError(f"{error.text} ({asked}). Give --num-classes {error.count}.") from error
            raise UsageError(
                f"{error.text}. Give data and weights of the same classes.{self._folders_as_classes()}"
                f"{hint_for(labels, error.count)}"
            ) from error
        except OtherShapes as error:
            if (classes := error.sizes.get(self._num_classes or 0)) is None:
                raise
            hint = hint_for(self._dataset.labels, classes)
            raise UsageError(f"{error}{self._folders_as_classes()}{hint}") from error

    def _folders_as_classes(self) -> str:
        """Which folders or labels have set the number of classes; "" where none have."""
        labels = self._dataset.labels
        if self._asked_classes is not None or len(labels.classes) != self._num_classes:
            return ""
        kind = "class folder" if labels.noun == "folder" else labels.noun
        number, names = counted(len(labels.classes), kind), first_of([*labels.classes], 20)
        return f" The model was made for {self._num_classes} classes, as the data has {number}: {names}."

    def notes(self) -> list[str]:
        return [*super().notes(), *self._dataset.notes()]

    def data_warnings(self) -> list[str]:
        return [*super().data_warnings(), *self._dataset.warnings()]

    def labels_used(self) -> dict[str, Any]:
        assert self._num_classes is not None, "build_model comes first"
        return self._dataset.labels_used(self._num_classes)

    def texts(self, rows: Mapping[str, Any], first: int) -> Mapping[str, Sequence[str | None]]:
        """The names of each image's class and of the predicted one; nothing where no class has a name."""
        return names_of(self._dataset.labels, rows)

    def _count_classes(self, model: nn.Module, images: Tensor) -> int:
        """Run the model once, and return the number of classes that it tells apart."""
        outputs = self._try_out(model, images, lambda copied: self.forward(copied, {"images": images}))
        if not isinstance(outputs, Tensor) or outputs.ndim != 2 or len(outputs) != len(images):
            raise no_logits(self._model_name, outputs, len(images))
        classes = outputs.shape[1]
        refuse_probabilities(f"the model {self._model_name}", outputs)
        expected = None if self._may_have_more_classes else self._num_classes
        self._check_classes(f"the model {self._model_name}", classes, expected)
        return classes

    def _check_classes(self, model: str, classes: int, expected: int | None) -> None:
        check_classes(
            self._dataset.labels,
            model,
            classes,
            expected=expected,
            largest=self._dataset.largest_target,
            class_map=self._class_map,
        )

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Normalise uint8 images on their device, float32 ones are ready; return the logits (n, classes)."""
        outputs = model(self._scaled(batch["images"]))
        # Models of transformers return them among other things.
        logits: Tensor = getattr(outputs, "logits", outputs)
        return logits

    @keeps_late
    def observe(self, outputs: Tensor, batch: dict[str, Tensor]) -> Mapping[str, Tensor]:
        """Loss, confidence, prediction, rank of the target and the five likeliest classes of each image."""
        return observed_logits(outputs, batch["targets"], _TOP, self.requested, observe=self.observe)

    def metrics(self) -> list[Metric | RowMetric]:
        assert self._num_classes is not None, "build_model comes first"
        return classification_metrics(self._metric_names, self._num_classes)

    def options(self) -> dict[str, Any]:
        return {
            **self._model_options(),
            **self._data.to_json(),
            "data_fingerprint": self._data_fingerprint,
            "num_classes": self._num_classes,
            "class_map": None if self._class_map is None else str(self._class_map.absolute()),
            "class_order": self._class_order,
            **self._preprocessing.to_json(),
            "metric": [metric.name for metric in self.metrics()],
        }

    def description(self) -> dict[str, str]:
        as_stored = type(self._preprocessing.values) is Normalisation
        size = "{1} x {2} as stored, ".format(*self._dataset.sample_shape) if as_stored else ""
        return {
            "model": self._model.shown + self._model_detail,
            "weights": self._weights_description(),
            "data": self._data.description(),
            **({} if self._data.is_small else {"labels": str(self._dataset.labels)}),
            "preprocessing": f"{size}{self._preprocessing.values} ({self._preprocessing.origin})",
        }

    def _weights_description(self) -> str:
        if self._weights_are_embedded:
            return f"{EMBEDDED_WEIGHTS.name}, shipped with dualeval"
        return super()._weights_description()

    def fingerprint(self) -> dict[str, Any]:
        """Model name, classes, labels and preprocessing; data and weights have fingerprints of their own."""
        return {
            **self._model_identity(),
            "num_classes": self._num_classes,
            # As a hash: a thousand ranks send each other what they have here.
            "classes_of_folders": self._dataset.labels.fingerprint(),
            "preprocessing": self._preprocessing.to_json(),
            "data_fingerprint": self._data_fingerprint,
        }


def stored_metrics(options: Mapping[str, Any], names: Sequence[str]) -> Sequence[Metric | RowMetric]:
    """Metrics by name, for the rows of a run with these ``options``, which are its ``fingerprint()``."""
    return classification_metrics(names, options["num_classes"])
