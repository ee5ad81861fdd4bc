"""Pictures of detections for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image, ImageDraw

from dualeval.tasks.detection.masks import runs_of
from dualeval.tasks.detection.matches import matches_of


def drawn(picture: Image.Image, row: Mapping[str, Any], categories: Mapping[int, str]) -> Image.Image:
    """A picture with its boxes: green what was found, orange what was missed, red what is not there.

    Objects that were taken for others have the other's name in red.
    """
    matches, image = matches_of(row), picture.copy()
    draw, width = ImageDraw.Draw(image), max(1, min(picture.size) // 150)
    true, found = (_boxes_of(row, name) for name in ("true_", ""))

    def mark(box: Sequence[float], colour: str, label: int, score: float | None = None) -> None:
        draw.rectangle([*box], outline=colour, width=width)
        draw.text(
            (box[0] + width, box[1]),
            f"{categories[label]}{'' if score is None else f' {score:.2f}'}",
            fill=colour,
        )

    for place in matches.missed:
        mark(true[place], "orange", row["true_labels"][place])
    for place in matches.false:
        mark(found[place], "red", row["labels"][place], row["scores"][place])
    for one, other in matches.pairs:
        right = row["true_labels"][one] == row["labels"][other]
        draw.rectangle([*true[one]], outline="lime", width=width)
        mark(found[other], "green" if right else "red", row["labels"][other], row["scores"][other])
    return image


def _boxes_of(row: Mapping[str, Any], before: str) -> list[tuple[float, float, float, float]]:
    """x1, y1, x2, y2 of a row's boxes, or of its masks."""
    if f"{before}boxes" not in row:
        from pycocotools import mask

        boxes = [mask.toBbox(each).tolist() for each in runs_of(row[f"{before}masks"])]
    elif not before:
        return [tuple(box) for box in row["boxes"]]
    else:
        boxes = row["true_boxes"]
    return [(left, top, left + width, top + height) for left, top, width, height in boxes]
