"""AveragePrecision: COCO's figures of boxes, masks and keypoints, computed by pycocotools on rank 0."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

import numpy as np
import numpy.typing as npt

from dualeval.errors import UsageError
from dualeval.messages import listed
from dualeval.metrics.detection.annotations import BOX_FORMATS, XYXY, Instances
from dualeval.metrics.detection.bootstrap import Resampled, interval, resampled_figures
from dualeval.metrics.detection.figures import Figure
from dualeval.metrics.metric import Measured, Value
from dualeval.metrics.scores import FRACTION
from dualeval.options.choices import check_choice, check_count, check_kind

BBOX, SEGM, KEYPOINTS = "bbox", "segm", "keypoints"
# What stands before each kind's figures.
PREFIXES = {BBOX: "", SEGM: "mask_", KEYPOINTS: "keypoint_"}
# What a kind's detections and its annotations are told by, beside labels.
_OF_DETECTIONS = {BBOX: ("boxes",), SEGM: ("masks",), KEYPOINTS: ("keypoints",)}
_OF_TRUTH = {BBOX: ("boxes",), SEGM: ("masks",), KEYPOINTS: ("boxes", "keypoints")}
_TRUTH = ("boxes", "labels", "masks", "keypoints", "areas", "crowds")
_COCO_KEYPOINTS, _RESAMPLES = 17, 1000
# Of so many images, where a category has so many objects with a detection on them, of which more than so many
# are called alike.
_LOOKED_INTO, _FEW, _MOST, _OVERLAP = 500, 5, 0.8, 0.5
# Places in pycocotools' list of thresholds of overlap, .50 to .95 by .05.
_THRESHOLDS = {"": None, "50": 0, "75": 5}


class AveragePrecision:
    """COCO's average precision and recall of detections: all sizes, by size, and of each category.

    Every detection counts, however low its score: filter none. Detections of equal score count in the order
    of the images, and in an image in the model's. A RowMetric, computed by pycocotools on rank 0; its figures
    are those of pycocotools in one process, to the last bit. Needs ``pip install 'dualeval[detection]'``.

    Columns, with any number of entries an image (``dualeval.Ragged``): ``labels`` (ids of categories),
    ``scores``, and ``boxes`` (n, 4) as x1, y1, x2, y2 in pixels; or ``masks``, a text ``"HEIGHT WIDTH RLE RLE
    ..."`` of compressed run lengths; or ``keypoints`` (n, 3 K) as x, y, confidence. Then what ``truth``
    names, with ``true_`` before it.

    Args:
        categories: their names by id.
        iou_type: "bbox" (keys ``ap``, ``ap50``, ...), "segm" (``mask_ap``, ...) or "keypoints"
            (``keypoint_ap``, ...).
        max_detections: so many of an image count, those with the highest scores; 100, of keypoints 20.
        truth: what is known of the annotations: "labels", and "boxes" or "masks", or "boxes" and "keypoints"
            (with visibility, 0 for none); also "areas" (else those of the boxes or masks) and "crowds".
        true_format: of ``true_boxes``, "xyxy" or, as in COCO's files, "xywh" (left, top, width, height).
        sigmas: how exact each keypoint is; None for COCO's 17.
        ordered_by: a column of numbers, as ids, in whose order images count; None for that of the rows.
        bootstrap: how often images are drawn again for the intervals, which takes less time than the figures;
            0 for no intervals.
        seed: of these draws.

    Raises:
        UsageError: an argument is of another kind, or pycocotools is not installed.
    """

    def __init__(
        self,
        categories: Mapping[int, str],
        *,
        iou_type: str = BBOX,
        max_detections: int | None = None,
        truth: Sequence[str] = ("boxes", "labels"),
        true_format: str = XYXY,
        sigmas: Sequence[float] | None = None,
        ordered_by: str | None = None,
        bootstrap: int = _RESAMPLES,
        seed: int = 0,
    ) -> None:
        if importlib.util.find_spec("pycocotools") is None:
            raise UsageError(
                "average precision needs pycocotools, which is not installed. Type: pip install "
                "'dualeval[detection]'"
            )
        named = isinstance(categories, Mapping) and all(
            isinstance(number, int) and isinstance(name, str) for number, name in categories.items()
        )
        check_kind("categories", categories, named and bool(categories), 'names by id, as in {1: "person"}')
        check_kind("categories", categories, len({*categories.values()}) == len(categories), "each name once")
        check_choice("iou_type", iou_type, tuple(PREFIXES))
        check_choice("true_format", true_format, BOX_FORMATS)
        check_count("max_detections", max_detections, 1)
        check_count("bootstrap", bootstrap, 0)
        check_count("seed", seed, 0)
        for each in truth:
            check_choice("truth", each, _TRUTH)
        if lacking := [each for each in ("labels", *_OF_TRUTH[iou_type]) if each not in truth]:
            raise UsageError(f"truth {tuple(truth)}: expected {' and '.join(lacking)}, too, for {iou_type}")
        self.categories = {number: categories[number] for number in sorted(categories)}
        self.iou_type = iou_type
        self.max_detections = max_detections or (20 if iou_type == KEYPOINTS else 100)
        self.truth = tuple(truth)
        self.true_format = true_format
        self.sigmas = None if sigmas is None else tuple(sigmas)
        self.ordered_by = ordered_by
        self.bootstrap, self.seed = bootstrap, seed

    def fingerprint(self) -> dict[str, Any]:
        """What the figures depend on, from which ``compare`` makes the metric again: ``of_fingerprint``."""
        named = {str(number): name for number, name in self.categories.items()}
        kind = f"{type(self).__module__}.{type(self).__qualname__}"
        return {"class": kind, **vars(self), "categories": named, "truth": [*self.truth]}

    @classmethod
    def of_fingerprint(cls, content: Mapping[str, Any]) -> AveragePrecision:
        """The metric that gave a fingerprint."""
        options = {name: value for name, value in content.items() if name != "class"}
        categories = {int(number): name for number, name in options.pop("categories").items()}
        return cls(categories, **options)

    @property
    def definition(self) -> dict[str, Any]:
        """What two runs have to have in common for a comparison."""
        drawn = ("bootstrap", "seed")
        return {name: value for name, value in self.fingerprint().items() if name not in drawn}

    @property
    def truth_columns(self) -> tuple[str, ...]:
        """The columns that no model decides."""
        return tuple(f"true_{each}" for each in self.truth)

    @property
    def name(self) -> str:
        """That of the first figure: "ap", "mask_ap" or "keypoint_ap"."""
        return f"{PREFIXES[self.iou_type]}ap"

    @property
    def columns(self) -> tuple[str, ...]:
        """What the model gave, then the truth."""
        given = (*_OF_DETECTIONS[self.iou_type], "scores", "labels")
        return (*given, *self.truth_columns, *([self.ordered_by] if self.ordered_by else []))

    def _order(self, columns: Mapping[str, Any]) -> npt.NDArray[np.int64] | slice:
        """The rows of the images in their order."""
        return np.argsort(columns[self.ordered_by], kind="stable") if self.ordered_by else slice(None)

    @property
    def limits(self) -> list[int]:
        """How many detections of an image may count, ascending: each has its recall."""
        of_boxes = {1, 10} if self.iou_type != KEYPOINTS else set()
        return sorted(each for each in {*of_boxes, self.max_detections} if each <= self.max_detections)

    @property
    def figures(self) -> dict[str, Figure]:
        """By key, the twelve figures; of keypoints ten."""
        of_points = self.iou_type == KEYPOINTS
        sizes = ("_medium", "_large") if of_points else ("_small", "_medium", "_large")
        last = len(self.limits) - 1
        found = {f"ap{name}": Figure("precision", place, 0, last) for name, place in _THRESHOLDS.items()}
        found |= {f"ap{name}": Figure("precision", None, at, last) for at, name in enumerate(sizes, 1)}
        if of_points:
            found |= {f"ar{name}": Figure("recall", place, 0, last) for name, place in _THRESHOLDS.items()}
        else:
            found |= {f"ar{most}": Figure("recall", None, 0, at) for at, most in enumerate(self.limits)}
        found |= {f"ar{name}": Figure("recall", None, at, last) for at, name in enumerate(sizes, 1)}
        return {PREFIXES[self.iou_type] + key: figure for key, figure in found.items()}

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of its values."""
        prefix = PREFIXES[self.iou_type]
        return (*self.figures, f"{prefix}by_class", f"{prefix}precision_by_recall")

    def compute(self, columns: Mapping[str, Any]) -> Measured:
        """The figures of all images, and of each category."""
        evaluation = self.evaluated(columns)
        values: dict[str, Value] = {key: figure.of(evaluation) for key, figure in self.figures.items()}
        of_classes, of_curves = self.keys[-2:]
        values |= {of_classes: self._by_class(evaluation), of_curves: self._curves(evaluation)}
        resampled = self._resampled(evaluation) if self.bootstrap else {}
        found = {key: ends for key, each in resampled.items() if (ends := interval(each)) is not None}
        return Measured(
            values=values,
            intervals={key: ends for key, (ends, _) in found.items()},
            rough={key: why for key, (_, why) in found.items() if why is not None},
            warnings=(*_nothing(evaluation), *_renamed(evaluation)),
            units=dict.fromkeys(self.figures, FRACTION),
            directions=dict.fromkeys(self.figures, "higher"),
        )

    def resampled(
        self, columns: Mapping[str, Any], units: npt.NDArray[np.int64] | None = None
    ) -> dict[str, Resampled]:
        """Each figure, and what it is where images, or units of them, are drawn again.

        Equal numbers of units have equal draws: two models of the same images are compared pair by pair.

        Args:
            columns: as of ``compute``.
            units: the number of each image's cluster, from 0 on; None where images are independent.
        """
        return self._resampled(
            self.evaluated(columns), None if units is None else units[self._order(columns)]
        )

    def _resampled(self, evaluation: Any, units: npt.NDArray[np.int64] | None = None) -> dict[str, Resampled]:
        return resampled_figures(evaluation, self.figures, self.bootstrap or _RESAMPLES, self.seed, units)

    def evaluated(self, columns: Mapping[str, Any]) -> Any:
        """pycocotools' evaluation of the images, matched and accumulated."""
        from pycocotools.cocoeval import COCOeval

        order = self._order(columns)
        columns = {name: columns[name][order] for name in self.columns}
        truth, detections = self._truth(columns), self._detections(columns)
        images = [{"id": place, "height": 0, "width": 0} for place in range(len(truth.lengths))]
        if len(detections.lengths) != len(images):
            raise UsageError(f"there are detections of {len(detections.lengths)} images of {len(images)}")
        if self.iou_type == SEGM:
            _check_sizes(truth, detections)
        with redirect_stdout(None):
            both = [self._indexed(images, each.annotations()) for each in (truth, detections)]
            evaluation = COCOeval(*both, self.iou_type)
            evaluation.params.maxDets = self.limits
            if self.sigmas is not None:
                evaluation.params.kpt_oks_sigmas = np.array(self.sigmas)
            evaluation.evaluate()
            evaluation.accumulate()
        return evaluation

    def _truth(self, columns: Mapping[str, Any]) -> Instances:
        truth = Instances(columns, "true_", self.categories)
        if self.iou_type == KEYPOINTS:
            truth.keypoints(self._number_of_keypoints)
        areas = truth.masks() if self.iou_type == SEGM else truth.boxes(self.true_format)
        truth.areas(areas, given="areas" in self.truth)
        truth.crowds(given="crowds" in self.truth)
        return truth

    def _detections(self, columns: Mapping[str, Any]) -> Instances:
        detections = Instances(columns, "", self.categories)
        detections.scores()
        if self.iou_type == BBOX:
            areas = detections.boxes(XYXY)
        elif self.iou_type == SEGM:
            areas = detections.masks()
        else:
            areas = detections.keypoints(self._number_of_keypoints)
        detections.areas(areas)
        return detections

    @property
    def _number_of_keypoints(self) -> int:
        return _COCO_KEYPOINTS if self.sigmas is None else len(self.sigmas)

    def _indexed(self, images: list[dict[str, Any]], annotations: list[dict[str, Any]]) -> Any:
        from pycocotools.coco import COCO

        coco = COCO()
        categories = [{"id": number, "name": name} for number, name in self.categories.items()]
        coco.dataset = {"images": images, "categories": categories, "annotations": annotations}
        coco.createIndex()
        return coco

    def _curves(self, evaluation: Any) -> dict[str, Value]:
        """By overlap, the mean over categories of the precision at each of pycocotools' values of recall."""
        precision = evaluation.eval["precision"][:, :, :, 0, -1]
        precision = precision[..., (precision > -1).all(axis=(0, 1))]
        if not precision.size:
            return {}
        of_overlaps = {"0.50": precision[0], "0.75": precision[_THRESHOLDS["75"]]}
        of_overlaps["0.50 to 0.95"] = precision.mean(axis=0)
        return {overlap: each.mean(axis=-1).tolist() for overlap, each in of_overlaps.items()}

    def _by_class(self, evaluation: Any) -> dict[str, Value]:
        last = len(self.limits) - 1
        figures = {
            "ap": Figure("precision", None, 0, last),
            "ap50": Figure("precision", 0, 0, last),
            "ar": Figure("recall", None, 0, last),
        }
        counts = []
        for coco in (evaluation.cocoGt, evaluation.cocoDt):
            counted = [each for each in coco.anns.values() if not each.get("iscrowd")]
            labels = [each["category_id"] for each in counted]
            counts.append(dict(zip(*np.unique(labels, return_counts=True), strict=True)))
        return {
            name: {
                **{key: figure.of(evaluation, place) for key, figure in figures.items()},
                "annotations": int(counts[0].get(number, 0)),
                "detections": int(counts[1].get(number, 0)),
            }
            for place, (number, name) in enumerate(self.categories.items())
        }


