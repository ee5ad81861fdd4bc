"""Made pictures with annotations as COCO has them, and a detector that finds what was drawn."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

# Ids with gaps, as COCO's; the third is never drawn.
CATEGORIES = {3: "cat", 7: "red dog", 8: "bird", 12: "fox"}
_COLOURS = {3: 0, 7: 1, 12: 2}
# Its largest area is COCO's "large".
_SIDES = (8, 140)


# How exact the three keypoints are.
SIGMAS = (0.1, 0.05, 0.2)


def _points(left: int, top: int, wide: int, high: int) -> list[int]:
    """Two corners, seen."""
    return [left, top, 2, left + wide, top + high, 2]


def _segmentation(box: tuple[int, int, int, int], size: tuple[int, int], crowd: int) -> Any:
    """Two polygons, or of crowds the lengths of runs, as COCO has it."""
    left, top, wide, high = box
    if not crowd:
        half = wide // 2
        return [
            [left, top, left + half, top, left + half, top + high, left, top + high],
            [left + half, top, left + wide, top + high, left + half, top + high],
        ]
    mask = np.zeros(size, np.uint8)
    mask[top : top + high, left : left + wide] = 1
    flat = mask.flatten(order="F")
    ends = [0, *(np.flatnonzero(np.diff(flat)) + 1).tolist(), len(flat)]
    runs = [after - before for before, after in pairwise(ends)]
    return {"size": [*size], "counts": [0, *runs] if flat[0] else runs}


def write_coco(folder: Path, count: int = 12, *, seed: int = 0, sizes: int = 3) -> tuple[Path, Path]:
    """Write pictures with at most one rectangle of each colour, and their annotations.

    Every fourth picture is empty, some objects are of crowds, and areas are smaller than boxes, as of masks.

    Returns:
        the folder of the pictures, and the JSON file.
    """
    draw = np.random.default_rng(seed)
    pictures = folder / "pictures"
    pictures.mkdir(parents=True)
    images: list[dict[str, Any]] = []
    objects: list[dict[str, Any]] = []
    shapes = [(int(draw.integers(150, 220)), int(draw.integers(150, 220))) for _ in range(sizes)]
    for place in range(count):
        height, width = shapes[place % sizes]
        # Not in the order of names or of the list.
        number = 1000 + (place * 7) % (count * 7 + 1)
        pixels = draw.integers(0, 60, (height, width, 3), np.uint8)
        for category, channel in _COLOURS.items():
            if place % 4 == 3 or draw.random() < 0.3:
                continue
            wide, high = (int(each) for each in draw.integers(*_SIDES, 2))
            left, top = int(draw.integers(0, width - wide)), int(draw.integers(0, height - high))
            pixels[top : top + high, left : left + wide, channel] = 255
            objects.append(
                {
                    "id": 10 * len(objects) + 1,
                    "image_id": number,
                    "category_id": category,
                    "bbox": [left + 0.25, top, wide, high],
                    "area": 0.9 * wide * high,
                    "iscrowd": (crowd := int(draw.random() < 0.1)),
                    "segmentation": _segmentation((left, top, wide, high), (height, width), crowd),
                    "keypoints": [
                        *_points(left, top, wide, high),
                        *((left + 2, top, 0) if crowd else (left, top, 1)),
                    ],
                    "num_keypoints": 2 + (not crowd),
                }
            )
        name = f"{place:03}.png"
        Image.fromarray(pixels).save(pictures / name)
        site = "north" if place % 2 else "south"
        images.append({"id": number, "file_name": name, "width": width, "height": height, "site": site})
    draw.shuffle(objects)
    path = folder / "instances.json"
    categories = [{"id": number, "name": name} for number, name in CATEGORIES.items()]
    path.write_text(json.dumps({"images": images, "annotations": objects, "categories": categories}))
    return pictures, path


class Finder(nn.Module):
    """Finds the rectangles by their colours, not quite, and some that are not there."""

    def __init__(self, labels: tuple[int, ...] = (3, 7, 12)) -> None:
        super().__init__()
        self.labels = labels
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, pictures: list[Tensor]) -> list[dict[str, Tensor]]:
        return [self._of(each) for each in pictures]

    def _of(self, picture: Tensor) -> dict[str, Tensor]:
        # Of the picture alone, so that nothing depends on its batch.
        draw = torch.Generator().manual_seed(int(1e6 * float(picture.mean())))
        boxes, scores, labels = [], [], []
        for channel, label in enumerate(self.labels):
            there = picture[channel] > 0.9
            if there.any():
                rows, columns = there.any(1).nonzero().flatten(), there.any(0).nonzero().flatten()
                box = torch.stack([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]).float()
                for _ in range(2):
                    shift = 0.12 * (box[2:] - box[:2]).repeat(2) * (torch.rand(4, generator=draw) - 0.5)
                    boxes.append(box + shift)
                    # In hundredths, so that some are equal.
                    scores.append(torch.rand((), generator=draw).mul(100).round() / 100)
                    labels.append(label)
        for _ in range(3):
            corner = 60 * torch.rand(2, generator=draw)
            boxes.append(torch.cat([corner, corner + 50 * torch.rand(2, generator=draw)]))
            scores.append(0.5 * torch.rand((), generator=draw))
            labels.append(self.labels[int(torch.randint(len(self.labels), (), generator=draw))])
        found = torch.stack(boxes)
        rows, columns = torch.arange(picture.shape[1])[:, None], torch.arange(picture.shape[2])
        left, top, right, bottom = found[:, :, None, None].unbind(1)
        inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
        points = torch.stack([found[:, :2], found[:, 2:], found[:, :2] + 1], 1)
        return {
            "boxes": found,
            "scores": torch.stack(scores) * self.weight,
            "labels": torch.tensor(labels),
            # As torchvision's: probabilities of shape (n, 1, height, width).
            "masks": 0.9 * inside[:, None].float(),
            "keypoints": torch.nn.functional.pad(points, (0, 1), value=1.0),
        }


def finder() -> nn.Module:
    """As ``--model tests.vehicles.coco_data:finder``."""
    return Finder()


def _results(row: dict[str, Any], column: str) -> list[Any]:
    """A picture's detections, as in a file of results."""
    if column == "masks":
        height, width, *codes = row[column].split()
        return [{"size": [int(height), int(width)], "counts": code} for code in codes]
    if column == "boxes":
        return [[box[0], box[1], box[2] - box[0], box[3] - box[1]] for box in row[column]]
    points: list[Any] = row[column]
    return points


