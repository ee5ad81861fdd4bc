"""Boxes of detections for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dualeval.tasks.detection.masks import runs_of
from dualeval.tasks.detection.matches import matches_of

# Of layers; what was found has its object's box, too.
COLOURS = {"found": "green", "missed": "orange", "wrong": "red", "crowds": "grey"}
_OF_FOUND = "lime"


def layers_of(row: Mapping[str, Any], categories: Mapping[int, str]) -> dict[str, list[tuple[Any, ...]]]:
    """By name the boxes of a picture: found, missed, wrong (not there, or another category), crowds."""
    matches = matches_of(row)
    true, found = _boxes_of(row, "true_"), _boxes_of(row, "")
    layers: dict[str, list[tuple[Any, ...]]] = {name: [] for name in COLOURS}

    def add(layer: str, box: tuple[float, ...], label: int, score: float | None = None) -> None:
        text = f"{categories[label]}{'' if score is None else f' {score:.2f}'}"
        layers[layer].append((*box, COLOURS[layer], text))

    for place, crowd in enumerate(row["true_crowds"]):
        if crowd:
            add("crowds", true[place], row["true_labels"][place])
    for place in matches.missed:
        add("missed", true[place], row["true_labels"][place])
    for place in matches.false:
        add("wrong", found[place], row["labels"][place], row["scores"][place])
    for one, other in matches.pairs:
        layer = "found" if row["true_labels"][one] == row["labels"][other] else "wrong"
        layers[layer].append((*true[one], _OF_FOUND, ""))
        add(layer, found[other], row["labels"][other], row["scores"][other])
    return {name: boxes for name, boxes in layers.items() if boxes}


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
