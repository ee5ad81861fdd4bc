"""Annotations as COCO writes them: the pictures of a file, their categories, and what is true of each."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

from dualeval.columns.of_data import FurtherColumns, KeptColumns
from dualeval.columns.ragged import Ragged, Text
from dualeval.errors import UsageError, text_of
from dualeval.messages import counted, listed
from dualeval.tasks.detection.masks import as_text, true_code

COCO_KEYPOINTS = 17
_LISTS = ("images", "annotations", "categories")
# What COCO writes of each picture that no group is made by.
_USUAL = (
    *("id", "file_name", "width", "height", "license", "date_captured"),
    *("coco_url", "flickr_url", "url", "extra"),
)
# Of so many boxes of a file, most that end beyond their picture are no left, top, width and height.
_MOST_BEYOND = 0.5
# Boxes that all end before it are no pixels.
UNIT = 1.5
# An area of less than this part of its box is none of the object.
_TINY = 0.02
# Of so many objects segmentation and box are compared, which else overlap by this much.
_LOOKED_INTO, _OVERLAP = 32, 0.5
_WITHOUT_AREA = "{} without area: that of the box was taken."


@dataclass(frozen=True, kw_only=True)
class Annotations:
    """What is true of pictures, in the order of the pictures' ids."""

    path: Path
    # By id.
    categories: Mapping[int, str]
    # Of each picture: paths below the data folder, ids (pictures,), and height and width (pictures, 2).
    names: Sequence[str]
    ids: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    # Where each picture's objects begin, and the last one's end: (pictures + 1,).
    ends: npt.NDArray[np.int64]
    # Of each object: left, top, width and height in pixels (objects, 4); category; pixels; whether it is of a
    # crowd.
    boxes: npt.NDArray[np.float64]
    labels: npt.NDArray[np.int64]
    areas: npt.NDArray[np.float64]
    crowds: npt.NDArray[np.bool_]
    # What is compared: of each object its segmentation as the file has it, and x, y and visibility of its
    # keypoints; None or without columns where they are not asked for.
    segmentations: Sequence[Any] | None
    keypoints: npt.NDArray[np.float64]
    kept: KeptColumns
    notes: tuple[str, ...] = ()
    # What decides figures, and may not be as it is meant.
    warnings: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.names)

    @property
    def _of_objects(self) -> tuple[str, ...]:
        """The arrays of objects."""
        return ("boxes", "labels", "areas", "crowds", *(["keypoints"] if self.keypoints.shape[1] else []))

    def select(self, indices: npt.NDArray[np.int64]) -> Annotations:
        """Of some pictures alone, in this order."""
        counts = np.diff(self.ends)[indices]
        runs = [np.arange(self.ends[each], self.ends[each + 1]) for each in indices]
        places = np.concatenate([np.zeros(0, np.int64), *runs])
        of_objects: dict[str, Any] = {name: getattr(self, name)[places] for name in self._of_objects}
        if self.segmentations is not None:
            of_objects["segmentations"] = [self.segmentations[each] for each in places]
        return replace(
            self,
            names=[self.names[each] for each in indices],
            ids=self.ids[indices],
            sizes=self.sizes[indices],
            ends=np.concatenate([[0], counts.cumsum()]).astype(np.int64),
            kept=self.kept.select(indices),
            **of_objects,
        )

    def columns(self, samples: range) -> dict[str, Any]:
        """The truth of consecutive pictures, as a batch's columns."""
        first, last = self.ends[samples.start], self.ends[samples.stop]
        lengths = torch.from_numpy(np.diff(self.ends[samples.start : samples.stop + 1]))

        def ragged(values: npt.NDArray[Any]) -> Ragged:
            return Ragged(torch.from_numpy(values[first:last].copy()), lengths)

        truth: dict[str, Any] = {f"true_{name}": ragged(getattr(self, name)) for name in self._of_objects}
        if self.segmentations is not None:
            truth["true_masks"] = Text([self._masks(sample, self.segmentations) for sample in samples])
        return {**truth, "image_id": torch.from_numpy(self.ids[samples.start : samples.stop].copy())}

    def _masks(self, sample: int, segmentations: Sequence[Any]) -> str:
        height, width = self.sizes[sample].tolist()
        of_sample = segmentations[self.ends[sample] : self.ends[sample + 1]]
        try:
            return as_text(height, width, [true_code(each, height, width) for each in of_sample])
        except ValueError as error:
            raise UsageError(
                f"{self.path}: a segmentation of a picture of {width} x {height}: {error}"
            ) from error

    def digest(self, samples: range) -> str:
        """sha256, in hex, over what is true of consecutive pictures."""
        first, last = self.ends[samples.start], self.ends[samples.stop]
        digest = hashlib.sha256(json.dumps([*self.categories.items()]).encode())
        for array in (self.ids, self.sizes):
            digest.update(array[samples.start : samples.stop].tobytes())
        digest.update((self.ends[samples.start : samples.stop + 1] - first).tobytes())
        for name in self._of_objects:
            digest.update(np.ascontiguousarray(getattr(self, name)[first:last]).tobytes())
        if self.segmentations is not None:
            digest.update(json.dumps(self.segmentations[first:last]).encode())
        return digest.hexdigest()


