"""Masks of objects as run lengths, COCO's form: in the rows of a run a text ``HEIGHT WIDTH RLE RLE ...``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate


def as_text(height: int, width: int, codes: Sequence[str]) -> str:
    """The masks of one picture."""
    return " ".join([str(height), str(width), *codes])


def runs_of(text: str) -> list[dict[str, Any]]:
    """The masks of one picture, as pycocotools takes them."""
    height, width, *codes = text.split()
    return [{"size": [int(height), int(width)], "counts": code} for code in codes]


def codes_of(masks: Tensor) -> list[str]:
    """The compressed run lengths of masks, bools or 0 and 1 of shape (n, height, width)."""
    from pycocotools import mask

    if not len(masks):
        return []
    encoded = mask.encode(np.asfortranarray(masks.permute(1, 2, 0).numpy().astype(np.uint8)))
    return [each["counts"].decode() for each in encoded]


def true_code(segmentation: Any, height: int, width: int) -> str:
    """The run lengths of an annotation: polygons, which are joined, or run lengths, compressed or not.

    Raises:
        ValueError: it is none of these.
    """
    from pycocotools import mask

    counts = segmentation.get("counts") if isinstance(segmentation, Mapping) else None
    if counts is not None and segmentation.get("size") != [height, width]:
        raise ValueError(f"its size is {segmentation.get('size')}, expected {[height, width]}")
    if isinstance(counts, str):
        if (pixels := _pixels_of(counts)) != height * width:
            raise ValueError(f"its compressed run lengths are of {pixels} pixels, expected {height * width}")
        return counts
    if isinstance(counts, list):
        if sum(counts) != height * width:
            raise ValueError(f"its run lengths add up to {sum(counts)}, expected {height * width} pixels")
        return str(mask.frPyObjects(segmentation, height, width)["counts"].decode())
    is_polygons = isinstance(segmentation, list) and segmentation
    if not is_polygons or any(not isinstance(each, list) or len(each) < 6 for each in segmentation):
        raise ValueError(f"it is {segmentation!r:.60}, expected polygons of 3 or more points, or run lengths")
    return str(mask.merge(mask.frPyObjects(segmentation, height, width))["counts"].decode())


def _pixels_of(code: str) -> int:
    """How many pixels compressed run lengths cover, as COCO's rleFrString reads them; -1 of what is none.

    pycocotools itself checks nothing, and writes beyond its memory.
    """
    runs: list[int] = []
    value = shift = 0
    for letter in code:
        number = ord(letter) - 48
        if not 0 <= number < 64 or shift > 30:
            return -1
        value |= (number & 31) << shift
        shift += 5
        if not number & 32:
            value -= (1 << shift) if number & 16 else 0
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
            value = shift = 0
    return sum(runs) if runs and min(runs) >= 0 and not shift else -1


def masks_by(
    processor: Any, columns: Mapping[str, Tensor], sizes: Sequence[Sequence[int]]
) -> dict[str, list[Any]]:
    """What an image processor makes of a network's queries: of each picture codes, scores and labels."""
    found: dict[str, list[Any]] = {"masks": [], "scores": [], "labels": []}
    height, width = columns["input"].tolist()[0] if len(sizes) else (0, 0)
    for place, size in enumerate(sizes):
        logits = columns["masks_queries_logits"][place : place + 1]
        valid_height, valid_width = columns["valid"][place].tolist()
        if (valid_height, valid_width) != (height, width):
            # The processor takes masks for those of the whole input, of which padding is a part.
            logits = interpolate(logits, size=(height, width), mode="bilinear", align_corners=False)
            logits = logits[..., :valid_height, :valid_width]
        outputs = SimpleNamespace(
            class_queries_logits=columns["class_queries_logits"][place : place + 1],
            masks_queries_logits=logits,
        )
        [made] = processor.post_process_instance_segmentation(
            outputs, threshold=0.0, target_sizes=[tuple(size)], return_binary_maps=True
        )
        segments = made["segments_info"]
        found["masks"].append(codes_of(made["segmentation"]) if segments else [])
        found["scores"].append(torch.tensor([each["score"] for each in segments], dtype=torch.float32))
        found["labels"].append(torch.tensor([each["label_id"] for each in segments], dtype=torch.int64))
    return found