def figures(
    annotations: Path, rows: list[dict[str, Any]], kind: str = "bbox", most: int = 100
) -> list[float]:
    """pycocotools' figures of a run's rows, read from files as its users do."""
    return [float(each) for each in coco_evaluation(annotations, rows, kind, most).stats]


def coco_evaluation(
    annotations: Path, rows: list[dict[str, Any]], kind: str = "bbox", most: int = 100
) -> Any:
    """Its evaluation, with the tables."""
    from contextlib import redirect_stdout

    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    of_kind = {"bbox": ("boxes", "bbox"), "segm": ("masks", "segmentation"), "keypoints": ("keypoints",) * 2}
    column, key = of_kind[kind]
    results = [
        {"image_id": row["image_id"], "category_id": label, "score": score, key: value}
        for row in rows
        for value, score, label in zip(_results(row, column), row["scores"], row["labels"], strict=True)
    ]
    path = annotations.with_name("results.json")
    path.write_text(json.dumps(results))
    with redirect_stdout(None):
        truth = COCO(str(annotations))
        evaluation = COCOeval(truth, truth.loadRes(str(path)), kind)
        evaluation.params.imgIds = [row["image_id"] for row in rows]
        if kind == "keypoints":
            evaluation.params.kpt_oks_sigmas = np.array(SIGMAS)
        else:
            evaluation.params.maxDets = [1, 10, most]
        for step in (evaluation.evaluate, evaluation.accumulate, evaluation.summarize):
            step()
    return evaluation
