"""Small pictures with masks, networks for them, and their counts by plain numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import nn

CLASSES = 5
IGNORED = 255
# Width and height: three sizes, which come again within a batch.
SIZES = ((24, 16), (16, 24), (20, 20), (24, 16), (16, 24))
COLOURS = np.array([[0, 0, 0], [255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 0]], np.uint8)

# For the command line: logits at a quarter of the size, and a head for training beside them.
NETS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.layer = nn.Conv2d(3, num_classes, 3, stride=2, padding=1)

    def forward(self, images):
        logits = self.layer(images)
        return {"out": logits, "aux": logits[:, :1]}


def make(num_classes):
    return Net(num_classes)
"""


class Exact(nn.Module):
    """Logits that are whole numbers in float32, so that no way of computing them differs."""

    def __init__(self, classes: int = CLASSES, seed: int = 0) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.layer = nn.Conv2d(3, classes, 1)
        weight = torch.randint(-4, 5, self.layer.weight.shape, generator=draw).float()
        self.layer.load_state_dict({"weight": weight, "bias": torch.arange(float(classes))})

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layer((images * 255).round())
        return logits


def write_pictures(root: Path, count: int = 13, *, seed: int = 0, classes: int = CLASSES) -> list[str]:
    """Write ``img`` and ``masks``; returns the names of the pictures without a suffix, in their order."""
    draw = np.random.default_rng(seed)
    for folder in ("img", "masks"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    names = [f"{number:03}" for number in range(count)]
    for number, name in enumerate(names):
        width, height = SIZES[number % len(SIZES)]
        labels = (
            draw.integers(0, classes, (height // 4, width // 4)).repeat(4, 0).repeat(4, 1).astype(np.uint8)
        )
        colours = COLOURS[labels] // 2 + draw.integers(0, 128, (height, width, 3)).astype(np.uint8)
        labels[draw.random(labels.shape) < 0.1] = IGNORED
        Image.fromarray(colours).save(root / "img" / f"{name}.png")
        write_mask(root / "masks" / f"{name}.png", labels)
    return names


def write_mask(path: Path, labels: npt.NDArray[Any]) -> None:
    """Write an indexed PNG."""
    image = Image.fromarray(labels.astype(np.uint8)).convert("P")
    image.frombytes(labels.astype(np.uint8).tobytes())
    image.putpalette([*COLOURS.flatten().tolist(), *[0] * (768 - COLOURS.size)])
    image.save(path)


def counts(labels: npt.NDArray[Any], predicted: npt.NDArray[Any], classes: int = CLASSES) -> npt.NDArray[Any]:
    """Intersection, target and predicted pixels by class, (3, classes)."""
    counted = labels != IGNORED
    right = [((labels == each) & (predicted == each)).sum() for each in range(classes)]
    target = [(labels == each).sum() for each in range(classes)]
    guessed = [((predicted == each) & counted).sum() for each in range(classes)]
    return np.array([right, target, guessed])
