"""The task detection: objects in pictures, their boxes compared with annotations as COCO has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from dualeval.columns.ragged import Ragged, Text
from dualeval.data.cache import DataCache
from dualeval.data.preprocessing import Normalisation
from dualeval.errors import UsageError
from dualeval.messages import listed
from dualeval.metrics import AveragePrecision, Confusion, Metric, Ratio, RowMetric
from dualeval.metrics.metric import chosen
from dualeval.metrics.scores import FRACTION
from dualeval.options.fields import of_python, with_keywords
from dualeval.tasks import place_of
from dualeval.tasks.detection import detectors
from dualeval.tasks.detection.annotations import COCO_KEYPOINTS, UNIT
from dualeval.tasks.detection.categories import CategoryMap, category_map, names_from, renamed_from
from dualeval.tasks.detection.detectors import (
    GIVEN,
    TransformersDetector,
    checked_outputs,
    detector_of,
    found_by,
)
from dualeval.tasks.detection.drawing import COLOURS, layers_of
from dualeval.tasks.detection.masks import as_text, codes_of
from dualeval.tasks.detection.matches import facets_of, matches_of
from dualeval.tasks.detection.pictures import AnnotatedPictures, open_annotated, padded
from dualeval.tasks.keywords import DetectionKeywords
from dualeval.tasks.options.detection import DetectionOptions
from dualeval.tasks.picture_task import ChosenPreprocessing, PictureTask, named_preprocessing

# So few pixels a picture may have; of fewer boxes nothing is concluded.
_FEW = 10
# Of a batch's boxes; a network's own lie in the picture, or are cut there.
_MOST_BEYOND = 0.2
# By what is compared, what is known of objects.
_TRUTH = {
    "bbox": ("boxes", "labels", "areas", "crowds"),
    "segm": ("masks", "labels", "areas", "crowds"),
    "keypoints": ("boxes", "keypoints", "labels", "areas", "crowds"),
}


class Detection(PictureTask):
    """A network that finds objects, on pictures with annotations.

    Args:
        model: a name, as on the command line; a module, which is called with a list of pictures, float32 of
            shape (3, height, width) from 0 to 1, and returns of each a dict of boxes (n, 4; x1, y1, x2, y2 in
            pixels), scores (n,) and labels (n,); or a function without arguments that returns one.
        data: the folder of the pictures.
        annotations: the JSON file, as COCO has it.
        category_names: the name of each label of the model: in order, by label, or a file. Without it labels
            of a module are the categories' ids.
        category_map: names of the model's to names of the annotations; or a file.
        preprocessing: a function from a PIL picture to a tensor, in place of scaling to 0 to 1.
        metrics: names of metrics; none for all.
        model_arguments: of what makes the model, by name.
        cache: what other tasks of the run have read of their data.
        options: the others of ``dualeval run``, with the same names and defaults (docs/detection.md):
            weights, weights_key, weights_prefix, trust_checkpoint, num_classes, orientation, order, iou_type,
            boxes_in, sigmas, score_threshold, max_detections, bootstrap, data_fingerprint, keep.

    Raises:
        UsageError: options, model, weights and data do not fit together.
        TypeError: there is no such option.
    """

    name = "detection"
    legend = (
        "Green was found, orange missed, red is not there or was taken for another category; grey are crowds."
    )
    wants_workers = True

    @with_keywords(DetectionKeywords, DetectionOptions)
    def __init__(
        self,
        *,
        model: str | nn.Module | Callable[[], nn.Module],
        data: str | Path,
        annotations: str | Path | None = None,
        category_names: str | Path | Sequence[str] | Mapping[int, str] | None = None,
        category_map: str | Path | Mapping[str, str] | None = None,
        preprocessing: Any = None,
        metrics: Sequence[str] = (),
        model_arguments: Mapping[str, Any] | None = None,
        cache: DataCache | None = None,
        **options: Unpack[DetectionKeywords],
    ) -> None:
        if TYPE_CHECKING:  # for jedi, as in dualeval.evaluate
            DetectionOptions(metric=(), download=False, model_arg=(), **options)  # type: ignore[arg-type]
        self._options = settings = of_python(
            DetectionOptions,
            options,
            metrics,
            model="",
            data=Path(data),
            annotations=None if annotations is None else Path(annotations),
        )
        self._kinds = settings.iou_type
        if settings.sigmas and "keypoints" not in self._kinds:
            raise UsageError("--sigmas is of keypoints: leave it out, or give --iou-type keypoints.")
        arguments, trust = dict(model_arguments or {}), settings.trust_checkpoint
        source = detector_of(model, arguments, kinds=self._kinds, trust=trust)
        super().__init__(source, settings.weights, settings)
        self._processor = source.processor if isinstance(source, TransformersDetector) else None
        self._preprocessing = self._chosen(source, preprocessing)
        self._dataset = open_annotated(
            settings.data,
            settings.annotations,
            self._preprocessing.values,
            kinds=self._kinds,
            points=len(settings.sigmas) if settings.sigmas else COCO_KEYPOINTS,
            keep=settings.keep,
            orientation=settings.orientation,
            order=settings.order,
            whole_files=settings.data_fingerprint == "content",
            cache=cache or DataCache(),
        )
        self._categories = self._map(names_from(category_names), renamed_from(category_map))
        # A name that no metric has is refused now, before anything is built.
        chosen(settings.metric, self.metrics())

    def _chosen(self, source: Any, preprocessing: Any) -> ChosenPreprocessing:
        boxes_in = self._options.boxes_in
        if isinstance(source, TransformersDetector):
            if boxes_in is not None:
                raise UsageError(
                    f"--boxes-in {boxes_in}: the image processor of {source.name} gives pixels of the "
                    "picture. Leave it out."
                )
            if preprocessing is not None:
                raise UsageError(
                    f"--preprocessing: the image processor of {source.name} prepares pictures. Leave it out."
                )
            return ChosenPreprocessing(values=source.prepares(), origin=source.preprocessing_origin())
        if (named := named_preprocessing(preprocessing, f"--preprocessing {preprocessing}")) is None:
            if boxes_in not in (None, "picture"):
                raise UsageError(
                    f"--boxes-in {boxes_in} is of the input that a function of --preprocessing makes, and "
                    "the "
                    "model is given whole pictures. Leave it out; what its forward resizes or pads, it has "
                    "to "
                    "undo in its boxes."
                )
            values = Normalisation(mean=(0.0,), std=(1.0,))
            return ChosenPreprocessing(values=values, origin="as torchvision's detectors take them")
        return named

    def _map(self, names: dict[int, str] | None, renamed: Mapping[str, str]) -> CategoryMap:
        annotations = self._dataset.annotations
        if names is None and hasattr(self._model, "label_names"):
            names = self._model.label_names(self._source)
        return category_map(
            names,
            annotations.categories,
            {*annotations.labels.tolist()},
            renamed,
            model=f"--model {self._model.name}",
            path=annotations.path,
        )

    @property
    def rows(self) -> tuple[str, ...]:
        return ("image_id", *(GIVEN[kind] for kind in self._kinds), "scores", "labels")

    @property
    def libraries(self) -> tuple[str, ...]:  # type: ignore[override]
        of_folder = () if self._processor is None else ("transformers",)
        return (*PictureTask.libraries, "pycocotools", *of_folder)

    def dataset(self) -> AnnotatedPictures:
        return self._dataset

    def collate(self, samples: Sequence[Tensor]) -> dict[str, Any]:
        """One batch; for a folder's network the pictures are padded to the largest, with the mask."""
        if self._processor is None:
            return {"pictures": [*samples], "sizes": torch.tensor([each.shape[1:] for each in samples])}
        batch = padded(samples)
        masks = {"pixel_mask": batch[:, 3].long()} if batch.shape[1] > 3 else {}
        return {"pixel_values": batch[:, :3].contiguous(), **masks}

    def _built(self, build: Callable[..., nn.Module]) -> nn.Module:
        return build(self._source, self._options.num_classes, self._loading)

    def _checked(self, model: nn.Module, device: torch.device) -> nn.Module:
        self._scale = self._scale_on(device)
        count = min(2, len(self._dataset))
        blanks = [self._dataset.placeholder(index) for index in range(count)]
        batch = self.collate([each.to(device) for each in blanks])
        tried = self._try_out(model, padded(blanks), lambda copied: self._tried(copied, batch), "other sizes")
        assert len(tried) == count
        return model

    def _tried(self, model: nn.Module, batch: Any) -> Any:
        columns = self.observe(self.forward(model, batch), batch)
        return next(iter(columns.values()))

    def forward(self, model: nn.Module, batch: Mapping[str, Any]) -> Any:
        if self._processor is not None:
            return detectors.run_transformers(model, batch)
        return model([self._scaled(each) for each in batch["pictures"]])

    def observe(self, outputs: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs of a folder's network, of which boxes are made on the host; else the boxes."""
        if self._processor is not None:
            return dict(outputs)
        count = len(batch["pictures"])
        found = checked_outputs(self._model.name, outputs, count, self._kinds)
        return {**found, "input": batch["sizes"]}

    def postprocess(self, columns: Mapping[str, Any], samples: range) -> dict[str, Any]:
        """Detections in pixels of the pictures, of categories that are annotated, and what is true."""
        annotations = self._dataset.annotations
        sizes = torch.from_numpy(annotations.sizes[samples.start : samples.stop].copy())
        if self._processor is not None:
            columns = found_by(self._processor, columns, sizes.tolist())
        lengths = torch.tensor([len(each) for each in columns["scores"]])
        places = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        scores, labels = (torch.cat([*columns[name]]) for name in ("scores", "labels"))
        ratio = self._ratio(columns.get("input", sizes), sizes, samples)[places]
        found = {"scores": scores}
        if "bbox" in self._kinds:
            found["boxes"] = torch.cat([*columns["boxes"]]) * ratio.repeat(1, 2)
        if "keypoints" in self._kinds:
            points = torch.cat([*columns["keypoints"]])
            scale = torch.nn.functional.pad(ratio, (0, 1), value=1.0)
            found["keypoints"] = points * scale.repeat(1, points.shape[1] // 3)
        self._check(found, sizes, places, lambda at: self._dataset.id(samples[int(places[at])]))
        ids = self._ids_of(labels)
        keep, threshold = ids >= 0, self._options.score_threshold
        if threshold is not None:
            keep &= scores >= threshold
        counts = torch.bincount(places[keep], minlength=len(lengths))
        result: dict[str, Any] = {
            name: Ragged(values[keep], counts) for name, values in ({**found, "labels": ids}).items()
        }
        if "segm" in self._kinds:
            kept = torch.split(keep, lengths.tolist())
            wrong = (columns.get("mask_size", sizes) != sizes).any(1) & (lengths > 0)
            if wrong.any():
                at = int(wrong.nonzero()[0])
                height, width = columns["mask_size"][at].tolist()
                raise UsageError(
                    f"the model {self._model.name} gave masks of {height} x {width} (height x width) for "
                    f"{self._dataset.id(samples[at])}, which has {sizes[at, 0]} x {sizes[at, 1]}: "
                    "expected masks of the picture's own size."
                )
            each = zip(columns["masks"], kept, sizes.tolist(), strict=True)
            result["masks"] = Text([self._masks(*of_picture) for of_picture in each])
        result |= annotations.columns(samples)
        return {**result, **self._matches(result)}

    def _ratio(self, inputs: Tensor, sizes: Tensor, samples: range) -> Tensor:
        """By what x and y of the model's boxes are multiplied, shape (pictures, 2)."""
        boxes_in, differ = self._options.boxes_in, (inputs != sizes).any(1)
        if boxes_in == "picture" or not differ.any():
            return torch.ones(len(sizes), 2)
        at = int(differ.nonzero()[0])
        shapes = [" x ".join(map(str, each[at].flip(0).tolist())) for each in (inputs, sizes)]
        picture = self._dataset.id(samples[at])
        made = f"--preprocessing makes {shapes[0]} pixels of {picture}, which has {shapes[1]}"
        if boxes_in is None:
            raise UsageError(
                f"{made}: say whose pixels the model's boxes are in, --boxes-in picture, or --boxes-in input."
            )
        # A side of the input is a whole number of pixels.
        scales = sizes / inputs
        other_shape = (scales[:, :1] * inputs - sizes).abs() > scales.amax(1, keepdim=True) + 1
        if boxes_in == "input" and other_shape.any():
            raise UsageError(
                f"{made}, another shape: type --boxes-in stretched if the function stretches pictures to it. "
                "If it pads them (letterbox), its boxes cannot be undone here: leave out --preprocessing, "
                "and "
                "resize, pad and undo both in the model's forward."
            )
        return scales.flip(1)

    def _matches(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """What cards, F1 and confusions go by; nothing of keypoints alone."""
        if not {"bbox", "segm"} & {*self._kinds}:
            return {}
        places = {number: place for place, number in enumerate(self._dataset.annotations.categories)}
        nothing = len(places)
        target: list[list[int]] = []
        prediction: list[list[int]] = []
        twice, boxes = [], []
        rows = {name: columns[name].tolist() for name in columns if name != "image_id"}
        for row in (dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)):
            matches = matches_of(row)
            true, found = ([places[each] for each in row[name]] for name in ("true_labels", "labels"))
            target.append([true[one] for one, _ in matches.pairs])
            prediction.append([found[other] for _, other in matches.pairs])
            twice.append(2.0 * sum(map(int.__eq__, target[-1], prediction[-1])))
            boxes.append(2 * len(matches.pairs) + len(matches.missed) + len(matches.false))
            target[-1] += [true[each] for each in matches.missed] + [nothing] * len(matches.false)
            prediction[-1] += [nothing] * len(matches.missed) + [found[each] for each in matches.false]
        counts = torch.tensor([*map(len, target)])
        pairs = {"matched_target": target, "matched_prediction": prediction}
        return {
            "twice_right": torch.tensor(twice),
            "boxes_of_both": torch.tensor(boxes),
            **{
                name: Ragged(torch.tensor([*chain(*each)], dtype=torch.int64), counts)
                for name, each in pairs.items()
            },
        }

    @staticmethod
    def _masks(masks: Any, keep: Tensor, size: list[int]) -> str:
        """The masks of a picture that count."""
        if isinstance(masks, Tensor):
            return as_text(size[0], size[1], codes_of(masks.view(len(keep), size[0], size[1])[keep]))
        return as_text(size[0], size[1], [*compress(masks, keep.tolist())])

    def _ids_of(self, labels: Tensor) -> Tensor:
        """The category of each label; -1 for one that does not count."""
        distinct, places = torch.unique(labels, return_inverse=True)
        known = self._dataset.annotations.categories
        if unnamed := self._categories.without_name(distinct.tolist()):
            raise UsageError(
                f"the model {self._model.name} gives the labels {listed(map(str, unnamed))}, and "
                "--category-names, or the model's own names, end before: give the name of each label from 0 "
                "on, background for one that is none."
            )
        ids = [self._categories.of_label(int(label)) for label in distinct]
        if other := [each for each in ids if each is not None and each not in known]:
            raise UsageError(
                f"the model {self._model.name} gives the labels {listed(map(str, other))}, which are no ids "
                f"of categories in {self._dataset.annotations.path}: these are {listed(map(str, known))}. If "
                "labels count from 0 or have an order of their own, give --category-names, the name of each "
                "label in order."
            )
        return torch.tensor([-1 if each is None else each for each in ids], dtype=torch.int64)[places]

    def _check(
        self, found: Mapping[str, Tensor], sizes: Tensor, places: Tensor, named: Callable[[int], str]
    ) -> None:
        """Refuse detections that are not what they are taken for."""
        begin = f"the model {self._model.name} gave"
        for name, values in found.items():
            bad = ~values.isfinite().flatten(1).all(1) if values.ndim > 1 else ~values.isfinite()
            if bad.any():
                raise UsageError(
                    f"{begin} {name} that are NaN or infinite, of {int(bad.sum())} of {len(bad)} detections, "
                    f"first in {named(int(bad.nonzero()[0]))}. With --precision fp32 they may be finite."
                )
        if (boxes := found.get("boxes")) is None:
            return
        bad = (boxes[:, 2:] < boxes[:, :2]).any(1)
        if bad.any():
            at = int(bad.nonzero()[0])
            raise UsageError(
                f"{begin} {int(bad.sum())} of {len(bad)} boxes that end before they begin, first "
                f"{[round(each, 2) for each in boxes[at].tolist()]} in {named(at)}: expected x1, y1, x2, y2. "
                "Of x, y, width, height return torch.cat([b[:, :2], b[:, :2] + b[:, 2:]], 1)."
            )
        if len(boxes) > 1 and boxes.abs().max() <= UNIT and sizes.min() > _FEW:
            raise UsageError(
                f"{begin} boxes between 0 and 1, expected pixels of the picture: multiply them by its width "
                "and height; or by those of the input, and type --boxes-in input."
            )
        centres = (boxes[:, :2] + boxes[:, 2:]) / 2
        beyond = ((centres < 0) | (centres > sizes.flip(1)[places])).any(1)
        if len(boxes) >= _FEW and beyond.float().mean() > _MOST_BEYOND:
            raise UsageError(
                f"{begin} {int(beyond.sum())} of {len(boxes)} boxes whose centre lies outside of their "
                f"picture, first in {named(int(beyond.nonzero()[0]))}: expected pixels of the picture. If "
                "they are of the input that a function of --preprocessing made, type --boxes-in input."
            )

    def metrics(self) -> list[Metric | RowMetric]:
        return stored_metrics(self._of_figures(), self._options.metric)

    def _of_figures(self) -> dict[str, Any]:
        categories = self._dataset.annotations.categories
        options = self._options
        return {
            "categories": {str(number): name for number, name in categories.items()},
            "iou_type": [*self._kinds],
            "max_detections": options.max_detections,
            "sigmas": options.sigmas and [*options.sigmas],
            "bootstrap": options.bootstrap,
        }

    def notes(self) -> list[str]:
        # A processor that pads gives a mask behind the colours.
        pads = self._processor is not None and len(self._dataset.placeholder(0)) > 3
        padding = (
            "pictures of a batch are padded to its largest, which changes this network's numbers: the batch "
            f"size counts, and the order (--order {self._options.order})."
        )
        return [
            *super().notes(),
            *self._dataset.annotations.notes,
            *self._categories.notes(),
            *[padding] * pads,
        ]

    def data_warnings(self) -> list[str]:
        of_file = self._dataset.annotations.warnings
        left_out = self._dataset.pictures.left_out()
        return [*super().data_warnings(), *of_file, *self._categories.warnings(), *left_out]

    def labels_used(self) -> dict[str, Any]:
        rule = "ids of categories" if self._categories.ids is None else "names of categories"
        classes = [*self._dataset.annotations.categories.values(), "nothing"]
        return {"rule": rule, "classes": classes}

    def show(self, row: Mapping[str, Any]) -> Any:
        """The picture, and as layers what was found, missed, and is not there."""
        picture = self._dataset.picture(place_of(self._dataset, row))
        if not {"bbox", "segm"} & {*self._kinds}:
            return picture
        return [picture, layers_of(row, self._dataset.annotations.categories)]

    def colours(self, class_names: Sequence[str]) -> dict[str, str]:
        return COLOURS

    def facets(self, row: Mapping[str, Any]) -> Mapping[str, Sequence[str]]:
        """Which categories were found, missed, and not there, with what overlap and with what score."""
        if not {"bbox", "segm"} & {*self._kinds}:
            return {}
        return facets_of(row, self._dataset.annotations.categories)

    def options(self) -> dict[str, Any]:
        options = self._options
        return {
            **self._model_options(),
            "data": str(options.data.absolute()),
            "annotations": str(self._dataset.annotations.path.absolute()),
            "category_names": options.category_names,
            "category_map": options.category_map,
            "num_classes": options.num_classes,
            "orientation": options.orientation,
            "order": options.order,
            "boxes_in": options.boxes_in,
            "iou_type": [*self._kinds],
            "sigmas": options.sigmas and [*options.sigmas],
            "score_threshold": options.score_threshold,
            "max_detections": options.max_detections,
            "bootstrap": options.bootstrap,
            "data_fingerprint": options.data_fingerprint,
            **self._preprocessing.to_json(),
            "metric": [metric.name for metric in self.metrics()],
        }

    def description(self) -> dict[str, str]:
        annotations = self._dataset.annotations
        threshold = self._options.score_threshold
        most = self._options.max_detections or "100 (keypoints 20)"
        return {
            "model": self._model.shown,
            "weights": self._weights_description(),
            "data": f"{self._options.data}, annotations {annotations.path}",
            "preprocessing": f"{self._preprocessing.values} ({self._preprocessing.origin})",
            "compared": f"{', '.join(self._kinds)}; {len(annotations.categories)} categories, all scores"
            f"{'' if threshold is None else f' from {threshold:g}'}, at most {most} detections of a category "
            "in a picture; by pycocotools",
        }

    def fingerprint(self) -> dict[str, Any]:
        """Model, labels, preprocessing and what is compared; data and weights have their own."""
        processor = {} if self._processor is None else {"processor": self._processor.to_dict()}
        return {
            **self._model_identity(),
            **self._of_figures(),
            **processor,
            "labels": self._categories.to_json(),
            "boxes_in": self._options.boxes_in,
            "score_threshold": self._options.score_threshold,
            "preprocessing": self._preprocessing.to_json(),
        }


def stored_metrics(options: Mapping[str, Any], names: Sequence[str]) -> list[Metric | RowMetric]:
    """Metrics by name, for the rows of a run with these ``options``, which are its ``fingerprint()``."""
    categories = {int(number): name for number, name in options["categories"].items()}
    sigmas = options["sigmas"]
    metrics: list[Metric | RowMetric] = [
        AveragePrecision(
            categories,
            iou_type=kind,
            max_detections=options["max_detections"],
            truth=_TRUTH[kind],
            true_format="xywh",
            sigmas=sigmas if kind == "keypoints" else None,
            ordered_by="image_id",
            bootstrap=options["bootstrap"],
        )
        for kind in options["iou_type"]
    ]
    if {"bbox", "segm"} & {*options["iou_type"]}:
        of = "" if "bbox" in options["iou_type"] else "mask_"
        metrics += [
            Ratio("twice_right", "boxes_of_both", name=f"{of}f1", unit=FRACTION, higher_is_better=True),
            Confusion(len(categories) + 1, "matched_prediction", "matched_target", name=f"{of}confusion"),
        ]
    return chosen(names, metrics)