def read_annotations(
    path: Path, kinds: Sequence[str], keep: Sequence[str] = (), points: int = COCO_KEYPOINTS
) -> Annotations:
    """Read a file of annotations, and check all of it, for what is compared ("bbox", "segm", "keypoints").

    ``points`` is how many keypoints an object has.
    """
    content = _content(path)
    categories = _by_id(path, content["categories"], "categories", {"id": int, "name": str})
    names = [each["name"] for each in categories.values()]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise UsageError(f"{path} has several categories of the name {twice[0]!r}: rename all but one.")
    images = _by_id(
        path, content["images"], "images", {"id": int, "file_name": str, "width": int, "height": int}
    )
    order = sorted(images)
    files = [images[each]["file_name"] for each in order]
    if len({*files}) < len(files):
        seen: set[str] = set()
        name = next(name for name in files if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise UsageError(
            f"{path} has the file_name {name} in two of its images: remove one, with its objects."
        )
    places = {number: place for place, number in enumerate(order)}
    objects = _by_id(path, content["annotations"], "annotations", {"id": int})
    of_images = np.zeros(len(objects), np.int64)
    boxes, areas = np.zeros((len(objects), 4)), np.zeros(len(objects))
    labels, crowds = np.zeros(len(objects), np.int64), np.zeros(len(objects), np.bool_)
    for place, each in enumerate(objects.values()):
        for key, known, of in (("image_id", images, "images"), ("category_id", categories, "categories")):
            if each.get(key) not in known:
                raise UsageError(
                    f"{path}: the annotation {each['id']} has {key} {each.get(key)!r}, which none of the "
                    f"{len(known):,} {of} has"
                )
        box = each.get("bbox")
        if not _is_box(box):
            raise UsageError(
                f"{path}: the annotation {each['id']} has bbox {box!r:.80}, expected left, top, width and "
                "height in pixels, the last two not negative"
            )
        of_images[place], labels[place] = places[each["image_id"]], each["category_id"]
        if (crowd := each.get("iscrowd", 0)) not in (0, 1):
            raise UsageError(
                f"{path}: the annotation {each['id']} has iscrowd {crowd!r:.80}, expected 0 or 1"
            )
        boxes[place], crowds[place] = box, bool(crowd)
        area = each.get("area")
        if area is not None and not (type(area) in (int, float) and 0 <= area < math.inf):
            raise UsageError(
                f"{path}: the annotation {each['id']} has area {area!r:.80}, expected a number of pixels"
            )
        areas[place] = box[2] * box[3] if area is None else area
    entries = [*objects.values()]
    # pycocotools takes a picture's objects in the order of the file, too.
    by_image = np.argsort(of_images, kind="stable")
    sizes = np.array([[images[each]["height"], images[each]["width"]] for each in order], np.int64)
    sizes = sizes.reshape(-1, 2)
    _refuse_corners(path, boxes, sizes[of_images])
    if len(boxes) and boxes.max() <= UNIT and sizes.min() > UNIT:
        raise UsageError(
            f"{path}: its boxes lie between 0 and {boxes.max():g}, expected left, top, width and height in "
            "pixels: "
            "multiply them by width and height of their pictures."
        )
    names_there = dict.fromkeys(name for each in images.values() for name in each)
    further = FurtherColumns([*names_there], _USUAL, keep)
    further.take({name: [images[each].get(name) for each in order] for name in further.names})
    return Annotations(
        path=path,
        categories={number: each["name"] for number, each in categories.items()},
        names=files,
        ids=np.array(order, np.int64),
        sizes=sizes,
        ends=np.concatenate([[0], np.bincount(of_images, minlength=len(order)).cumsum()]).astype(np.int64),
        boxes=boxes[by_image],
        labels=labels[by_image],
        areas=areas[by_image],
        crowds=crowds[by_image],
        segmentations=[_there(path, entries[each], "segmentation") for each in by_image]
        if "segm" in kinds
        else None,
        keypoints=_keypoints(path, entries, points)[by_image] if "keypoints" in kinds else np.zeros((0, 0)),
        kept=further.kept(),
        notes=_notes(boxes, [each.get("area") for each in entries], asked="keypoints" in kinds),
        warnings=_warnings(path, entries, boxes, areas, sizes[of_images], kinds),
    )


def _content(path: Path) -> Mapping[str, Any]:
    if path.suffix.lower() == ".xml" or path.is_dir():
        raise UsageError(
            f"--annotations {path}: a file for each picture, as Pascal VOC has them, is not read: expected "
            "one JSON file as COCO has it. Tools such as fiftyone and datumaro write it."
        )
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"--annotations {path} cannot be read as JSON: {text_of(error)}") from error
    if isinstance(content, list):
        raise UsageError(
            f"--annotations {path} is a list, as COCO writes detections: expected the true objects, a JSON "
            f"object with {', '.join(_LISTS)}."
        )
    if missing := [name for name in _LISTS if not isinstance(content.get(name), list)]:
        raise UsageError(
            f"--annotations {path} has no list {missing[0]!r}: found {listed(map(str, content))}, expected "
            f"{', '.join(_LISTS)}."
        )
    if any("neg_category_ids" in each for each in content["images"][:1] if isinstance(each, dict)):
        raise UsageError(
            f"--annotations {path} are of LVIS, of which only some categories are annotated in each picture: "
            "its figures are others, and are not computed. The package lvis does."
        )
    for name in ("images", "categories"):
        if not content[name]:
            raise UsageError(f"--annotations {path}: its list {name!r} is empty.")
    checked: Mapping[str, Any] = content
    return checked


