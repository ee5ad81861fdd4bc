"""Made COCO data, what pycocotools says of them from JSON files in one process, and their columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pycocotools import mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from dualeval.columns.ragged import Text, as_column, to_rows

CATEGORIES = {1: "person", 3: "car", 7: "dog", 8: "unseen", 90: "tooth brush"}
HEIGHT, WIDTH = 240, 320
POINTS = 17


@dataclass(frozen=True, kw_only=True)
class MadeCoco:
    """COCO's annotations and results; ids of images have gaps."""

    kind: str
    categories: Mapping[int, str]
    images: Sequence[int]
    annotations: list[dict[str, Any]]
    detections: list[dict[str, Any]]

    def reference(self, folder: Path, limits: Sequence[int] | None = None) -> Any:
        """pycocotools' evaluation, of files."""
        images = [{"id": each, "height": HEIGHT, "width": WIDTH} for each in self.images]
        categories = [{"id": each, "name": name} for each, name in self.categories.items()]
        content = {"images": images, "categories": categories, "annotations": self.annotations}
        (folder / "truth.json").write_text(json.dumps(content))
        kept = {"bbox": "bbox", "segm": "segmentation", "keypoints": "keypoints"}[self.kind]
        found = [
            {key: each[key] for key in ("image_id", "category_id", "score", kept)} for each in self.detections
        ]
        (folder / "found.json").write_text(json.dumps(found))
        with redirect_stdout(None):
            truth = COCO(str(folder / "truth.json"))
            evaluation = COCOeval(truth, truth.loadRes(str(folder / "found.json")), self.kind)
            if limits is not None:
                evaluation.params.maxDets = [*limits]
            for step in (evaluation.evaluate, evaluation.accumulate):
                step()
            if limits is None:
                evaluation.summarize()
        return evaluation

    def columns(self, images: Sequence[int] | None = None) -> dict[str, Any]:
        """As a run's rows; of some images, or all in order."""
        chosen = self.images if images is None else images
        truth, found = (
            [[each for each in every if each["image_id"] == image] for image in chosen]
            for every in (self.annotations, self.detections)
        )

        def rows(
            every: Any, name: str, of: Callable[[Any], Any], width: int | None, dtype: torch.dtype
        ) -> Any:
            shape = (0,) if width is None else (0, width)
            tensors = [
                torch.tensor([of(each) for each in image], dtype=dtype)
                if image
                else torch.zeros(shape, dtype=dtype)
                for image in every
            ]
            return to_rows(as_column(name, tensors))

        real, whole = torch.float64, torch.int64
        columns = {
            "scores": rows(found, "scores", lambda each: each["score"], None, real),
            "labels": rows(found, "labels", lambda each: each["category_id"], None, whole),
            "true_labels": rows(truth, "true_labels", lambda each: each["category_id"], None, whole),
            "true_areas": rows(truth, "true_areas", lambda each: each["area"], None, real),
            "true_crowds": rows(truth, "true_crowds", lambda each: bool(each["iscrowd"]), None, torch.bool),
        }
        if self.kind != "segm":
            columns["true_boxes"] = rows(truth, "true_boxes", lambda each: each["bbox"], 4, real)
        if self.kind == "bbox":
            columns["boxes"] = rows(found, "boxes", lambda each: each["xyxy"], 4, torch.float32)
        for before, every in (("", found), ("true_", truth)):
            if self.kind == "segm":
                texts = [
                    " ".join([f"{HEIGHT} {WIDTH}", *(e["segmentation"]["counts"] for e in image)])
                    for image in every
                ]
                columns[f"{before}masks"] = to_rows(Text(texts))
            if self.kind == "keypoints":
                name = f"{before}keypoints"
                columns[name] = rows(every, name, lambda each: each["keypoints"], 3 * POINTS, real)
        return columns


