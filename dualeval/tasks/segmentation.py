"""The task segmentation: a class for each pixel of a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import interpolate
from typing_extensions import Unpack

from dualeval.columns.ragged import Column, as_column
from dualeval.data.cache import DataCache
from dualeval.data.masks import NO_LABEL, LabelRule, MaskedPictures, open_masked, read_mask_values
from dualeval.data.pictures import prepare
from dualeval.data.preprocessing import OwnPreprocessing
from dualeval.data.set_names import refuse_several
from dualeval.data.stores.path import path_at
from dualeval.data.table import TableOptions
from dualeval.errors import UsageError
from dualeval.messages import listed
from dualeval.metrics import Metric, RowMetric
from dualeval.metrics.metric import chosen
from dualeval.metrics.segmentation import COUNTS, PixelCheck, counts_of, picture_scores, segmentation_metrics
from dualeval.models.segmenters import TransformersSegmenter, published_uncropped, segmenter_of
from dualeval.options.fields import of_python, with_keywords
from dualeval.tasks import place_of
from dualeval.tasks.keywords import SegmentationKeywords
from dualeval.tasks.mask_layers import COLOURS, colour_of, layers_of, runs_of
from dualeval.tasks.options.segmentation import SegmentationOptions
from dualeval.tasks.picture_task import PictureTask, choose_uncropped
from dualeval.tasks.refusals import describe

# Ignored where nobody says another label, and it can be no class.
_IGNORED = (255,)
_TRIED = 16
# Of the input's sides: strides of networks, and of patches.
_STRIDES = (1, 2, 4, 8, 16, 32, 7, 14)
# With --keep-masks.
_MASK = "predicted_mask"
_PIXELS = ("resize", "interpolation", "channels", "mean", "std")


class Segmentation(PictureTask):
    """A network that gives logits for each pixel, on pictures with masks.

    Args:
        model: a name, as on the command line; a module, which is evaluated as it is; or a function without
            arguments that returns one.
        data: a folder of pictures, or a manifest.
        masks: the folder of their masks.
        mask_values: the class of each label in masks, None for one that does not count; a file, or a text.
        class_names: a file, or the names.
        preprocessing: a name, a function of a PIL image, or a mapping of mean, std and perhaps resize,
            interpolation and channels.
        metrics: names of metrics; none for all.
        model_arguments: of what makes the model, by name.
        cache: what other tasks of the run have read of their data.
        options: the others of ``dualeval run``, with the same names and defaults (docs/segmentation.md):
            weights, weights_key, weights_prefix, trust_checkpoint, path_column, mask_column, quoting,
            num_classes, ignore_index, reduce_labels, keep_masks, data_fingerprint, keep, resize,
            interpolation, channels, mean, std.

    Raises:
        UsageError: options, model, weights and data do not fit together.
        TypeError: there is no such option.
    """

    name = "segmentation"
    legend = "A pixel has the colour of its class."

    @with_keywords(SegmentationKeywords, SegmentationOptions)
    def __init__(
        self,
        *,
        model: str | nn.Module | Callable[[], nn.Module],
        data: str | Path,
        masks: str | Path | None = None,
        mask_values: str | Path | Mapping[int, int | None] | None = None,
        class_names: str | Path | Sequence[str] | None = None,
        preprocessing: Any = None,
        metrics: Sequence[str] = (),
        model_arguments: Mapping[str, Any] | None = None,
        cache: DataCache | None = None,
        **options: Unpack[SegmentationKeywords],
    ) -> None:
        refuse_several(data)
        folder = None if masks is None else Path(masks)
        if isinstance(label := options.get("ignore_index"), int):
            options["ignore_index"] = (label,)
        if TYPE_CHECKING:  # for jedi, as in dualeval.evaluate
            SegmentationOptions(metric=(), download=False, model_arg=(), **options)  # type: ignore[arg-type]
        self._options = settings = of_python(
            SegmentationOptions, options, metrics, model="", data=path_at(data), masks=folder
        )
        source = segmenter_of(model, dict(model_arguments or {}), trust=settings.trust_checkpoint)
        super().__init__(source, settings.weights, settings)
        self._num_classes = settings.num_classes
        pixels = {name: getattr(settings, name) for name in _PIXELS if getattr(settings, name) is not None}
        self._preprocessing = choose_uncropped(
            source, self._source, settings.num_classes, preprocessing, pixels, published_uncropped
        )
        values = {} if mask_values is None else read_mask_values(mask_values)
        ignored = (() if values else _IGNORED) if settings.ignore_index is None else settings.ignore_index
        ignored = () if ignored == "none" else ignored
        if values and (ignored or settings.reduce_labels == "yes"):
            other = "--ignore-index" if ignored else "--reduce-labels yes"
            raise UsageError(
                f"--mask-values and {other} both say what a label is. Leave {other} out: in --mask-values "
                "7=none does not count."
            )
        reduces = not values and isinstance(source, TransformersSegmenter) and source.reduces_labels()
        self._rule = LabelRule(
            ignore=ignored,
            reduce=reduces if settings.reduce_labels is None else settings.reduce_labels == "yes",
            values=values,
        )
        self._dataset = open_masked(
            settings.data,
            folder,
            self._rule,
            self._preprocessing.values,
            columns=(settings.path_column, settings.mask_column),
            whole_files=settings.data_fingerprint == "content",
            options=TableOptions(settings.keep, settings.quoting),
            cache=cache or DataCache(),
        )
        self._class_names = _names_of(class_names)
        self._metric_names = settings.metric
        # A name that no metric has is refused now, before anything is built.
        chosen(self._metric_names, segmentation_metrics(1))

    @property
    def rows(self) -> tuple[str, ...]:
        of_picture = (
            "right_pixels",
            "labelled_pixels",
            "is_labelled",
            "picture_iou",
            "nan_logits",
            "inf_logits",
        )
        return (*COUNTS, *of_picture, *[_MASK] * self._options.keep_masks)

    @property
    def wants_workers(self) -> bool:
        """True where pictures are decoded."""
        return not self._dataset.in_memory

    def dataset(self) -> MaskedPictures:
        return self._dataset

    def to_pack(self, cache: DataCache) -> tuple[MaskedPictures, dict[str, Any]]:
        """What ``dualeval pack`` packs, and the rule of its classes."""
        self.build_model(torch.device("cpu"))  # tells how many there are
        return self._dataset, self._rule.to_json()

    def collate(self, samples: Sequence[tuple[Tensor, Tensor, bool]]) -> dict[str, Any]:
        """Group pictures by their sizes and those of their masks, in the order in which sizes come.

        A batch always has the same samples, so its groups have, too: no bit depends on who computes them.
        """
        groups: dict[Any, list[int]] = {}
        for place, (picture, labels, _) in enumerate(samples):
            if picture.numel():
                groups.setdefault((picture.shape, picture.dtype, labels.shape), []).append(place)
        joined = []
        for places in groups.values():
            pictures, masks, _ = zip(*(samples[place] for place in places), strict=True)
            images, labels = torch.stack(pictures), torch.stack(masks)
            joined.append({"images": images, "labels": labels, "places": torch.tensor(places)})
        turned = torch.tensor([turned for *_, turned in samples])
        return {"size": len(samples), "groups": joined, "turned": turned}

    def _built(self, build: Callable[..., nn.Module]) -> nn.Module:
        return build(self._source, self._num_classes, self._loading)

    def _checked(self, model: nn.Module, device: torch.device) -> nn.Module:
        self._scale = self._scale_on(device)
        if isinstance(wanted := self._preprocessing.values, OwnPreprocessing):
            with suppress(OSError, ValueError):  # the loop names it
                self._refuse_crops(wanted)
        blanks = (self._dataset.placeholder(index)[0] for index in range(min(_TRIED, len(self._dataset))))
        any_size = torch.zeros(3, 64, 64, dtype=torch.uint8)
        image = next((blank for blank in blanks if blank.numel()), any_size)
        images = torch.stack([image] * self._model.trial_images).to(device)
        logits = self._try_out(model, images, lambda copied: self._logits(copied, images), "--resize")
        self._check_classes(logits.shape[1])
        return model

    def _refuse_crops(self, wanted: OwnPreprocessing) -> None:
        """Refuse a function that pads or crops: the tensor's border does not depend on the picture's."""
        draw, last = np.random.default_rng(0), len(self._dataset) - 1
        some = (self._dataset.placeholder(last * place // _TRIED) for place in range(_TRIED))
        for height, width in dict.fromkeys(tuple(labels.shape) for _, labels, _ in some if labels.numel()):
            noise = draw.integers(0, 256, (height, width, 3), np.uint8)
            image = prepare(Image.fromarray(noise), wanted)
            for axis, size in ((0, height), (1, width)):
                strip = math.ceil(size / max(image.shape[axis + 1], 1))
                for pixels, end in ((range(strip), 0), (range(size - strip, size), -1)):
                    other = noise.copy()
                    np.moveaxis(other, axis, 0)[pixels] ^= 255
                    changed = prepare(Image.fromarray(other), wanted)
                    if torch.equal(*(each.select(axis + 1, end) for each in (image, changed))):
                        raise UsageError(
                            f"--preprocessing: {wanted} makes {tuple(image.shape)} of a picture of {height} "
                            f"x {width} (height x width), and its border is not the picture's: it pads or "
                            "crops. Logits are stretched over the whole mask. Let it resize whole pictures, "
                            "or leave their size; pad in the model's forward, which cuts its logits back."
                        )

    def _check_classes(self, count: int) -> None:
        """Set the number of classes, on which the options must agree."""
        begin, names = f"the model {self._model.name} has {count} classes", self._class_names
        if count == 1:
            raise UsageError(
                f"the model {self._model.name} gives one logit per pixel, expected one for each class. For "
                "two classes let its forward return torch.cat([torch.zeros_like(logits), logits], dim=1); "
                "of probabilities p, as a sigmoid gives them, torch.cat([1 - p, p], dim=1)."
            )
        if self._num_classes not in (None, count):
            raise UsageError(
                f"{begin}, and --num-classes {self._num_classes} was given. Give data and model of the same "
                "classes."
            )
        if names and len(names) != count:
            raise UsageError(f"{begin}, and --class-names gives {len(names)}: expected one per class")
        self._num_classes = self._rule.classes = count
        rule, asked = self._rule, self._options.ignore_index
        if (last := max(rule.values.values(), default=0)) >= count:
            raise UsageError(
                f"{begin}, and --mask-values has the class {last}, expected at most {count - 1}. To leave "
                "out label 7, write 7=none, in a file null."
            )
        self._dataset.check_palettes()
        if asked is None and count - 1 + rule.reduce >= min(_IGNORED):  # it is the label of a class
            rule.ignore = ()
        elif asked is None and count == 2 and rule.ignore:
            self._refuse_ignored_foreground(begin)
        self._dataset.check_rule()

    def _refuse_ignored_foreground(self, begin: str) -> None:
        """Refuse masks of 0 and 255, of which 255 may be a class or none."""
        seen: set[int] = set()
        for labels in self._dataset.labels_of_first():
            seen.update(labels)
            if not seen <= {0, *_IGNORED}:
                return
        if seen & {*_IGNORED}:
            raise UsageError(
                f"the masks have no label but 0 and 255, and {begin}: 255 may be class 1, or no class. If it "
                "is class 1 (the foreground), type --mask-values 0=0,255=1; if its pixels do not count, "
                "--ignore-index 255."
            )

    def forward(self, model: nn.Module, batch: Mapping[str, Any]) -> list[Tensor]:
        """The logits of each group, (pictures, classes, height, width)."""
        return [self._logits(model, group["images"]) for group in batch["groups"]]

    def _logits(self, model: nn.Module, images: Tensor) -> Tensor:
        outputs = model(self._scaled(images))
        # torchvision's networks return a dict, whose "aux" is for training; those of transformers an object.
        logits = outputs["out"] if isinstance(outputs, Mapping) and "out" in outputs else outputs
        logits = getattr(logits, "logits", logits)
        if not isinstance(logits, Tensor) or logits.ndim != 4 or len(logits) != len(images):
            raise UsageError(
                f"the model {self._model.name} returned {describe(outputs)} for {len(images)} pictures, "
                "expected logits of shape (pictures, classes, height, width), or a dict with these as 'out'. "
                "Wrap it in a module whose forward returns them."
            )
        if not _is_whole(images.shape[2:], logits.shape[2:]):
            raise UsageError(
                f"the model {self._model.name} gives logits of {' x '.join(map(str, logits.shape[2:]))} for "
                f"pictures of {' x '.join(map(str, images.shape[2:]))}, which is none of 1, 1/2, 1/4, 1/8, "
                "1/16, 1/32 of both sides: a network without padding loses the border, and logits are "
                "stretched over the whole mask. Let its forward pad the pictures by what is lost; or, if "
                "they cover the whole picture, resize them to its size."
            )
        return logits

    def observe(self, outputs: Sequence[Tensor], batch: Mapping[str, Any]) -> dict[str, Column]:
        """Counts of pixels by class, of each picture at its mask's own size; the masks, if they are kept."""
        assert self._num_classes is not None, "build_model comes first"
        device, classes = outputs[0].device, self._num_classes
        counts = torch.zeros(batch["size"], 3, classes, dtype=torch.int64, device=device)
        ignored = torch.zeros(batch["size"], dtype=torch.int64, device=device)
        nonfinite = torch.zeros(batch["size"], 2, dtype=torch.bool, device=device)
        masks: dict[int, Tensor] = {}
        for logits, group in zip(outputs, batch["groups"], strict=True):
            pixels, runs = [], []
            for scores, labels in zip(logits, group["labels"], strict=True):
                predicted = _predicted(scores, labels.shape)
                pixels.append(counts_of(labels, predicted, classes))
                if self._options.keep_masks:
                    runs.append(runs_of(predicted))
            if runs:  # places on a device are waited for
                masks |= zip(group["places"].tolist(), runs, strict=True)
            counts[group["places"]] = torch.stack(pixels)
            ignored[group["places"]] = (group["labels"] == NO_LABEL).flatten(1).sum(1)
            flat = logits.flatten(1)
            nonfinite[group["places"]] = torch.stack([flat.isnan().any(1), flat.isinf().any(1)], dim=1)
        if absent := self._rule.without_label():
            counts[:, 2, absent] = 0  # else they are in the means, with 0
        columns: dict[str, Column] = dict(zip(COUNTS, counts.unbind(1), strict=True))
        columns |= {"ignored_pixels": ignored, "turned": batch["turned"]}
        if self._options.keep_masks:
            none = torch.zeros(0, dtype=torch.int32, device=device)
            columns[_MASK] = as_column(_MASK, [masks.get(place, none) for place in range(batch["size"])])
        return {**columns, "nan_logits": nonfinite[:, 0], "inf_logits": nonfinite[:, 1]}

    def postprocess(self, columns: Mapping[str, Any], samples: range) -> dict[str, Column]:
        """Add each picture's own scores."""
        return {**columns, **picture_scores(*(columns[name] for name in COUNTS))}

    def show(self, row: Mapping[str, Any]) -> Any:
        """The picture, and as layers its mask, and the predicted one where it is kept."""
        picture, classes = self._dataset.picture(place_of(self._dataset, row))
        return [picture, layers_of(classes, row.get(_MASK))]

    def colours(self, class_names: Sequence[str]) -> dict[str, str]:
        of_masks = COLOURS if self._options.keep_masks else {}
        return {**{name: colour_of(number) for number, name in enumerate(class_names)}, **of_masks}

    def metrics(self) -> list[Metric | RowMetric]:
        names = self._metric_names and (*self._metric_names, PixelCheck.name)
        return stored_metrics({"num_classes": self._num_classes}, names)

    def notes(self) -> list[str]:
        return [*super().notes(), *self._dataset.notes]

    def data_warnings(self) -> list[str]:
        return [*super().data_warnings(), *self._dataset.warnings, *self._dataset.pictures.left_out()]

    def labels_used(self) -> dict[str, Any]:
        known = self._model.known_classes(self._source)
        names = self._class_names or (() if known is None else known.names)
        return {"rule": "labels of pixels", "classes": [*names]} if len(names) == self._num_classes else {}

    def _label_options(self) -> dict[str, Any]:
        return {
            "num_classes": self._num_classes,
            "ignore_index": [*self._rule.ignore],
            "reduce_labels": "yes" if self._rule.reduce else "no",
            **({"mask_values": self._rule.values_text} if self._rule.values else {}),
            **({"left_out": absent} if (absent := self._rule.without_label()) else {}),
            **({"keep_masks": True} if self._options.keep_masks else {}),
            "class_names": [*self._class_names] or None,
            "data_fingerprint": self._options.data_fingerprint,
        }

    def options(self) -> dict[str, Any]:
        options = self._options
        return {
            **self._model_options(),
            "data": str(options.data.absolute()),
            "masks": options.masks and str(options.masks.absolute()),
            "path_column": options.path_column,
            "mask_column": options.mask_column,
            "quoting": options.quoting,
            **self._label_options(),
            **self._preprocessing.to_json(),
            "metric": [metric.name for metric in self.metrics()],
        }

    def description(self) -> dict[str, str]:
        ignored = "".join(f", {label} ignored" for label in self._rule.ignore)
        reduced = ", labels less 1 (0 ignored)" if self._rule.reduce else ""
        values = f", mask values {self._rule.values_text}" if self._rule.values else ""
        absent = [str(number) for number in self._rule.without_label()]
        without = f"; not in the means: {listed(absent)}, which no label is" if absent else ""
        masks = "" if self._options.masks is None else f", masks {self._options.masks}"
        return {
            "model": self._model.shown,
            "weights": self._weights_description(),
            "data": f"{self._options.data}{masks}",
            "preprocessing": f"{self._preprocessing.values} ({self._preprocessing.origin})",
            "compared": "at each mask's own size, logits by bilinear interpolation (align_corners=False); "
            f"{self._num_classes} classes{values}{ignored}{reduced}{without}",
        }

    def fingerprint(self) -> dict[str, Any]:
        """Model, labels and preprocessing; data and weights have fingerprints of their own."""
        done = self._preprocessing.to_json()
        return {**self._model_identity(), **self._label_options(), "preprocessing": done}