def _by_id(
    path: Path, entries: Sequence[Any], of: str, kinds: Mapping[str, type]
) -> dict[int, Mapping[str, Any]]:
    """Entries by their ids, in the order of the file."""
    known: dict[int, Mapping[str, Any]] = {}
    for place, each in enumerate(entries):
        for key, kind in kinds.items():
            value: Any = each.get(key) if isinstance(each, dict) else None
            least = 1 if key in ("width", "height") else -(2**63)
            if type(value) is not kind or (isinstance(value, int) and not least <= value < 2**63):
                raise UsageError(
                    f"{path}: entry {place} of {of!r} has {key} {value!r:.80}, expected "
                    f"{'a text' if kind is str else 'a whole number of 64 bits'}"
                )
        if known.setdefault(each["id"], each) is not each:
            raise UsageError(f"{path} has the id {each['id']} twice in {of!r}: remove one, or renumber it.")
    return known


def _is_box(box: Any) -> TypeGuard[list[float]]:
    numbers = isinstance(box, list) and len(box) == 4 and all(type(each) in (int, float) for each in box)
    return numbers and all(map(math.isfinite, box)) and min(box[2:]) >= 0


def _there(path: Path, entry: Mapping[str, Any], key: str) -> Any:
    if not entry.get(key):
        raise UsageError(f"{path}: the annotation {entry['id']} has no {key}, which --iou-type compares.")
    return entry[key]


