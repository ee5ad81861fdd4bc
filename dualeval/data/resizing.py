"""A picture brought to a size and cut out: as torchvision, timm and transformers do it, by Pillow.

What the crop leaves out is not resized, bit for bit with what Pillow's resize of the whole gives. Pillow
resizes in two passes, mostly first across and then down, with 8 bits between them. A pixel of the second pass
needs a few rows of the first, and no other column. So rows that no pixel of the part needs are cut off before
the first pass, and columns before the second. Pillow 13 goes down first where a picture is much taller than
wide, or is shrunk in height more than in width: these pictures are resized as a whole.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from PIL import Image
from PIL.Image import Resampling
from torch import Tensor

from dualeval.data.preprocessing import Preprocessing, Uncropped

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


def cut_out(image: Image.Image, wanted: Preprocessing) -> Tensor:
    """Bring a picture to its size, and cut out its centre."""
    resized = _resized_size(image.size, wanted)
    resample = Resampling[wanted.interpolation.upper()]
    height, width = wanted.crop_size
    if wanted.padding is not None and (resized[0] < width or resized[1] < height):
        padded = _padded(image.resize(resized, resample), height, width, wanted.padding)
        cut = padded.crop(_centre_of(padded.size, wanted))
    else:
        cut = resized_part(image, resized, resample, _centre_of(resized, wanted))
    bands = cut.getbands()
    if wanted.channel_order == "bgr":
        bands = bands[::-1]
    # A channel at a time: batches are made of contiguous tensors in a fifth of the time.
    channels = b"".join([cut.tobytes("raw", band) for band in bands])
    return torch.frombuffer(bytearray(channels), dtype=torch.uint8).view(-1, height, width)


def whole(size: tuple[int, int], wanted: Uncropped) -> Preprocessing:
    """What is done to a picture of this width and height, of which nothing is cut off."""
    width, height = size
    if wanted.resize is not None and wanted.resize_mode == "squash":
        width, height = wanted.resize_width or wanted.resize, wanted.resize
    elif wanted.resize is not None:
        width, height = _resized_size(size, Preprocessing(resize=wanted.resize))
    return wanted.of_size(height, width)


def _resized_size(size: tuple[int, int], wanted: Preprocessing) -> tuple[int, int]:
    """Width and height of the resized picture."""
    width, height = size
    if wanted.resize_mode == "shorter":
        # As torchvision rounds them.
        shorter = wanted.resize
        if width <= height:
            return shorter, int(shorter * height / width)
        return int(shorter * width / height), shorter
    target = wanted.resize_size
    if wanted.resize_mode == "squash":
        return target[1], target[0]
    # As timm's ResizeKeepRatio, to the last bit of the ratio.
    ratios = [side / wish for side, wish in zip((height, width), target, strict=True)]
    ratio = max(ratios) if wanted.resize_mode == "inside" else min(ratios)
    return round(width / ratio), round(height / ratio)


def _centre_of(size: tuple[int, int], wanted: Preprocessing) -> tuple[int, int, int, int]:
    """Left, upper, right and lower edge of the crop: beyond the picture where that is small."""
    height, width = wanted.crop_size
    crop = width, height
    if wanted.crop_rounding == "down" and size[0] >= width and size[1] >= height:
        left, upper = ((side - wish) // 2 for side, wish in zip(size, crop, strict=True))
    else:
        # As torchvision's center_crop.
        left, upper = (
            -((wish - side) // 2) if wish > side else round((side - wish) / 2)
            for side, wish in zip(size, crop, strict=True)
        )
    return left, upper, left + width, upper + height


def _padded(image: Image.Image, height: int, width: int, colour: tuple[int, ...]) -> Image.Image:
    """The picture with borders where it is smaller than its crop; an odd pixel goes right and below."""
    across, down = max(0, width - image.width), max(0, height - image.height)
    fill = colour if len(colour) > 1 else colour[0]
    framed = Image.new(image.mode, (image.width + across, image.height + down), fill)
    framed.paste(image, (across // 2, down // 2))
    return framed


def resized_part(
    image: Image.Image, resized: tuple[int, int], resample: Resampling, part: tuple[int, int, int, int]
) -> Image.Image:
    """``image.resize(resized, resample).crop(part)`` in less time."""
    left, upper, right, lower = part
    inside = 0 <= left < right <= resized[0] and 0 <= upper < lower <= resized[1]
    across, down = image.width / resized[0], image.height / resized[1]
    is_usual = image.height <= _TALL * image.width and down <= _SQUEEZED * across
    if inside and part != (0, 0, *resized) and is_usual and _across_first(resample):
        return _two_passes(image, resized, resample, part)
    return image.resize(resized, resample).crop(part)


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
        if _two_passes(image, resized, resample, part).tobytes() != wanted.tobytes():
            return False
    return True


def _two_passes(
    image: Image.Image, resized: tuple[int, int], resample: Resampling, part: tuple[int, int, int, int]
) -> Image.Image:
    left, upper, right, lower = part
    scale = image.height / resized[1]
    reach = _REACH[resample] * max(1.0, scale) + _SPARE
    first = max(0, math.floor(upper * scale - reach))
    last = min(image.height, math.ceil(lower * scale + reach))
    rows = image.crop((0, first, image.width, last)).resize((resized[0], last - first), resample)
    # The rows that were cut off are put back as black ones: a pass goes by its picture's height.
    columns = rows.crop((left, -first, right, image.height - first))
    return columns.resize((right - left, resized[1]), resample).crop((0, upper, right - left, lower))
