"""The task segmentation: a class for each pixel of a picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from dualeval.data.cache import DataCache
from dualeval.data.masks import NO_LABEL, LabelRule, MaskedPictures, open_masked
from dualeval.errors import DualevalError, UsageError
from dualeval.metrics import Metric, RowMetric
from dualeval.metrics.segmentation import COUNTS, counts_of, picture_scores, segmentation_metrics
from dualeval.models.segmenters import TransformersSegmenter, segmenter_of
from dualeval.models.sources import Loading
from dualeval.models.weights import (
    LoadedWeights,
    notes_of,
    options_of,
    place_in_file,
    refuse_choice_without_file,
)
from dualeval.tasks import Task
from dualeval.tasks.image_refusals import refused_images
from dualeval.tasks.refusals import described
from dualeval.tasks.scored_answers import chosen
from dualeval.tasks.segmentation_options import SegmentationOptions
from dualeval.tasks.segmentation_preprocessing import choose_preprocessing, preprocessing_to_json

NAME = "segmentation"
# Ignored where nobody says another label, and it can be no class.
_IGNORED = 255
_TRIED = 16


class Segmentation(Task):
    """A network that gives logits for each pixel, on pictures with masks.

    Args:
        model: a name, as on the command line; a module, which is evaluated as it is; or a function without
            arguments that returns one.
        data: a folder of pictures, or a manifest.
        masks: the folder of their masks; that from which a manifest's paths of masks count.
        metrics: names of metrics; none for all.
        class_names: a file, or the names.
        preprocessing: a name, a function of a PIL image, or a mapping of the options from ``resize`` on.
        model_arguments: of what makes the model, by name.
        cache: what other tasks of the run have read of their data.
        weights: this and all others: as the options of ``dualeval run`` (docs/segmentation.md).

    Raises:
        UsageError: options, model, weights and data do not fit together.
    """

    name = NAME
    rows = (
        *COUNTS,
        "right_pixels",
        "labelled_pixels",
        "is_labelled",
        "picture_iou",
        "nan_logits",
        "inf_logits",
    )
    libraries = ("torchvision", "pillow")
    wants_workers = True

    def __init__(
        self,
        *,
        model: str | nn.Module | Callable[[], nn.Module],
        data: str | Path,
        masks: str | Path | None = None,
        weights: str | None = None,
        weights_key: str | None = None,
        weights_prefix: str | None = None,
        trust_checkpoint: bool = False,
        model_arguments: Mapping[str, Any] | None = None,
        image_root: str | Path | None = None,
        path_column: str | None = None,
        mask_column: str | None = None,
        num_classes: int | None = None,
        ignore_index: int | None = None,
        reduce_labels: str | None = None,
        class_names: str | Path | Sequence[str] | None = None,
        data_fingerprint: str = "ends",
        metrics: Sequence[str] = (),
        preprocessing: Any = None,
        resize: int | None = None,
        interpolation: str | None = None,
        channels: int | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        cache: DataCache | None = None,
    ) -> None:
        steps = {"resize": resize, "interpolation": interpolation, "channels": channels}
        pixels = {name: tuple(each) for name, each in (("mean", mean), ("std", std)) if each is not None}
        asked: dict[str, Any] = {name: step for name, step in steps.items() if step is not None} | pixels
        # Under the names of the command line's options, which checks them.
        labels: Any = {
            "num_classes": num_classes,
            "ignore_index": ignore_index,
            "reduce_labels": reduce_labels,
        }
        SegmentationOptions(model="", data=Path(data), data_fingerprint=data_fingerprint, **labels, **asked)
        self._model = segmenter_of(model, dict(model_arguments or {}), trust=trust_checkpoint)
        if weights is None and self._model.needs_weights:
            raise UsageError(
                f"--model {self._model.name} was given without --weights. Give --weights PATH, --weights "
                "DEFAULT (the library's own) or --weights random:SEED."
            )
        refuse_choice_without_file(
            weights, weights_key, weights_prefix, trust_checkpoint and not self._model.needs_trust
        )
        self._loading = Loading(key=weights_key, prefix=weights_prefix, on_load=self._remember)
        # What was taken from a file that `weights` names; None before `build_model`.
        self.loaded_weights: LoadedWeights | None = None
        self._source = self._model.find_weights(weights)
        self._num_classes = num_classes
        self._preprocessing = choose_preprocessing(
            self._model, self._source, num_classes, preprocessing, asked
        )
        reduces = isinstance(self._model, TransformersSegmenter) and self._model.reduces_labels()
        self._rule = LabelRule(
            ignore=_IGNORED if ignore_index is None else ignore_index,
            reduce=reduces if reduce_labels is None else reduce_labels == "yes",
        )
        self._ignore_is_given = ignore_index is not None
        self._paths = {
            "data": Path(data).absolute(),
            "masks": None if masks is None else Path(masks).absolute(),
            "image_root": None if image_root is None else Path(image_root).absolute(),
        }
        self._columns = {"path_column": path_column, "mask_column": mask_column}
        self._data_fingerprint = data_fingerprint
        self._dataset = open_masked(
            Path(data),
            None if masks is None else Path(masks),
            self._rule,
            self._preprocessing.values,
            image_root=None if image_root is None else Path(image_root),
            **self._columns,
            whole_files=data_fingerprint == "content",
            cache=cache or DataCache(),
        )
        self._class_names = _names_of(class_names)
        self._metric_names = tuple(metrics)
        # A name that no metric has is refused now, before anything is built.
        chosen(self._metric_names, segmentation_metrics(1))
        self._scale: tuple[Tensor, Tensor] | None = None

    def dataset(self) -> MaskedPictures:
        """The pictures with their masks."""
        return self._dataset

    def collate(self, samples: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Any]:
        """Group pictures by their sizes and those of their masks, in the order in which sizes come.

        A batch always has the same samples, so its groups have, too: no bit depends on who computes them.
        """
        groups: dict[Any, list[int]] = {}
        for place, (picture, labels) in enumerate(samples):
            if picture.numel():
                groups.setdefault((picture.shape, picture.dtype, labels.shape), []).append(place)
        return {
            "size": len(samples),
            "groups": [
                {
                    "images": torch.stack([samples[place][0] for place in places]),
                    "labels": torch.stack([samples[place][1] for place in places]),
                    "places": torch.tensor(places),
                }
                for places in groups.values()
            ],
        }

    def build_model(self, device: torch.device) -> nn.Module:
        """Make the model, give it its weights, and try it on a black picture."""
        return self._tried(
            self._model.build(self._source, self._num_classes, self._loading).to(device), device
        )

    def build_late(self, device: torch.device) -> nn.Module:
        """As ``build_model``, on the CPU: the values of the parameters stay in their file where they can."""
        self._late_notes: list[str] = []
        build = partial(self._model.build_late, note=self._late_notes.append)
        model = self._tried(build(self._source, self._num_classes, self._loading), torch.device("cpu"))
        self._scale = self._scale_on(device)
        return model

    def _remember(self, loaded: LoadedWeights) -> None:
        self.loaded_weights = loaded

    def _scale_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, float32 (channels, 1, 1)."""
        wanted = self._preprocessing.values
        mean, std = (
            torch.tensor(values, dtype=torch.float32, device=device).view(-1, 1, 1)
            for values in (wanted.mean, wanted.std)
        )
        return mean, std

    def _tried(self, model: nn.Module, device: torch.device) -> nn.Module:
        self._scale = self._scale_on(device)
        blanks = (self._dataset.placeholder(index)[0] for index in range(min(_TRIED, len(self._dataset))))
        any_size = torch.zeros(3, 64, 64, dtype=torch.uint8)
        image = next((blank for blank in blanks if blank.numel()), any_size)
        images = torch.stack([image] * self._model.trial_images).to(device)
        try:
            with torch.inference_mode():
                [logits] = self.forward(model, {"groups": [{"images": images}]})
        except (DualevalError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of the model's own code any
            raise refused_images(error, self._model.name, model, images) from error
        self._check_classes(logits)
        return model

    def _check_classes(self, logits: Tensor) -> None:
        """Set the number of classes, which all of the options must agree on."""
        found, name = logits.shape[1], self._model.name
        if found == 1:
            raise UsageError(
                f"the model {name} gives one logit a pixel, expected one for each class. Of two classes let "
                "its forward return torch.cat([torch.zeros_like(logits), logits], dim=1)."
            )
        if self._num_classes not in (None, found):
            raise UsageError(
                f"the model {name} has {found} classes, and --num-classes {self._num_classes} was given. "
                "Give data and model of the same classes."
            )
        names = self._class_names
        if names and len(names) != found:
            raise UsageError(
                f"--class-names has {len(names)} names, and the model {name} has {found} classes"
            )
        self._num_classes = self._rule.classes = found
        if found > _IGNORED and not self._ignore_is_given:
            self._rule.ignore = None

    def forward(self, model: nn.Module, batch: Mapping[str, Any]) -> list[Tensor]:
        """The logits of each group, (pictures, classes, height, width)."""
        return [self._logits(model, group["images"]) for group in batch["groups"]]

    def _logits(self, model: nn.Module, images: Tensor) -> Tensor:
        assert self._scale is not None, "build_model comes first"
        mean, std = self._scale
        if images.dtype == torch.uint8:
            images = images.float().div_(255).sub_(mean).div_(std)
        outputs = model(images)
        # torchvision's networks return a dict, whose "aux" is for training; those of transformers an object.
        found = outputs.get("out") if isinstance(outputs, Mapping) and "out" in outputs else outputs
        found = getattr(found, "logits", found)
        if not isinstance(found, Tensor) or found.ndim != 4 or len(found) != len(images):
            raise UsageError(
                f"the model {self._model.name} returned {described(outputs)} for {len(images)} pictures, "
                "expected logits of shape (pictures, classes, height, width), or a dict with these as "
                "'out'. Wrap it in a module whose forward returns them."
            )
        return found

    def check_batches(self, batch_size: int, samples: int) -> None:
        """Refuse batches of a size that the model does not take."""
        self._model.check_batches(batch_size, samples)

    def observe(self, outputs: Sequence[Tensor], batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Counts of pixels by class, of each picture at its mask's own size."""
        assert self._num_classes is not None, "build_model comes first"
        size, classes = batch["size"], self._num_classes
        device = outputs[0].device
        counts = torch.zeros(size, 3, classes, dtype=torch.int64, device=device)
        nonfinite = torch.zeros(size, 2, dtype=torch.bool, device=device)
        for logits, group in zip(outputs, batch["groups"], strict=True):
            found = [
                torch.stack(counts_of(labels, _predicted(own, labels.shape), classes))
                for own, labels in zip(logits, group["labels"], strict=True)
            ]
            counts[group["places"]] = torch.stack(found)
            flat = logits.flatten(1)
            nonfinite[group["places"]] = torch.stack([flat.isnan().any(1), flat.isinf().any(1)], dim=1)
        columns = dict(zip(COUNTS, counts.unbind(1), strict=True))
        return {**columns, "nan_logits": nonfinite[:, 0], "inf_logits": nonfinite[:, 1]}

    def postprocess(self, columns: Mapping[str, Tensor], samples: range) -> dict[str, Tensor]:
        """Add each picture's own scores."""
        return {**columns, **picture_scores(*(columns[name] for name in COUNTS))}

    def metrics(self) -> list[Metric | RowMetric]:
        """The metrics asked for, or all."""
        assert self._num_classes is not None, "build_model comes first"
        return stored_metrics({"num_classes": self._num_classes}, self._metric_names)

    def notes(self) -> list[str]:
        """Where in a checkpoint the weights were found, and which masks have no picture."""
        late = getattr(self, "_late_notes", [])
        return [*self._model.notes(), *notes_of(self.loaded_weights), *late, *self._dataset.notes]

    def data_warnings(self) -> list[str]:
        """Where preprocessing may be another than the model's, and which pictures have no mask."""
        return [*filter(None, [self._preprocessing.warning]), *self._dataset.warnings]

    def labels_used(self) -> dict[str, Any]:
        """The classes' names, where they are known."""
        known = self._model.known_classes(self._source)
        names = self._class_names or (() if known is None else known.names)
        return (
            {"rule": "numbers of pixels", "classes": list(names)} if len(names) == self._num_classes else {}
        )

    def sources(self) -> list[Any]:
        """The factory that made the model, where it has one, and the user's preprocessing."""
        function = getattr(self._preprocessing.values, "function", None)
        return [*self._model.sources(), *([] if function is None else [function])]

    def options(self) -> dict[str, Any]:
        """The options as they are used; null for what is not done."""
        path = self._source.path
        return {
            "model": self._model.name,
            **({"model_arg": self._arguments()} if self._model.arguments else {}),
            "weights": self._source.text if path is None else str(path.absolute()),
            **options_of(self.loaded_weights),
            "trust_checkpoint": self._model.trust,
            **{name: None if path is None else str(path) for name, path in self._paths.items()},
            **self._columns,
            **self._label_options(),
            "class_names": list(self._class_names) or None,
            "data_fingerprint": self._data_fingerprint,
            **preprocessing_to_json(self._preprocessing.values),
            "metric": [metric.name for metric in self.metrics()],
        }

    def _label_options(self) -> dict[str, Any]:
        return {
            "num_classes": self._num_classes,
            "ignore_index": self._rule.ignore,
            "reduce_labels": "yes" if self._rule.reduce else "no",
        }

    def _arguments(self) -> list[str]:
        return [f"{name}={value!r}" for name, value in sorted(self._model.arguments.items())]

    def description(self) -> dict[str, str]:
        """Model, weights, data, preprocessing, and how logits and masks are compared."""
        source, rule = self._source, self._rule
        weights = source.text if source.seed is None else f"{source.text}, untrained"
        if source.path is not None:
            weights = f"{source.path}{place_in_file(self.loaded_weights)}"
        masks = "" if self._paths["masks"] is None else f", masks of {self._paths['masks'].name}"
        left_out = "" if rule.ignore is None else f", {rule.ignore} ignored"
        reduced = ", labels less 1 (0 ignored)" if rule.reduce else ""
        return {
            "model": self._model.shown,
            "weights": weights,
            "data": f"{self._paths['data']}{masks}",
            "preprocessing": f"{self._preprocessing.values} ({self._preprocessing.origin})",
            "compared": f"at each mask's own size, logits by bilinear interpolation (align_corners=False); "
            f"{self._num_classes} classes{left_out}{reduced}",
        }

    def fingerprint(self) -> dict[str, Any]:
        """Model name, labels, names and preprocessing; data and weights have fingerprints of their own."""
        return {
            "model": self._model.identity,
            **({"model_arguments": self._arguments()} if self._model.arguments else {}),
            **self._label_options(),
            "class_names": list(self._class_names),
            "preprocessing": preprocessing_to_json(self._preprocessing.values),
            "data_fingerprint": self._data_fingerprint,
        }


def _predicted(logits: Tensor, size: torch.Size) -> Tensor:
    """The class of each pixel, -1 for one with a NaN logit: (classes, h, w) brought to (height, width)."""
    # A picture at a time: all classes of a whole batch in full size would not fit into memory.
    logits = logits.float()
    if logits.shape[1:] != size:
        logits = interpolate(logits[None], size=tuple(size), mode="bilinear", align_corners=False)[0]
    # The first of equal ones; a NaN is the largest.
    largest, predicted = logits.max(0)
    return torch.where(largest.isnan(), NO_LABEL, predicted)


def _names_of(given: str | Path | Sequence[str] | None) -> tuple[str, ...]:
    """The classes' names: given, with commas between, or in a file: JSON, or a line each."""
    if given is None or not isinstance(given, (str, Path)):
        return tuple(given or ())
    if "," in str(given):
        return tuple(name.strip() for name in str(given).split(","))
    try:
        text = Path(given).read_text("utf-8")
        found = json.loads(text) if Path(given).suffix == ".json" else text.splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--class-names {given} cannot be read: {error}. Expected a file with a name a line, or .json "
            "with a list of names, or names with commas between."
        ) from error
    names = [str(name).strip() for name in (found.values() if isinstance(found, dict) else found)]
    return tuple(filter(None, names))


def stored_metrics(options: Mapping[str, Any], names: Sequence[str]) -> list[Metric | RowMetric]:
    """Metrics by name, for the rows of a run with these ``options``, which are its ``fingerprint()``."""
    every = segmentation_metrics(options["num_classes"])
    return chosen(names, every) if names else [*every]
