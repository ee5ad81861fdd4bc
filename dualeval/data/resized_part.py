"""A part of a resized picture, without the work for the rest of it: bit for bit what Pillow's resize gives.

Pillow resizes in two passes, mostly first across and then down, with 8 bits between them. A pixel of the
second pass needs a few rows of the first, and no other column. So rows that no pixel of the part needs are
cut off before the first pass, and columns before the second. Pillow 13 goes down first where a picture is
much taller than wide, or is shrunk in height more than in width: these pictures are resized as a whole.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from PIL import Image

Resampling = Image.Resampling
# Gives rows of a picture, from the first number to before the second, as an image of mode L or RGB.
Rows: TypeAlias = Callable[[int, int], Image.Image]
# How far each filter reaches, in pixels of the larger of both pictures.
_REACH = {Resampling.BILINEAR: 1, Resampling.BICUBIC: 2, Resampling.LANCZOS: 3}
# Rows more than needed, whatever way centres are rounded.
_SPARE = 2
# Height over width, and scale down over scale across, up to which all versions of Pillow go across first.
_TALL = 1.75
_SQUEEZED = 1.02
# Sizes before and after a resize that are tried for that, as a later version may have another rule.
_TRIED = (
    ((500, 375), (341, 256)),
    ((375, 500), (256, 341)),
    ((300, 500), (232, 386)),
    ((180, 120), (384, 256)),
    ((120, 180), (256, 384)),
)


def resized_part(
    rows: Rows,
    size: tuple[int, int],
    resized: tuple[int, int],
    resample: Resampling,
    part: tuple[int, int, int, int],
) -> Image.Image:
    """``image.resize(resized, resample).crop(part)`` in less time."""
    left, upper, right, lower = part
    inside = 0 <= left < right <= resized[0] and 0 <= upper < lower <= resized[1]
    if inside and part != (0, 0, *resized) and _is_usual(size, resized) and _across_first(resample):
        return _two_passes(rows, size, resized, resample, part)
    return rows(0, size[1]).resize(resized, resample).crop(part)


def _is_usual(size: tuple[int, int], resized: tuple[int, int]) -> bool:
    across, down = size[0] / resized[0], size[1] / resized[1]
    return size[1] <= _TALL * size[0] and down <= _SQUEEZED * across


@functools.cache
def _across_first(resample: Resampling) -> bool:
    """Whether this Pillow gives the same by both ways: each process finds out once."""
    if resample not in _REACH:
        return False
    noise = np.random.default_rng(0).integers(0, 256, (500, 500, 3), np.uint8)
    for size, resized in _TRIED:
        image = Image.fromarray(np.ascontiguousarray(noise[: size[1], : size[0]]))
        part = (resized[0] // 8, resized[1] // 8, resized[0] * 7 // 8, resized[1] * 7 // 8)
        wanted = image.resize(resized, resample).crop(part)
        if _two_passes(rows_of(image), size, resized, resample, part).tobytes() != wanted.tobytes():
            return False
    return True


def rows_of(image: Image.Image) -> Rows:
    """The rows of a picture that is in memory."""
    return lambda first, last: image.crop((0, first, image.width, last))


def _two_passes(
    rows: Rows,
    size: tuple[int, int],
    resized: tuple[int, int],
    resample: Resampling,
    part: tuple[int, int, int, int],
) -> Image.Image:
    left, upper, right, lower = part
    height = size[1]
    scale = height / resized[1]
    reach = _REACH[resample] * max(1.0, scale) + _SPARE
    first = max(0, math.floor(upper * scale - reach))
    last = min(height, math.ceil(lower * scale + reach))
    across = rows(first, last).resize((resized[0], last - first), resample)
    # The rows that were cut off are put back as black ones: a pass goes by its picture's height.
    columns = across.crop((left, -first, right, height - first))
    return columns.resize((right - left, resized[1]), resample).crop((0, upper, right - left, lower))