def _is_whole(size: Sequence[int], of_logits: Sequence[int]) -> bool:
    """Whether logits are of the whole input: of a stride, up to one logit, or of patches made finer."""
    ratio = Fraction(size[0], max(of_logits[0], 1))
    is_even = ratio.denominator & (ratio.denominator - 1) == 0 and ratio * of_logits[1] == size[1]
    sides = [*zip(size, of_logits, strict=True)]
    return is_even or any(all(abs(logits * s - side) <= s for side, logits in sides) for s in _STRIDES)


def _predicted(logits: Tensor, size: torch.Size) -> Tensor:
    """The class of each pixel, -1 for one with a NaN logit: (classes, h, w) brought to (height, width)."""
    # A picture at a time: all classes of a whole batch in full size would not fit into memory.
    logits = logits.float()
    if logits.shape[1:] != size:
        logits = interpolate(logits[None], size=tuple(size), mode="bilinear", align_corners=False)[0]
    # The first of equal ones; a NaN is the largest.
    largest, predicted = logits.max(0)
    return torch.where(largest.isnan(), NO_LABEL, predicted)


def _names_of(class_names: str | Path | Sequence[str] | None) -> tuple[str, ...]:
    """The classes' names: given, with commas between, or in a file: JSON, or a line each."""
    if class_names is None or not isinstance(class_names, (str, Path)):
        return tuple(class_names or ())
    if "," in str(class_names):
        return tuple(name.strip() for name in str(class_names).split(","))
    try:
        text = Path(class_names).read_text("utf-8")
        names = json.loads(text) if Path(class_names).suffix == ".json" else text.splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--class-names {class_names} cannot be read: {error}. Expected a file with one name per line, "
            "or .json with a list of names, or names with commas between."
        ) from error
    return tuple(str(name).strip() for name in names if str(name).strip())


def stored_metrics(options: Mapping[str, Any], names: Sequence[str]) -> list[Metric | RowMetric]:
    """Metrics by name, for the rows of a run with these ``options``, which are its ``fingerprint()``."""
    return chosen(names, segmentation_metrics(options["num_classes"]))
