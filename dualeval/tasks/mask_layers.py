"""Masks for people: layers over a picture, with a colour for each class."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

# Of 255: how much of a class's colour covers the picture, and of the layers before.
_COVER = 100


def layer_of(classes: npt.NDArray[Any]) -> Image.Image:
    """A layer with the colour of each pixel's class; nothing where there is none."""
    # The golden angle apart: neighbours among the classes have colours that differ.
    hues = np.asarray(classes, np.float64) * 0.618034 % 1
    colours = np.stack([hues * 255, np.full(hues.shape, 200), np.full(hues.shape, 235)], axis=-1)
    layer = Image.fromarray(colours.astype(np.uint8), "HSV").convert("RGB")
    layer.putalpha(Image.fromarray(np.where(classes >= 0, _COVER, 0).astype(np.uint8)))
    return layer


def colour_of(number: int) -> str:
    """The colour of a class, as "#rrggbb"."""
    return "#" + layer_of(np.array([[number]])).convert("RGB").tobytes().hex()
