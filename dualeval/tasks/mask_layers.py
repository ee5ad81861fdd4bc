"""Predicted masks in the rows of a run, as run lengths; and masks for people, as layers over a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

# Of 255: how much of a class's colour covers the picture, and of the layers before.
_COVER = 100
_WRONG = (255, 255, 255, 235)
# By name, of layers.
COLOURS = {"wrong": "#ffffff"}


def runs_of(classes: Tensor) -> Tensor:
    """Height and width, and row by row of each run of equal classes its class and length; int32, flat."""
    values, lengths = torch.unique_consecutive(classes, return_counts=True)
    size = torch.tensor(classes.shape, device=classes.device)
    return torch.cat([size, torch.stack([values.long(), lengths], dim=1).flatten()]).int()


def classes_of(runs: Sequence[int]) -> npt.NDArray[np.int32]:
    """The classes that ``runs_of`` was given."""
    height, width, *pairs = runs
    flat = np.repeat(np.array(pairs[::2], np.int32), pairs[1::2])
    return flat.reshape(height, width)


def layers_of(target: npt.NDArray[Any], runs: Sequence[int] | None) -> dict[str, Image.Image]:
    """The layers of a picture; with what was predicted also where that is wrong, of the pixels that count."""
    if runs is None:
        return {"target": layer_of(target)}
    predicted = classes_of(runs)
    is_wrong = (predicted != target) & (target >= 0)
    wrong = Image.fromarray(np.where(is_wrong[..., None], _WRONG, 0).astype(np.uint8))
    return {"target": layer_of(target), "prediction": layer_of(predicted), "wrong": wrong}


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
