"""A picture brought to a size and cut out: as torchvision, timm and transformers do it, by Pillow."""

from __future__ import annotations

from typing import Any

from PIL import Image
from torch import Tensor

from dualeval.data.preprocessing import Preprocessing
from dualeval.vision_library import torchvision


def resized(image: Image.Image, wanted: Preprocessing) -> Image.Image:
    """A picture in the size that its crop is cut from.

    Args:
        image: of mode L or RGB.
        wanted: resize, its mode and interpolation.
    """
    transforms: Any = torchvision().transforms
    found: Image.Image = transforms.functional.resize(
        image, _size_of(image, wanted), interpolation=transforms.InterpolationMode(wanted.interpolation)
    )
    return found


def _size_of(image: Image.Image, wanted: Preprocessing) -> int | list[int]:
    """The shorter side, or height and width, of the resized picture."""
    if wanted.resize_mode == "shorter":
        return wanted.resize
    target = wanted.resize_size
    if wanted.resize_mode == "squash":
        return list(target)
    # As timm's ResizeKeepRatio, to the last bit of the ratio.
    sides = image.height, image.width
    ratios = [side / size for side, size in zip(sides, target, strict=True)]
    ratio = max(ratios) if wanted.resize_mode == "inside" else min(ratios)
    return [round(side / ratio) for side in sides]


def cut_out(image: Image.Image, wanted: Preprocessing) -> Tensor:
    """The centre of a picture.

    Args:
        image: as ``resized`` gave it.
        wanted: crop, its rounding and padding, order of channels.

    Returns:
        uint8 of shape (channels, height, width).
    """
    of: Any = torchvision().transforms.functional
    height, width = wanted.crop_size
    if wanted.padding is not None:
        image = _padded(image, height, width, wanted.padding)
    if wanted.crop_rounding == "down" and image.height >= height and image.width >= width:
        image = of.crop(image, (image.height - height) // 2, (image.width - width) // 2, height, width)
    else:
        image = of.center_crop(image, [height, width])
    pixels: Tensor = of.pil_to_tensor(image)
    return pixels.flip(0) if wanted.channel_order == "bgr" else pixels


def _padded(image: Image.Image, height: int, width: int, colour: tuple[int, ...]) -> Image.Image:
    """The picture with borders where it is smaller than its crop; an odd pixel goes right and below."""
    across, down = max(0, width - image.width), max(0, height - image.height)
    if not across and not down:
        return image
    fill = colour if len(colour) > 1 else colour[0]
    framed = Image.new(image.mode, (image.width + across, image.height + down), fill)
    framed.paste(image, (across // 2, down // 2))
    return framed
