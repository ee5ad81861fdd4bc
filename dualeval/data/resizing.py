"""A picture brought to a size and cut out: as torchvision, timm and transformers do it, by Pillow."""

from __future__ import annotations

import torch
from PIL import Image
from torch import Tensor

from dualeval.data.preprocessing import Preprocessing, Uncropped
from dualeval.data.resized_part import Rows, resized_part


def cut_out(rows: Rows, size: tuple[int, int], wanted: Preprocessing) -> Tensor:
    """Bring a picture to its size, and cut out its centre."""
    resized = _resized_size(size, wanted)
    resample = Image.Resampling[wanted.interpolation.upper()]
    height, width = wanted.crop_size
    if wanted.padding is not None and (resized[0] < width or resized[1] < height):
        image = _padded(rows(0, size[1]).resize(resized, resample), height, width, wanted.padding)
        cut = image.crop(_centre_of(image.size, wanted))
    else:
        cut = resized_part(rows, size, resized, resample, _centre_of(resized, wanted))
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