def _nothing(evaluation: Any) -> tuple[str, ...]:
    """A warning where there is nothing to compare."""
    both = (("object", evaluation.cocoGt), ("detection", evaluation.cocoDt))
    return tuple(f"there is no {what} in any image" for what, coco in both if not coco.anns)


def _renamed(evaluation: Any) -> tuple[str, ...]:
    """A warning where the best detections on a category's objects are called another category.

    So it is where labels are taken for other ids, or names are in another order.
    """
    from pycocotools import mask

    kind = "segmentation" if evaluation.params.iouType == SEGM else "bbox"
    images = evaluation.params.imgIds[:: -(-len(evaluation.params.imgIds) // _LOOKED_INTO) or 1]
    called: dict[int, Counter[int]] = {}
    for image in images:
        true, found = (
            [each for each in coco.imgToAnns[image] if kind in each and not each.get("iscrowd")]
            for coco in (evaluation.cocoGt, evaluation.cocoDt)
        )
        if not true or not found:
            continue
        overlaps = mask.iou([each[kind] for each in found], [each[kind] for each in true], [0] * len(true))
        scores = np.array([each["score"] for each in found])
        for place, each in enumerate(true):
            on = np.where(overlaps[:, place] >= _OVERLAP, scores, -np.inf)
            if np.isfinite(on).any():
                called.setdefault(each["category_id"], Counter())[found[int(on.argmax())]["category_id"]] += 1
    names = {category["id"]: category["name"] for category in evaluation.cocoGt.dataset["categories"]}
    told = []
    for category, counts in called.items():
        (other, number), whole = counts.most_common(1)[0], counts.total()
        own = called.get(other, Counter())
        # A weak model calls the rare what is frequent, which then is itself called so.
        if other != category and whole >= _FEW and number > _MOST * whole and own[other] <= own.total() // 2:
            told.append(f"of {whole} objects of {names[category]}, {number} are called {names[other]}")
    if not told:
        return ()
    return (
        f"by the best detections on them, {listed(told, 4)}: the labels may stand for other categories, or "
        "their names be in another order",
    )


def _check_sizes(truth: Instances, detections: Instances) -> None:
    """Masks of different pictures would overlap nowhere."""
    sizes: list[dict[int, list[int]]] = [
        dict(zip(each.images.tolist(), (mask["size"] for mask in each.entries["segmentation"]), strict=True))
        for each in (truth, detections)
    ]
    for image in sizes[0].keys() & sizes[1].keys():
        if sizes[0][image] != sizes[1][image]:
            true, detected = ("x".join(map(str, size[image])) for size in sizes)
            raise UsageError(
                f"the masks of image {image} are {detected} (height x width), and its true masks {true}: "
                "expected masks of the picture's size"
            )