def _keypoints(path: Path, entries: Sequence[Mapping[str, Any]], number: int) -> npt.NDArray[np.float64]:
    """x, y and visibility of all objects' keypoints, (objects, 3 keypoints)."""
    for each in entries:
        points = _there(path, each, "keypoints")
        numbers = isinstance(points, list) and all(type(value) in (int, float) for value in points)
        if not numbers or len(points) != 3 * number:
            found = f"{len(points) / 3:g}" if isinstance(points, list) else repr(points)[:40]
            raise UsageError(
                f"{path}: the annotation {each['id']} has {found} keypoints, expected {number}, each as x, "
                "y, visibility. Of other keypoints than COCO's 17 give --sigmas, how exact each is."
            )
        seen = sum(visibility > 0 for visibility in points[2::3])
        if each.get("num_keypoints", seen) != seen:
            raise UsageError(
                f"{path}: the annotation {each['id']} has num_keypoints {each['num_keypoints']}, and {seen} "
                "with a visibility above 0: make them agree."
            )
    return np.array([each["keypoints"] for each in entries], np.float64).reshape(-1, 3 * number)


def _refuse_corners(path: Path, boxes: npt.NDArray[np.float64], sizes: npt.NDArray[np.int64]) -> None:
    """Refuse boxes that are no left, top, width and height: most end beyond their picture."""
    beyond = (boxes[:, :2] + boxes[:, 2:] > sizes[:, ::-1] + 1).any(axis=1)
    if len(boxes) and beyond.mean() > _MOST_BEYOND:
        raise UsageError(
            f"{path}: {int(beyond.sum()):,} of {len(boxes):,} boxes end beyond their pictures, if bbox is "
            "left, top, width and height, as COCO has it. If it is left, top, right and bottom, subtract: "
            "[x1, y1, x2 - x1, y2 - y1]."
        )


def _warnings(
    path: Path,
    entries: Sequence[Mapping[str, Any]],
    boxes: npt.NDArray[np.float64],
    areas: npt.NDArray[np.float64],
    sizes: npt.NDArray[np.int64],
    kinds: Sequence[str],
) -> tuple[str, ...]:
    """Areas that are not those of the objects, and segmentations that lie elsewhere than their boxes."""
    if not entries:
        return (f"{path} has no object: there is nothing to find.",)
    warnings, pixels = [], boxes[:, 2] * boxes[:, 3]
    if (tiny := int((areas < _TINY * pixels).sum())) > len(areas) / 2:
        by = "their size, and of keypoints all figures," if "keypoints" in kinds else "their size"
        warnings.append(
            f"{tiny:,} of {counted(len(areas), 'object')} have an area below {_TINY:.0%} of their box: "
            "figures by "
            f"{by} go by the area."
        )
    if "keypoints" in kinds and (without := sum(each.get("area") is None for each in entries)):
        warnings.append(_WITHOUT_AREA.format(counted(without, "object")))
    places = [place for place, each in enumerate(entries) if not each.get("iscrowd") and pixels[place] > 0]
    places = places[:: -(-len(places) // _LOOKED_INTO) or 1]
    if "segm" in kinds and places:
        apart = [
            place for place in places if _lies_elsewhere(entries[place], boxes[place], sizes[place].tolist())
        ]
        if len(apart) > len(places) / 2:
            warnings.append(
                f"the segmentations of {len(apart)} of {counted(len(places), 'object')} looked into lie "
                "elsewhere "
                f"than their boxes, first of annotation {entries[apart[0]]['id']}: run lengths go down the "
                "columns, from the left one on."
            )
    return tuple(warnings)


def _lies_elsewhere(entry: Mapping[str, Any], box: npt.NDArray[np.float64], size: list[int]) -> bool:
    from pycocotools import mask

    with suppress(ValueError):  # what is no segmentation is refused where it is read
        code = true_code(entry["segmentation"], *size)
        of_mask = mask.toBbox({"size": size, "counts": code})
        return bool(mask.iou(of_mask[None].astype(np.float64), box[None], [0])[0, 0] < _OVERLAP)
    return False


def _notes(boxes: npt.NDArray[np.float64], areas: Sequence[Any], *, asked: bool) -> tuple[str, ...]:
    notes = []
    if flat := int((boxes[:, 2:] == 0).any(axis=1).sum()):
        notes.append(f"{counted(flat, 'object')} without width or height: no detection can find them.")
    # Of keypoints it is a warning.
    if not asked and (without := sum(area is None for area in areas)):
        notes.append(_WITHOUT_AREA.format(counted(without, "object")))
    return tuple(notes)
