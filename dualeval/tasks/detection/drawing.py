"""Pictures of detections for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image, ImageDraw

from dualeval.tasks.detection.masks import runs_of
from dualeval.tasks.detection.matches import matches_of

# Pixels of the longer side, of small pictures and of large ones: what is written there is read on a page.
_SIDE = 240


def drawn(picture: Image.Image, row: Mapping[str, Any], categories: Mapping[int, str]) -> Image.Image:
    """A picture with its boxes: green found, orange missed, red not there, grey crowds.

    Objects that were taken for others have the other's name in red.
    """
    matches, scale = matches_of(row), _SIDE / max(picture.size)
    image = picture.convert("RGB").resize([max(1, round(scale * side)) for side in picture.size])
    draw = ImageDraw.Draw(image)
    true, found = (
        [tuple(scale * each for each in box) for box in _boxes_of(row, name)] for name in ("true_", "")
    )

    def mark(box: Sequence[float], colour: str, label: int, score: float | None = None) -> None:
        draw.rectangle([*box], outline=colour)
        text = f"{categories[label]}{'' if score is None else f' {score:.2f}'}"
        # Within the picture, whatever the box.
        _, _, width, height = draw.textbbox((0, 0), text)
        left, top = max(0, min(box[0], image.width - width - 2)), max(0, min(box[1], image.height - height))
        draw.rectangle([left, top, left + width + 2, top + height], fill=colour)
        draw.text((left + 1, top), text, fill="black" if colour == "orange" else "white")

    for place, crowd in enumerate(row["true_crowds"]):
        if crowd:
            mark(true[place], "grey", row["true_labels"][place])
    for place in matches.missed:
        mark(true[place], "orange", row["true_labels"][place])
    for place in matches.false:
        mark(found[place], "red", row["labels"][place], row["scores"][place])
    for one, other in matches.pairs:
        right = row["true_labels"][one] == row["labels"][other]
        draw.rectangle([*true[one]], outline="lime")
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
