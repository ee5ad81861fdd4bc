"""COCO's annotations, made of columns; what pycocotools would count as 0 without a word is refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dualeval.columns.ragged import RaggedRows
from dualeval.errors import UsageError
from dualeval.messages import counted

XYXY, XYWH = BOX_FORMATS = ("xyxy", "xywh")
# Ids of categories that a message names.
_NAMED = 10

_Floats = npt.NDArray[np.float64]


class Instances:
    """The detections of all images, or their true annotations (``true_`` before a column's name).

    Args:
        columns: as in ``RowMetric.compute``.
        before: "" or "true_".
        categories: the ids that there are.
    """

    def __init__(self, columns: Mapping[str, Any], before: str, categories: Collection[int]) -> None:
        self._columns, self._before = columns, before
        self.lengths = _lengths(columns[f"{before}labels"])
        self.images = np.repeat(np.arange(len(self.lengths)), self.lengths)
        self.labels = self._values("labels").astype(np.int64)
        known = ", ".join(map(str, sorted(categories)[:_NAMED]))
        known += f", ... ({len(categories)} in all)" if len(categories) > _NAMED else ""
        self._refuse(
            "labels",
            self.labels,
            ~np.isin(self.labels, list(categories)),
            f"expected the id of a category: {known}. Where a model counts its classes from 0, give the ids "
            "of the annotations instead, by the names of the classes",
        )
        self.entries: dict[str, Sequence[Any]] = {
            "image_id": self.images.tolist(),
            "category_id": self.labels.tolist(),
            # From 1 on: pycocotools takes a match with an annotation 0 for none.
            "id": range(1, len(self.labels) + 1),
        }

    def scores(self) -> None:
        """Add the scores."""
        scores = self._values("scores").astype(np.float64)
        self._refuse("scores", scores, ~np.isfinite(scores), "expected finite numbers")
        self.entries["score"] = scores.tolist()

    def boxes(self, form: str) -> _Floats:
        """Add the boxes, as left, top, width and height; returns their areas."""
        boxes = self._values("boxes", 4).astype(np.float64)
        self._refuse("boxes", boxes, ~np.isfinite(boxes).all(axis=1), "expected finite numbers")
        if form == XYXY:
            # The difference of float64 numbers, also where the corners are of float32.
            boxes = np.column_stack([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]])
        expected = "left, top, width and height, of which the last two are never below 0"
        if form == XYXY:
            expected = (
                "x1, y1, x2, y2 with x2 >= x1 and y2 >= y1; of left, top, width and height take the sums"
            )
        self._refuse(
            "boxes", self._values("boxes", 4), (boxes[:, 2:] < 0).any(axis=1), f"expected {expected}"
        )
        self.entries["bbox"] = boxes.tolist()
        areas: _Floats = boxes[:, 2] * boxes[:, 3]
        return areas

    def keypoints(self, number: int) -> _Floats:
        """Add the keypoints; returns the areas of what they span."""
        points = self._values("keypoints", 3 * number).astype(np.float64)
        self._refuse("keypoints", points, ~np.isfinite(points).all(axis=1), "expected finite numbers")
        self.entries["keypoints"] = points.tolist()
        if self._before:
            self.entries["num_keypoints"] = (points[:, 2::3] > 0).sum(axis=1).tolist()
        x, y = points[:, 0::3], points[:, 1::3]
        spans: _Floats = np.ptp(x, axis=1) * np.ptp(y, axis=1)
        return spans

    def masks(self) -> _Floats:
        """Add the masks, as COCO's compressed run lengths; returns their areas."""
        from pycocotools import mask

        name, masks = f"{self._before}masks", list[dict[str, Any]]()
        for place, text in enumerate(self._columns[name]):
            size, codes = text.split()[:2], text.split()[2:]
            if len(codes) != self.lengths[place] or not all(map(str.isdecimal, size)):
                raise UsageError(
                    f"column {name!r} has {counted(len(codes), 'mask')} in image {place}, and "
                    f"'{self._before}labels' {self.lengths[place]}: expected 'HEIGHT WIDTH RLE RLE ...' with "
                    "the compressed run lengths of pycocotools.mask.encode, one a label"
                )
            masks += ({"size": [*map(int, size)], "counts": code} for code in codes)
        self.entries["segmentation"] = masks
        # Not of the whole list, of which pycocotools 2.0.11 takes 255 at most beside numpy 2.
        return np.array([mask.area(each) for each in masks], np.float64)

    def areas(self, default: _Floats, *, given: bool = False) -> None:
        """Add the areas, by which annotations are small, medium or large."""
        areas = self._values("areas").astype(np.float64) if given else default
        self._refuse("areas", areas, ~(areas >= 0), "expected numbers of 0 or more")
        self.entries["area"] = areas.tolist()

    def crowds(self, *, given: bool) -> None:
        """Add whether an annotation is a crowd: it is not asked for, and any detections may lie in it."""
        crowds = self._values("crowds").astype(np.int64) if given else np.zeros(len(self.labels), np.int64)
        self.entries["iscrowd"] = crowds.tolist()

    def annotations(self) -> list[dict[str, Any]]:
        """A dict for each, as in COCO's JSON."""
        names = tuple(self.entries)
        rows = zip(*self.entries.values(), strict=True)
        return [dict(zip(names, row, strict=True)) for row in rows]

    def _values(self, name: str, width: int | None = None) -> npt.NDArray[Any]:
        """Those of all images, one image's behind the other's, as many of each as labels."""
        name = self._before + name
        rows, lengths = self._columns[name], _lengths(self._columns[name])
        differing = np.flatnonzero(lengths != self.lengths)
        if len(differing):
            place = int(differing[0])
            raise UsageError(
                f"column {name!r} has {int(lengths[place])} entries in image {place}, "
                f"and '{self._before}labels' {self.lengths[place]}: expected one for each label"
            )
        values: npt.NDArray[Any] = rows.values if isinstance(rows, RaggedRows) else np.concatenate(rows)
        shape = values.shape[1:]
        if shape != (() if width is None else (width,)):
            expected = "one number" if width is None else f"{width} numbers"
            raise UsageError(
                f"column {name!r} has entries of shape {tuple(shape)}, expected {expected} for each label"
            )
        return values

    def _refuse(
        self, name: str, values: npt.NDArray[Any], wrong: npt.NDArray[Any] | np.bool_, expected: str
    ) -> None:
        at = np.flatnonzero(wrong)
        if len(at):
            raise UsageError(
                f"column '{self._before}{name}' has {values[at[0]].tolist()} in image {self.images[at[0]]} "
                f"(counted from 0 among those evaluated), {len(at):,} such of {len(values):,}: "
                f"{expected}"
            )


def _lengths(rows: Any) -> npt.NDArray[np.int64]:
    """How many entries each image has."""
    return rows.lengths if isinstance(rows, RaggedRows) else np.full(len(rows), rows.shape[1])