def _shape(draw: np.random.Generator, box: Sequence[float]) -> dict[str, Any]:
    """A mask within a box, as COCO's JSON has it: an ellipse."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    left, top, width, height = box
    inside = ((x - left - width / 2) / (width / 2)) ** 2 + ((y - top - height / 2) / (height / 2)) ** 2 <= 1
    code = mask.encode(np.asfortranarray(inside.astype(np.uint8)))
    return {"size": [HEIGHT, WIDTH], "counts": code["counts"].decode()}


def _points(draw: np.random.Generator, box: Sequence[float], spread: float) -> Any:
    base = np.random.default_rng(5).random((POINTS, 2))
    return np.array(box[:2]) + base * np.array(box[2:]) + draw.normal(0, spread, (POINTS, 2))


def made_coco(
    kind: str = "bbox",
    *,
    seed: int = 0,
    images: int = 30,
    categories: Mapping[int, str] = CATEGORIES,
    most: int = 6,
    false: int = 6,
) -> MadeCoco:
    """Crowds, ties, images without annotations, without detections and without both, all sizes."""
    draw = np.random.default_rng(seed)
    used = [each for each in categories if categories[each] != "unseen"]
    ids = np.cumsum(draw.integers(1, 5, images)).tolist()
    annotations: list[dict[str, Any]] = []
    detections: list[dict[str, Any]] = []
    for place, image in enumerate(ids):
        truth = 0 if place % 7 == 3 else int(draw.integers(1, most + 1))
        boxes = []
        for _ in range(truth):
            size = draw.choice([12.0, 50.0, 130.0]) * draw.uniform(0.7, 1.3, 2)
            corner = draw.uniform(0, [WIDTH - size[0], HEIGHT - size[1]])
            box, label = [*corner.tolist(), *size.tolist()], int(draw.choice(used))
            boxes.append((box, label))
            seen = draw.integers(0, 3, POINTS) * (draw.random() < 0.8)
            shape = _shape(draw, box) if kind == "segm" else None
            points = np.column_stack([_points(draw, box, 0.0), seen])
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image,
                    "category_id": label,
                    "bbox": box,
                    "area": box[2] * box[3] * draw.uniform(0.4, 1.0),
                    "iscrowd": int(draw.random() < 0.1),
                    "segmentation": shape,
                    "keypoints": points.ravel().tolist(),
                    "num_keypoints": int((seen > 0).sum()),
                }
            )
        if place % 9 == 5 or (place % 7 == 3 and place % 2):
            continue
        made = [(box, label if draw.random() < 0.9 else int(draw.choice(used))) for box, label in boxes]
        made += made[: len(made) // 2]
        made += [(box, label) for box, label in made[:1] for _ in range(false)]
        made += [([10.0, 10.0, 60.0, 40.0], int(draw.choice(used))) for _ in range(2)]
        for box, label in made:
            corner = np.maximum(0, np.array(box[:2]) + draw.normal(0, 0.06, 2) * box[2:])
            size = np.array(box[2:]) * draw.uniform(0.8, 1.2, 2)
            xyxy = np.concatenate([corner, corner + size]).astype(np.float32)
            wide = (xyxy[2:].astype(np.float64) - xyxy[:2].astype(np.float64)).tolist()
            found = [*xyxy[:2].astype(np.float64).tolist(), *wide]
            spread = 0.05 * float(np.mean(box[2:]))
            detections.append(
                {
                    "image_id": image,
                    "category_id": label,
                    # One digit: many are equal.
                    "score": round(float(draw.random()), 1),
                    "xyxy": xyxy.tolist(),
                    "bbox": found,
                    "segmentation": _shape(draw, found) if kind == "segm" else None,
                    "keypoints": np.column_stack([_points(draw, box, spread), np.ones(POINTS)])
                    .ravel()
                    .tolist(),
                }
            )
    return MadeCoco(
        kind=kind, categories=categories, images=ids, annotations=annotations, detections=detections
    )
